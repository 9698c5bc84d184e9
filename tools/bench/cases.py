"""The cases of run.py: each compares a few ways to do the same work."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from tools.bench import ways
from tools.bench.inputs import COUNTS, SIZES, Place

OURS: Final = "onnxarchive"
MIB: Final = 1 << 20
ASKED_ONLY: Final = "real"  # prefix of the cases that run only with --only, or with --readme
NOT_QUICK: Final = (
    *("convert-single", "growth", "lists", "overlay", "remote", "session", "weights"),
)
README: Final = (
    "view-small",
    "growth-bytes",
    "session-unpacked",
    "save-large",
    "use-large",
    "convert-large",
    "verify",
    "real-open",
)

# What is timed. "warm": the step, in a process that has taken the same step with a small file.
# "first": the step, in a process that takes only this step. "process": the whole process of
# "first", from start to end.
Clock: TypeAlias = Literal["warm", "first", "process"]


@dataclass(frozen=True)
class Measure:
    """One way to do the work of a case.

    Attributes:
        name: The name of the measure.
        group: The name of the group of tensors.
        prepare: Returns the step to time.
        reads: The kinds of input files.
        needs: The packages and programs needed in addition to this library's requirements.
        writes: True if the measure writes all bytes of the group to disk.
        clock: What is timed (see `Clock`).
        is_raw: True if the measure shows a limit of the machine, or the cost of a parsed model.
        is_peer: True if the measure is another library's; its failure does not fail the tool.
    """

    name: str
    group: str
    prepare: Callable[[Place], ways.Step]
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    writes: bool = False
    clock: Clock = "warm"
    is_raw: bool = False
    is_peer: bool = False


_peer: Final = partial(Measure, is_peer=True)
_real: Final = partial(Measure, group="real")
_UNPACKED: Final = partial(ways.session_of_archive, is_packed=False)


@dataclass(frozen=True)
class Target:
    """A target of one row of a case.

    Attributes:
        bound: "at most": row / beside <= `limit`, or row <= `limit` without `beside`.
            "at least": beside / row >= `limit`.
        limit: The limit of the ratio, or of the figure in seconds or bytes.
        beside: The other row of the comparison, or None.
        row: The row; None for the first row of the case.
        figure: The attribute of `Figures` to compare.
    """

    bound: Literal["at most", "at least"]
    limit: float
    beside: str | None = None
    row: str | None = None
    figure: Literal["seconds", "cpu_seconds", "anonymous", "resident"] = "seconds"


@dataclass(frozen=True)
class Case:
    """Several ways to do the same work.

    Attributes:
        title: The work, in words.
        measures: The ways; the report compares the first with each of the others.
        targets: The targets of the case.
        times: Repetitions of each way in a round; 1 with --quick or a single round. The median is
            the figure of the round. Short steps need more repetitions.
        moves_bytes: True if the time depends on the bytes of the tensors; the report shows GB/s.
        grows: The quantity that grows from measure to measure, or None. The measures of a growing
            case are named "what: how much".
        is_served: True if a server serves the files.
        is_large: True if the files exceed the page cache; each way is then measured once.
    """

    title: str
    measures: tuple[Measure, ...]
    targets: tuple[Target, ...] = ()
    times: int = 1
    moves_bytes: bool = False
    grows: Literal["tensors", "bytes"] | None = None
    is_served: bool = False
    is_large: bool = False


_ONNX_IR: Final = ("onnx_ir",)
_SAFETENSORS: Final = ("safetensors",)
_TORCH: Final = ("torch",)
_ONNXRUNTIME: Final = ("onnxruntime",)
_SERVED: Final = ("nginx", "obstore")
_PROGRAMS: Final = ("nginx", "curl")
MODEL: Final = "ModelProto"  # the row that shows the memory of a parsed model
_PARSED: Final = Measure(MODEL, "many", ways.parse_model, is_raw=True)


def _start() -> Case:
    onnx = partial(ways.import_package, package="onnx")
    ours = partial(ways.import_package, package=OURS)
    python = "python -c 'import onnx'"
    whole, first = partial(Measure, clock="process"), partial(Measure, clock="first")
    return Case(
        "whole processes; the rows 'open', 'import onnx' and 'import onnxarchive' time one step, "
        "the first of its process",
        (
            whole("import, open, views", "light", ways.view_archive, ("archive",)),
            whole("onnxarchive ls", "light", ways.run_ls, ("archive",)),
            whole(python, "light", onnx, is_peer=True),
            first("open", "light", ways.open_archive, ("archive",)),
            first("import onnxarchive", "light", ours),
            first("import onnx", "light", onnx, is_peer=True),
        ),
        (
            Target("at most", 1.25, python),
            Target("at most", 1.25, python, "onnxarchive ls"),
            Target("at most", 0.25, "import onnx", "open"),
            Target("at most", 1.1, "import onnx", "import onnxarchive"),
        ),
        times=5,
    )


def _views(group: str, *, is_used: bool = False) -> tuple[Measure, ...]:
    def opened(way: str, **options: Any) -> Callable[[Place], ways.Step]:
        if is_used:
            return partial(ways.use, way=way, **options)
        return partial(getattr(ways, way), **options)

    for_torch = opened("view_safetensors", framework="pt")
    return (
        Measure(OURS, group, opened("view_archive"), ("archive",)),
        _peer("onnx_ir", group, opened("view_onnx_ir"), ("external",), _ONNX_IR),
        _peer("safetensors", group, opened("view_safetensors"), ("safetensors",), _SAFETENSORS),
        _peer("safetensors pt", group, for_torch, ("safetensors",), (*_SAFETENSORS, *_TORCH)),
        _peer("torch.load mmap", group, opened("load_torch"), ("pickled",), _TORCH),
        _peer("onnx.load", group, opened("load_onnx"), ("external",)),
    )


def _saves(group: str) -> tuple[Measure, ...]:
    return (
        Measure(OURS, group, ways.save_archive, writes=True),
        Measure("pwrite", group, ways.write_raw, writes=True, is_raw=True),
        _peer("onnx", group, ways.save_onnx, writes=True),
        _peer("onnx_ir", group, ways.save_onnx_ir, (), _ONNX_IR, True),
        _peer("safetensors", group, ways.save_safetensors, (), _SAFETENSORS, True),
        _peer("numpy.savez", group, ways.save_numpy, writes=True),
        _peer("torch.save", group, ways.save_torch, (), _TORCH, True),
    )


_SAVING_PEERS: Final = tuple(it.name for it in _saves("many") if it.is_peer)


def _conversions(group: str, kind: str, targets: tuple[Target, ...] | None = None) -> Case:
    described = {"external": "external data", "single": "a single .onnx"}[kind]
    measures = (
        Measure(OURS, group, partial(ways.convert, kind=kind), (kind,), writes=True),
        Measure("copy", group, partial(ways.copy_raw, kind=kind), (kind,), (), True, is_raw=True),
        _peer("onnx", group, partial(ways.convert_onnx, kind=kind), (kind,), writes=True),
        _peer("onnx_ir", group, partial(ways.convert_onnx_ir, kind=kind), (kind,), _ONNX_IR, True),
    )
    if targets is None:
        targets = (
            Target("at least", 0.75, "copy"),
            Target("at most", 0.2, "onnx"),
            Target("at most", 150 * MIB, figure="anonymous"),
        )
    title = f"convert {described}; onnx and onnx_ir: load and save"
    return Case(title, measures, targets, moves_bytes=True)


def _sessions(*, is_packed: bool) -> Case:
    measures = [
        Measure(name, "chain", prepare, (kind,), _ONNXRUNTIME, is_peer=name != OURS)
        for name, prepare, kind in (
            (OURS, partial(ways.session_of_archive, is_packed=is_packed), "archive"),
            ("onnxruntime", partial(ways.session_of_onnx, is_packed=is_packed), "external"),
        )
    ]
    targets = (
        Target("at most", 1.05, "onnxruntime"),
        Target("at most", 1.05, "onnxruntime", figure="anonymous"),
    )
    title = f"session of ONNX Runtime, {'default options' if is_packed else 'prepacking off'}"
    return Case(title, tuple(measures), targets, 1 if is_packed else 3)


def _constants() -> Case:
    """Sessions of weights in Constant nodes, outside and inside the model."""
    outside = partial(_UNPACKED, kind="outside")
    onnx = partial(ways.session_of_onnx, is_packed=False, kind="single")
    measures = (
        Measure("outside", "constants", outside, ("outside",), _ONNXRUNTIME),
        Measure("inside", "constants", _UNPACKED, ("archive",), _ONNXRUNTIME),
        _peer("onnxruntime", "constants", onnx, ("single",), _ONNXRUNTIME),
    )
    title = "session of 128 MiB in Constant nodes, prepacking off; an archive of each kind"
    targets = (Target("at most", 16 * MIB, figure="anonymous"),)
    return Case(title, measures, targets, times=3)


def _changes(to: str) -> Case:
    """Weights changed one at a time, and all in memory."""
    prepare = partial(ways.change_weights, to=to)
    loaded = partial(ways.change_loaded, to=to)
    needs = (*_ONNX_IR, *_ONNXRUNTIME)
    measures = (
        Measure("one by one", "weights", prepare, ("archive",), needs),
        _peer("loaded", "weights", loaded, ("archive",), needs),
    )
    title = f"weights to {to} by ONNX Runtime's functions, by the recipe and with the model loaded"
    return Case(title, measures, (Target("at most", 128 * MIB, figure="anonymous"),))


_OVERLAY: Final = ("archive", "tuned", "overlay")


def _overlays() -> Case:
    """Sessions of an overlay and of the fine-tuned archive."""
    trusted = partial(ways.session_of_overlay, verify=False)
    compared = partial(ways.session_of_overlay, verify=True)
    whole = partial(_UNPACKED, kind="tuned")
    measures = (
        Measure("overlay", "tuned", trusted, _OVERLAY, _ONNXRUNTIME),
        Measure("4 of an overlay", "tuned", partial(trusted, count=4), _OVERLAY, _ONNXRUNTIME),
        Measure("overlay, SHA-256", "tuned", compared, _OVERLAY, _ONNXRUNTIME),
        Measure("fine-tuned", "tuned", whole, ("tuned",), _ONNXRUNTIME),
    )
    title = "session of an overlay (16.8 MB) and of the fine-tuned archive (268 MB), prepacking off"
    targets = (
        Target("at most", 8 * MIB, figure="anonymous"),
        Target("at most", 16 * MIB, row="4 of an overlay", figure="anonymous"),
    )
    return Case(title, measures, targets, times=3)


def _edits(group: str) -> Case:
    return Case(
        "set an item of the metadata; onnx.load: load the model with external data",
        (
            Measure(OURS, group, ways.edit_archive, ("archive",)),
            _peer("onnx.load", group, ways.load_onnx, ("external",)),
        ),
        (Target("at most", 0.35, "onnx.load", figure="cpu_seconds"),),
        times=5,
    )


def _lists(group: str, limit: float) -> Case:
    """A model with long lists; each step may take `limit` times the CPU time of onnx's."""
    load, both = "onnx.load", "onnx.load, save"
    measures = (
        Measure("open", group, ways.open_archive, ("archive",)),
        Measure("check", group, ways.check, ("archive",)),
        _peer(load, group, partial(ways.load_onnx, kind="single"), ("single",)),
        Measure("convert", group, partial(ways.convert, kind="single"), ("single",), writes=True),
        Measure("edit", group, ways.edit_archive, ("archive",)),
        Measure("export", group, ways.export_archive, ("archive",), writes=True),
        _peer(both, group, partial(ways.convert_onnx, kind="single"), ("single",), writes=True),
    )
    beside = {"open": load, "check": load, "convert": both, "edit": both, "export": both}
    targets = (Target("at most", limit, peer, row, "cpu_seconds") for row, peer in beside.items())
    return Case(f"{group}: open, check, convert, edit, export", measures, tuple(targets))


