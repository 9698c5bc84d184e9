"""The first inputs of the fuzzer's targets."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

import onnxarchive
from onnxarchive.errors import ArchiveError

VECTORS: Final = Path(__file__).resolve().parents[2] / "conformance" / "vectors"
LARGEST_SEED: Final = 1 << 16  # bytes
# The field 99 in every wire type: varint, fixed64, bytes, group and fixed32.
UNKNOWN_FIELDS: Final = (
    b"\x98\6" + b"\xff" * 9 + b"\1",
    b"\x99\6" + b"\xff" * 8,
    b"\x9a\6\3cat",
    b"\x9b\6\x9c\6",
    b"\x9d\6" + b"\xff" * 4,
)


def archives() -> list[bytes]:
    """Small archives, and the conformance suite's vectors of up to 64 KiB if present."""
    found = [path.read_bytes() for path in sorted(VECTORS.glob("*")) if path.is_file()]
    found = [data for data in found if len(data) <= LARGEST_SEED]
    for model in _models():
        for assets in ({}, {"a/b": b"cat", "ü": b""}):
            file = io.BytesIO()
            onnxarchive.save(model, file, size_threshold=0, convert_attribute=True, assets=assets)
            found.append(file.getvalue())
    logged = _with_undo_log(found[-1])
    never_written = found[-1] + bytes(len(logged) - len(found[-1]))
    return [logged, never_written, *found]


def _with_undo_log(archive: bytes) -> bytes:
    offset = archive.rindex(b"PK\3\4")  # of the model's local header
    end = np.bitwise_not(np.frombuffer(archive[offset:], np.uint8)).tobytes()
    hashed = hashlib.sha256(end).digest()
    signed = struct.pack("<16sQQ32s", b"onnxa undo log 1", offset, len(archive), hashed)
    return archive + end + signed + hashlib.sha256(signed).digest()


def serialized_models() -> list[bytes]:
    """Small models with their weights, and models as stored in archives."""
    found = [model.SerializeToString() for model in _models()]
    for data in archives():
        try:
            with onnxarchive.open(data) as archive:
                found.append(bytes(archive.read("__MODEL_PROTO")))
        except ArchiveError:
            continue
    return list(dict.fromkeys(found))


def sources() -> list[bytes]:
    """Small models, archives, and zip files of a model and its data, as other tools write them."""
    found = [*serialized_models(), *archives()]
    model = onnx.ModelProto(ir_version=10)
    for location, offset in (("w.bin", 0), ("both.bin", 8), ("both.bin", 32)):
        tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[2, 3])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", 24)):
            tensor.external_data.add(key=key, value=str(value))
    contents = {"m.onnx": model.SerializeToString(), "w.bin": bytes(24), "both.bin": bytes(56)}
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as by_zipfile:
            for name, content in {**contents, "assets/a": b"cat", "notes": b""}.items():
                by_zipfile.writestr(f"folder/{name}", content)
        found.append(file.getvalue())
    return found


def _models() -> list[onnx.ModelProto]:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], raw_data=bytes(24))
    four = TensorProto(name="four", data_type=TensorProto.INT4, dims=[3], raw_data=b"\x21\3")
    bools = TensorProto(name="bools", data_type=TensorProto.BOOL, dims=[2], raw_data=b"\0\1")
    none = TensorProto(name="none", data_type=TensorProto.DOUBLE, dims=[2, 0], raw_data=b"")
    typed = [
        TensorProto(name="floats", data_type=TensorProto.FLOAT, dims=[2], float_data=[1, -2]),
        TensorProto(name="longs", data_type=TensorProto.INT64, dims=[2], int64_data=[300, -1]),
        TensorProto(name="six", data_type=TensorProto.FLOAT6E2M3, dims=[5], int32_data=range(5)),
        TensorProto(name="text", data_type=TensorProto.STRING, dims=[1], string_data=[b"cat"]),
    ]
    inner = onnx.GraphProto(name="inner", initializer=[four])
    attribute = onnx.AttributeProto(name="then", type=onnx.AttributeProto.GRAPH, g=inner)
    constant = onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=bools)
    nodes = [onnx.NodeProto(op_type="If", attribute=[attribute, constant])]
    sparse = onnx.SparseTensorProto(values=weight, indices=none, dims=[9])
    graphs = [
        onnx.GraphProto(),
        onnx.GraphProto(name="g", initializer=[weight, four, bools, none]),
        onnx.GraphProto(name="g", initializer=typed),
        onnx.GraphProto(name="g", initializer=[weight], node=nodes, sparse_initializer=[sparse]),
    ]
    models = [onnx.ModelProto(ir_version=10, graph=graph) for graph in graphs]
    for field in UNKNOWN_FIELDS:
        for level in ("model", "graph", "tensor"):
            graph = onnx.GraphProto(initializer=[four, weight])
            model = onnx.ModelProto(ir_version=10, graph=graph)
            places = {"model": model, "graph": model.graph, "tensor": model.graph.initializer[1]}
            places[level].MergeFromString(field)
            models.append(model)
    return models
