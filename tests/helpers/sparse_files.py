"""Large sparse files, and models with weights in such files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import models
import numpy as np
import pytest
from onnx import GraphProto, ModelProto, TensorProto, helper
from plain_wire import varint

import onnxarchive

GIB = 1 << 30
# The numbers of fields that are written by hand.
GRAPH = ModelProto.GRAPH_FIELD_NUMBER
INITIALIZER = GraphProto.INITIALIZER_FIELD_NUMBER
NEEDED = 8 * GIB  # free disk for all files on a file system without sparse files


class SparseFile:
    """A writable file that leaves holes for pieces of zeros."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: memoryview, /) -> int:
        """Writes `data`; returns the number of bytes written, possibly fewer than `len(data)`."""
        if np.frombuffer(data, np.uint8).any():
            return self._file.write(data)
        self._file.seek(len(data), os.SEEK_CUR)
        return len(data)

    def close(self) -> None:
        """Sets the size, since a seek over zeros does not extend the file, and closes the file."""
        self._file.truncate()
        self._file.close()


def require_room(path: Path) -> None:
    """Skips the test if less than `NEEDED` bytes of disk are free."""
    free = shutil.disk_usage(path).free
    if free < NEEDED:
        pytest.skip(f"8 GiB of free disk are needed, {free / GIB:.1f} GiB are free in {path}")


def convert_sparsely(source: Path, path: Path) -> None:
    """Converts a model to an archive with holes."""
    target = SparseFile(path)
    try:
        onnxarchive.convert(source, target)
    finally:
        target.close()


def write_data(path: Path, size: int, marks: Mapping[int, bytes]) -> None:
    """Writes a file of zeros with `marks` at their offsets."""
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, mark in marks.items():
            file.seek(offset)
            file.write(mark)


def external(
    name: str, number: int, dims: Sequence[int], location: str, offset: int
) -> TensorProto:
    """An external tensor in a file."""
    tensor = TensorProto(name=name, data_type=number, dims=dims)
    size = helper.tensor_dtype_to_np_dtype(number).itemsize * int(np.prod(dims))
    return models.external(tensor, location, offset=offset, length=size)


def write_model(path: Path, tensors: Sequence[TensorProto]) -> None:
    """Writes a model that outputs its initializers, `tensors`."""
    nodes = [helper.make_node("Identity", [tensor.name], [f"{tensor.name}!"]) for tensor in tensors]
    outputs = [
        helper.make_tensor_value_info(f"{tensor.name}!", tensor.data_type, tensor.dims)
        for tensor in tensors
    ]
    graph = helper.make_graph(nodes, "graph", [], outputs, tensors)
    opset = helper.make_opsetid("", 21)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    path.write_bytes(model.SerializeToString())


def header(field: int, nbytes: int) -> bytes:
    """The tag and length before the bytes of a length-delimited field."""
    return varint(field << 3 | 2) + varint(nbytes)


def write_sparse_model(path: Path, sizes: Sequence[int]) -> None:
    """A single .onnx whose initializers have these many bytes of raw_data, which are holes."""
    headers = []
    for index, nbytes in enumerate(sizes):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.UINT8, dims=[nbytes])
        head = tensor.SerializeToString() + header(TensorProto.RAW_DATA_FIELD_NUMBER, nbytes)
        headers.append(header(INITIALIZER, len(head) + nbytes) + head)
    name = GraphProto(name="graph").SerializeToString()
    graph_nbytes = len(name) + sum(map(len, headers)) + sum(sizes)
    with open(path, "wb") as file:
        file.write(ModelProto(ir_version=10).SerializeToString())
        file.write(header(GRAPH, graph_nbytes) + name)
        for start, nbytes in zip(headers, sizes, strict=True):
            file.write(start)
            file.seek(nbytes - 1, os.SEEK_CUR)
            file.write(b"\x07")  # not all is zero
        file.truncate()


def write_int64_data(path: Path, values: Sequence[int], repeats: int) -> None:
    """A single .onnx of a tensor with these values again and again, as varints."""
    pattern = b"".join(map(varint, values))
    nbytes = repeats * len(pattern)
    tensor = TensorProto(name="w", data_type=TensorProto.INT64, dims=[repeats * len(values)])
    head = tensor.SerializeToString() + header(TensorProto.INT64_DATA_FIELD_NUMBER, nbytes)
    initializer = header(INITIALIZER, len(head) + nbytes) + head
    with open(path, "wb") as file:
        file.write(ModelProto(ir_version=10).SerializeToString())
        file.write(header(GRAPH, len(initializer) + nbytes) + initializer)
        file.write(pattern * (repeats % 1000))
        for _ in range(repeats // 1000):
            file.write(pattern * 1000)