_GROWING: Final[Mapping[str, Callable[[Place], ways.Step]]] = {
    "open": ways.open_archive,
    "ls": ways.list_archive,
    "edit": ways.edit_archive,
}


def _growth(grows: Literal["tensors", "bytes"]) -> Case:
    groups = (
        {f"{count:,}": f"count-{count}" for count in COUNTS}
        if grows == "tensors"
        else {f"{size / 10**9:g} GB": f"size-{size}" for size in SIZES}
    )
    measures = [
        Measure(f"{what}: {much}", group, prepare, ("archive",))
        for what, prepare in _GROWING.items()
        for much, group in groups.items()
    ]
    saved = (
        groups
        if grows == "tensors"
        else {"0.01 GB": "size-10000000", "0.1 GB": "size-100000000", "1 GB": "size-1000000000"}
    )
    measures += [
        Measure(f"save: {much}", group, ways.save_archive, writes=True)
        for much, group in saved.items()
    ]
    titles = {
        "tensors": "growth with the number of tensors of 64 bytes",
        "bytes": "growth with the bytes of 100 tensors; sparse files, except for save",
    }
    least, *_, most = groups
    targets = [
        Target("at most", 1.5, f"{what}: {least}", f"{what}: {most}")
        for what in _GROWING
        if grows == "bytes"
    ]
    return Case(titles[grows], tuple(measures), tuple(targets), grows=grows)


