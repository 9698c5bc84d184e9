"""Reads an archive but for the data of tensors and assets, and holds that data against rules.

End records, directory and model are read by position and not through a map: a file that becomes
shorter meanwhile gives an error and not a fault.
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
from onnxarchive.zipformat import directory, false_ends
from onnxarchive.zipformat.end_records import locate
from onnxarchive.zipformat.entries import EMPTY, Directory, Entry
from onnxarchive.zipformat.false_ends import SEARCHED_SIZE

MAX_MODEL_NBYTES = proto.SIZE_LIMIT - 1


@dataclass(frozen=True, slots=True)
class Contents:
    """What end records, central directory and model say.

    Attributes:
        directory: The directory.
        model: The model, or None where it cannot be read.
        refs: The tensor of each key.
        shapes: Data type and shape of the tensor of each entry, but for the last ones that are no
            tensors; None where they were looked at one by one.
    """

    directory: Directory
    model: onnx.ModelProto | None
    refs: TensorRefs
    shapes: Shapes | None = None


def read_contents(
    file: MappedFile, report: Report, max_model_nbytes: int = MAX_MODEL_NBYTES
) -> Contents:
    """Reads all of an archive but the tensors and assets, data and local headers.

    Args:
        file: The archive.
        report: Takes each broken rule that can be seen so.
        max_model_nbytes: Size in bytes above which a model is reported and not read.
    """
    end = file.read(max(file.size - SEARCHED_SIZE, 0), SEARCHED_SIZE)
    bounds = locate(end, file.size, report)
    if bounds is None:
        return Contents(EMPTY, None, TensorRefs())
    listed = directory.read(file.read(bounds.offset, bounds.size), bounds, report)
    named = keys.check_names(listed.names, report, are_all=listed.is_whole)
    entries, directory_end = listed.entries, bounds.offset + bounds.size
    false_ends.check(
        end, file.size, bounds.offset, directory_end, entries.names, entries.header_offsets, report
    )
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
    """Compares the size of a model with the format's limit and the caller's (MODEL-2).

    Args:
        nbytes: Size of the model in bytes.
        max_model_nbytes: The caller's limit in bytes.
        report: Takes the broken rule.

    Returns:
        Whether it is within both.
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
    """Holds the model against the entries of tensors, whose names are `named`."""
    # Assets are behind the tensors.
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
    """Compares size and CRC-32 of the bytes of an entry with its directory record (ZIP-15)."""
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
    """Reads an entry once, in pieces, for the rules that need its bytes.

    Args:
        file: The archive.
        entry: The entry.
        ref: The tensor that has it as its location, or None.
        report: Takes each broken rule (ZIP-15, DATA-6, TENSOR-4, TENSOR-5).
        counter: Tells of the bytes that are read.
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
    """The bytes of an entry in pieces; its CRC-32 is compared behind the last (ZIP-15)."""
    found = Crc32()
    for piece in found(file.pieces(entry.data_offset, entry.nbytes)):
        yield memoryview(piece)
    check_crc32(entry, found.nbytes, found.value, report)
