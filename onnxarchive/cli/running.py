"""The command that runs a model."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.cli.frame import DONE, FOUND, require_free, say
from onnxarchive.cli.progress import count_bar
from onnxarchive.cli.table import count, printable, shape, table
from onnxarchive.conversion.sources import open_source
from onnxarchive.interop.comparing import Comparison, Difference, compare, require_tolerances
from onnxarchive.interop.running import Memory, Outcome, Value, run
from onnxarchive.model.keys import Keys
from onnxarchive.storage.files import MappedFile
from onnxarchive.storage.paths import require_no_input
from onnxarchive.storage.replacement import Replacement, replacing

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_MIB: Final = 1 << 20
_MS: Final = 1000.0
# What follows the name of a sequence or map in the names of the arrays in it.
_PLACE: Final = re.compile(r"(\[[0-9]+\]|\.keys|\.values)*")


def run_command(arguments: argparse.Namespace) -> int:
    """Runs `run`."""
    _require_comparable(arguments)
    inputs, declared = _read(arguments) if arguments.output else ([], _Declared())
    _require_writable(arguments, inputs, declared)
    given = dict(_load(name, path) for name, path in _pairs("--input", arguments.input))
    dims = {name: _size(name, text) for name, text in _pairs("--dim", arguments.dim, last=True)}
    with _progress("run", arguments.repeat) as progress:
        outcome = run(
            arguments.model,
            given,
            seed=arguments.seed,
            dims=dims,
            providers=arguments.provider,
            repeat=arguments.repeat,
            progress=progress,
        )
    saved = _save_all(arguments, inputs, declared, outcome.outputs)
    comparison = None
    if arguments.compare is not None:
        with _progress("compare", arguments.repeat) as progress:
            comparison = compare(
                outcome,
                arguments.compare,
                absolute=arguments.atol,
                relative=arguments.rtol,
                providers=arguments.provider,
                repeat=arguments.repeat,
                progress=progress,
            )
    result = _described(outcome, arguments.seed) | {"saved": saved}
    lines = _told(outcome, arguments.seed)
    lines += [f"saved     {printable(name)} as {printable(path)}" for name, path in saved.items()]
    if comparison is not None:
        result["comparison"] = _described_comparison(comparison, arguments.compare)
        lines += ["", *_told_comparison(comparison, arguments.compare)]
    say(arguments, result, "\n".join(lines))
    return DONE if comparison is None or comparison.is_same else FOUND


def _require_comparable(arguments: argparse.Namespace) -> None:
    """Refuses a comparison that would fail in any case, before anything is run."""
    if arguments.compare is None:
        if arguments.atol or arguments.rtol:
            raise ValueError("--atol and --rtol go with --compare")
        return
    require_tolerances(arguments.atol, arguments.rtol)
    MappedFile(arguments.compare).close()


@contextlib.contextmanager
def _progress(description: str, repeat: int) -> Iterator[Any]:
    if repeat <= 1:
        yield None
        return
    with count_bar(description, "run") as progress:
        yield progress


# Arguments


def _pairs(option: str, given: Iterable[str], *, last: bool = False) -> list[tuple[str, str]]:
    """What is written as NAME=VALUE; names may have a `=` where `last` is to be the one."""
    pairs: dict[str, str] = {}
    for argument in given:
        name, equals, value = argument.rpartition("=") if last else argument.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"{option}: expected NAME=VALUE, found {argument!r}")
        if name in pairs:
            raise ValueError(f"{option}: expected each name once, found {name!r} again")
        pairs[name] = value
    return list(pairs.items())


def _size(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--dim {name}: expected a whole number, found {text!r}") from None


def _load(name: str, path: str) -> tuple[str, NDArray[Any] | list[NDArray[Any]]]:
    """An input and the array, or arrays, of a file."""
    with open(path, "rb") as file:
        try:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return name, loaded
            with loaded:
                return name, [loaded[key] for key in loaded.files]
        except Exception as error:  # numpy says in many ways that a file is damaged
            raise ValueError(
                f"{path}: expected an array as numpy.save writes it, for input {name!r}; "
                f"{' '.join(str(error).split())}"
            ) from error


# Outputs


@dataclass(frozen=True, slots=True)
class _Declared:
    """The outputs of a model before it is run.

    Attributes:
        tensors: The names of those that come out as one array each.
        others: The names of the others, of whose arrays only a run tells how many there are.
    """

    tensors: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: onnx.ModelProto) -> _Declared:
        kinds = {value.name: value.type.WhichOneof("value") for value in model.graph.output}
        return cls(
            tuple(name for name, kind in kinds.items() if kind == "tensor_type"),
            tuple(name for name, kind in kinds.items() if kind != "tensor_type"),
        )

    def may_have(self, name: str) -> bool:
        """Whether there may be an array of this name."""
        return name in self.tensors or any(
            name.startswith(other) and _PLACE.fullmatch(name, len(other)) for other in self.others
        )


def _read(arguments: argparse.Namespace) -> tuple[list[str], _Declared]:
    """All files that are read (models, their data files, inputs), and the outputs of the model."""
    files = [path for _, path in _pairs("--input", arguments.input)]
    with open_source(arguments.model) as source:
        files += [arguments.model, *source.files]
        declared = _Declared.of(source.model)
    if arguments.compare is not None:
        with open_source(arguments.compare) as source:
            files += [arguments.compare, *source.files]
    return files, declared


def _require_writable(
    arguments: argparse.Namespace, inputs: Sequence[str], declared: _Declared
) -> None:
    """Refuses outputs that will not be saved, before the model is run, which may take long."""
    named = [(argument, _name_in(argument, declared)) for argument in arguments.output]
    for _, path in _targets(named, declared.tensors):
        _require_target(path, arguments.force, inputs)
        _try_to_make(path)
    for argument, name in named:
        if name is None and declared.others:
            try:
                _try_to_make(os.path.join(argument, str(uuid.uuid4())))
            except OSError as error:
                error.filename = argument
                raise


def _require_target(path: str, force: bool, inputs: Sequence[str]) -> None:
    if not os.path.isdir(path):  # which is refused in any case, and says so
        require_free(path, force)
    require_no_input(path, inputs)


def _try_to_make(path: str) -> None:
    """Makes a file beside one that is to be written, and removes it.

    Raises:
        OSError: It cannot be made; nor could the other one be.
    """
    directory = os.path.dirname(path)
    while directory not in ("", path) and not os.path.lexists(directory):
        path, directory = directory, os.path.dirname(directory)  # which will be made
    Replacement(path).discard()


def _name_in(argument: str, declared: _Declared) -> str | None:
    """The output that NAME=FILE.npy names; None for DIR.

    Raises:
        ValueError: It is neither.
    """
    ends = [index for index, letter in enumerate(argument) if letter == "="]
    names = [argument[:end] for end in ends if declared.may_have(argument[:end])]
    if names:
        return names[-1]
    if ends and not os.path.isdir(argument):
        listed = ", ".join(map(repr, (*declared.tensors, *declared.others))) or "none"
        raise ValueError(
            f"--output: expected DIR or NAME=FILE.npy with an output of the model, which has "
            f"{listed}, found {argument!r}"
        )
    return None


def _targets(
    named: Iterable[tuple[str, str | None]], outputs: Collection[str]
) -> list[tuple[str, str]]:
    """The outputs to save, and where: for each argument the one that it names, or all of them."""
    targets: dict[str, tuple[str, str]] = {}
    for argument, name in named:
        if name is not None:
            files = [(name, argument[len(name) + 1 :])]
        else:
            keys = Keys()  # names that every file system has, and that lead nowhere else
            files = [(it, os.path.join(argument, f"{keys.assign(it)}.npy")) for it in outputs]
        for output, path in files:
            file = os.path.normcase(os.path.realpath(path))
            if not os.path.basename(path) or file in targets:
                raise ValueError(f"--output: expected one file for each output, found {argument!r}")
            targets[file] = output, path
    for file, (_, path) in targets.items():
        if any(str(parent) in targets for parent in PurePath(file).parents):
            raise ValueError(f"--output: expected a file in a directory, found {path!r} in another")
    return list(targets.values())


def _save_all(
    arguments: argparse.Namespace,
    inputs: Sequence[str],
    declared: _Declared,
    outputs: Sequence[Value],
) -> dict[str, str]:
    """Saves outputs, and gives the path of each.

    Raises:
        OSError: One cannot be saved; all others are.
        ValueError: Likewise.
    """
    arrays = {value.name: value.array for value in outputs}
    # Tensors first: their files in a directory are then the same as before the run.
    ordered = sorted(arrays, key=lambda name: name not in declared.tensors)
    known = _Declared(tuple(ordered))
    named: list[tuple[str, str | None]] = []
    saved: dict[str, str] = {}
    problems: list[OSError | ValueError] = []
    for argument in arguments.output:
        try:
            named.append((argument, _name_in(argument, known)))
        except ValueError as error:
            problems.append(error)
    for name, path in _targets(named, ordered):
        try:
            _require_target(path, arguments.force, inputs)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            _save(path, name, arrays[name], arguments.force)
        except (OSError, ValueError) as error:
            problems.append(error)
        else:
            saved[name] = path
    if problems:
        raise problems[0]
    return saved


def _save(path: str, name: str, array: NDArray[Any], force: bool) -> None:
    if array.dtype.hasobject:
        texts = array.astype(str)
        if np.any(texts != array):
            raise ValueError(
                f"output {name!r}: expected strings that a .npy file can hold, found one that ends "
                "with a null character; take them from onnxarchive.interop.running.run"
            )
        array = texts
    is_claimed, process = False, os.getpid()
    try:
        with replacing(path) as replacement:
            np.save(replacement.file, array, allow_pickle=False)
            if not force:
                _claim(path)
                is_claimed = True
    except BaseException:
        if is_claimed and os.getpid() == process:  # a fork leaves it to its parent
            os.unlink(path)
        raise


def _claim(path: str) -> None:
    """Makes an empty file of a name that nothing has, so that what is replaced is nobody else's."""
    try:
        with open(path, "xb"):
            pass
    except FileExistsError:
        require_free(path, force=False)  # which says what to do
        raise


