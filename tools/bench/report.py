"""The report of run.py: medians, ratios and their spread, targets, growth."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tools.bench.cases import Case, Target
from tools.bench.process import Figures

MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9

_LINES_SHOWN: Final = 2  # the report shows this many of the last lines of an error

LIBRARIES: Final = (
    "onnxarchive",
    "numpy",
    "onnx",
    "protobuf",
    "zlib-ng",
    "onnxruntime",
    "onnx-ir",
    "safetensors",
    "torch",
)


@dataclass(frozen=True)
class Spread:
    """The median, the least and the greatest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more values."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def width(self) -> float:
        """The difference of the greatest value and the least value."""
        return self.high - self.low


@dataclass(frozen=True)
class Point:
    """The figures at one size.

    Attributes:
        amount: The number of tensors, or the bytes of all tensors.
        seconds: The time in seconds.
        anonymous: Peak growth of anonymous memory in bytes; None if unknown.
    """

    amount: int
    seconds: Spread
    anonymous: float | None


@dataclass(frozen=True)
class Verdict:
    """Result of a target.

    Attributes:
        target: The target.
        row: The row that the target limits.
        spread: The spread of the ratio or figure that the target limits; None if not measured.
        met: True if the median meets the target; None if not measured, if the sizes are scaled, or
            if the spread exceeds the difference of median and target.
        rounds_met: The number of rounds that meet the target.
        rounds: The number of rounds measured.
        reason: Why `met` is None; None if `met` is True or False.
    """

    target: Target
    row: str
    spread: Spread | None = None
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
        size: The number and size of the tensors, in words.
        nbytes: Bytes of all tensors.
        rounds: The figures of each row, in the order of the rounds.
        amounts: The amount of `case.grows` in each measure; empty if `case.grows` is None.
        left_out: The measures left out, each with the reason.
        failures: The measures that failed, each with the last lines of output.
        is_scaled: True if the sizes are smaller than those that the targets are for.
    """

    name: str
    case: Case
    size: str
    nbytes: int
    rounds: dict[str, list[Figures]] = field(default_factory=dict)
    amounts: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    is_scaled: bool = False

    @property
    def is_failed(self) -> bool:
        """True if a measure other than a peer failed."""
        return any(it.name in self.failures and not it.is_peer for it in self.case.measures)

    def verdicts(self) -> list[Verdict]:
        """The verdict on each target of the case."""
        return [judge(it, self) for it in self.case.targets]


def values(figures: Sequence[Figures], name: str) -> list[float]:
    """The figure `name` of each round; empty if a round lacks this figure."""
    column = [getattr(it, name) for it in figures]
    return [] if None in column else column


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """`ours` / `others` for each round; empty if a value is missing or a divisor is zero."""
    if len(ours) != len(others) or not all(others):
        return []
    return [own / other for own, other in zip(ours, others, strict=True)]


def judge(target: Target, result: Result) -> Verdict:
    """Compares the figures of a case with a target."""
    row = target.row or result.case.measures[0].name
    compared = [row] if target.beside is None else [row, target.beside]
    reasons = {**result.left_out, **result.failures}
    for name in compared:
        if name in reasons:
            return Verdict(target, row, reason=f"{name}: {reasons[name].splitlines()[-1]}")
    compared_values = values(result.rounds[row], target.figure)
    if target.beside is not None:
        others = values(result.rounds[target.beside], target.figure)
        is_share = target.bound == "at most"
        compared_values = (
            ratios(compared_values, others) if is_share else ratios(others, compared_values)
        )
    if not compared_values:
        return Verdict(target, row, reason=f"{target.figure} is 0 or not reported by this system")
    spread = Spread.of(compared_values)
    rounds_met = sum(is_met(target, it) for it in compared_values)
    reason = None
    if result.is_scaled:
        reason = "the target is for full sizes"
    elif spread.width > abs(target.limit - spread.median):
        reason = "the spread exceeds the difference of median and target"
    met = is_met(target, spread.median) if reason is None else None
    return Verdict(target, row, spread, met, rounds_met, len(compared_values), reason)


def is_met(target: Target, value: float) -> bool:
    """True if a ratio or figure is within the bound of the target."""
    return value <= target.limit if target.bound == "at most" else value >= target.limit


# In words


def describe(verdict: Verdict) -> str:
    """Describes a verdict in one line."""
    target = verdict.target
    is_absolute = target.beside is None
    limit = f"{target.bound} {_figure(target.limit, target.figure, is_absolute)}"
    figures = {"seconds": "time", "cpu_seconds": "CPU time"}
    what = figures.get(target.figure, f"{target.figure} memory")
    if target.figure == "seconds" and target.bound == "at least" and target.beside is not None:
        what = f"times as fast as {target.beside}"
    elif target.beside is not None:
        what = f"{what} relative to {target.beside}"
    what = f"{target.row}: {what}" if target.row else what
    if verdict.spread is None:
        return f"not measured  {what}: {limit} ({verdict.reason})"
    median, low, high = (
        _figure(it, target.figure, is_absolute)
        for it in (verdict.spread.median, verdict.spread.low, verdict.spread.high)
    )
    rounds = f"in {verdict.rounds_met} of {verdict.rounds} rounds"
    state = {True: "met", False: "NOT MET", None: "no verdict"}[verdict.met]
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{state:<12}  {what}: {median} ({low}..{high}); {limit}: {rounds}{reason}"


def _figure(value: float, figure: str, is_absolute: bool) -> str:
    if not is_absolute:
        return ratio(value)
    return duration(value) if figure.endswith("seconds") else memory(value)


def ratio(value: float) -> str:
    """A ratio with three significant digits, or as a whole number if it is at least 100."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A time in seconds, or in milliseconds if it is short."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def size(nbytes: float) -> str:
    """A size with its unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes:.0f} bytes"


def memory(nbytes: float) -> str:
    """Memory in MiB, or in GiB if it is large."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"


