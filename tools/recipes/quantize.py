"""Quantizes the models of an archive with ONNX Runtime, to 8 or 4 bits.

pip install 'onnxarchive[ort,ir]'
python quantize.py model.onnxa small.onnxa --bits 4

With 8 bits, weights of MatMul, Conv and some other operators become int8, and ONNX Runtime
quantizes activations at run time. With 4 bits, only weights of MatMul are quantized, in blocks that
share a scale (MatMulNBits). Each model is loaded whole, since a quantizer reads the weights. Assets
are kept.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import onnx
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import onnxarchive


def to_8_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """Quantizes weights to int8; ONNX Runtime writes the result to a file, so any size works."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.onnx")
        quantize_dynamic(model, path, use_external_data_format=True)
        return onnx.load(path)


def to_4_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """Quantizes weights to 4 bits, in blocks of 32 that share a scale."""
    quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=32)
    quantizer.process()
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


def main() -> None:
    """Quantizes every model of the archive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive")
    parser.add_argument("target")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8)
    arguments = parser.parse_args()
    quantize = to_8_bits if arguments.bits == 8 else to_4_bits
    with onnxarchive.open(arguments.archive) as archive:
        models = list(archive.models)
    source = arguments.archive
    for model in models:
        onnxarchive.transform(source, arguments.target, quantize, model=model, weights="loaded")
        source = arguments.target
    before, after = map(os.path.getsize, (arguments.archive, arguments.target))
    print(f"{arguments.target}: {after:,} bytes, {after / before:.0%} of {before:,}")


if __name__ == "__main__":
    main()
