"""Quantizes the models of an archive with ONNX Runtime, to 8 or 4 bits.

pip install 'onnxarchive[ort,ir]'
python quantize.py model.onnxa small.onnxa --bits 4

With 4 bits, only constant weights of MatMul are quantized, in blocks of 32 that share a scale
(MatMulNBits). Each weight is read and quantized when it is written, so memory holds one weight, and
the model may be larger than the memory. A weight with more than two dims is left as it is, unless
it is one matrix, and the activations are known to have as many dims.

With 8 bits, weights of MatMul, Conv and some other operators become int8, and ONNX Runtime
quantizes activations at run time. Its quantizer needs the whole model in memory, below 2 GiB.

Models, assets and alignment are kept. Of several models, weights of the same type and shape are
quantized up to three times, since equal results are stored once.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
)

import onnxarchive
import onnxarchive.ir

BLOCK_SIZE = 32
QUANTIZER = DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, bits=4))
# An `onnx_ir.Value` that has a name, a graph and a tensor.
Initializer: TypeAlias = Any
TYPES = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)


def to_8_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """Quantizes weights to int8; ONNX Runtime writes the result to a file, so any size works."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.onnx")
        quantize_dynamic(model, path, use_external_data_format=True)
        return onnx.load(path)


@lru_cache(maxsize=1)  # the three tensors of a weight are written one after the other
def quantized(weight: Any) -> list[np.ndarray]:
    """The blocks of a weight with 4 bits for each element, their scales and their zero points."""
    array = weight.numpy().reshape(weight.shape.numpy()[-2:])
    if weight.dtype != DataType.BFLOAT16:
        return [*QUANTIZER.qbits_block_quant(array)]
    blocks, scales, zero_points = QUANTIZER.qbits_block_quant(array.astype(np.float32))
    return [blocks, scales.astype(array.dtype), zero_points]


def to_4_bits(model: onnx_ir.Model) -> onnx_ir.Model:
    """Puts MatMulNBits in the place of each MatMul by a weight; no weight is read here."""
    parts_of: dict[Initializer, list[onnx_ir.Value]] = {}
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) != ("", "MatMul"):
            continue
        factors: Any = node.inputs
        activations, weight = factors
        if not can_quantize(activations, weight):
            continue
        if weight not in parts_of:
            parts_of[weight] = lazy_parts(weight)
        rows, columns = weight.const_value.shape.numpy()[-2:]
        numbers = {"K": rows, "N": columns, "bits": 4, "block_size": BLOCK_SIZE}
        node.domain, node.op_type = "com.microsoft", "MatMulNBits"
        node.attributes.update(
            {it: onnx_ir.AttrInt64(it, number) for it, number in numbers.items()}
        )
        node.resize_inputs(4)
        for index, part in enumerate(parts_of[weight], 1):
            node.replace_input_with(index, part)
    for weight in parts_of:
        if weight.is_graph_input():
            weight.graph.inputs.remove(weight)
        if not weight.uses() and not weight.is_graph_output():
            del weight.graph.initializers[weight.name]
    model.opset_imports["com.microsoft"] = 1
    return model


def can_quantize(activations: Any, weight: Any) -> bool:
    """True if the second factor of a MatMul is a constant matrix that MatMulNBits can hold."""
    if not weight.is_initializer() or weight.const_value.dtype not in TYPES:
        return False
    dims = weight.const_value.shape.numpy()
    if len(dims) <= 2:
        return len(dims) == 2
    # MatMulNBits gives as many dims as the activations have.
    has_as_many = activations.shape is not None and len(activations.shape) >= len(dims)
    return has_as_many and math.prod(dims[:-2]) == 1


def lazy_parts(weight: Initializer) -> list[onnx_ir.Value]:
    """Adds the three tensors of a quantized weight to the graph of the weight."""
    tensor = weight.const_value
    rows, columns = tensor.shape.numpy()[-2:]
    blocks = -(-rows // BLOCK_SIZE)
    kinds = (
        ("_Q4", DataType.UINT8, (columns, blocks, BLOCK_SIZE // 2)),
        ("_scales", tensor.dtype, (columns, blocks)),
        ("_zero_points", DataType.UINT8, (columns, -(-blocks // 2))),
    )
    parts = []
    for index, (suffix, dtype, shape) in enumerate(kinds):
        make = partial(make_part, tensor, index)
        name = f"{weight.name}{suffix}"
        lazy = onnx_ir.LazyTensor(make, dtype, onnx_ir.Shape(shape), name=name)
        parts.append(onnx_ir.Value(name=name, const_value=lazy))
        weight.graph.register_initializer(parts[-1])
    return parts


def make_part(weight: Any, index: int) -> onnx_ir.TensorProtocol:
    """One of the three tensors of a quantized weight."""
    return onnx_ir.Tensor(quantized(weight)[index])


def quantize_to_4_bits(path: str, target: str) -> None:
    """Writes an archive whose models have weights of 4 bits."""
    with onnxarchive.open(path) as archive:
        archive.verify()  # the target gets CRC-32s of its own
        models = {id: to_4_bits(onnxarchive.ir.load(path, model=id)) for id in archive.models}
        onnxarchive.save(
            models.pop(""),
            target,
            models=models,
            assets=dict(archive.assets),
            alignment=archive.alignment,
            convert_attribute=any(
                not ref.is_initializer
                for id in archive.models
                for ref in onnxarchive.open(path, model=id).tensors.refs.values()
            ),
        )


def quantize_to_8_bits(path: str, target: str) -> None:
    """Writes an archive whose models have weights of 8 bits."""
    with onnxarchive.open(path) as archive:
        models = list(archive.models)
    for model in models:
        onnxarchive.transform(path, target, to_8_bits, model=model, weights="loaded")
        path = target


def main() -> None:
    """Quantizes every model of the archive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive")
    parser.add_argument("target")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8)
    arguments = parser.parse_args()
    before = os.path.getsize(arguments.archive)
    quantize = quantize_to_8_bits if arguments.bits == 8 else quantize_to_4_bits
    quantize(arguments.archive, arguments.target)
    after = os.path.getsize(arguments.target)
    print(f"{arguments.target}: {after:,} bytes, {after / before:.0%} of {before:,}")


if __name__ == "__main__":
    main()
