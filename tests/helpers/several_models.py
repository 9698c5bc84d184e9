"""Models that share tensors, and checks of their archives."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import onnx
from models import location, model_of, normalised, raw_tensor
from onnx import TensorProto

import onnxarchive

A, B, C = (raw_tensor("", dims=(300,), seed=seed).raw_data for seed in range(3))


def floats(name: str, raw_data: bytes) -> TensorProto:
    return TensorProto(
        name=name, data_type=TensorProto.FLOAT, dims=[len(raw_data) // 4], raw_data=raw_data
    )


def of(**contents: bytes) -> onnx.ModelProto:
    """A model with these initializers: raw_data by name."""
    return model_of(*(floats(name, raw_data) for name, raw_data in contents.items()))


def entries_of(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def keys_of(path: Path, model: str = "") -> dict[str, str]:
    """The keys of a model's initializers, by name."""
    with onnxarchive.open(path, model=model) as archive:
        return {it.name: location(it) for it in archive.model.graph.initializer}


def require_loads(path: Path, models: dict[str, onnx.ModelProto]) -> None:
    """Requires that an archive breaks no rule and contains these models."""
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert list(archive.models) == sorted(models)
        archive.verify()
    for id, model in models.items():
        assert onnxarchive.load(path, model=id) == normalised(model)
