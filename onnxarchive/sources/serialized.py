"""Serialized models, parsed without the data of their large tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files.data import Data
from onnxarchive.model import proto, tensors, wire
from onnxarchive.model.tensors import LazyData, TensorRef
from onnxarchive.model.weights import SPAN_LOCATION, Span, Stripped, decode, strip_weights
from onnxarchive.sources.places import DataFile
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

    def data(self, ref: TensorRef, location: str) -> Data | None:
        """The bytes of a tensor whose location names a span.

        None if type and shape do not determine the number of bytes. This method then puts the bytes
        into the tensor; the plan of the archive checks them.
        """
        span = self.spans[int(location.removeprefix(SPAN_LOCATION))]
        nbytes = tensors.stored_nbytes(ref.tensor)
        if nbytes is None:
            tensors.set_raw_data(ref.tensor, b"".join(decode(self.view, span)))
            return None
        if nbytes != span.nbytes if span.is_raw else nbytes > _MAX_DECODED * span.nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes, as its shape and data type need, found {span.nbytes}"
            )
        if span.is_raw:
            return self.file.part(span.offset, nbytes)
        return LazyData(nbytes, partial(_Decoded, self.view, span, nbytes), ref)


def require_messages(files: Iterable[DataFile]) -> None:
    """Checks the total number of messages in models that are not yet parsed (rule MODEL-3).

    Raises:
        ArchiveFormatError: The models have too many messages, or a model is malformed or too large.
    """
    _require_messages([_strip(file)[1].model for file in files])


def _require_messages(models: Sequence[bytes]) -> None:
    if wire.have_more_messages(models, proto.MAX_MESSAGES):
        together = " in all models together" if len(models) > 1 else ""
        raise ArchiveFormatError(
            f"expected at most {proto.MAX_MESSAGES} messages{together}, found more", rule="MODEL-3"
        )


def _strip(file: DataFile) -> tuple[memoryview, Stripped]:
    """The bytes of a model, and the model without the data of large tensors."""
    if file.nbytes >= proto.SIZE_LIMIT:  # before `file.view` inflates an entry of a zip
        raise ArchiveFormatError(
            f"expected a model of less than {proto.SIZE_LIMIT} bytes, found {file.nbytes}; store "
            "its tensors as external data",
            rule="MODEL-2",
        )
    view = file.view
    with recognised(view, expected="a model"):
        return view, strip_weights(view)


def parse_file(file: DataFile) -> Serialized:
    """Parses a file as a model; the data of large tensors stays in the file.

    Raises:
        ArchiveFormatError: The file is no model, or the model is too large or has too many
            messages.
    """
    view, stripped = _strip(file)
    _require_messages([stripped.model])
    with recognised(view, expected="a model"):
        if wire.occurrences(stripped.model, "graph") > 1:
            raise ArchiveFormatError(
                "expected one graph, found several, which protobuf would merge; the file is two "
                "models in one"
            )
        try:
            model = onnx.ModelProto.FromString(stripped.model)
        except DecodeError as error:
            raise ArchiveFormatError(
                f"expected a serialized ModelProto, found: {error}; the file is not a .onnx or is "
                "damaged"
            ) from None
        if not model.HasField("graph"):
            raise ArchiveFormatError(
                f"expected a model with a graph, found none in {file.nbytes} bytes; the file is "
                "not a .onnx"
            )
    proto.take_link_fingerprint(model)  # a link has a fingerprint, a model in an archive has none
    return Serialized(model, file, view, stripped.spans)


@dataclass(frozen=True, slots=True)
class _Decoded:
    """The numbers of a tensor in a serialized model, decoded to bytes while they are read."""

    model: memoryview
    span: Span
    nbytes: int
    crc32: None = None

    def __iter__(self) -> Iterator[memoryview]:
        return decode(self.model, self.span)
