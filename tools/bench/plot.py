"""Draws the figures of run.py: bars for the README, all ways of each case, and growth with size.

The same file of `run.py --json` gives the same bytes. The pictures follow the viewer's light or
dark mode. Needs matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, Final

from tools.bench.cases import CASES, MODEL
from tools.bench.report import GB, MIB, duration, memory

# The libraries in speed.svg, and the names of their measures.
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "onnxarchive": ("onnxarchive",),
    "onnx": ("onnx", "onnx.load"),
    "onnx_ir": ("onnx_ir",),
    "safetensors": ("safetensors",),
    "safetensors in PyTorch": ("safetensors pt",),
    "PyTorch": ("torch.load mmap", "torch.save"),
}
# The cases in speed.svg, and those in ways.svg; run.py prints all cases.
BARS: Final = {"use-large": "open {} and use every tensor", "save-large": "save {}"}
COMPARED: Final = (
    "use-large",
    "view-large",
    "view-small",
    "view-many",
    "save-large",
    "save-many",
    "convert-large",
    "session-unpacked",
)
OURS, PEER, MACHINE = "#d9480f", "#3b82c4", "#8a8a8a"
_SERIES: Final = (OURS, PEER, "#2b9a5d", "#9b5fc0")
_LEAST: Final = 0.1  # MiB; smaller values are drawn as this value
_HEIGHT: Final = 0.21  # height of a row in inches
# Placeholder colours of text and background, replaced with variables of the style sheet.
_TEXT, _BACKGROUND = "#010203", "#fefdfc"
LIGHT: Final = {"text": "#1f2328", "background": "#ffffff"}
DARK: Final = {"text": "#e6edf3", "background": "#0d1117"}
_SETTINGS: Final[Any] = {
    "axes.edgecolor": MACHINE,
    "axes.facecolor": _BACKGROUND,
    "axes.labelcolor": _TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": _BACKGROUND,
    "font.family": "DejaVu Sans",  # which comes with matplotlib
    "font.size": 8.0,
    "savefig.facecolor": _BACKGROUND,
    "svg.fonttype": "none",
    "svg.hashsalt": "onnxarchive",  # and nothing is clipped: ids of clip paths would vary
    "text.color": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
}


def pictures(run: Mapping[str, Any]) -> dict[str, bytes]:
    """Draws the figures of a run.

    Args:
        run: The parsed content of a `--json` file.

    Returns:
        The pictures by name; a picture without cases to draw is left out.
    """
    import matplotlib

    cases = {name: it for name, it in run["cases"].items() if it["medians"]}
    drawn = {
        "speed.svg": (_bars, {name: cases[name] for name in BARS if BARS.keys() <= cases.keys()}),
        "ways.svg": (_ways, {name: cases[name] for name in COMPARED if name in cases}),
        "growth.svg": (_growth, {name: it for name, it in cases.items() if it["growth"]}),
    }
    machine = run["machine"]
    title = f"{machine['CPU']}, {machine['memory']}, {machine['file system']}"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        return {name: _as_svg(draw(it, title)) for name, (draw, it) in drawn.items() if it}


def median(case: Mapping[str, Any], library: str, figure: str) -> float | None:
    """The median of a figure of a library in a case, or None if it was not measured."""
    for name in LIBRARIES[library]:
        if name in case["medians"]:
            return case["medians"][name].get(figure)  # type: ignore[no-any-return]
    return None


def _as_svg(figure: Any) -> bytes:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue().decode()
    for color, name in ((_TEXT, "text"), (_BACKGROUND, "background")):
        text = text.replace(color, f"var(--{name})")
    light, dark = (
        ":root { " + "; ".join(f"--{name}: {color}" for name, color in form.items()) + " }"
        for form in (LIGHT, DARK)
    )
    style = f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    return text.replace(" <defs>", f" {style}\n <defs>", 1).encode()


def title_of(name: str, case: Mapping[str, Any]) -> str:
    """What a case of `BARS` does, with its size."""
    return BARS[name].format(f"{case['nbytes'] / GB:.1f} GB")


def _bars(cases: Mapping[str, Any], title: str) -> Any:
    """Draws a row for each case: a bar of time and a bar of private memory for each library."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    figure.suptitle(title, fontsize=7)
    counts = [
        sum(median(it, each, "seconds") is not None for each in LIBRARIES) for it in cases.values()
    ]
    panels = figure.subplots(len(cases), 2, squeeze=False, height_ratios=counts)
    columns = (("seconds", "{}", duration), ("anonymous", "private memory", memory))
    for column, (name, heading, words) in zip(panels.T, columns, strict=True):
        for panel, (key, case) in zip(column, cases.items(), strict=True):
            medians = {library: median(case, library, name) for library in LIBRARIES}
            measured = {library: it for library, it in medians.items() if it is not None}
            colors = [OURS if library == "onnxarchive" else PEER for library in measured]
            drawn = panel.barh(
                list(measured), list(measured.values()), color=colors, height=0.7, clip_on=False
            )
            panel.bar_label(drawn, [words(it) for it in measured.values()], padding=3)
            panel.set_title(heading.format(title_of(key, case)), loc="left", fontsize=9)
            panel.invert_yaxis()
            panel.tick_params(left=False)
            panel.spines.bottom.set_visible(False)
            panel.xaxis.set_visible(False)
            panel.set_xlim(0, panel.dataLim.xmax * 1.25)  # room for the words at the longest bar
    most = max(panel.dataLim.xmax for panel in panels[:, 1])
    for panel in panels[:, 1]:  # memory has one scale
        panel.set_yticklabels([])
        panel.set_xlim(0, most * 1.25)
    return figure


