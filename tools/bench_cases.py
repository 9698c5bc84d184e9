"""The cases of tools/bench.py: each compares a few ways to do the same, and has targets.

A measure prepares a step from a place's files, or from its tensors in memory, and returns
the step, which alone is timed. It imports its own libraries, so that a process loads no others.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from bench_inputs import PIECE_NBYTES, Place

OURS: Final = "onnxarchive"
MIB: Final = 1 << 20

Step: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Told:
    """Result of a step that another process measures.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Time that processors were busy.
    """

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Measure:
    """One way to do the work of a case.

    Attributes:
        name: Its name.
        group: The group of files or tensors that it takes.
        prepare: Returns the step that is timed.
        reads: The kinds of files that it reads.
        needs: The packages that it needs beyond this library's own.
        writes: Whether it writes the bytes of the group anew.
        is_process: Whether the step is a process of its own, whose memory is not looked at.
        is_raw: Whether it is a limit of the machine and no library.
        is_peer: Whether it is another library, which may fail.
    """

    name: str
    group: str
    prepare: Callable[[Place], Step]
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    writes: bool = False
    is_process: bool = False
    is_raw: bool = False
    is_peer: bool = False


_peer: Final = partial(Measure, is_peer=True)


@dataclass(frozen=True)
class Target:
    """A target of a case's first measure, or of `measure`.

    Attributes:
        bound: "at most" for a ratio of this measure to the other, or for a figure alone; "at
            least" for how many times as fast as the other it is.
        limit: The bound.
        beside: The measure that it is compared with, or None.
        measure: The measure, or None for the case's first.
        figure: What is compared.
    """

    bound: Literal["at most", "at least"]
    limit: float
    beside: str | None = None
    measure: str | None = None
    figure: Literal["seconds", "anonymous", "resident"] = "seconds"


@dataclass(frozen=True)
class Case:
    """Ways to do the same, taken in turn.

    Attributes:
        title: The work, in words.
        measures: The ways; the others are compared with the first.
        targets: Its targets.
        times: How many figures of each way a round takes if there are several rounds: more of what
            is short.
        moves_bytes: Whether it is about the bytes of the tensors, so that bytes a second are told.
        is_rehearsed: Whether a fork of the process takes the step first, for the memory that it
            leaves: see tools/bench_process.py. Not, where the step changes the files it reads.
    """

    title: str
    measures: tuple[Measure, ...]
    targets: tuple[Target, ...] = ()
    times: int = 1
    moves_bytes: bool = False
    is_rehearsed: bool = False


# Opening and looking


def open_archive(place: Place) -> Step:
    """Opens the archive."""
    import onnxarchive

    return lambda: onnxarchive.open(place.archive)


def view_archive(place: Place) -> Step:
    """Opens the archive and looks up every tensor, with a check of its local header."""
    import onnxarchive

    def step() -> object:
        with onnxarchive.open(place.archive) as archive:
            return [archive.tensors[name] for name in archive.tensors]

    return step


def verify(place: Place) -> Step:
    """Opens the archive and compares every CRC-32."""
    import onnxarchive

    def step() -> None:
        with onnxarchive.open(place.archive) as archive:
            archive.verify()

    return step


def open_safetensors(place: Place) -> Step:
    """Opens the file and lists its tensors."""
    safe_open = importlib.import_module("safetensors").safe_open

    def step() -> object:
        file = safe_open(place.safetensors, framework="numpy")
        return file, file.keys()

    return step


def view_safetensors(place: Place) -> Step:
    """Opens the file and gets every tensor, which safetensors copies for numpy."""
    safe_open = importlib.import_module("safetensors").safe_open

    def step() -> object:
        with safe_open(place.safetensors, framework="numpy") as file:
            return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118

    return step


def view_onnx_ir(place: Place) -> Step:
    """Loads the `.onnx` and takes every tensor as an array over a map."""
    import onnx_ir

    return lambda: _arrays_of(onnx_ir.load(place.external))


def view_onnx_safetensors(place: Place) -> Step:
    """As `view_onnx_ir`, but with the tensors of the file of safetensors."""
    import onnx_ir

    load = importlib.import_module("onnx_safetensors").load_file_as_external_data
    return lambda: _arrays_of(
        load(onnx_ir.load(place.external), place.safetensors.name, place.safetensors.parent)
    )


def _arrays_of(model: Any) -> tuple[object, list[Any]]:
    arrays = [value.const_value.numpy() for value in model.graph.initializers.values()]
    return model, arrays


def load_torch(place: Place) -> Step:
    """Loads a PyTorch file through a map."""
    import torch

    return lambda: torch.load(place.pickled, mmap=True, weights_only=True)


def load_onnx(place: Place) -> Step:
    """Loads the `.onnx` with its external data."""
    import onnx

    return lambda: onnx.load(place.external)


def read_archive(place: Place, *, prefetch: Any = None) -> Step:
    """Opens the archive and adds up every tensor."""
    import onnxarchive

    def step() -> object:
        with onnxarchive.open(place.archive, prefetch=prefetch) as archive:
            return [_sum(array) for array in archive.tensors.values()]

    return step


def read_safetensors(place: Place) -> Step:
    """Opens the file and adds up every tensor."""
    safe_open = importlib.import_module("safetensors").safe_open

    def step() -> object:
        with safe_open(place.safetensors, framework="numpy") as file:
            return [_sum(file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118

    return step


def read_onnx_ir(place: Place) -> Step:
    """Loads the `.onnx` and adds up every tensor."""
    import onnx_ir

    def step() -> object:
        _, arrays = _arrays_of(onnx_ir.load(place.external))
        return list(map(_sum, arrays))

    return step


def _sum(array: Any) -> int:
    """The sum of the data as 8-byte numbers, computed at memory speed."""
    import numpy as np

    return int(np.add.reduce(array.reshape(-1).view(np.uint64)))


def read_map(place: Place) -> Step:
    """Reads every byte of the archive through a map, and adds them up as numbers of 8 bytes."""
    import numpy as np

    def step() -> object:
        with open(place.archive, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers = np.frombuffer(mapped, np.uint64, len(mapped) // 8)
        piece = PIECE_NBYTES // 8
        return [np.add.reduce(numbers[it : it + piece]) for it in range(0, len(numbers), piece)]

    return step


# Saving models in memory


def save_archive(place: Place, *, is_synced: bool = False) -> Step:
    """Saves a ModelProto that holds its tensors."""
    import onnxarchive

    model = place.model()
    _sync_nothing(is_synced)
    path = place.output / "model.onnxa"
    return lambda: onnxarchive.save(model, path, size_threshold=0)


def _sync_nothing(is_synced: bool = False) -> None:
    """Leaves out waiting for the disk, as other libraries do."""
    from onnxarchive.storage import filesystem

    if not is_synced:
        filesystem.sync = lambda descriptor: None
        filesystem.sync_directory = lambda directory: None


def write_raw(place: Place, *, is_synced: bool = False) -> Step:
    """Writes the bytes of all tensors to a new file, in pieces of 8 MiB at most, with pwrite."""
    arrays = [array.data.cast("B") for _, array in place.arrays()]

    def step() -> None:
        path = place.output / "raw"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        offset = 0
        for view in arrays:
            for start in range(0, len(view), PIECE_NBYTES):
                offset += os.pwrite(descriptor, view[start : start + PIECE_NBYTES], offset)
        if is_synced:
            os.fsync(descriptor)
        os.close(descriptor)

    return step


def save_onnx(place: Place) -> Step:
    """Saves a ModelProto that holds its tensors, with external data."""
    import onnx

    model = place.model()
    return lambda: _save_with_onnx(onnx, model, place)


def _save_with_onnx(onnx: Any, model: object, place: Place) -> None:
    onnx.save_model(
        model,
        place.output / "model.onnx",
        save_as_external_data=True,
        location="weights.data",
        size_threshold=0,
    )


def save_onnx_ir(place: Place) -> Step:
    """Saves a model that holds its tensors, with external data."""
    import onnx_ir

    model = onnx_ir.from_proto(place.model())
    return lambda: _save_with_onnx_ir(onnx_ir, model, place)


def _save_with_onnx_ir(onnx_ir: Any, model: object, place: Place) -> None:
    path = place.output / "model.onnx"
    onnx_ir.save(model, path, external_data="weights.data", size_threshold_bytes=0)


def save_safetensors(place: Place) -> Step:
    """Saves numpy arrays."""
    save_file = importlib.import_module("safetensors.numpy").save_file
    tensors = dict(place.arrays())
    return lambda: save_file(tensors, place.output / "tensors.safetensors")


def save_onnx_safetensors(place: Place) -> Step:
    """Saves a ModelProto that holds its tensors, as a `.onnx` and safetensors beside it."""
    save_model = importlib.import_module("onnx_safetensors").save_model
    model = place.model()
    path = place.output / "model.onnx"
    return lambda: save_model(model, path, external_data="tensors.safetensors")


def save_numpy(place: Place) -> Step:
    """Saves numpy arrays, not compressed."""
    import numpy as np

    tensors: Mapping[str, Any] = dict(place.arrays())
    return lambda: np.savez(place.output / "tensors.npz", **tensors)


def save_torch(place: Place) -> Step:
    """Saves tensors over the memory of numpy arrays."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in place.arrays()}
    return lambda: torch.save(tensors, place.output / "tensors.pt")


