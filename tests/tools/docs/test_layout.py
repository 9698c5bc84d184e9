from __future__ import annotations

import re

from tools.bench.plot import IMAGES
from tools.docs import layout


def test_the_picture_in_the_repository_is_the_one_that_is_drawn() -> None:
    assert (IMAGES / "layout.svg").read_text(encoding="utf-8") == layout.draw()


def test_data_in_the_picture_begins_at_multiples_of_64() -> None:
    offsets = re.findall(r">([\d,]+)</text>", layout.draw())
    assert len(offsets) == 4
    assert all(int(offset.replace(",", "")) % 64 == 0 for offset in offsets)
