"""What the functions that write an archive from an archive keep of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import edits
import numpy as np
import onnx
import pytest
from models import model_of, raw_tensor
from onnx import TensorProto

import onnxarchive

Rewrite: TypeAlias = Callable[[Path, Path], object]

ALIGNMENT = 4096
ASSETS = {"folder/tokenizer.json": b"{}", "labels.txt": b"cat\n"}


def _renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.name = "renamed"
    return model


def _transform(**options: Any) -> Rewrite:
    return lambda path, target: onnxarchive.transform(path, target, _renamed, **options)


def _edit(**options: Any) -> Rewrite:
    def edit(_: Path, target: Path) -> None:
        with onnxarchive.edit(target, **options) as edit:
            edit.metadata["author"] = "Ada"
            _renamed(edit.model)

    return edit


def _remove_model(_: Path, target: Path) -> None:
    edits.replace_model(target, model_of(raw_tensor("w", dims=(600,), seed=3)), name="third")
    edits.remove_model(target, "third", compact=True)


def _rename_model(_: Path, target: Path) -> None:
    edits.rename_model(target, "decoder", "other")
    edits.rename_model(target, "other", "decoder")


def _edit_ir(**options: Any) -> Rewrite:
    def edit(_: Path, target: Path) -> None:
        pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
        import onnxarchive.ir

        model = onnxarchive.ir.load(target)
        model.graph.name = "renamed"
        with onnxarchive.edit(target, **options) as edit:
            edit.model = model

    return edit


# Each function gets an archive and a copy of it, which it changes or replaces.
KEEPING_ALL: dict[str, Rewrite] = {
    "infer_shapes": onnxarchive.infer_shapes,
    "transform, hidden": _transform(),
    "transform, external": _transform(weights="external"),
    "transform, loaded": _transform(weights="loaded"),
    "edit": _edit(),
    "edit, compact": _edit(compact=True),
    "edit, copy": _edit(copy=True),
    "edit by onnx_ir": _edit_ir(),
    "edit by onnx_ir, compact": _edit_ir(compact=True),
    "edit of a tensor": lambda _, target: edits.replace_tensor(
        target, "large", np.zeros(600, np.float32)
    ),
    "edit of assets": lambda _, target: edits.add_asset(target, "new", b"new"),
    "remove_model": _remove_model,
    "rename_model": _rename_model,
}


def _model(seed: int) -> onnx.ModelProto:
    """A model with initializers of 4, 40, 1,200 and 2,400 bytes."""
    dims = {"tiny": 1, "small": 10, "medium": 300, "large": 600}
    weights = [raw_tensor(name, dims=(dim,), seed=seed) for name, dim in dims.items()]
    model = model_of(*weights)
    x = onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, [600])
    model.graph.input.append(x)
    model.graph.node.add(op_type="Add", input=["x", "large"], output=["y"])
    return model


# Thresholds, and the tensors that are then outside.
THRESHOLDS = {
    0: ["tiny", "small", "medium", "large"],
    16: ["small", "medium", "large"],
    1024: ["medium", "large"],
    2000: ["large"],
    1 << 20: [],
}


def _archive(path: Path, threshold: int) -> Path:
    onnxarchive.save(
        _model(0),
        path,
        models={"decoder": _model(1)},
        assets=ASSETS,
        size_threshold=threshold,
        alignment=ALIGNMENT,
    )
    return path


def _outside(path: Path) -> dict[str, list[str]]:
    """The names of the tensors outside each model."""
    with onnxarchive.open(path) as archive:
        return {
            identifier: [
                tensor.name
                for tensor in model.graph.initializer
                if tensor.data_location == TensorProto.EXTERNAL
            ]
            for identifier, model in archive.models.items()
        }


def _require_assets(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        found = {name: bytes(data) for name, data in archive.assets.items() if name in ASSETS}
        assert list(found.items()) == list(ASSETS.items())
    assert onnxarchive.check(path, full=True) == []


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("name", KEEPING_ALL)
def test_changing_an_archive_keeps_alignment_assets_models_and_threshold(
    tmp_path: Path, name: str, threshold: int
) -> None:
    path = _archive(tmp_path / "m.onnxa", threshold)
    target = Path(shutil.copy(path, tmp_path / "target.onnxa"))
    KEEPING_ALL[name](path, target)
    is_undone = name in ("remove_model", "rename_model")
    assert (target.read_bytes() == path.read_bytes()) is is_undone
    _require_assets(target)
    with onnxarchive.open(target) as archive:
        offsets = [entry.data_offset for entry in archive.entries.values()]
        assert archive.alignment == ALIGNMENT
    assert [offset % ALIGNMENT for offset in offsets] == [0] * len(offsets)
    assert _outside(target) == {"": THRESHOLDS[threshold], "decoder": THRESHOLDS[threshold]}


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_convert_keeps_assets_and_models_and_has_options_of_its_own(
    tmp_path: Path, threshold: int
) -> None:
    path = _archive(tmp_path / "m.onnxa", threshold)
    onnxarchive.convert(path, tmp_path / "converted.onnxa")
    onnxarchive.convert_many([path], tmp_path / "many")
    for target in (tmp_path / "converted.onnxa", tmp_path / "many" / "m.onnxa"):
        _require_assets(target)
        with onnxarchive.open(target) as archive:
            assert archive.alignment == 64
        assert _outside(target) == {"": THRESHOLDS[1024], "decoder": THRESHOLDS[1024]}
