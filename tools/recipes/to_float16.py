"""Converts the models of an archive to float16 with ONNX Runtime's converter.

pip install 'onnxarchive[ort,ir]'
python to_float16.py model.onnxa half.onnxa

Inputs and outputs keep their type. The converter changes the graph, and sees no large weight: each
is read and converted when it is written, so memory holds one weight and the assets, and the model
may be larger than the memory. The converter leaves functions as they are: for models that have
some, call `onnxarchive.transform` with `onnx.inliner.inline_local_functions` first.

Models, assets and alignment are kept, but not what `onnxarchive.prepack` has stored. Of several
models, weights of the same type and shape are converted up to three times, since equal results are
stored once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType
from onnxruntime.transformers import float16

import onnxarchive
import onnxarchive.ir

PREPACKED = "onnxruntime/prepacked/"  # assets with copies of the old weights
PIECE = 1 << 20  # elements that are converted together; the converter makes copies of them


def to_float16(archive: onnxarchive.Archive) -> onnx_ir.Model:
    """Converts a model to float16, except its inputs and outputs; no large weight is read here."""
    onnxarchive.ir.load(archive.path, model=archive.model_id)  # refuses what onnx_ir would lose
    # Unlike the converter's own inference, this one reads shapes that are outside the model.
    inferred = onnxarchive.infer_shapes(archive.path, model=archive.model_id)
    # The converter's own function makes an array of each weight, to know its shape.
    with mock.patch.object(float16, "make_value_info_from_tensor", type_of):
        proto = float16.convert_float_to_float16(
            inferred, keep_io_types=True, disable_shape_infer=True
        )
    model: onnx_ir.Model = onnx_ir.from_proto(proto)
    for graph in model.graphs():
        graph.sort()  # the converter puts its nodes last
        for value in graph.initializers.values():
            value.const_value = lazy(archive, value.const_value)
    for node in all_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == onnx_ir.AttributeType.TENSOR and not attribute.is_ref():
                tensor = lazy(archive, attribute.as_tensor())
                node.attributes[name] = onnx_ir.AttrTensor(name, tensor, attribute.doc_string)
    return model


def type_of(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    """The type and shape of a weight."""
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)


def all_nodes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    """The nodes of all graphs and functions."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def lazy(archive: onnxarchive.Archive, tensor: Any) -> Any:
    """A tensor that is read and converted when it is written, if the archive has it."""
    if not isinstance(tensor, onnx_ir.ExternalTensor):
        return tensor
    return onnx_ir.LazyTensor(
        partial(read, archive, str(tensor.location), tensor.dtype),
        tensor.dtype,
        tensor.shape,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def read(archive: onnxarchive.Archive, key: str, dtype: DataType) -> onnx_ir.TensorProtocol:
    """Reads a tensor, and converts it if the converter has given it the type float16."""
    array = archive.tensor_by_key(key)
    if dtype != DataType.FLOAT16 or array.dtype == np.float16:
        return onnx_ir.Tensor(array, dtype=dtype)
    half = np.empty(array.size, np.float16)
    for start in range(0, array.size, PIECE):
        part = slice(start, start + PIECE)
        half[part] = float16.convert_np_to_float16(array.reshape(-1)[part])
    return onnx_ir.Tensor(half.reshape(array.shape))


def main() -> None:
    """Converts every model of the archive."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    path, target = sys.argv[1:]
    try:
        before = os.path.getsize(path)
        convert(path, target)
    except (ValueError, OSError, onnxarchive.ArchiveError) as error:
        raise SystemExit(str(error)) from None
    after = os.path.getsize(target)
    print(f"{target}: {after:,} bytes, {after / before:.0%} of {before:,}")


def convert(path: str, target: str) -> None:
    """Writes an archive whose models have weights of 16 bits."""
    with onnxarchive.open(path) as archive:
        archive.verify()  # the target gets CRC-32s of its own
        archives = [onnxarchive.open(path, model=id) for id in archive.models]
        refs = chain.from_iterable(it.tensors.refs.values() for it in archives)
        has_outer_attributes = any(not ref.is_initializer for ref in refs)
        models = {it.model_id: to_float16(it) for it in archives}
        assets = archive.assets.items()
        onnxarchive.save(
            models.pop(""),
            target,
            models=models,
            assets={name: data for name, data in assets if not name.startswith(PREPACKED)},
            alignment=archive.alignment,
            convert_attribute=has_outer_attributes,
        )


if __name__ == "__main__":
    main()
