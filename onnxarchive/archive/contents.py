"""Reads end records, directory and model of an archive, and checks the data of entries.

They are read by position and not through a map: if another program truncates the file meanwhile,
that is an error and does not end the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from onnxarchive.buffers import checksums
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import ProgressCounter
from onnxarchive.errors import Report, shown
from onnxarchive.model import keys, proto, tensors
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.shapes import Shapes
from onnxarchive.model.tensors import TensorRef, TensorRefs
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat import directory
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.entries import EMPTY, Directory, Entry

MAX_MODEL_NBYTES = proto.SIZE_LIMIT - 1


@dataclass(frozen=True, slots=True)
class Contents:
    """End records, central directory and model of an archive.

    Attributes:
        directory: The directory.
        model: The model; None if it cannot be read.
        refs: The tensor of each key.
        shapes: Data type and shape of the tensor of each entry, as far as entries are tensors; None
            if the tensors were checked one by one.
    """

    directory: Directory
    model: onnx.ModelProto | None
    refs: TensorRefs
    shapes: Shapes | None = None


def read_contents(
    file: MappedFile, report: Report, max_model_nbytes: int = MAX_MODEL_NBYTES
) -> Contents:
    """Reads end records, directory and model of an archive.

    Args:
        file: The archive.
        report: Receives each broken rule that they show.
        max_model_nbytes: Largest size in bytes of a model; a larger one is reported and not read.
    """
    tail_offset = max(file.size - TAIL_SIZE, 0)
    bounds = locate(file.read(tail_offset, TAIL_SIZE), file.size, report)
    if bounds is None:
        return Contents(EMPTY, None, TensorRefs())
    listed = directory.read_directory(file.read(bounds.offset, bounds.size), bounds, report)
    named = keys.check_names(listed.names, report, are_all=listed.is_whole)
    data = _read_model(file, listed.entries, report, max_model_nbytes)
    model = None if data is None else proto.parse(data, report)
    if data is None or model is None:
        return Contents(listed, None, TensorRefs())
    refs, shapes = _refs(model, data, listed, named, report)
    return Contents(listed, model, refs, shapes)


def _read_model(
    file: MappedFile, entries: Sequence[Entry], report: Report, max_model_nbytes: int
) -> bytes | None:
    entry = next((entry for entry in reversed(entries) if entry.name == MODEL_PROTO), None)
    if entry is None:
        return None
    if not check_model_nbytes(entry.nbytes, max_model_nbytes, report):
        return None
    data = file.read(entry.data_offset, entry.nbytes)
    check_crc32(entry, len(data), checksums.crc32(data), report)
    return data


def check_model_nbytes(nbytes: int, max_model_nbytes: int, report: Report) -> bool:
    """Compares the size of a model with the limits of the format and the caller (rule MODEL-2).

    Args:
        nbytes: Size of the model in bytes.
        max_model_nbytes: Limit of the caller in bytes.
        report: Receives the broken rule.

    Returns:
        True if the size is within both limits.
    """
    if nbytes <= min(max_model_nbytes, MAX_MODEL_NBYTES):
        return True
    expected = f"at most {MAX_MODEL_NBYTES} bytes"
    if nbytes <= MAX_MODEL_NBYTES:
        expected = f"at most the {max_model_nbytes} bytes that the caller allows"
    report.broken("MODEL-2", f"expected {expected}, found {nbytes} bytes", entry=MODEL_PROTO)
    return False


def _refs(
    model: onnx.ModelProto, data: bytes, listed: Directory, named: Sequence[str], report: Report
) -> tuple[TensorRefs, Shapes | None]:
    """Compares the model with the entries of its tensors, whose names are `named`."""
    # Assets follow the tensors.
    if listed.is_whole and listed.entries.names[: len(named)] == named:
        sizes = listed.entries.sizes[: len(named)]
        found = proto.refs_at_once(model, data, named, sizes)
        if found is not None:
            return found
    size_of = dict(zip(listed.names, listed.sizes, strict=True))
    refs = proto.check_references(
        model, {key: size_of[key] for key in named}, report, are_all=listed.is_whole
    )
    return refs, None


def check_crc32(entry: Entry, nbytes: int, crc32: int, report: Report) -> None:
    """Compares size and CRC-32 of an entry's data with its directory record (rule ZIP-15)."""
    if (nbytes, crc32) != (entry.nbytes, entry.crc32):
        report.broken(
            "ZIP-15",
            f"expected {entry.nbytes} bytes with CRC-32 {entry.crc32:#010x}, found {nbytes} with "
            f"{crc32:#010x}",
            entry=entry.name,
        )


def check_data(
    file: MappedFile, entry: Entry, ref: TensorRef | None, report: Report, counter: ProgressCounter
) -> None:
    """Checks the data of an entry, which is read once, in pieces.

    Args:
        file: The archive.
        entry: The entry.
        ref: Its tensor, or None.
        report: Receives each broken rule (ZIP-15, DATA-6, TENSOR-4, TENSOR-5).
        counter: Counts the bytes that are read.
    """
    pieces = summed(file, entry, report)
    checksum = None
    if ref is not None:
        checksum = tensors.checksum(ref.tensor)
        if tensors.array_type(ref.tensor) is not None:
            pieces = tensors.checked(ref, pieces, report, entry=entry.name)
    sha1 = hashlib.sha1(usedforsecurity=False)
    for piece in counter(pieces):
        if checksum is not None:
            sha1.update(piece)
    if checksum is not None and checksum != sha1.hexdigest():
        report.broken(
            "DATA-6",
            f"{ref}: expected the checksum {sha1.hexdigest()}, found {shown(checksum)}",
            entry=entry.name,
        )


def summed(file: MappedFile, entry: Entry, report: Report) -> Iterator[memoryview]:
    """The data of an entry in pieces; after the last its CRC-32 is compared (rule ZIP-15)."""
    found = Crc32()
    for piece in found(file.pieces(entry.data_offset, entry.nbytes)):
        yield memoryview(piece)
    check_crc32(entry, found.nbytes, found.value, report)
