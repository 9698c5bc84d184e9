"""`infer_shapes`: `onnx.shape_inference` on archives of any size, without reading large weights."""

from __future__ import annotations

import os

import onnx

from onnxarchive.archive.linked_models import is_unread, linked_model
from onnxarchive.archive.opening import open
from onnxarchive.archive.referring import archive_options, save_referring
from onnxarchive.errors import with_path
from onnxarchive.model import walking

__all__ = ["infer_shapes"]


def infer_shapes(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    model: str = "",
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Infers shapes in the model of an archive with `onnx.shape_inference.infer_shapes`.

    The result is that of onnx for the complete model, with one exception: nothing is inferred from
    the values of vectors of 16 MiB or more, which are not read.

    Args:
        path: The archive.
        destination: An archive to write, with the inferred shapes and copies of weights, assets
            and other models, and the alignment of the archive; it may be `path`. None writes
            nothing.
        model: Id of the model, such as `"decoder"`; `""` for the default one.
        check_type: As in onnx.
        strict_mode: As in onnx.
        data_prop: As in onnx.

    Returns:
        The model with the inferred shapes; large tensors are external, as in `Archive.model`.

    Raises:
        onnx.shape_inference.InferenceError: Shapes conflict (with `strict_mode`), or types
            conflict (with `check_type`).
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: Bytes of the archive do not match their CRC-32.
        ArchiveError: `destination` is `path`, which was edited meanwhile.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        ValueError: `destination` is not allowed.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: A file cannot be read, or the archive cannot be written.

    Example:
        model = onnxarchive.infer_shapes("model.onnxa", "inferred.onnxa")
    """
    with open(path, model=model) as archive, with_path(path):
        inferred = onnx.shape_inference.infer_shapes(
            linked_model(archive, "archive", is_unread),
            check_type=check_type,
            strict_mode=strict_mode,
            data_prop=data_prop,
        )
        for ref in archive._refs.values():  # inference keeps their paths
            walking.at(inferred, ref.path).CopyFrom(ref.tensor)
        if destination is not None:
            options = archive_options(archive, archive.models)
            save_referring(inferred, archive, destination, options)
    return inferred