# Results


def _described(outcome: Outcome, seed: int) -> dict[str, Any]:
    """An outcome as JSON has it."""
    memory = outcome.memory
    return {
        "path": outcome.path,
        "providers": list(outcome.providers),
        "seed": seed,
        "assumed_dims": dict(outcome.assumed),
        "inputs": [
            _described_value(value) | {"random": _is_random(value, outcome)}
            for value in outcome.inputs
        ],
        "outputs": [_described_value(value) for value in outcome.outputs],
        "session_ms": outcome.session_seconds * _MS,
        "run_ms": outcome.median_seconds * _MS,
        "runs_ms": [seconds * _MS for seconds in outcome.run_seconds],
        "memory": {
            "anonymous_nbytes": memory.anonymous,
            "mapped_nbytes": memory.mapped,
            "resident_nbytes": memory.resident,
        },
    }


def _described_value(value: Value) -> dict[str, Any]:
    summary = value.summary()
    return {
        "name": value.name,
        "data_type": value.data_type,
        "dims": list(value.array.shape),
        "minimum": None if summary is None else _json_number(summary.minimum),
        "maximum": None if summary is None else _json_number(summary.maximum),
        "mean": None if summary is None else _json_number(summary.mean),
        "nans": None if summary is None else summary.nans,
    }


