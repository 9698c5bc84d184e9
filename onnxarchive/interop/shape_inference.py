"""`onnx.shape_inference` on archives of any size; no weight is read that gives no shape."""

from __future__ import annotations

import os

import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.options import WriteOptions
from onnxarchive.archive.referring import has_outside_attributes, save_referring
from onnxarchive.errors import with_path
from onnxarchive.interop.checker import is_unread
from onnxarchive.interop.links import linked_model
from onnxarchive.model import walking

__all__ = ["infer_shapes"]


def infer_shapes(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Infers the shapes of an archive's model as `onnx.shape_inference.infer_shapes` does.

    Args:
        path: The archive.
        destination: The archive that is written with the inferred shapes in its model, weights
            copied from file to file and assets kept; it may be `path`, which is then replaced.
            None writes nothing.
        check_type: As in onnx.
        strict_mode: As in onnx.
        data_prop: As in onnx.

    Returns:
        The model with its inferred shapes, and as `Archive.model` otherwise: its large tensors
        are external, with their keys as location.

    Raises:
        onnx.shape_inference.InferenceError: With `strict_mode`, shapes do not fit; with
            `check_type`, types do not.
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ChecksumError: Bytes of the archive have changed.
        ArchiveError: `destination` is the archive, and others have edited it since it was opened.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        ValueError: `destination` is not allowed.
        OSError: A file cannot be read, or the archive not written.
    """
    with open(path) as archive, with_path(path):
        model = onnx.shape_inference.infer_shapes(
            linked_model(archive, "archive", is_unread),
            check_type=check_type,
            strict_mode=strict_mode,
            data_prop=data_prop,
        )
        for ref in archive._refs.values():  # inference adds values, and moves no tensor
            walking.at(model, ref.path).CopyFrom(ref.tensor)
        if destination is not None:
            options = WriteOptions(convert_attribute=has_outside_attributes(archive))
            save_referring(model, archive, destination, options)
    return model
