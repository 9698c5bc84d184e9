"""The report of tools/bench.py: medians, ratios and their spread, targets, a plot."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench_cases import Case, Target
from bench_process import Figures

MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9

_LINES_SHOWN: Final = 2  # of the output of a failed process

LIBRARIES: Final = (
    "onnxarchive",
    "numpy",
    "onnx",
    "protobuf",
    "zlib-ng",
    "onnxruntime",
    "onnx-ir",
    "safetensors",
    "onnx-safetensors",
    "torch",
)


@dataclass(frozen=True)
class Spread:
    """The median of some values, and the least and most of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one value or more."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Verdict:
    """Result of a target.

    Attributes:
        target: The target.
        measure: The measure that it is about.
        spread: The ratio or figure, or None where it was not measured.
        best: The same of the least figures of all rounds, on which other programs weigh least.
        met: Whether it is met by the median; None where it was not measured.
        rounds_met: In how many rounds it is met.
        rounds: In how many it was measured.
        reason: Why it was not measured, or None.
    """

    target: Target
    measure: str
    spread: Spread | None = None
    best: float | None = None
    met: bool | None = None
    rounds_met: int = 0
    rounds: int = 0
    reason: str | None = None


@dataclass
class Result:
    """Results of a case.

    Attributes:
        name: The case's name.
        case: The case.
        size: The data that was read or written, in words.
        nbytes: Bytes of the tensors.
        rounds: The figures of each measure, in the order of the rounds.
        left_out: Why which measures were not taken.
        failures: What which measures failed with.
    """

    name: str
    case: Case
    size: str
    nbytes: int
    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_failed(self) -> bool:
        """Whether a measure failed that is no peer."""
        return any(it.name in self.failures and not it.is_peer for it in self.case.measures)

    def verdicts(self) -> list[Verdict]:
        """The results of its targets."""
        return [judge(it, self) for it in self.case.targets]


def values(figures: Sequence[Figures], name: str) -> list[float]:
    """One figure of every round; empty if a round lacks it."""
    found = [getattr(it, name) for it in figures]
    return [] if None in found else found


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio of each round; empty if one is unknown."""
    if len(ours) != len(others) or not all(others):
        return []
    return [own / other for own, other in zip(ours, others, strict=True)]


def judge(target: Target, result: Result) -> Verdict:
    """Holds the figures of a case against a target."""
    measure = target.measure or result.case.measures[0].name
    compared = [measure] if target.beside is None else [measure, target.beside]
    for name in compared:
        reasons = {**result.left_out, **result.failures}
        if name in reasons:
            return Verdict(target, measure, reason=f"{name}: {reasons[name].splitlines()[-1]}")
    found = values(result.rounds[measure], target.figure)
    best = [min(found, default=0)]
    if target.beside is not None:
        others = values(result.rounds[target.beside], target.figure)
        best_others = [min(others, default=0)]
        if target.bound == "at most":
            found, best = ratios(found, others), ratios(best, best_others)
        else:
            found, best = ratios(others, found), ratios(best_others, best)
    if not found:
        return Verdict(target, measure, reason=f"this system does not tell {target.figure}")
    spread = Spread.of(found)
    met = sum(is_met(target, it) for it in found)
    is_met_by_median = is_met(target, spread.median)
    return Verdict(target, measure, spread, best[0], is_met_by_median, met, len(found))


def is_met(target: Target, value: float) -> bool:
    """Whether a ratio or figure is within the target's bound."""
    return value <= target.limit if target.bound == "at most" else value >= target.limit


# In words


def describe(verdict: Verdict) -> str:
    """A line about a target."""
    target = verdict.target
    is_absolute = target.beside is None
    limit = f"{target.bound} {_figure(target.limit, target.figure, is_absolute)}"
    if target.beside is None:
        what = f"{target.figure} memory" if target.figure != "seconds" else "time"
    elif target.figure != "seconds":
        what = f"{target.figure} memory, of that of {target.beside}"
    elif target.bound == "at most":
        what = f"time, of that of {target.beside}"
    else:
        what = f"times as fast as {target.beside}"
    if verdict.spread is None or verdict.best is None:
        return f"not measured  {what}: {limit} ({verdict.reason})"
    shown = [
        _figure(it, target.figure, is_absolute)
        for it in (verdict.spread.median, verdict.spread.low, verdict.spread.high, verdict.best)
    ]
    rounds = f"in {verdict.rounds_met} of {verdict.rounds} rounds"
    state = "met" if verdict.met else "NOT MET"
    spread = f"{shown[0]} ({shown[1]}..{shown[2]}), of the best {shown[3]}"
    return f"{state:<12}  {what}: {spread}; {limit}: {rounds}"


def _figure(value: float, figure: str, is_absolute: bool) -> str:
    if not is_absolute:
        return ratio(value)
    return duration(value) if figure == "seconds" else f"{value / MIB:.1f} MiB"


def ratio(value: float) -> str:
    """A ratio with three digits that count."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds where they are few."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def size(nbytes: float) -> str:
    """A size as people say it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.0f} bytes"


