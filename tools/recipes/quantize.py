"""Quantizes the models of an archive with ONNX Runtime, to 8 or 4 bits.

pip install 'onnxarchive[ort,ir]'
python quantize.py model.onnxa small.onnxa --bits 4

With 4 bits, only constant weights of MatMul are quantized, in blocks of 32 that share a scale
(MatMulNBits). Each weight is read, quantized and written once, also if several models use it.
Memory holds one weight, and the model may be larger than the memory. A weight with more than two
dims is left as it is, unless it is one matrix, and the activations are known to have as many dims.

With 8 bits, weights of MatMul, Conv and some other operators become int8, and ONNX Runtime
quantizes activations at run time. Its quantizer needs the whole model in memory, below 2 GiB.

Models, assets and alignment are kept, but not what `onnxarchive.prepack` has stored.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir
from google.protobuf.message import Message
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
EXTERNAL = onnx.TensorProto.EXTERNAL
PREPACKED = "onnxruntime/prepacked/"  # assets with copies of the old weights


# 8 bits


def to_8_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    """Quantizes weights to int8; ONNX Runtime writes the result to a file, so any size works."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.onnx")
        quantize_dynamic(model, path, use_external_data_format=True)
        return onnx.load(path)


def quantize_to_8_bits(path: str, target: str) -> None:
    """Writes an archive whose models have weights of 8 bits."""
    with onnxarchive.open(path) as archive:
        archives = [onnxarchive.open(path, model=id) for id in archive.models]
        refs = [ref for one in archives for ref in one.tensors.refs.values()]
        models = {id: to_8_bits(onnxarchive.load(path, model=id)) for id in archive.models}
        onnxarchive.save(
            models.pop(""),
            target,
            models=models,
            assets={path: archive.assets[path] for path in assets_to_keep(archive)},
            alignment=archive.alignment,
            convert_attribute=any(not ref.is_initializer for ref in refs),
        )


def assets_to_keep(archive: onnxarchive.Archive) -> list[str]:
    """The paths of the assets that fit the new weights, too."""
    return [path for path in archive.assets if not path.startswith(PREPACKED)]


# 4 bits


def quantize_to_4_bits(path: str, target: str) -> None:
    """Writes an archive whose models have weights of 4 bits."""
    with (
        onnxarchive.open(path) as archive,
        onnxarchive.Writer(
            target, size_threshold=sys.maxsize, alignment=archive.alignment
        ) as writer,
    ):
        archive.verify()  # the target gets CRC-32s of its own
        archives = [onnxarchive.open(path, model=id) for id in archive.models]
        models = {one.model_id: to_4_bits(one) for one in archives}
        # The writer would give a tensor that is added to each initializer of its name.
        names = {
            tensor.name
            for model in models.values()
            for tensor in tensors_of(model)
            if tensor.data_location != EXTERNAL
        }
        keys: dict[str, str] = {}  # in the target, by location
        for one in archives:
            for tensor in tensors_of(models[one.model_id]):
                if tensor.data_location != EXTERNAL:
                    continue
                (pair,) = (it for it in tensor.external_data if it.key == "location")
                if pair.value not in keys:
                    for location, array in arrays_of(one, pair.value).items():
                        keys[location] = writer.add(new_name(location, names), array)
                pair.value = keys[pair.value]
        for asset in assets_to_keep(archive):
            writer.add_asset(asset, archive.assets[asset])
        writer.finish(models.pop(""), models)


def arrays_of(archive: onnxarchive.Archive, location: str) -> dict[str, np.ndarray]:
    """The tensor with this location; of a quantized weight all parts, by their locations."""
    key, is_part, _ = location.partition(".")
    array = archive.tensor_by_key(key)
    if not is_part:
        return {key: array}
    return {f"{key}.{part}": of_part for part, of_part in quantized(array).items()}


def new_name(name: str, names: set[str]) -> str:
    """Adds a name to others; with underscores at its end if it is one of them."""
    while name in names:
        name += "_"
    names.add(name)
    return name


def tensors_of(message: Message) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for one in [value] if isinstance(value, Message) else value:
            if isinstance(one, onnx.TensorProto):
                yield one
            else:
                yield from tensors_of(one)


def to_4_bits(archive: onnxarchive.Archive) -> onnx.ModelProto:
    """Puts MatMulNBits in the place of each MatMul by a weight.

    Weights outside the model are not read here; see `add_parts`.
    """
    onnxarchive.ir.load(archive.path, model=archive.model_id)  # refuses what onnx_ir would lose
    model: onnx_ir.Model = onnx_ir.from_proto(archive.model)
    parts_of: dict[Initializer, list[onnx_ir.Value]] = {}
    for node in model.graph.all_nodes():
        if (node.domain, node.op_type) != ("", "MatMul"):
            continue
        factors: Any = node.inputs
        activations, weight = factors
        if not can_quantize(activations, weight):
            continue
        if weight not in parts_of:
            parts_of[weight] = add_parts(weight)
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
    result: onnx.ModelProto = onnx_ir.to_proto(model)
    return result


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


def add_parts(weight: Initializer) -> list[onnx_ir.Value]:
    """Adds the three tensors of a quantized weight to the graph of the weight.

    If the weight has the key `w`, their locations are `w.Q4`, `w.scales` and `w.zero_points`.
    """
    tensor = weight.const_value
    rows, columns = tensor.shape.numpy()[-2:]
    blocks = -(-rows // BLOCK_SIZE)
    kinds = {
        "Q4": (DataType.UINT8, (columns, blocks, BLOCK_SIZE // 2)),
        "scales": (tensor.dtype, (columns, blocks)),
        "zero_points": (DataType.UINT8, (columns, -(-blocks // 2))),
    }
    is_external = isinstance(tensor, onnx_ir.ExternalTensor)
    arrays = {} if is_external else quantized(tensor.numpy())
    values = []
    for part, (dtype, dims) in kinds.items():
        name = f"{weight.name}_{part}"
        made: onnx_ir.TensorProtocol
        if is_external:
            location, shape = f"{tensor.location}.{part}", onnx_ir.Shape(dims)
            made = onnx_ir.ExternalTensor(location, None, None, dtype, shape=shape, name=name)
        else:
            made = onnx_ir.Tensor(arrays[part], name=name)
        values.append(onnx_ir.Value(name=name, const_value=made))
        weight.graph.register_initializer(values[-1])
    return values


def quantized(weight: np.ndarray) -> dict[str, np.ndarray]:
    """The blocks of a weight with 4 bits for each element, their scales and their zero points."""
    matrix = weight.reshape(weight.shape[-2:])
    if matrix.dtype not in (np.float32, np.float16):
        matrix = matrix.astype(np.float32)  # from bfloat16
    blocks, scales, zero_points = QUANTIZER.qbits_block_quant(matrix)
    return {"Q4": blocks, "scales": scales.astype(weight.dtype), "zero_points": zero_points}


def main() -> None:
    """Quantizes every model of the archive."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archive")
    parser.add_argument("target")
    parser.add_argument("--bits", type=int, choices=(8, 4), default=8)
    arguments = parser.parse_args()
    quantize = quantize_to_8_bits if arguments.bits == 8 else quantize_to_4_bits
    try:
        before = os.path.getsize(arguments.archive)
        quantize(arguments.archive, arguments.target)
    except (ValueError, OSError, onnxarchive.ArchiveError) as error:
        raise SystemExit(str(error)) from None
    after = os.path.getsize(arguments.target)
    print(f"{arguments.target}: {after:,} bytes, {after / before:.0%} of {before:,}")


if __name__ == "__main__":
    main()
