"""Runs the model of an archive with OpenVINO, on inputs of ones.

pip install onnxarchive openvino
python run_openvino.py model.onnxa

OpenVINO supports external data, but not archives. So OpenVINO gets a link: a small `.onnx` beside
the archive. The weights stay in the archive.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino

import onnxarchive


def compile_archive(archive: Path, device: str = "CPU") -> Any:
    """Compiles the model of an archive for a device."""
    link = archive.with_suffix(".link.onnx")
    onnxarchive.link(archive, link)
    core = openvino.Core()
    return core.compile_model(core.read_model(link), device)


def main() -> None:
    """Runs the archive, and prints the outputs."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    compiled = compile_archive(Path(sys.argv[1]))
    inputs = {}
    for port in compiled.inputs:
        dims = [dim.get_length() if dim.is_static else 1 for dim in port.get_partial_shape()]
        inputs[port] = np.ones(dims, port.get_element_type().to_dtype())
    for port, output in compiled(inputs).items():
        print(port.get_any_name(), output)


if __name__ == "__main__":
    main()