# Cases of the same large files are neighbours, so that few files are on the disk at a time.
CASES: Final[Mapping[str, Case]] = {
    "start": _start(),
    "edit": _edits("light"),
    "edit-many": _edits("many"),
    "open-many": Case(
        "open an archive; safetensors: safe_open, and list the keys",
        (
            Measure(OURS, "many", ways.open_archive, ("archive",)),
            _peer("safetensors", "many", ways.open_safetensors, ("safetensors",), _SAFETENSORS),
        ),
        (Target("at most", 5, "safetensors"),),
        times=3,
    ),
    "open-far": Case(
        "open a sparse archive of 1,000 tensors: with 64-bit offsets, and with 32-bit ones",
        (
            Measure("open: 98 GiB", "far", ways.open_archive, ("archive",)),
            Measure("open: 0.1 GiB", "near", ways.open_archive, ("archive",)),
        ),
        (Target("at most", 1.2, "open: 0.1 GiB"),),
        times=5,
    ),
    "lists-forest": _lists("forest", 3),
    "lists-svm": _lists("svm", 3),
    "lists-labels": _lists("labels", 8),
    "lists-nodes": _lists("nodes", 8),
    "lists-functions": _lists("functions", 8),
    "view-many": Case(
        "open and get each tensor (onnx.load: load only)",
        (*_views("many"), _PARSED),
        (
            Target("at most", 1, "onnx.load"),
            Target("at most", 80 * MIB, figure="anonymous"),
        ),
    ),
    "view-small": Case(
        "open and get each tensor (onnx.load: load only)",
        _views("small"),
        (Target("at most", 0.25, "onnx_ir"),),
        times=3,
    ),
    "save-many": Case(
        "save from memory, synced",
        (*_saves("many"), _PARSED),
        (
            Target("at most", 1.5, "numpy.savez"),
            *(Target("at most", 1, peer) for peer in ("onnx", "onnx_ir")),
            Target("at most", 128 * MIB, figure="anonymous"),
        ),
        moves_bytes=True,
    ),
    "convert-many": Case(
        "convert external data; save: the same tensors from memory",
        (
            Measure(
                OURS, "many", partial(ways.convert, kind="external"), ("external",), writes=True
            ),
            Measure("save", "many", ways.save_archive, writes=True),
            _PARSED,
        ),
        (
            Target("at most", 2, "save"),
            Target("at most", 192 * MIB, figure="anonymous"),
        ),
        moves_bytes=True,
    ),
    "remote-ls": Case(
        "onnxarchive ls of a URL (nginx on this machine); file: ls of the file",
        (
            Measure(
                OURS, "many", partial(ways.list_archive, is_remote=True), ("archive",), _SERVED
            ),
            Measure("file", "many", ways.list_archive, ("archive",), _SERVED),
        ),
        (Target("at most", 4, "file"),),
        is_served=True,
    ),
    "growth-tensors": _growth("tensors"),
    "growth-bytes": _growth("bytes"),
    "session": _sessions(is_packed=True),
    "session-unpacked": _sessions(is_packed=False),
    "session-constants": _constants(),
    "convert-medium": _conversions("medium", "external", (Target("at most", 0.48, "onnx_ir"),)),
    "convert-single": _conversions("single", "single"),
    "save-large": Case(
        "save from memory, synced",
        _saves("large"),
        (
            Target("at least", 0.85, "pwrite"),
            *(Target("at most", 1, peer) for peer in _SAVING_PEERS),
        ),
        moves_bytes=True,
    ),
    "view-large": Case(
        "open and get each tensor (onnx.load: load only)",
        _views("large"),
        (
            Target("at most", 0.25, "onnx_ir"),
            Target("at most", 1 / 100, "safetensors"),
            Target("at most", 1 / 100, "onnx.load"),
            Target("at most", 16 * MIB, figure="resident"),
        ),
    ),
    "use-large": Case(
        "open, keep every tensor, and add up the elements of each",
        _views("large", is_used=True),
        (
            Target("at most", 1, "onnx_ir"),
            Target("at most", 0.5, "onnx.load"),
            Target("at most", 16 * MIB, figure="anonymous"),
        ),
        moves_bytes=True,
    ),
    "remote-download": Case(
        "download from nginx on this machine, synced; only onnxarchive checks the bytes",
        (
            Measure(OURS, "large", ways.download, ("archive",), _SERVED, True),
            _peer("curl", "large", ways.download_with_curl, ("archive",), ("nginx", "curl"), True),
            _peer("obstore", "large", ways.download_with_obstore, ("archive",), _SERVED, True),
            # A lower bound for every download: a copy of the file.
            Measure(
                "copy",
                "large",
                partial(ways.copy_raw, kind="archive"),
                ("archive",),
                writes=True,
                is_raw=True,
            ),
        ),
        (Target("at least", 1.5, "curl"), Target("at least", 0.8, "obstore")),
        moves_bytes=True,
        is_served=True,
    ),
    "convert-large": _conversions("large", "external"),
    "verify": Case(
        "compare every CRC-32; check: every rule, too; map: the sum of all bytes, through a map",
        (
            Measure(OURS, "large", ways.verify, ("archive",)),
            Measure("check --full", "large", ways.check, ("archive",)),
            Measure("map", "large", ways.read_map, ("archive",), is_raw=True),
        ),
        (Target("at least", 0.7, "map"), Target("at most", 1.1, OURS, "check --full")),
        times=2,
        moves_bytes=True,
    ),
    "weights-4-bits": _changes("4 bits"),
    "weights-float16": _changes("float16"),
    "overlay-session": _overlays(),
    "overlay-make": Case(
        "an overlay (16.8 MB) of a fine-tuned archive (268 MB), of which 1 of 16 tensors differs",
        (
            Measure("make", "tuned", ways.make_overlay, _OVERLAY, _ONNXRUNTIME),
            Measure("merge", "tuned", ways.merge_overlay, _OVERLAY, _ONNXRUNTIME, writes=True),
        ),
        moves_bytes=True,
    ),
    "real-open": Case(
        "an archive of 20 GiB, not sparse",
        (
            _real("session", prepare=_UNPACKED, reads=("archive",), needs=_ONNXRUNTIME),
            _real("edit", prepare=ways.edit_archive, reads=("archive",)),
        ),
        is_large=True,
    ),
    "real": Case(
        "an archive of 20 GiB, not sparse",
        (
            _real("write", prepare=ways.write_archive, writes=True),
            _real("check --full", prepare=ways.check, reads=("archive",)),
            _real("export", prepare=ways.export_archive, reads=("archive",), writes=True),
        ),
        moves_bytes=True,
        is_large=True,
    ),
    "real-convert": Case(
        "convert external data of 20 GiB",
        (
            _real(
                OURS,
                prepare=partial(ways.convert, kind="external"),
                reads=("external",),
                writes=True,
            ),
        ),
        moves_bytes=True,
        is_large=True,
    ),
}


def names(asked: Sequence[str] = (), is_quick: bool = False) -> list[str]:
    """Selects cases by name or by first words, in the order in which they run.

    Without `asked`, selects all cases except `ASKED_ONLY` and, with `is_quick`, `NOT_QUICK`.
    """
    if asked:
        return [
            it for it in CASES if any(it == name or it.startswith(f"{name}-") for name in asked)
        ]
    left_out = (ASKED_ONLY, *NOT_QUICK) if is_quick else ASKED_ONLY
    return [it for it in CASES if not it.startswith(left_out)]


def program(name: str) -> str | None:
    """The path of a program on PATH or in an sbin directory; None if missing."""
    return shutil.which(name) or shutil.which(name, path=f"/usr/sbin{os.pathsep}/usr/local/sbin")


def missing(is_quick: bool = False) -> dict[str, str]:
    """The packages and programs that are missing or left out, each with the reason."""
    needed = {package for case in CASES.values() for it in case.measures for package in it.needs}
    absent = {"torch": "PyTorch takes seconds to import"} if is_quick else {}
    for package in sorted(needed - absent.keys()):
        if package in _PROGRAMS and program(package):
            continue
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(package) is not None:
                continue
        absent[package] = f"{package.replace('_', '-')} is not installed"
    return absent