def _is_random(value: Value, outcome: Outcome) -> bool:
    return value.name in outcome.random  # one of a sequence is given


def _json_number(number: float | None) -> float | str | None:
    """A number as JSON has it; infinities and NaN, which it lacks, by their names."""
    if number is None or math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _told(outcome: Outcome, seed: int) -> list[str]:
    origins = [
        f"random, seed {seed}" if _is_random(value, outcome) else "given"
        for value in outcome.inputs
    ]
    header = ["data type", "shape", "min", "max", "mean"]
    lines = [
        table(
            ["input", *header, "from"],
            [[*_row(value), origin] for value, origin in zip(outcome.inputs, origins, strict=True)],
        ),
        "",
        table(["output", *header], [_row(value) for value in outcome.outputs]),
        "",
    ]
    if outcome.assumed:
        assumed = ", ".join(f"{name}={size}" for name, size in outcome.assumed.items())
        lines.append(f"assumed   {printable(assumed)} (--dim NAME=SIZE says another)")
    return [*lines, f"provider  {', '.join(outcome.providers)}", *_told_cost(outcome)]


def _row(value: Value) -> list[object]:
    summary = value.summary()
    if summary is None:
        numbers = ["", "", ""]
    else:
        numbers = [_number(it) for it in (summary.minimum, summary.maximum, summary.mean)]
        if summary.nans:
            numbers[-1] += f" and {summary.nans:,} NaN"
    return [value.name, value.data_type, shape(value.array.shape), *numbers]


