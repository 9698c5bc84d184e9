"""Archives as models of onnx_ir. Importing this module does not import onnx_ir."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxarchive.errors import needing

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["load"]


def load(path: str | os.PathLike[str], *, model: str = "") -> onnx_ir.Model:
    """Loads a model from an archive as an `onnx_ir.Model` without reading its large tensors.

    Large tensors are views of the file (`onnxarchive.writing.onnx_ir.ArchiveTensor`). The tensors
    and the graph keep the file open and mapped, even after another file has replaced it. You can
    change the model and save it with `onnxarchive.save`. The target may be the archive of the
    model, unless the archive was edited meanwhile. The graph's `meta` refers to the archive, so
    `save` keeps other models and assets (see the argument `keep` of `save`). A new model built from
    the tensors lacks this reference.

    Args:
        path: The archive.
        model: Id of the model, such as `"decoder"`; `""` for the default one.

    Returns:
        The model; its large tensors are views of the file.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        UnsupportedFeatureError: The model has sparse tensors or training_info, which onnx_ir cannot
            hold.
        ImportError: onnx_ir is not installed.
        OSError: The file cannot be opened or read.

    Example:
        model = onnxarchive.ir.load("model.onnxa")
        onnxarchive.save(model, "model.onnxa")
    """
    with needing("onnx_ir", "hold the model of an archive"):
        from onnxarchive.writing.onnx_ir import load as load_model
    return load_model(path, model)
