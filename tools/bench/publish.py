"""Writes what the README, the proposal and this benchmark's page show of one run.

python3 tools/dev.py python tools/bench/run.py --readme --json FILE.json
python3 tools/dev.py python tools/bench/prepacking.py --threads 1 2 --json FILE.json
python3 tools/dev.py python tools/bench/publish.py FILE.json

Replaces the text between the comments `<!-- NAME -->` and `<!-- end -->` of the pages. The same
file gives the same bytes. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tools.bench import plot
from tools.bench.report import GB, duration, memory

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURES: Final = {
    "speed.svg": "spec/images",
    "ways.svg": "tools/bench/images",
    "growth.svg": "tools/bench/images",
}
WIDTH: Final = 104
_COLUMNS: Final = ("onnxarchive", "onnx", "onnx_ir", "safetensors", "PyTorch")
_Run = Mapping[str, Any]


def publish(run: _Run, root: Path = ROOT) -> None:
    """Writes pages and pictures.

    Args:
        run: The parsed content of a `--json` file of run.py.
        root: The directory of the repository.

    Raises:
        KeyError: The run lacks a case or a row.
    """
    texts = {
        page: {name: words(run) for name, words in blocks.items()} for page, blocks in PAGES.items()
    }
    for page, blocks in texts.items():
        path = root / page
        text = path.read_text(encoding="utf-8")
        for name, words in blocks.items():
            text = replaced(text, name, words)
        path.write_text(text, encoding="utf-8")
    for name, data in plot.pictures(run).items():
        (root / PICTURES[name] / name).write_bytes(data)


def replaced(text: str, name: str, words: str) -> str:
    """Replaces the text between the comments of a block.

    Raises:
        ValueError: The text does not have this block once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->\n)", re.DOTALL)
    text, count = pattern.subn(lambda block: f"{block[1]}{words}{block[2]}", text)
    if count != 1:
        raise ValueError(f"expected one block <!-- {name} --> ... <!-- end -->, found {count}")
    return text


# The blocks


def _session(run: _Run) -> str:
    """A sentence: how a session of a large archive starts."""
    case = run["cases"]["real-open"]
    row = case["medians"]["session"]
    return _paragraph(
        f"In [our measurement](#speed-and-memory), ONNX Runtime started a session of {_size(case)} "
        f"in {duration(row['seconds'])}, with {memory(row['anonymous'])} of private memory "
        "(prepacking off)."
    )


def _figures(run: _Run) -> str:
    """The picture of speed, the table of this library beside others, and sentences."""
    cases, machine = run["cases"], run["machine"]
    model = _size(cases["use-large"])
    alt = (
        f"![Bars: opening a model of {model} and using every tensor, saving it, and the memory of "
        "both, with onnxarchive, onnx, onnx_ir, safetensors and PyTorch](spec/images/speed.svg)"
    )
    processor, cores, *_ = machine["CPU"].split(", ")
    source = _paragraph(
        f"One run of [the benchmark](tools/bench/README.md) on {cores} ({processor}) with "
        f"{machine['memory']} of memory: medians of {run['settings']['rounds']} rounds, files in "
        "the page cache, output synced. Memory is private memory: pages of a mapped file are in "
        "the page cache, and shared by all processes. Saving starts with the model in memory."
    )
    rows = (
        (plot.title_of("use-large", cases["use-large"]), "use-large", True),
        (plot.title_of("save-large", cases["save-large"]), "save-large", True),
        (f"convert {_size(cases['convert-large'])} (others: load and save)", "convert-large", True),
        (f"open {cases['view-small']['size']}, get each (onnx: load)", "view-small", False),
    )
    table = _table(
        ["", *_COLUMNS],
        [[what, *_cells(cases[name], has_memory)] for what, name, has_memory in rows],
    )
    return "\n".join([_paragraph(alt), source, table, _paragraph(_sentences(cases))])