# Converting files


def convert(place: Place, *, kind: str) -> Step:
    """Converts a `.onnx`."""
    import onnxarchive

    _sync_nothing()
    source, path = place.file(kind), place.output / "model.onnxa"
    return lambda: onnxarchive.convert(source, path, size_threshold=0)


def copy_raw(place: Place, *, kind: str) -> Step:
    """Copies the file that has the weights, with read and write through one buffer of 8 MiB."""
    source = place.files(kind)[-1]
    buffer = memoryview(bytearray(PIECE_NBYTES))

    def step() -> None:
        with (
            open(source, "rb", buffering=0) as file,
            open(place.output / "raw", "xb", buffering=0) as target,
        ):
            while size := file.readinto(buffer):
                target.write(buffer[:size])

    return step


def convert_onnx(place: Place, *, kind: str) -> Step:
    """Loads a `.onnx`, and saves it with external data."""
    import onnx

    return lambda: _save_with_onnx(onnx, onnx.load(place.file(kind)), place)


def convert_onnx_ir(place: Place, *, kind: str) -> Step:
    """Loads a `.onnx`, and saves it with external data."""
    import onnx_ir

    return lambda: _save_with_onnx_ir(onnx_ir, onnx_ir.load(place.file(kind)), place)


# Running


def session_of_archive(place: Place, *, is_packed: bool = True, runs: bool = False) -> Step:
    """Makes a session of the archive, and runs it if asked."""
    import onnxarchive

    return _session(
        lambda options: onnxarchive.session(place.archive, options, ["CPUExecutionProvider"]),
        is_packed,
        place.group.width if runs else None,
    )


