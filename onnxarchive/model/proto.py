"""The serialized model of an archive: parsed strictly, and held against the entries."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx
from google.protobuf.message import DecodeError, EncodeError

from onnxarchive.errors import ArchiveFormatError, Report, UnsupportedFeatureError
from onnxarchive.model import dtypes, tensors, wire
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.tensors import Site

SIZE_LIMIT = 1 << 31  # protobuf's, in bytes; a message is smaller than this
MAX_MESSAGES = 1 << 22  # of a model; some hundred bytes each once parsed


def serialize(model: onnx.ModelProto) -> bytes:
    """The bytes of a model; the same model gives the same bytes.

    Raises:
        ArchiveFormatError: It would not be read back: no ir_version or graph, or too large or too
            deep for protobuf.
    """
    _check_required(model, Report())
    try:
        data = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ArchiveFormatError(
            f"expected a model that protobuf can serialize (less than 2 GiB without its external "
            f"tensors, nested less than 100 deep), found: {error}",
            rule="MODEL-2",
        ) from error
    if len(data) >= SIZE_LIMIT:
        raise ArchiveFormatError(
            f"expected a model of less than {SIZE_LIMIT} bytes without its external tensors, found "
            f"{len(data)}; store more tensors outside (size_threshold, convert_attribute)",
            rule="MODEL-2",
        )
    # What protobuf writes it may yet refuse to read: messages nested more than 100 deep.
    parse(data, Report())
    return data


def serialize_filled(
    model: onnx.ModelProto, held: Mapping[str, memoryview]
) -> tuple[memoryview, ...]:
    """The bytes of a model in pieces, with large tensors put in from where they lie.

    Args:
        model: The model, in which those tensors are external.
        held: Their bytes by the location that they have in `model`. They are not copied.

    Raises:
        ArchiveFormatError: As `serialize` does.
    """
    data = serialize(model)
    if not held:
        return (memoryview(data),)
    try:
        pieces = wire.fill(data, held.get)
    except UnsupportedFeatureError as error:
        raise ArchiveFormatError(
            f"{error.message}; store more tensors outside (size_threshold, convert_attribute)",
            rule="MODEL-2",
        ) from error
    return tuple(memoryview(piece) for piece in pieces)


def parse(data: bytes, report: Report) -> onnx.ModelProto | None:
    """Parses the bytes of a model (rule MODEL-3); None where they are not one."""
    try:
        if wire.has_more_messages(data, MAX_MESSAGES):
            report.broken(
                "MODEL-3",
                f"expected at most {MAX_MESSAGES} messages, found more",
                entry=MODEL_PROTO,
            )
            return None
        graphs = wire.occurrences(data, "graph")
        model = onnx.ModelProto.FromString(data)
    except (ArchiveFormatError, DecodeError) as error:
        report.broken(
            "MODEL-3",
            "expected a serialized ModelProto whose messages are nested at most 100 deep, found: "
            f"{error.args[0]}",
            entry=MODEL_PROTO,
        )
        return None
    if graphs > 1:
        report.broken("MODEL-3", f"expected one graph, found {graphs}, which protobuf would merge")
        return None
    return model if _check_required(model, report) else None


def _check_required(model: onnx.ModelProto, report: Report) -> bool:
    missing = [field for field in ("ir_version", "graph") if not model.HasField(field)]
    if missing:
        report.broken(
            "MODEL-3",
            f"expected a model with ir_version and graph, found no {' and no '.join(missing)}",
        )
    return not missing


def check_references(
    model: onnx.ModelProto, sizes: Mapping[str, int], report: Report
) -> dict[str, Site]:
    """Holds the external tensors of a model against the entries of its archive.

    Args:
        model: The model.
        sizes: The size in bytes of the entry of each key.
        report: Takes each broken rule (DATA-1 to DATA-7, TENSOR-1 to TENSOR-3).

    Returns:
        The tensor of each key, where one could be told.
    """
    sites: dict[str, Site] = {}
    for site in tensors.walk(model):
        tensor = site.tensor
        if tensor.data_location != tensors.EXTERNAL:
            if tensor.external_data:
                report.broken(
                    "DATA-7", f"{site}: expected data_location EXTERNAL beside external_data"
                )
            continue
        reference = tensors.external_data(site, report)
        if reference is None:
            continue
        key = reference.location
        broken = partial(report.broken, entry=key)
        if key not in sizes:
            report.broken("DATA-1", f"{site}: expected the key of an entry, found location {key!r}")
            continue
        if key in sites:
            broken("DATA-3", f"expected one tensor to name it, found {sites[key]} and {site}")
            continue
        sites[key] = site
        if reference.offset or reference.length not in (None, sizes[key]):
            broken(
                "DATA-5",
                f"{site}: expected offset 0 and length {sizes[key]}, found {reference.offset} and "
                f"{reference.length}",
            )
        _check_tensor(site, key, sizes[key], report)
    for key in sizes:
        if key not in sites:
            report.broken("DATA-2", "expected a tensor that names it, found none", entry=key)
    return sites


def _check_tensor(site: Site, key: str, nbytes: int, report: Report) -> None:
    tensor = site.tensor
    broken = partial(report.broken, entry=key)
    held = tensors.held_fields(tensor)
    if held or tensor.HasField("segment"):
        broken(
            "DATA-7", f"{site}: expected no data beside external_data, found {held or 'segment'}"
        )
    data_type = dtypes.BY_NUMBER.get(tensor.data_type)
    if data_type is None:
        broken(
            "TENSOR-1",
            f"{site}: expected a data type of fixed width, found number {tensor.data_type}",
        )
    elif not tensors.are_dims(tensor.dims, data_type):
        broken(
            "TENSOR-2",
            f"{site}: expected the shape of an array, found {list(tensor.dims[:65])}",
        )
    elif data_type.nbytes(tensor.dims) != nbytes:
        broken(
            "TENSOR-3",
            f"{site}: expected {data_type.nbytes(tensor.dims)} bytes for {data_type.name} of shape "
            f"{list(tensor.dims)}, found an entry of {nbytes}",
        )
