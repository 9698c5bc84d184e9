"""Archives as models of onnx_ir. Importing this module does not import onnx_ir."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from onnxarchive.errors import requires_library

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["load"]


def load(path: str | os.PathLike[str], *, model: str | None = None) -> onnx_ir.Model:
    """Loads a model from an archive as an `onnx_ir.Model` without reading its large tensors.

    Large tensors are views of the file (`onnxarchive.writing.onnx_ir.ArchiveTensor`). The tensors
    keep the file open and mapped, even after another file has replaced it.

    The model does not remember its archive. To change the archive, assign the changed model in
    `onnxarchive.edit`: its other models and assets stay, and weights that the archive has already
    are not written again. `onnxarchive.save` writes a new archive of this model alone. It may
    replace the archive that the model was loaded from, unless that was edited or replaced since.

    Args:
        path: The archive.
        model: Id of the model, such as `"decoder"`; None for the default one.

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
        with onnxarchive.edit("model.onnxa") as edit:
            edit.model = model
    """
    with requires_library("onnx_ir", "hold the model of an archive"):
        from onnxarchive.writing.onnx_ir import load as load_model
    return load_model(path, model)