def session_of_onnx(place: Place, *, is_packed: bool = True, runs: bool = False) -> Step:
    """Makes a session of the `.onnx` with external data, and runs it if asked."""
    import onnxruntime as ort

    path = os.fspath(place.external)
    return _session(
        lambda options: ort.InferenceSession(path, options, ["CPUExecutionProvider"]),
        is_packed,
        place.group.width if runs else None,
    )


def _session(make: Callable[[Any], Any], is_packed: bool, width: int | None) -> Step:
    import numpy as np
    import onnxruntime as ort

    options = ort.SessionOptions()
    if not is_packed:
        options.add_session_config_entry("session.disable_prepacking", "1")

    def step() -> object:
        session = make(options)
        if width is None:
            return session
        return session, session.run(None, {"x0": np.ones((1, width), np.float32)})

    return step


# Changing


def replace_model(place: Place) -> Step:
    """Replaces the model by one that differs in a text of the same size."""
    import onnx

    import onnxarchive
    from onnxarchive.archive.editing import replace_model

    model = onnx.ModelProto()
    with onnxarchive.open(place.archive) as archive:
        model.CopyFrom(archive.model)
    model.doc_string = os.urandom(32).hex()
    return lambda: replace_model(place.archive, model)


# Starting


def list_archive(place: Place) -> Step:
    """Runs `onnxarchive ls` on the archive."""
    return partial(_run, "import onnxarchive.cli; onnxarchive.cli.run()", "ls", place.archive)


def start_onnx(place: Place) -> Step:
    """Runs Python to import onnx."""
    return partial(_run, "import onnx")


