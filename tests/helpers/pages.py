"""Checks which pages of an archive a process has touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from models import model_of, run_python
from numpy.typing import DTypeLike

import onnxarchive

MIB = 1 << 20
ROWS, COLUMNS = 16384, 1024

needs_smaps = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps"
)


def require_slice_to_read_its_pages_alone(folder: Path, dtype: DTypeLike, program: str) -> None:
    """Requires that reading a slice of a large tensor touches only the slice's pages.

    Args:
        folder: A directory for the archive.
        dtype: The type of the archive's tensor "w".
        program: Code that sets `tensor` to the tensor "w" of the open `archive`.
    """
    path = folder / "m.onnxa"
    weight = np.zeros((ROWS, COLUMNS), dtype)
    with onnxarchive.Writer(path) as writer:
        writer.add("w", weight)
        writer.finish(model_of())
    code = f"""
import sys, onnxarchive
def resident():
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            if line.rstrip().endswith("m.onnxa"):
                return next(int(it.split()[1]) << 10 for it in lines if it.startswith("Rss:"))
    return 0
archive = onnxarchive.open(sys.argv[1])
{program}
opened = resident()
tensor[{ROWS // 2}:{ROWS // 2 + 10}, 100:200].sum()
sliced = resident()
tensor.sum()
print(opened, sliced, resident())
"""
    opened, sliced, everything = map(int, run_python(code, path).split())
    print(f"{opened=} {sliced=} {everything=}")  # noqa: T201
    assert opened <= MIB
    assert sliced <= 8 * MIB  # ten rows are 40 KiB; the system may map pages around them
    assert everything >= weight.nbytes
