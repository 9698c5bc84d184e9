"""Serializes models, parses them strictly, and changes their metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import filterfalse
from typing import Final

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError, Report, Strict
from onnxarchive.files.data import Buffer
from onnxarchive.model import serialization, tensors, wire
from onnxarchive.model.keys import MODEL_PROTO

SIZE_LIMIT = 1 << 31  # protobuf's limit in bytes; every message is smaller
MAX_MESSAGES = 1 << 22  # of all models together; a parsed message takes 50 to 200 bytes

LINK_FINGERPRINT: Final = "onnxarchive.link"
"""Metadata key by which a link identifies its archive."""


def serialize(model: onnx.ModelProto) -> bytes:
    """Serializes a model deterministically.

    Raises:
        ArchiveFormatError: The model could not be read back: it has no ir_version or graph, has
            too many messages, or is too large or too deep for protobuf.
    """
    data = encode(model)
    # protobuf writes messages nested more than 100 deep, but refuses to parse them.
    parse(data, Strict())
    return data


def encode(model: onnx.ModelProto) -> bytes:
    """Serializes a model without checking its depth and its number of messages.

    The messages of the model must be nested at most 100 deep, as in every parsed model.

    Raises:
        ArchiveFormatError: The model has no ir_version or graph, or is too large for protobuf.
    """
    fault = _incomplete(model)
    if fault is not None:
        Strict().broken("MODEL-3", fault, entry=MODEL_PROTO)
    data = serialization.serialize(model)
    require_size(len(data))
    return data


def require_size(nbytes: int) -> None:
    """Refuses a model that is too large for protobuf."""
    if nbytes >= SIZE_LIMIT:
        raise ArchiveFormatError(
            f"expected a model of less than {SIZE_LIMIT} bytes, not counting its external tensors, "
            f"found {nbytes}; store more tensors outside (size_threshold, convert_attribute)",
            rule="MODEL-2",
        )


def filled(data: Buffer, inlined: Mapping[str, memoryview]) -> tuple[memoryview, ...]:
    """Puts data of external tensors, by location, into a serialized model; see `weights.fill`.

    Raises:
        ArchiveFormatError: The result is too large for protobuf.
    """
    if not inlined:
        return (memoryview(data),)
    from onnxarchive.model import weights  # not needed to open an archive

    require_size(len(data) + sum(view.nbytes for view in inlined.values()))
    return tuple(map(memoryview, weights.fill(data, inlined.get)))


def parse(data: bytes, report: Report, entry: str = MODEL_PROTO) -> onnx.ModelProto | None:
    """Parses a model; if its bytes are no valid model, MODEL-3 is reported for its entry."""
    model = fault = None
    try:
        if wire.have_more_messages([data], MAX_MESSAGES):
            fault = f"the model has more than {MAX_MESSAGES} messages, the limit"
        else:
            graphs = wire.count_graphs(data)
            model = serialization.parse(onnx.ModelProto, data)
            fault = _incomplete(model)
            if graphs > 1:
                fault = f"expected one graph, found {graphs}, which protobuf would merge"
    except (ArchiveFormatError, DecodeError) as error:
        fault = (
            "this is no serialized ModelProto whose messages are nested at most 100 deep: "
            f"{error.args[0]}"
        )
    if fault is None:
        return model
    report.broken("MODEL-3", fault, entry=entry)
    return None


def check_messages_together(models: Iterable[Buffer], report: Report) -> bool:
    """Checks the total number of messages of serialized models (MODEL-3); False if too many."""
    try:
        are_too_many = wire.have_more_messages([*models], MAX_MESSAGES)
    except ArchiveFormatError:
        return True  # a model is malformed: counting stopped, and `parse` will report the model
    if are_too_many:
        report.broken(
            "MODEL-3",
            f"all models together have more than {MAX_MESSAGES} messages, the limit",
            entry=MODEL_PROTO,
        )
    return not are_too_many


def _incomplete(model: onnx.ModelProto) -> str | None:
    """The message for a model without ir_version or graph, or None."""
    missing = [*filterfalse(model.HasField, ("ir_version", "graph"))]
    if not missing:
        return None
    return f"the model has no {' and no '.join(missing)}"


def take_link_fingerprint(model: onnx.ModelProto) -> str | None:
    """Removes the fingerprint of a link from the metadata; returns the fingerprint, or None."""
    are_fingerprints = [pair.key == LINK_FINGERPRINT for pair in model.metadata_props]
    if True not in are_fingerprints:
        return None
    fingerprint = tensors.text(model.metadata_props[are_fingerprints.index(True)].value)
    tensors.remove(model.metadata_props, are_fingerprints)
    return fingerprint


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    """The metadata (`metadata_props`) by key; for a repeated key, the last value."""
    return {tensors.text(pair.key): tensors.text(pair.value) for pair in model.metadata_props}


def set_metadata(model: onnx.ModelProto, pairs: Mapping[str, str]) -> None:
    """Replaces the metadata of a model; unchanged pairs keep their place."""
    before = metadata(model)
    changed = {key: value for key, value in pairs.items() if before.get(key) != value}
    unwritten = dict(changed)
    are_removed = []
    for pair in model.metadata_props:
        key = tensors.text(pair.key)
        are_removed.append(key not in unwritten and (key in changed or key not in pairs))
        if key in unwritten:
            pair.value = unwritten.pop(key)
    if True in are_removed:
        tensors.remove(model.metadata_props, are_removed)
    for key, value in unwritten.items():
        model.metadata_props.add(key=key, value=value)