def _run(program: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


_IMPORT = """
import time
busy, begun = time.process_time(), time.perf_counter()
import {package}
print(time.perf_counter() - begun, time.process_time() - busy)
"""


def import_package(place: Place, *, package: str) -> Step:
    """Imports a package in a process that has imported nothing yet, and times the import alone."""

    def step() -> Told:
        told = _run(_IMPORT.format(package=package))
        return Told(*map(float, told.split()))

    return step


# All of them

_ONNX_IR: Final = ("onnx_ir",)
_SAFETENSORS: Final = ("safetensors",)
_ONNX_SAFETENSORS: Final = ("onnx_ir", "onnx_safetensors", "safetensors")
_TORCH: Final = ("torch",)
_ONNXRUNTIME: Final = ("onnxruntime",)


def _views(group: str) -> tuple[Measure, ...]:
    both = ("external", "safetensors")
    return (
        Measure(OURS, group, view_archive, ("archive",)),
        _peer("onnx_ir", group, view_onnx_ir, ("external",), _ONNX_IR),
        _peer("safetensors", group, view_safetensors, ("safetensors",), _SAFETENSORS),
        _peer("onnx-safetensors", group, view_onnx_safetensors, both, _ONNX_SAFETENSORS),
        _peer("torch.load mmap", group, load_torch, ("pickled",), _TORCH),
        _peer("onnx.load", group, load_onnx, ("external",)),
    )


def _saves(group: str) -> tuple[Measure, ...]:
    return (
        Measure(OURS, group, save_archive, writes=True),
        Measure("pwrite", group, write_raw, writes=True, is_raw=True),
        _peer("onnx", group, save_onnx, writes=True),
        _peer("onnx_ir", group, save_onnx_ir, (), _ONNX_IR, True),
        _peer("safetensors", group, save_safetensors, (), _SAFETENSORS, True),
        _peer("onnx-safetensors", group, save_onnx_safetensors, (), _ONNX_SAFETENSORS, True),
        _peer("numpy.savez", group, save_numpy, writes=True),
        _peer("torch.save", group, save_torch, (), _TORCH, True),
    )


_SAVING_PEERS: Final = (
    "onnx",
    "onnx_ir",
    "safetensors",
    "onnx-safetensors",
    "numpy.savez",
    "torch.save",
)


def _conversions(group: str, kind: str) -> Case:
    described = {"external": "external data", "single": "a single .onnx"}[kind]
    measures = [
        Measure(OURS, group, partial(convert, kind=kind), (kind,), writes=True),
        Measure("copy", group, partial(copy_raw, kind=kind), (kind,), writes=True, is_raw=True),
        _peer("onnx", group, partial(convert_onnx, kind=kind), (kind,), writes=True),
        _peer("onnx_ir", group, partial(convert_onnx_ir, kind=kind), (kind,), _ONNX_IR, True),
    ]
    targets = (
        Target("at least", 0.75, "copy"),
        Target("at least", 5, "onnx"),
        Target("at most", 150 * MIB, figure="anonymous"),
    )
    title = f"convert {described}; onnx and onnx_ir: load, and save with external data"
    return Case(title, tuple(measures), targets, moves_bytes=True, is_rehearsed=True)


def _sessions(*, is_packed: bool, runs: bool) -> Case:
    ways = (
        (OURS, session_of_archive, "archive"),
        ("onnxruntime", session_of_onnx, "external"),
    )
    measures = [
        Measure(
            name,
            "chain",
            partial(prepare, is_packed=is_packed, runs=runs),
            (kind,),
            _ONNXRUNTIME,
            is_peer=name != OURS,
        )
        for name, prepare, kind in ways
    ]
    targets = (
        Target("at most", 1.05, "onnxruntime"),
        Target("at most", 1.05, "onnxruntime", figure="anonymous"),
    )
    title = "session of ONNX Runtime" + (" and its first run" if runs else "")
    title += ", default options" if is_packed else ", prepacking off"
    times = 1 if is_packed else 3
    return Case(title, tuple(measures), () if runs else targets, times, is_rehearsed=True)


# Groups of large files come one after the other, so that few of them are on the disk at a time.
CASES: Final[Mapping[str, Case]] = {
    "import": Case(
        "import, in a fresh interpreter",
        (
            Measure(OURS, "warm", partial(import_package, package=OURS), is_process=True),
            Measure("onnx", "warm", partial(import_package, package="onnx"), is_process=True),
        ),
        (Target("at most", 1.1, "onnx"),),
        times=5,
    ),
    "ls": Case(
        "onnxarchive ls, as a process; beside python -c 'import onnx'",
        (
            Measure(OURS, "light", list_archive, ("archive",), is_process=True),
            Measure("import onnx", "light", start_onnx, is_process=True),
        ),
        (Target("at most", 1.5, "import onnx"),),
        times=5,
    ),
    "open-many": Case(
        "open; safetensors: safe_open and keys",
        (
            Measure(OURS, "many", open_archive, ("archive",)),
            _peer("safetensors", "many", open_safetensors, ("safetensors",), _SAFETENSORS),
        ),
        (Target("at most", 0.8, "safetensors"),),
        times=3,
        is_rehearsed=True,
    ),
    "view-many": Case(
        "open and a view of each tensor; others: load and an array of each tensor",
        _views("many"),
        (Target("at most", 0.8, "safetensors"),),
        is_rehearsed=True,
    ),
    "save-many": Case(
        "save from memory, without fsync", _saves("many"), moves_bytes=True, is_rehearsed=True
    ),
    "open-huge": Case(
        "open a sparse archive, beside a small one of as many entries",
        (
            Measure("huge", "huge", open_archive, ("archive",)),
            Measure("small", "small", open_archive, ("archive",)),
        ),
        (Target("at most", 1.2, "small"),),
        times=5,
    ),
    "replace-huge": Case(
        "replace the model of a sparse archive, beside a small one of as many entries",
        (
            Measure("huge", "huge", replace_model, ("archive",)),
            Measure("small", "small", replace_model, ("archive",)),
        ),
        (Target("at most", 1.5, "small"),),
        times=5,
    ),
    "view-one": Case(
        "open and a view of each tensor; others: load and an array of each tensor",
        _views("one"),
        is_rehearsed=True,
    ),
    "save-one": Case(
        "save from memory, without fsync", _saves("one"), moves_bytes=True, is_rehearsed=True
    ),
    "session": _sessions(is_packed=True, runs=False),
    "session-unpacked": _sessions(is_packed=False, runs=False),
    "session-run": _sessions(is_packed=True, runs=True),
    "session-run-unpacked": _sessions(is_packed=False, runs=True),
    "convert-single": _conversions("single", "single"),
    "save-large": Case(
        "save from memory, without fsync",
        _saves("large"),
        (
            Target("at least", 0.85, "pwrite"),
            *(Target("at most", 1, peer) for peer in _SAVING_PEERS),
        ),
        moves_bytes=True,
        is_rehearsed=True,
    ),
    "save-synced": Case(
        "save from memory, with fsync",
        (
            Measure(OURS, "large", partial(save_archive, is_synced=True), writes=True),
            Measure(
                "pwrite", "large", partial(write_raw, is_synced=True), writes=True, is_raw=True
            ),
        ),
        moves_bytes=True,
        is_rehearsed=True,
    ),
    "view-large": Case(
        "open and a view of each tensor; others: load and an array of each tensor",
        _views("large"),
        (
            Target("at most", 1 / 15, "onnx_ir"),
            Target("at most", 1 / 200, "safetensors"),
            Target("at most", 1 / 200, "onnx.load"),
            Target("at most", 16 * MIB, figure="resident"),
        ),
        is_rehearsed=True,
    ),
    "read": Case(
        "open, and add up every tensor; prefetch as open() takes it",
        (
            Measure(OURS, "large", read_archive, ("archive",)),
            Measure("willneed", "large", partial(read_archive, prefetch="willneed"), ("archive",)),
            Measure("populate", "large", partial(read_archive, prefetch="populate"), ("archive",)),
            Measure("map", "large", read_map, ("archive",), is_raw=True),
            _peer("onnx_ir", "large", read_onnx_ir, ("external",), _ONNX_IR),
            _peer("safetensors", "large", read_safetensors, ("safetensors",), _SAFETENSORS),
        ),
        moves_bytes=True,
    ),
    "convert-external": _conversions("large", "external"),
    "verify": Case(
        "read all bytes: every CRC-32; map: their sum, through a map",
        (
            Measure(OURS, "large", verify, ("archive",)),
            Measure("map", "large", read_map, ("archive",), is_raw=True),
        ),
        (Target("at least", 0.7, "map"),),
        times=2,
        moves_bytes=True,
        is_rehearsed=True,
    ),
    "replace-large": Case(
        "replace the model, beside weights of a hundredth of the size",
        (
            Measure("large", "large", replace_model, ("archive",)),
            Measure("light", "light", replace_model, ("archive",)),
        ),
        (Target("at most", 1.2, "light"),),
        times=5,
    ),
}


def names(cases: Sequence[str] = ()) -> list[str]:
    """The cases of these names, or all of them, in the order in which they run."""
    return [name for name in CASES if not cases or name in cases]


def missing() -> dict[str, str]:
    """Packages that measures need and that are missing, each with a sentence."""
    needed = {package for case in CASES.values() for it in case.measures for package in it.needs}
    found = {}
    for package in sorted(needed):
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(package) is not None:
                continue
        found[package] = f"{package.replace('_', '-')} is not installed"
    return found
