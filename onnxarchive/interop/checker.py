"""`onnx.checker` on archives of any size; no weight is read.

onnx checks a model of 2 GiB or more by its path alone, and demands that the files of its external
data exist, in its directory or below, are regular and have one name. It does not read them. So it
is given the model as a link has it, in a temporary directory, beside an empty stand-in of the
archive: whether the archive's own directory can be written to does not matter, and nothing is left
there.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Final

import onnx

from onnxarchive.archive import opening
from onnxarchive.archive.rules import Finding
from onnxarchive.errors import with_path
from onnxarchive.interop.links import linked_model, may_give_shape
from onnxarchive.model import proto
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.tensors import TensorRef

__all__ = ["check_model", "is_unread"]

_MODEL: Final = "model.onnx"
_STAND_IN: Final = "archive.onnxa"


def check_model(
    path: str | os.PathLike[str],
    full_check: bool = False,
    skip_opset_compatibility_check: bool = False,
    check_custom_domain: bool = False,
) -> list[Finding]:
    """Checks the model of an archive with `onnx.checker.check_model`.

    `onnxarchive.check` checks the file, this function the model in it. The fault is returned as
    `check` returns its findings, where onnx raises an exception. Large weights are not read.

    Args:
        path: The archive.
        full_check: Also infers shapes and compares them with those in the model.
        skip_opset_compatibility_check: As in onnx.
        check_custom_domain: As in onnx.

    Returns:
        An empty list if the model is valid, else one finding with onnx's message, since onnx stops
        at the first fault. Its entry is the model's, its rule None.

    Raises:
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ChecksumError: Bytes of a small tensor have changed.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        OSError: The file cannot be read, or there is no place for temporary files.
    """
    with opening.open(path) as archive, with_path(path):
        serialized = proto.serialize(linked_model(archive, _STAND_IN, is_unread))
    with tempfile.TemporaryDirectory(prefix="onnxarchive-") as directory:
        model = os.path.join(directory, _MODEL)
        with open(model, "xb") as file:
            file.write(serialized)
        with open(os.path.join(directory, _STAND_IN), "xb") as file, suppress(OSError):
            # A hole as large as the archive, where there can be one: onnx asks for no size so far.
            file.truncate(os.path.getsize(path))
        try:
            onnx.checker.check_model(
                model,
                full_check=full_check,
                skip_opset_compatibility_check=skip_opset_compatibility_check,
                check_custom_domain=check_custom_domain,
            )
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return [Finding(None, MODEL_PROTO, str(error))]
    return []


def is_unread(ref: TensorRef, nbytes: int) -> bool:
    """Whether neither checker nor shape inference of onnx reads a tensor's data.

    They read what may give a shape (`onnxarchive.interop.links.may_give_shape`), wherever it
    stands, and the indices of sparse tensors.

    Args:
        ref: The tensor.
        nbytes: Its size in bytes.
    """
    is_sparse = any(field.startswith("sparse_") for field, _ in ref.path)
    return not is_sparse and not may_give_shape(ref.tensor, nbytes)
