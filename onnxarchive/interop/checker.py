"""`check_model`: `onnx.checker` on archives of any size, without reading large weights.

onnx checks models of 2 GiB or more only by path. External data must be in regular files without
further hard links, in the model's directory or below; onnx does not read these files. So
`check_model` writes two files to a temporary directory: the model without large weights, and in
place of the archive, a file of the archive's size without data. Nothing is written to the archive's
directory.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Final

import onnx

from onnxarchive.archive import opening
from onnxarchive.archive.linked_models import is_unread, linked_model
from onnxarchive.archive.rules import Finding
from onnxarchive.errors import naming, with_path
from onnxarchive.model import proto
from onnxarchive.model.keys import model_entry

__all__ = ["check_model"]

_MODEL: Final = "model.onnx"
_EMPTY: Final = "archive.onnxa"


def check_model(
    path: str | os.PathLike[str],
    full_check: bool = False,
    skip_opset_compatibility_check: bool = False,
    check_custom_domain: bool = False,
    *,
    model: str = "",
) -> list[Finding]:
    """Checks the model of an archive with `onnx.checker.check_model`.

    `onnxarchive.check` checks the file; this function checks the model without reading large
    weights. Unlike `onnx.checker.check_model`, this function returns a fault instead of raising it.

    Args:
        path: The archive.
        full_check: Whether to also infer shapes and compare them with the model's shapes.
        skip_opset_compatibility_check: As in onnx.
        check_custom_domain: As in onnx.
        model: Id of the model, such as `"decoder"`; `""` for the default one.

    Returns:
        An empty list if the model is valid; else one finding with onnx's message, since onnx stops
        at the first fault.

    Raises:
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a model or small tensor do not match their CRC-32.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        OSError: The file cannot be read, or temporary files cannot be written.

    Example:
        assert onnxarchive.check_model("model.onnxa", full_check=True) == []
    """
    with opening.open(path, model=model) as archive, with_path(path):
        serialized = proto.serialize(linked_model(archive, _EMPTY, is_unread, in_place=True))
    with (
        naming("the system's temporary directory"),
        tempfile.TemporaryDirectory(prefix="onnxarchive-") as directory,
    ):
        linked = os.path.join(directory, _MODEL)
        with open(linked, "xb") as file:
            file.write(serialized)
        with open(os.path.join(directory, _EMPTY), "xb") as file, suppress(OSError):
            # The file gets the archive's size, but no data. If the system refuses this size, the
            # file stays empty: onnx does not check the size.
            file.truncate(os.path.getsize(path))
        try:
            onnx.checker.check_model(
                linked,
                full_check=full_check,
                skip_opset_compatibility_check=skip_opset_compatibility_check,
                check_custom_domain=check_custom_domain,
            )
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return [Finding(None, model_entry(model), " ".join(str(error).split()))]
    return []
