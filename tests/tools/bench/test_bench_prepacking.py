from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/smaps_rollup"),
        reason="/proc says how much memory is private",
    ),
]

TOOL = Path(__file__).resolve().parents[3] / "tools" / "bench" / "prepacking.py"


def test_the_table_shows_what_packed_copies_take() -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    command = [sys.executable, str(TOOL), "--layers", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
    ]
    found = {
        tuple(cells[:3]): int(cells[-1].removesuffix(" MiB").replace(",", "")) for cells in rows[2:]
    }
    assert list(found) == [
        (weights, prepack, processes)
        for weights in ("float32", "4 bits")
        for prepack in ("yes", "no", "stored")
        for processes in "14"
    ]
    for processes in "14":
        packed = int(processes) * 4 * 16  # MiB
        assert found["float32", "yes", processes] >= packed
        assert found["float32", "no", processes] < packed / 2
        assert found["float32", "stored", processes] < packed
