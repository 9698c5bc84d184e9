"""Reads the directory and the models of an archive; checks the data of entries on request.

End records, directory and models are read by position, not from a map: if the file is truncated
meanwhile, reading raises an error instead of SIGBUS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import onnx

from onnxarchive.buffers import checksums
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.buffers.counting import ProgressCounter
from onnxarchive.errors import Report, shown
from onnxarchive.model import keys, proto, tensors
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.proto import CheckedModel
from onnxarchive.model.tensors import TensorRef
from onnxarchive.storage.random_access import RandomAccessFile
from onnxarchive.zipformat import directory, false_ends
from onnxarchive.zipformat.directory import EMPTY, Directory, Entry
from onnxarchive.zipformat.end_records import locate
from onnxarchive.zipformat.false_ends import SEARCHED_SIZE
from onnxarchive.zipformat.local_header import check_local_header

MAX_MODEL_NBYTES = proto.SIZE_LIMIT - 1
# The models of a remote archive are read by one request, unless their headers and padding exceed
# this many bytes.
_MAX_BESIDE = 1 << 20


class Contents:
    """The central directory and the parsed models of an archive.

    Attributes:
        directory: The central directory.
        models: The readable models by id. The default model (`""`) is first; the others are in the
            order of their ids.
    """

    def __init__(self, directory: Directory, models: Mapping[str, CheckedModel]) -> None:
        self.directory = directory
        self.models = models

    def refs(self, key: str) -> Sequence[TensorRef]:
        """The tensors with this key; at most one from each model."""
        if len(self.models) == 1:
            (found,) = self.models.values()
            return [found.refs[key]] if key in found.refs else []
        return self._refs.get(key, [])

    @cached_property
    def _refs(self) -> Mapping[str, list[TensorRef]]:
        refs: defaultdict[str, list[TensorRef]] = defaultdict(list)
        for found in self.models.values():
            for key, ref in found.refs.items():
                refs[key].append(ref)
        return refs


def read_contents(
    file: RandomAccessFile, report: Report, max_model_nbytes: int = MAX_MODEL_NBYTES
) -> Contents:
    """Reads all of an archive except local headers and the data of tensors and assets.

    Args:
        file: The archive.
        report: Receives each broken rule.
        max_model_nbytes: Limit in bytes on all models together; above it, no model is read
            and MODEL-2 is reported.
    """
    end = file.read(max(file.size - SEARCHED_SIZE, 0), SEARCHED_SIZE)
    bounds = locate(end, file.size, report)
    if bounds is None:
        return Contents(EMPTY, {})
    file.hold(bounds.offset)
    listed = directory.read_directory(file.read(bounds.offset, bounds.size), bounds, report)
    named = keys.check_names(listed.names, report, are_all=listed.is_whole)
    entries, directory_end = listed.entries, bounds.offset + bounds.size
    false_ends.check(
        end,
        file.size,
        bounds.offset,
        directory_end,
        [entry.name for entry in entries],
        [entry.header_offset for entry in entries],
        report,
    )
    data = _read_models(file, entries, bounds.offset, report, max_model_nbytes)
    return Contents(listed, _models(data, listed, named, report))


def _read_models(
    file: RandomAccessFile,
    entries: Sequence[Entry],
    directory_offset: int,
    report: Report,
    max_model_nbytes: int,
) -> dict[str, bytes]:
    """The bytes of each model by entry name, the default model first; {} if MODEL-2 is broken."""
    found = {entry.name: entry for entry in entries[first_model(entries) :]}
    # The default model is first, since its name is a prefix of the others.
    sizes = {name: found[name].nbytes for name in sorted(found)}
    if not check_model_sizes(sizes, max_model_nbytes, report):
        return {}
    begin = min((entry.header_offset for entry in found.values()), default=directory_offset)
    if directory_offset - begin <= sum(sizes.values()) + _MAX_BESIDE:
        file.hold(begin)
    data: dict[str, bytes] = {}
    for name in sizes:
        entry = found[name]
        data[name] = file.read(entry.data_offset, entry.nbytes)
        check_crc32(entry, len(data[name]), checksums.crc32(data[name]), report)
    return data


def first_model(entries: Sequence[Entry]) -> int:
    """Index of the first model's entry; the models are the last entries."""
    first = len(entries)
    while first and keys.is_model(entries[first - 1].name):
        first -= 1
    return first