def table(result: Result) -> str:
    """The figures of a case, a line for each measure."""
    first = result.case.measures[0].name
    own = result.rounds.get(first, [])
    header = ["", "median", "min..max", "CPU", "GB/s", "anonymous", "resident"]
    header += [f"{first} / this", "of CPU"]
    rows = [header if result.case.moves_bytes else [*header[:4], *header[5:]]]
    for name, figures in result.rounds.items():
        seconds = values(figures, "seconds")
        if not seconds:
            continue
        time = Spread.of(seconds)
        busy = values(figures, "cpu_seconds")
        row = [
            name,
            duration(time.median),
            f"{duration(time.low)}..{duration(time.high)}",
            duration(statistics.median(busy)),
            f"{result.nbytes / time.median / GB:.2f}",
            *(_memory(values(figures, it)) for it in ("anonymous", "resident")),
            _ratios(ratios(values(own, "seconds"), seconds) if name != first else []),
            _ratios(ratios(values(own, "cpu_seconds"), busy) if name != first else []),
        ]
        rows.append(row if result.case.moves_bytes else [*row[:4], *row[5:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _memory(found: Sequence[float]) -> str:
    return f"{statistics.median(found) / MIB:.1f} MiB" if found else ""


def _ratios(found: Sequence[float]) -> str:
    if not found:
        return ""
    spread = Spread.of(found)
    return f"{ratio(spread.median)} ({ratio(spread.low)}..{ratio(spread.high)})"


def text(result: Result) -> str:
    """A case as it is printed."""
    lines = [f"{result.name}: {result.case.title} [{result.size}]", table(result)]
    lines += [f"  left out: {name}: {reason}" for name, reason in result.left_out.items()]
    for name, reason in result.failures.items():
        lines.append(f"  FAILED: {name}: " + "; ".join(reason.splitlines()[-_LINES_SHOWN:]))
    lines += [f"  {describe(verdict)}" for verdict in result.verdicts()]
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """How many targets are met, and the others by name."""
    verdicts = [(it.name, verdict) for it in results for verdict in it.verdicts()]
    met = sum(verdict.met is True for _, verdict in verdicts)
    lines = [f"targets met: {met} of {len(verdicts)}"]
    lines += [f"  {name}: {describe(it)}" for name, it in verdicts if it.met is not True]
    return "\n".join(lines)


# The machine


def machine(directory: Path) -> dict[str, str]:
    """Describes the machine and the versions."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    load = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "CPU": f"{_processor()}, {os.cpu_count()} cores, load {load} at the beginning",
        "memory": _memory_size(),
        "system": f"{platform.system()} {platform.release()}",
        "file system": _file_system(directory),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_size() -> str:
    try:
        return size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return "unknown"


def _file_system(directory: Path) -> str:
    """The kind of file system of a directory, or None if unknown."""
    found = (Path("/"), "unknown")
    for line in _lines("/proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        mount = Path(place.split()[4].replace("\\040", " "))
        if directory.is_relative_to(mount) and len(mount.parts) >= len(found[0].parts):
            found = (mount, kind.split()[0])
    return found[1]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


# For other programs


def as_json(
    machine: Mapping[str, str], settings: Mapping[str, Any], results: Sequence[Result]
) -> Any:
    """Everything, for a file of JSON."""
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "cases": {it.name: _case_as_json(it) for it in results},
    }


def _case_as_json(result: Result) -> Any:
    medians = {}
    for name, figures in result.rounds.items():
        told = {it: values(figures, it) for it in asdict(figures[0])} if figures else {}
        medians[name] = {key: statistics.median(found) for key, found in told.items() if found}
    return {
        "title": result.case.title,
        "size": result.size,
        "nbytes": result.nbytes,
        "medians": medians,
        "rounds": {name: [asdict(it) for it in found] for name, found in result.rounds.items()},
        "left_out": result.left_out,
        "failures": result.failures,
        "targets": [asdict(it) for it in result.verdicts()],
    }


def plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Draws the time of each measure, a panel for each case; needs matplotlib.

    Points are medians, their whiskers the least and most of all rounds, and axes logarithmic.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    drawn = sorted((it for it in results if it.rounds), key=lambda it: len(it.rounds))
    columns = 2 if len(drawn) > 1 else 1
    rows = [drawn[start : start + columns] for start in range(0, len(drawn), columns)] or [[]]
    heights = [2 + max((len(it.rounds) for it in row), default=0) for row in rows]
    figure = Figure(figsize=(7 * columns, 0.25 * sum(heights) + 1), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for panel in panels.flat[len(drawn) :]:
        panel.set_axis_off()
    for panel, result in zip(panels.flat, drawn, strict=False):
        _draw(panel, result)
    figure.savefig(path, format="svg")


def _draw(panel: Any, result: Result) -> None:
    raw = {it.name for it in result.case.measures if it.is_raw}
    first = result.case.measures[0].name
    found = {name: Spread.of(values(it, "seconds")) for name, it in result.rounds.items()}
    for place, (name, time) in enumerate(found.items()):
        color = "C0" if name == first else "0.5" if name in raw else "C1"
        whiskers = [[time.median - time.low], [time.high - time.median]]
        panel.errorbar([time.median], [place], xerr=whiskers, fmt="o", color=color, capsize=3)
        panel.annotate(
            duration(time.median),
            (time.high, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize="x-small",
        )
    panel.set_yticks(range(len(found)), list(found))
    panel.set_ylim(len(found) - 0.5, -0.5)
    panel.set_xscale("log")
    panel.set_xlim(
        min(it.low for it in found.values()) / 2, max(it.high for it in found.values()) * 5
    )
    panel.xaxis.set_major_formatter(lambda value, _: duration(value))
    panel.xaxis.set_minor_formatter(lambda value, _: "")
    panel.grid(axis="x", which="both", color="0.9")
    panel.set_title(f"{result.name} [{result.size}]", fontsize="small", loc="left")
    panel.tick_params(labelsize="x-small")


def tell(message: str) -> None:
    """Says how far the work is, on standard error."""
    print(message, file=sys.stderr, flush=True)
