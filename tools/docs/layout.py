"""Draws the layout of an archive into spec/images/layout.svg, for the README.

python3 tools/dev.py python tools/docs/layout.py [FILE]

Saves a small archive and draws its entries with their real offsets. The picture follows
the viewer's light or dark mode.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnxarchive
from tools.bench.plot import IMAGES, OURS, PEER, style

_WIDTH, _HEIGHT = 886, 226
_LEFT, _TOP, _BAR = 20, 48, 54  # left, top and height of the file's bar
_WIDTHS: Final = {"header": 28, "tensor": 150, "assets": 134, "model": 150, "end": 150}
_COLORS: Final = {"tensor": OURS, "assets": "#2b9a5d", "model": PEER, "end": "#9b5fc0"}


def draw() -> str:
    """The SVG: a bar for the file; above, the part that `open` reads; below, a tensor's view."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.onnxa")
        onnxarchive.save(_model(), path, assets={"labels.txt": b"cat\ndog\n"})
        with onnxarchive.open(path) as archive:
            entries = list(archive.entries.values())
            size = path.stat().st_size
    parts = list(_parts([(entry.name, entry.data_offset) for entry in entries]))
    end = _LEFT + sum(_WIDTHS[kind] for _, kind, _ in parts)
    drawn: list[str] = []
    left = _LEFT
    for text, kind, offset in parts:
        drawn.append(_box(left, kind))
        if text:
            lines = text.split("\n")
            for number, line in enumerate(lines):
                middle = _TOP + _BAR / 2 + 5 - 8 * (len(lines) - 1) + 16 * number
                drawn.append(_text(left + _WIDTHS[kind] / 2, middle, line, "white"))
        if offset is not None:
            drawn.append(_text(left, _TOP + _BAR + 16, f"{offset:,}", anchor="start", size=11))
        if kind == "model":
            drawn.append(
                _bracket(left - _WIDTHS["header"], end, "1. open reads this, in one piece")
            )
        if text == "layer_0_weight":
            drawn.append(_arrow(left + _WIDTHS[kind] / 2))
        left += _WIDTHS[kind]
    drawn.append(_text(end, _TOP + _BAR + 16, f"{size:,} bytes", anchor="end", size=11))
    drawn.append(
        _text(
            _LEFT,
            _HEIGHT - 12,
            "A narrow box is a local header with padding, so that data begins at a multiple of 64.",
            anchor="start",
        )
    )
    content = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="13">\n{style()}\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--background)"/>\n{content}\n</svg>\n'
    )


def _model() -> ModelProto:
    weight = np.zeros((64, 32), np.float32)
    bias = np.zeros(300, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "layer.0/weight"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32])],
        [
            numpy_helper.from_array(weight, "layer.0/weight"),
            numpy_helper.from_array(bias, "layer.0/bias"),
        ],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def _parts(entries: list[tuple[str, int]]) -> Iterator[tuple[str, str, int | None]]:
    """The text and kind of each box; for an entry's data also its offset in the file, else None."""
    for name, offset in entries:
        yield "", "header", None
        if name.startswith("assets/"):
            yield name, "assets", offset
        elif name.startswith("__MODEL_PROTO"):
            yield f"{name}\nthe graph", "model", offset
        else:
            yield name, "tensor", offset
    yield "central directory,\nend records", "end", None


def _box(left: float, kind: str) -> str:
    color = _COLORS.get(kind)
    fill = f'fill="{color}"' if color else 'fill="#8a8a8a" fill-opacity="0.35"'
    return (
        f'<rect x="{left}" y="{_TOP}" width="{_WIDTHS[kind]}" height="{_BAR}" {fill} '
        'stroke="var(--background)" stroke-width="2"/>'
    )


def _text(
    x: float, y: float, text: str, fill: str = "var(--text)", anchor: str = "middle", size: int = 13
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}" font-size="{size}">'
        f"{text}</text>"
    )


def _bracket(left: float, right: float, text: str) -> str:
    top = _TOP - 22
    return (
        f'<path d="M{left:g} {_TOP - 6} V{top} H{right:g} V{_TOP - 6}" fill="none" '
        f'stroke="var(--text)"/>\n{_text((left + right) / 2, top - 8, text)}'
    )


def _arrow(x: float) -> str:
    top, bottom = _TOP + _BAR + 24, _TOP + _BAR + 56
    return (
        f'<path d="M{x:g} {top} V{bottom} m-5 -8 l5 8 l5 -8" fill="none" stroke="var(--text)"/>\n'
        + _text(
            _LEFT,
            bottom + 22,
            '2. archive.tensors["layer.0/weight"] is a numpy array over this part of the file: '
            "no copy; only used pages are read",
            anchor="start",
        )
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES / "layout.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(draw())