def check_model_sizes(sizes: Mapping[str, int], max_model_nbytes: int, report: Report) -> bool:
    """Compares model sizes with the limits of the format and of the caller (MODEL-2).

    Args:
        sizes: Size of each model in bytes, by its entry's name.
        max_model_nbytes: The caller's limit in bytes, for all models together.
        report: Receives the broken rule.

    Returns:
        True if all sizes are within both limits.
    """
    too_large = [name for name, nbytes in sizes.items() if nbytes > MAX_MODEL_NBYTES]
    for name in too_large:
        report.broken(
            "MODEL-2",
            f"expected at most {MAX_MODEL_NBYTES} bytes, found {sizes[name]} bytes",
            entry=name,
        )
    total = sum(sizes.values())
    if total <= max_model_nbytes or too_large:
        return not too_large
    report.broken(
        "MODEL-2",
        f"expected models of at most {max_model_nbytes} bytes in all (max_model_nbytes), found "
        f"{total} bytes",
        entry=MODEL_PROTO,
    )
    return False


def require_models(data: Mapping[str, bytes], sizes: Mapping[str, int]) -> None:
    """Checks models before they are written, as a reader of the archive will.

    Args:
        data: The bytes of each model by entry name, the default model first.
        sizes: Size in bytes of each tensor's entry, by key.

    Raises:
        ArchiveFormatError: A model breaks a rule, or does not fit the entries.
    """
    names, nbytes = list(sizes), list(sizes.values())
    _models(data, EMPTY._replace(names=names, sizes=nbytes), names, Report())


def _models(
    data: Mapping[str, bytes], listed: Directory, named: Sequence[str], report: Report
) -> dict[str, CheckedModel]:
    """Parses models and compares their tensors with the entries whose names are in `named`."""
    if len(data) > 1 and not proto.check_messages_together(data.values(), report):
        return {}
    models: dict[str, onnx.ModelProto] = {}
    for name, serialized in data.items():
        model = proto.parse(serialized, report, name)
        if model is None:
            # If a model is malformed, `check_messages_together` returns True without counting all
            # messages. So the later models are not parsed: they may have too many messages.
            break
        models[name] = model
    size_of = dict(zip(listed.names, listed.sizes, strict=True))
    checked = proto.check_all_references(
        models,
        {key: size_of[key] for key in named},
        report,
        are_all=listed.is_whole,
        are_all_models=len(models) == len(data) > 0,
    )
    return {keys.model_id(name): found for name, found in checked.items()}


def check_header(
    file: RandomAccessFile, listed: Directory, number: int, report: Report
) -> int | None:
    """Compares an entry's local header with its directory record; see `check_local_header`."""
    entry = listed.entries[number]
    header = file.read(entry.header_offset, entry.data_offset - entry.header_offset)
    return check_local_header(header, entry, listed.records[number], report)


def check_crc32(entry: Entry, nbytes: int, crc32: int, report: Report) -> None:
    """Compares the size and CRC-32 of an entry's data with the central directory (ZIP-15)."""
    if (nbytes, crc32) != (entry.nbytes, entry.crc32):
        report.broken(
            "ZIP-15",
            f"expected {entry.nbytes} bytes with CRC-32 {entry.crc32:#010x}, found {nbytes} with "
            f"{crc32:#010x}",
            entry=entry.name,
        )


def check_data(
    file: RandomAccessFile,
    entry: Entry,
    refs: Sequence[TensorRef],
    report: Report,
    counter: ProgressCounter,
) -> None:
    """Reads the data of an entry once, in pieces, and checks the rules about the data.

    Args:
        file: The archive.
        entry: The entry.
        refs: The tensors whose location is this entry; at most one from each model.
        report: Receives each broken rule (ZIP-15, DATA-6, TENSOR-4, TENSOR-5).
        counter: Counts the bytes read.
    """
    pieces = summed(file, entry, report)
    # By DATA-8, the tensor has the same type in all models.
    if refs and tensors.array_type(refs[0].tensor) is not None:
        pieces = tensors.checked(refs[0], pieces, report, entry=entry.name)
    stated = [
        (ref, checksum) for ref in refs if (checksum := tensors.checksum(ref.tensor)) is not None
    ]
    import hashlib  # opening an archive does not need it

    sha1 = hashlib.sha1(usedforsecurity=False)
    for piece in counter(pieces):
        if stated:
            sha1.update(piece)
    for ref, checksum in stated:
        if checksum != sha1.hexdigest():
            report.broken(
                "DATA-6",
                f"{ref}: expected the checksum {sha1.hexdigest()}, found {shown(checksum)}",
                entry=entry.name,
            )


def summed(file: RandomAccessFile, entry: Entry, report: Report) -> Iterator[memoryview]:
    """Yields the bytes of an entry in pieces, then compares their CRC-32 (ZIP-15)."""
    found = Crc32()
    for piece in found(file.pieces(entry.data_offset, entry.nbytes)):
        yield memoryview(piece)
    check_crc32(entry, found.nbytes, found.value, report)
