"""Converts the models of an archive to float16 with ONNX Runtime's converter.

pip install 'onnxarchive[ort]'
python to_float16.py model.onnxa half.onnxa

Inputs and outputs keep their type. Each model is loaded whole, since the converter changes the
weights. Assets are kept.
"""

from __future__ import annotations

import os
import sys

import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

import onnxarchive


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """Converts a model to float16, except its inputs and outputs."""
    # onnx cannot infer shapes of a model of 2 GiB or more in memory.
    is_large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    converted: onnx.ModelProto = convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=is_large
    )
    return converted


def main() -> None:
    """Converts every model of the archive."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    archive, target = sys.argv[1:]
    with onnxarchive.open(archive) as opened:
        models = list(opened.models)
    source = archive
    for model in models:
        onnxarchive.transform(source, target, to_float16, model=model, weights="loaded")
        source = target
    before, after = map(os.path.getsize, (archive, target))
    print(f"{target}: {after:,} bytes, {after / before:.0%} of {before:,}")


if __name__ == "__main__":
    main()