def table(result: Result) -> str:
    """The figures of a case, one line for each row."""
    first = result.case.measures[0].name
    header = ["", "median", "min..max", "CPU", "GB/s", "anonymous", "resident"]
    header += [f"{first} / this", "of CPU"]
    rows = [header]
    for name, figures in result.rounds.items():
        seconds, busy = values(figures, "seconds"), values(figures, "cpu_seconds")
        time = Spread.of(seconds)
        is_same_work = name != first and not result.case.grows and not result.case.is_large
        compared = result.rounds.get(first, []) if is_same_work else []
        rows.append(
            [
                name,
                duration(time.median),
                f"{duration(time.low)}..{duration(time.high)}",
                duration(statistics.median(busy)) if busy else "",
                f"{result.nbytes / time.median / GB:.2f}"
                if busy and result.case.moves_bytes
                else "",
                *(_memory(values(figures, it)) for it in ("anonymous", "resident")),
                _ratios(ratios(values(compared, "seconds"), seconds)),
                _ratios(ratios(values(compared, "cpu_seconds"), busy)),
            ]
        )
    columns = [it for it in zip(*rows, strict=True) if not it[0] or any(it[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for name, *cells in zip(*columns, strict=True):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  " + "  ".join([name.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def _memory(figures: Sequence[float]) -> str:
    return memory(statistics.median(figures)) if figures else ""


def _ratios(figures: Sequence[float]) -> str:
    if not figures:
        return ""
    spread = Spread.of(figures)
    return f"{ratio(spread.median)} ({ratio(spread.low)}..{ratio(spread.high)})"


def text(result: Result) -> str:
    """The printed report of a case."""
    size = f" [{result.size}]" if result.size else ""
    lines = [f"{result.name}: {result.case.title}{size}", table(result)]
    lines += [f"  left out: {name}: {reason}" for name, reason in result.left_out.items()]
    for name, reason in result.failures.items():
        lines.append(f"  FAILED: {name}: " + "; ".join(reason.splitlines()[-_LINES_SHOWN:]))
    for what, points in growth(result).items():
        exponent = slope(points)
        if exponent is not None:
            lines.append(
                f"  {what}: slope {exponent:.2f} (1: time in proportion to size; 0: constant time)"
            )
    lines += [f"  {describe(verdict)}" for verdict in result.verdicts()]
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """Counts met targets, and targets without a verdict; describes all except the met targets."""
    verdicts = [(it.name, verdict) for it in results for verdict in it.verdicts()]
    met = sum(verdict.met is True for _, verdict in verdicts)
    open = sum(verdict.met is None for _, verdict in verdicts)
    lines = [f"targets met: {met} of {len(verdicts)}, without a verdict: {open}"]
    lines += [f"  {name}: {describe(it)}" for name, it in verdicts if it.met is not True]
    return "\n".join(lines)


# How it grows


def growth(result: Result) -> dict[str, list[Point]]:
    """The points of each curve of a case about growth; empty for other cases."""
    curves: dict[str, list[Point]] = {}
    for measure in result.case.measures if result.case.grows else ():
        figures = result.rounds.get(measure.name)
        if figures:
            seconds = Spread.of(values(figures, "seconds"))
            memory = values(figures, "anonymous")
            anonymous = statistics.median(memory) if memory else None
            point = Point(result.amounts[measure.name], seconds, anonymous)
            curves.setdefault(measure.name.partition(":")[0], []).append(point)
    return curves


def slope(points: Sequence[Point]) -> float | None:
    """The exponent with which the time grows (1: linear); None for fewer than two sizes.

    Sizes below 1/100 of the largest size do not count.
    """
    upper = [it for it in points if it.amount * 100 >= points[-1].amount]
    x = [math.log(it.amount) for it in upper]
    y = [math.log(it.seconds.median) for it in upper]
    if len(set(x)) < 2:
        return None
    return statistics.linear_regression(x, y).slope


# The machine


def machine(directory: Path) -> dict[str, str]:
    """Describes the machine and the versions of libraries."""
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
    """The kind of file system of a directory, or "unknown"."""
    best = (Path("/"), "unknown")
    for line in _lines("/proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        mount = Path(place.split()[4].replace("\\040", " "))
        if directory.is_relative_to(mount) and len(mount.parts) >= len(best[0].parts):
            best = (mount, kind.split()[0])
    return best[1]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


# For other programs


def as_json(
    machine: Mapping[str, str], settings: Mapping[str, Any], results: Sequence[Result]
) -> Any:
    """The machine, the settings and all results, as values of JSON."""
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "cases": {it.name: _case_as_json(it) for it in results},
    }


def _case_as_json(result: Result) -> Any:
    medians = {}
    for name, figures in result.rounds.items():
        columns = {it: values(figures, it) for it in asdict(figures[0])} if figures else {}
        medians[name] = {
            key: statistics.median(column) for key, column in columns.items() if column
        }
    return {
        "title": result.case.title,
        "size": result.size,
        "nbytes": result.nbytes,
        "medians": medians,
        "rounds": {name: [asdict(it) for it in figures] for name, figures in result.rounds.items()},
        "growth": {
            what: {"slope": slope(points), "points": [asdict(it) for it in points]}
            for what, points in growth(result).items()
        },
        "left_out": result.left_out,
        "failures": result.failures,
        "targets": [asdict(it) for it in result.verdicts()],
    }


def tell(message: str) -> None:
    """Writes a message to standard error."""
    print(message, file=sys.stderr, flush=True)
