"""The command that runs a model, and compares the outputs of two models."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import numpy as np

from onnxarchive.archive.openable import files_of
from onnxarchive.cli.frame import DONE, FOUND, access, pairs, say
from onnxarchive.cli.table import count, printable, shape, table
from onnxarchive.interop.comparing import OutputDifference, compare, require_tolerances
from onnxarchive.interop.inputs import Input, npy_array
from onnxarchive.interop.running import Outcome, Value, run
from onnxarchive.model.keys import Keys
from onnxarchive.storage.files import MappedFile, PositionalWriter, make_file
from onnxarchive.storage.replacement import new_directory

_MIB: Final = 1 << 20
_MS: Final = 1000.0


def run_command(arguments: argparse.Namespace) -> int:
    """Runs `run`."""
    if arguments.compare is not None:  # wrong arguments fail before the first model runs
        require_tolerances(arguments.atol, arguments.rtol)
        for path in files_of(arguments.compare, {}):
            MappedFile(path).close()
    elif arguments.atol or arguments.rtol or arguments.compare_model:
        raise ValueError("--atol, --rtol and --compare-model need --compare")
    given = pairs("--input NAME=FILE.npy", arguments.input)
    inputs = {name: _load(path) for name, path in given.items()}
    dims = pairs("--dim NAME=SIZE", arguments.dim, int)
    call = partial(
        run,
        providers=arguments.provider,
        repeat=arguments.repeat,
        prepack=False if arguments.no_prepack else None,
        **access(arguments),
    )
    output = arguments.output
    with new_directory(output) if output is not None else contextlib.nullcontext() as directory:
        outcome = call(arguments.path, inputs, model=arguments.model, dims=dims)
        files = _save(outcome.outputs, directory) if directory is not None else {}
    saved = {name: os.path.join(output, file) for name, file in files.items()}
    result = _result(outcome) | {"saved": saved}
    lines = _lines(result)
    lines += [f"saved     {printable(name)} as {printable(path)}" for name, path in saved.items()]
    status = DONE
    if arguments.compare is not None:
        other = call(arguments.compare, outcome.feed, model=arguments.compare_model)
        differences = compare(outcome, other, absolute=arguments.atol, relative=arguments.rtol)
        status = DONE if all(it.is_same for it in differences) else FOUND
        listed = [_finite(asdict(it)) | {"is_same": it.is_same} for it in differences]
        comparison = _cost(other) | {"is_same": status == DONE, "differences": listed}
        result["comparison"] = comparison
        lines += ["", f"compared with {printable(other.path)}", *_cost_lines(comparison)]
        lines += [f"  {printable(it.name)}: {_difference(it)}" for it in differences]
        verdict = "the same" if status == DONE else "different"
        if status == DONE and any(it.unequal for it in differences):
            verdict += " within the tolerances"
        lines += [f"the models are {verdict} on these inputs"]
    say(arguments, result, lines)
    return status


def _load(path: str) -> Input:
    """Loads an array, or the arrays of a sequence."""
    with open(path, "rb") as file:
        try:
            # For other bytes, the error of `np.load` would suggest unpickling the file.
            if file.peek(4)[:4] not in (b"\x93NUM", b"PK\3\4"):
                raise ValueError("its first bytes match neither format")
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else list(loaded.values())
        except Exception as error:  # numpy raises many types for damaged files
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: expected a .npy or .npz file; {reason}") from error


def _save(outputs: Iterable[Value], directory: str) -> dict[str, str]:
    """Saves each output as a `.npy` file; returns the file names by output."""
    keys, files = Keys(), {}
    for output in outputs:
        name = f"output {output.name!r}"
        array = npy_array(output.array, name, "run without --output")
        files[output.name] = f"{keys.assign(output.name[:200])}.npy"  # valid in every file system
        with make_file(os.path.join(directory, files[output.name])) as file:
            np.save(PositionalWriter(file), array, allow_pickle=False)  # errors name the file
    return files


def _result(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a dict for JSON."""
    return _cost(outcome) | {
        "providers": list(outcome.providers),
        "assumed_dims": dict(outcome.assumed),
        "inputs": [_value(it) | {"random": it.name in outcome.random} for it in outcome.inputs],
        "outputs": [_value(it) for it in outcome.outputs],
    }


def _cost(outcome: Outcome) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "session_ms": outcome.session_seconds * _MS,
        "run_ms": statistics.median(outcome.run_seconds) * _MS,
        "runs_ms": [seconds * _MS for seconds in outcome.run_seconds],
        "memory": {f"{kind}_nbytes": nbytes for kind, nbytes in outcome.memory.items()},
    }


def _value(value: Value) -> dict[str, Any]:
    dims, summary = list(value.array.shape), _finite(value.summary()._asdict())
    return {"name": value.name, "data_type": value.data_type, "dims": dims} | summary


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces infinities and NaN, which JSON lacks, by their names."""
    return {
        name: json.dumps(it) if isinstance(it, float) and not math.isfinite(it) else it
        for name, it in fields.items()
    }


def _lines(result: Mapping[str, Any]) -> list[str]:
    """An outcome as lines of text."""
    header = ["data type", "shape", "min", "max", "mean"]
    inputs = [[*_row(it), "random" if it["random"] else "given"] for it in result["inputs"]]
    lines = [*table(["input", *header, "from"], inputs), ""]
    lines += [*table(["output", *header], map(_row, result["outputs"])), ""]
    if result["assumed_dims"]:
        assumed = ", ".join(f"{name}={size}" for name, size in result["assumed_dims"].items())
        lines.append(f"assumed   {printable(assumed)} (--dim NAME=SIZE sets another size)")
    return [*lines, f"provider  {', '.join(result['providers'])}", *_cost_lines(result)]


def _row(value: Mapping[str, Any]) -> list[str]:
    cells = [
        "-" if it is None else f"{it:.6g}" if isinstance(it, float) else str(it)
        for it in (value["minimum"], value["maximum"], value["mean"])
    ]
    cells[-1] += f" and {value['nans']:,} NaN" if value["nans"] else ""
    return [value["name"], value["data_type"], shape(value["dims"]), *cells]


def _cost_lines(result: Mapping[str, Any]) -> list[str]:
    runs, memory = len(result["runs_ms"]), result["memory"]
    median = f" (median of {runs:,})" if runs > 1 else ""
    time = f"session {result['session_ms']:,.1f} ms, run {result['run_ms']:,.3f} ms{median}"
    grown = ", ".join(
        f"{nbytes / _MIB:+,.1f} MiB {kind.removesuffix('_nbytes')}"
        for kind, nbytes in memory.items()
    )
    return [f"time      {time}", f"memory    {grown or 'not reported by this system'}"]


def _difference(difference: OutputDifference) -> str:
    if difference.problem is not None:
        return difference.problem
    elements = count(difference.elements, "element")
    if not difference.unequal:
        return f"the same in {elements}"
    text = f"differs in {difference.unequal:,} of {elements}"
    if difference.is_same:
        text += ", within the tolerances"
    elif difference.differing < difference.unequal:
        text += f", {difference.differing:,} beyond the tolerances"
    if difference.greatest_absolute:
        text += f"; at most by {difference.greatest_absolute:.6g}"
        text += f", relatively by {difference.greatest_relative:.6g}"
    elif difference.differing and difference.greatest_absolute is not None:
        text += " only in the sign of a zero (0 and -0)"
    return text