def _ways(cases: Mapping[str, Any], title: str) -> Any:
    """Draws a panel for each case, with a mark for each way."""
    from matplotlib.figure import Figure

    columns = 2 if len(cases) > 1 else 1
    order = list(cases)
    rows = [order[start : start + columns] for start in range(0, len(order), columns)]
    heights = [max(len(_names(cases[name])) for name in row) + 4 for row in rows]
    size = (5 * columns, _HEIGHT * sum(heights) + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{title}\nbars: least and most")
    panels = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    for panel in panels.flat[len(order) :]:
        panel.set_axis_off()
    for panel, name in zip(panels.flat, order, strict=False):
        _draw(panel, name, cases[name])
    return figure


def _names(case: Mapping[str, Any]) -> list[str]:
    return [name for name in case["rounds"] if name != MODEL]


def _draw(panel: Any, name: str, case: Mapping[str, Any]) -> None:
    measures = {it.name: it for it in CASES[name].measures}
    ways = _names(case)
    for place, way in enumerate(ways):
        measure = measures[way]
        is_ours = not (measure.is_peer or measure.is_raw)
        color = OURS if is_ours else MACHINE if measure.is_raw else PEER
        seconds = [it["seconds"] for it in case["rounds"][way]]
        middle = case["medians"][way]["seconds"]
        spread = [[middle - min(seconds)], [max(seconds) - middle]]
        panel.errorbar(
            [middle],
            [place],
            xerr=spread,
            fmt="o",
            color=color,
            markersize=5,
            capsize=2,
            clip_on=False,
        )
        panel.annotate(
            duration(middle),
            (middle, place),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=6,
        )
    panel.set_yticks(range(len(ways)), ways)
    panel.set_ylim(len(ways) - 0.5, -0.8)
    panel.set_title(f"{case['title']}\n{name}: {case['size']}", loc="left", fontsize=7)
    _scale(panel)


def _scale(panel: Any) -> None:
    """Makes the axis of times logarithmic, with powers of ten at both ends."""
    low, high = panel.dataLim.intervalx
    panel.set_xscale("log")
    panel.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    panel.xaxis.set_major_formatter(lambda value, _: _seconds(value))
    panel.xaxis.set_minor_formatter(lambda value, _: "")
    panel.grid(axis="x", which="major", color=MACHINE, alpha=0.35, clip_on=False)


def _growth(cases: Mapping[str, Any], title: str) -> Any:
    """Draws a column for each case: time above, memory below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(cases), 6), layout="constrained")
    figure.suptitle(f"{title}\nslope 1: time grows in proportion; slope 0: time is constant")
    panels = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for (times, memories), (name, case) in zip(panels.T, cases.items(), strict=True):
        for color, (what, curve) in zip(_SERIES, case["growth"].items(), strict=True):
            points = curve["points"]
            amounts = [it["amount"] for it in points]
            slope = "" if curve["slope"] is None else f", slope {curve['slope']:.2f}"
            seconds = [it["seconds"]["median"] for it in points]
            times.plot(amounts, seconds, "o-", color=color, label=what + slope, clip_on=False)
            memory = [max((it["anonymous"] or 0) / MIB, _LEAST) for it in points]
            memories.plot(amounts, memory, "o-", color=color, clip_on=False)
        times.set_title(case["title"], loc="left", fontsize=8)
        times.set_xscale("log")
        times.legend(frameon=False)
        memories.set_ylabel("anonymous memory")
        unit = _tensors if CASES[name].grows == "tensors" else _bytes
        for panel, words in ((times, _seconds), (memories, _mebibytes)):
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(lambda value, _, words=words: words(value))
            panel.yaxis.set_minor_formatter(lambda value, _: "")
            panel.xaxis.set_major_formatter(lambda value, _, unit=unit: unit(value))
            panel.grid(color=MACHINE, alpha=0.35, clip_on=False)
    return figure


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1000:g} ms"


def _tensors(count: float) -> str:
    return f"{count:,.0f}"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / GB:g} GB"


def _mebibytes(amount: float) -> str:
    return f"{amount:g} MiB"
