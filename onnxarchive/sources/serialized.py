"""Serialized models, parsed without the data of their large tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.data import Data
from onnxarchive.model import proto, tensors, wire
from onnxarchive.model.tensors import LazyData, TensorRef
from onnxarchive.model.weights import SPAN_LOCATION, Span, Stripped, decode, strip_weights
from onnxarchive.sources.data_files import DataFile
from onnxarchive.sources.recognition import recognised

_MAX_DECODED = 8  # bytes of a number that takes one byte in a packed field


@dataclass(frozen=True, slots=True)
class Serialized:
    """A model without the data of its large tensors, and the spans of this data in a file.

    Attributes:
        model: The model. The location of each large tensor contains the number of its span.
        file: The complete model.
        view: The bytes of `file`.
        spans: Offset and encoding of each large tensor's data in `file`.
    """

    model: onnx.ModelProto
    file: DataFile
    view: memoryview
    spans: tuple[Span, ...]

    def span(self, tensor: onnx.TensorProto) -> Span | None:
        """The span of a tensor's data, or None if it has none."""
        pairs = tensor.external_data
        if self.spans and len(pairs) == 1:
            location = pairs[0].value  # bytes, if it is not UTF-8
            if isinstance(location, str) and location.startswith(SPAN_LOCATION):
                return self.spans[int(location.removeprefix(SPAN_LOCATION))]
        return None

    def data(self, ref: TensorRef, span: Span) -> Data | None:
        """The bytes of a tensor that has a span.

        None if type and shape do not determine the number of bytes. This method then puts the bytes
        into the tensor; the plan of the archive checks them.
        """
        nbytes, is_raw = tensors.stored_nbytes(ref.tensor), span.data_type is None
        if nbytes is None:
            tensors.set_raw_data(ref.tensor, b"".join(decode(self.view, span)))
            return None
        if nbytes != span.nbytes if is_raw else nbytes > _MAX_DECODED * span.nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes, as its shape and data type need, found {span.nbytes}"
            )
        if is_raw:
            return self.file.part(span.offset, nbytes)
        return LazyData(nbytes, partial(_Decoded, self.view, span, nbytes))


def parse_files(files: Sequence[DataFile]) -> list[Serialized]:
    """Parses files as the models of one source; the data of large tensors stays in the files.

    The messages of all models together are counted before a model is parsed (MODEL-3).
    """
    views = [_view(file) for file in files]
    stripped: list[Stripped] = []
    for view in views:
        with recognised(view, expected="a model"):
            stripped.append(strip_weights(view))
    if wire.have_more_messages([without.model for without in stripped], proto.MAX_MESSAGES):
        together = " in all models together" if len(files) > 1 else ""
        raise ArchiveFormatError(
            f"expected at most {proto.MAX_MESSAGES} messages{together}, found more", rule="MODEL-3"
        )
    serialized: list[Serialized] = []
    for file, view, (data, spans) in zip(files, views, stripped, strict=True):
        with recognised(view, expected="a model"):
            model = _parse(data, file.nbytes)
        # A link has a fingerprint, a model in an archive has none.
        proto.take_link_fingerprint(model)
        serialized.append(Serialized(model, file, view, spans))
    return serialized


def _view(file: DataFile) -> memoryview:
    if file.nbytes >= proto.SIZE_LIMIT:  # before `file.view` inflates an entry of a zip
        raise ArchiveFormatError(
            f"expected a model of less than {proto.SIZE_LIMIT} bytes, found {file.nbytes}; store "
            "its tensors as external data",
            rule="MODEL-2",
        )
    return file.view


def _parse(data: bytes, nbytes: int) -> onnx.ModelProto:
    if wire.count_graphs(data) > 1:
        raise ArchiveFormatError(
            "expected one graph, found several, which protobuf would merge; the file is two models "
            "in one"
        )
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ArchiveFormatError(
            f"expected a serialized ModelProto, found: {error}; the file is not a .onnx or is "
            "damaged"
        ) from None
    if not model.HasField("graph"):
        raise ArchiveFormatError(
            f"expected a model with a graph, found none in {nbytes} bytes; the file is not a .onnx"
        )
    return model


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The numbers of a tensor in a serialized model, decoded to bytes while they are read."""

    model: memoryview
    span: Span
    nbytes: int
    crc32: None = None

    def __iter__(self) -> Iterator[memoryview]:
        return decode(self.model, self.span)
