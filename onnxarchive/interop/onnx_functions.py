"""Functions of onnx on the model of an archive, which need no weights.

onnx checks models of 2 GiB or more only by path. External data must be in regular files without
further hard links, in the model's directory or below; onnx does not read these files. So two files
are written to a temporary directory: the model without large weights, and an empty file in place of
the archive. Nothing is written to the archive's directory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import onnx

from onnxarchive.conversion.linked_models import with_external_data
from onnxarchive.errors import path_in_errors, with_path
from onnxarchive.files.new_directory import temporary_directory
from onnxarchive.model import model_proto, walking
from onnxarchive.model.external import is_unread
from onnxarchive.model.keys import model_entry
from onnxarchive.reading.archive import contents_of, open
from onnxarchive.reading.check import Finding
from onnxarchive.remote.location import require_local_target
from onnxarchive.writing.archive_models import archive_options, save_model_of_archive

_EMPTY: Final = "archive.onnxa"  # in place of the archive, for `check_model`


def check_model(
    path: str | os.PathLike[str],
    full_check: bool = False,
    skip_opset_compatibility_check: bool = False,
    check_custom_domain: bool = False,
    *,
    model: str | None = None,
) -> list[Finding]:
    """Checks the model of an archive with `onnx.checker.check_model`.

    `onnxarchive.check` checks the file; this function checks the model without reading large
    weights. It returns faults; unlike `onnx.checker.check_model`, it does not raise them.

    Args:
        path: The archive.
        full_check: Whether to also infer shapes and compare them with the model's shapes.
        skip_opset_compatibility_check: As in onnx.
        check_custom_domain: As in onnx.
        model: Id of the model, such as `"decoder"`; None for the default one.

    Returns:
        An empty list if the model is valid; else one finding with onnx's message, since onnx stops
        at the first fault.

    Raises:
        ArchiveError: The archive cannot be opened; see `onnxarchive.open`.
        ChecksumError: The bytes of a model or small tensor do not match their CRC-32.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors.
        OSError: The archive cannot be read, or temporary files cannot be written.

    Example:
        assert onnxarchive.check_model("model.onnxa", full_check=True) == []
    """
    with open(path, model=model) as archive, with_path(path):
        serialized = model_proto.serialize(
            with_external_data(archive, _EMPTY, is_unread, in_place=True)
        )
    with (
        path_in_errors("the system's temporary directory"),
        temporary_directory(os.path.join(tempfile.gettempdir(), "onnxarchive")) as directory,
    ):
        linked = Path(directory.lasting_path(), "model.onnx")
        linked.write_bytes(serialized)
        linked.with_name(_EMPTY).touch()  # onnx does not check the size
        try:
            onnx.checker.check_model(
                linked,
                full_check=full_check,
                skip_opset_compatibility_check=skip_opset_compatibility_check,
                check_custom_domain=check_custom_domain,
            )
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            return [Finding(None, model_entry(archive.model_id), " ".join(str(error).split()))]
    return []


def infer_shapes(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str] | None = None,
    *,
    model: str | None = None,
    check_type: bool = False,
    strict_mode: bool = False,
    data_prop: bool = False,
) -> onnx.ModelProto:
    """Infers shapes in the model of an archive with `onnx.shape_inference.infer_shapes`.

    The result is that of onnx for the complete model, with one exception: nothing is inferred from
    the values of vectors of 16 MiB or more, which are not read.

    Args:
        path: The archive.
        destination: An archive to write, with the inferred shapes and copies of weights, assets and
            other models, and the alignment of the archive; it may be `path`. None writes nothing.
        model: Id of the model, such as `"decoder"`; None for the default one.
        check_type: As in onnx.
        strict_mode: As in onnx.
        data_prop: As in onnx.

    Returns:
        The model with the inferred shapes; large tensors are external, as in `Archive.model`.

    Raises:
        onnx.shape_inference.InferenceError: Shapes conflict (with `strict_mode`), or types conflict
            (with `check_type`).
        ChecksumError: Bytes of the archive do not match their CRC-32.
        ArchiveError: The archive cannot be opened (see `onnxarchive.open`); or `destination` is
            `path`, which was edited meanwhile.
        UnsupportedFeatureError: The model takes 2 GiB or more without its large tensors, or
            `destination` is a URL.
        ValueError: `destination` is not allowed.
        LockedError: A file that is to be replaced stayed locked for 30 seconds.
        OSError: The archive cannot be read or written.

    Example:
        model = onnxarchive.infer_shapes("model.onnxa", "inferred.onnxa")
    """
    if destination is not None:
        destination = require_local_target(destination)
    with open(path, model=model) as archive, with_path(path):
        inferred = onnx.shape_inference.infer_shapes(
            with_external_data(archive, "archive", is_unread),
            check_type=check_type,
            strict_mode=strict_mode,
            data_prop=data_prop,
        )
        for ref in archive.tensors.refs.values():  # inference keeps their paths
            walking.at(inferred, ref.path).CopyFrom(ref.tensor)
        if destination is not None:
            options = archive_options(contents_of(archive), archive.models)
            save_model_of_archive(inferred, archive, destination, options)
    return inferred
