from __future__ import annotations

import json
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


def test_the_table_shows_what_packed_copies_take(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    told = tmp_path / "told.json"
    told.write_text('{"cases": {}}')
    command = [sys.executable, str(TOOL), "--layers", "4", "--threads", "1", "--json", str(told)]
    subprocess.run(command, check=True)
    run = json.loads(told.read_text())
    assert run["cases"] == {}
    rows = run["packed weights"]
    found = {
        tuple(cells[:3]): int(cells[-1].removesuffix(" MiB").replace(",", "")) for cells in rows[1:]
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
