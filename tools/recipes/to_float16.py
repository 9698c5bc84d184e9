"""Converts the models of an archive to float16 with ONNX Runtime's converter.

pip install 'onnxarchive[ort]'
python to_float16.py model.onnxa half.onnxa

Inputs and outputs keep their type. The converter changes the weights, so a whole model is loaded.
Assets are kept.
"""

from __future__ import annotations

import os
import sys

import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

import onnxarchive


def to_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with numbers of float16, whose inputs and outputs are float32."""
    # onnx infers no shapes of a model in memory from 2 GiB on.
    is_large = model.ByteSize() >= onnx.checker.MAXIMUM_PROTOBUF
    converted: onnx.ModelProto = convert_float_to_float16(
        model, keep_io_types=True, disable_shape_infer=is_large
    )
    return converted


def main() -> None:
    """Converts the archive that the command line names."""
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
