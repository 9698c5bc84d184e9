"""Archives as models of onnx_ir, with tensors that stay in the file until something reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["load"]


def load(path: str | os.PathLike[str]) -> onnx_ir.Model:
    """Loads an archive as an onnx_ir model whose large tensors are views of the file.

    It takes time and memory as `onnxarchive.open` does; no weight is read. Tensors stored outside
    the model become `onnxarchive.interop.onnx_ir.ArchiveTensor`. They and the model's graph keep
    the file open and mapped for as long as one of them lives, also when another file takes its
    path. So a model may be changed and saved, by `onnxarchive.save`, over the archive it was loaded
    from, unless others have edited that since.

    Args:
        path: The archive.

    Raises:
        ArchiveFormatError: The file is not an archive or breaks a rule.
        UnsupportedFeatureError: The model has what onnx_ir cannot hold: sparse tensors,
            training_info.
        ImportError: onnx_ir is not installed.
        OSError: The file cannot be opened or read.
    """
    from onnxarchive.interop import onnx_ir as integration

    return integration.load(path)