def _number(number: float | None) -> str:
    if number is None:
        return "-"
    return str(number) if isinstance(number, int) else f"{number:.6g}"


def _told_cost(outcome: Outcome) -> list[str]:
    runs = len(outcome.run_seconds)
    of = f" (median of {runs:,})" if runs > 1 else ""
    return [
        f"time      session {_milliseconds(outcome.session_seconds)}, "
        f"run {_milliseconds(outcome.median_seconds)}{of}",
        f"memory    {_memory(outcome.memory)}",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * _MS:,.{1 if seconds * _MS >= 10 else 3}f} ms"


def _memory(memory: Memory) -> str:
    if memory.anonymous is not None and memory.mapped is not None:
        return (
            f"{memory.anonymous / _MIB:,.1f} MiB anonymous, {memory.mapped / _MIB:,.1f} MiB mapped "
            "(the most that session and runs took)"
        )
    if memory.resident is not None:
        return f"{memory.resident / _MIB:,.1f} MiB (the most that the whole process had)"
    return "not told by this system"


# Comparisons


def _described_comparison(comparison: Comparison, path: str) -> dict[str, Any]:
    other = comparison.other
    return {
        "path": path,
        "is_same": comparison.is_same,
        "session_ms": None if other is None else other.session_seconds * _MS,
        "run_ms": None if other is None else other.median_seconds * _MS,
        "differences": [
            {
                "name": it.name,
                "is_same": it.is_same,
                "problem": it.problem,
                "differing": it.differing,
                "elements": it.elements,
                "greatest_absolute": _json_number(it.greatest_absolute),
                "greatest_relative": _json_number(it.greatest_relative),
                "signs_of_zero": it.signs_of_zero,
            }
            for it in comparison.differences
        ],
    }


def _told_comparison(comparison: Comparison, path: str) -> list[str]:
    lines = [f"compared with {printable(path)}"]
    if comparison.other is not None:
        lines += _told_cost(comparison.other)
    lines += [f"  {printable(it.name)}: {_told_difference(it)}" for it in comparison.differences]
    verdict = "the same" if comparison.is_same else "different"
    return [*lines, f"the models are {verdict} on these inputs"]


def _told_difference(difference: Difference) -> str:
    if difference.problem is not None:
        return printable(difference.problem)
    elements = count(difference.elements, "element")
    if difference.is_same:
        told = f"the same in {elements}"
    else:
        told = f"differs in {difference.differing:,} of {elements}"
    if difference.signs_of_zero:
        are_all = difference.signs_of_zero == difference.differing
        which = "" if are_all else f", {difference.signs_of_zero:,} of them"
        told += f"{which} only in the sign of a zero (0 and -0)"
    if difference.greatest_absolute:
        told += (
            f"; at most by {difference.greatest_absolute:.6g}, "
            f"relatively by {difference.greatest_relative:.6g}"
        )
    return told