def _sentences(cases: Mapping[str, Any]) -> str:
    in_torch = _cell(cases["use-large"], "safetensors in PyTorch", True)
    start, large = cases["session-unpacked"], cases["real-open"]
    edits = {
        point["amount"]: duration(point["seconds"]["median"])
        for point in cases["growth-bytes"]["growth"]["edit"]["points"]
    }
    least, *_, most = edits
    verified = cases["verify"]
    return (
        "safetensors makes copies for numpy and views for PyTorch, where the first row takes "
        f"{in_torch}. A session of ONNX Runtime without packed copies starts in "
        f"{_time(start, 'onnxarchive')} with {_size(start)} (from external data: "
        f"{_time(start, 'onnxruntime')}), and in {_time(large, 'session')} with {_size(large)}. "
        f"Setting an item of the metadata takes {edits[least]} in an archive of "
        f"{_gigabytes(least)}, and {edits[most]} in one of {_gigabytes(most)} (sparse). "
        f"Every CRC-32 of {_size(verified)} is compared in {_time(verified, 'onnxarchive')}."
    )


def _proposal(run: _Run) -> str:
    """A table of this library beside those that the proposal compares, and sentences."""
    cases = run["cases"]
    compared = _COLUMNS[:4]
    table = _table(
        ["", "archive", "onnx, external data", *compared[2:]],
        [
            [
                plot.title_of(name, cases[name]),
                *(_cell(cases[name], library, True) for library in compared),
            ]
            for name in ("use-large", "save-large")
        ],
    )
    start, large = cases["session-unpacked"], cases["real-open"]
    nbytes = large["medians"]["session"]["anonymous"]
    most = cases["growth-bytes"]["growth"]["edit"]["points"][-1]
    words = (
        f"A session of ONNX Runtime over {_size(large)} starts in {_time(large, 'session')} with "
        f"{memory(nbytes)} of private memory (prepacking off). With {_size(start)} it starts in "
        f"{_time(start, 'onnxarchive')}, from external data in {_time(start, 'onnxruntime')}. "
        f"Setting metadata takes {duration(most['seconds']['median'])} in an archive of "
        f"{_gigabytes(most['amount'])}."
    )
    return f"{table}\n{_paragraph(words)}"


def _machine(run: _Run) -> str:
    """Tables of the machine and the settings."""
    rows = {
        **run["machine"],
        "rounds": f"{run['settings']['rounds']}",
        "sizes": f"times {run['settings']['scale']:g}",
    }
    return _table(["what", ""], [[name, value] for name, value in rows.items()])


def _packed(run: _Run) -> str:
    """The table of prepacking.py."""
    header, *rows = run["packed weights"]
    return _table(header, rows)


PAGES: Final[Mapping[str, Mapping[str, Callable[[_Run], str]]]] = {
    "README.md": {"session": _session, "figures": _figures},
    "spec/proposal.md": {"figures": _proposal},
    "tools/bench/README.md": {"machine": _machine, "packed weights": _packed},
}


# In words


def _cells(case: Mapping[str, Any], has_memory: bool) -> list[str]:
    return [_cell(case, library, has_memory) for library in _COLUMNS]


def _cell(case: Mapping[str, Any], library: str, has_memory: bool) -> str:
    seconds = plot.median(case, library, "seconds")
    if seconds is None:
        return ""
    nbytes = plot.median(case, library, "anonymous") if has_memory else None
    return duration(seconds) if nbytes is None else f"{duration(seconds)}, {memory(nbytes)}"


def _time(case: Mapping[str, Any], row: str) -> str:
    return duration(case["medians"][row]["seconds"])


def _size(case: Mapping[str, Any]) -> str:
    return _gigabytes(case["nbytes"])


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / GB:.0f} GB" if nbytes >= 10 * GB else f"{nbytes / GB:.2g} GB"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _paragraph(words: str) -> str:
    return textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the file of run.py --json")
    publish(json.loads(parser.parse_args().file.read_text(encoding="utf-8")))
