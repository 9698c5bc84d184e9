"""Explains why an archive is not valid any more, and which command helps.

An archive is a chain of entries from its first byte on, with the directory after it. Its local
headers alone show how far the chain reaches: to the end of a valid archive, to the end of a
truncated file, or to a place that another tool or a fault has changed.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxarchive.errors import (
    AGAIN,
    DAMAGED,
    INTERRUPTED,
    MENDED_RULES,
    ArchiveError,
    ArchiveFormatError,
    Strict,
    UnsupportedFeatureError,
    quoted_names,
    without_traceback,
)
from onnxarchive.files.data import File
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.zipformat import layout, records
from onnxarchive.zipformat.directory import read_directory
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.records import EndRecord, LocalHeader

_USUAL_HEADER_SIZE = 512  # bytes; the largest local header has about 128 KiB
_SHOWN_NBYTES = 16  # of the bytes after an archive
# A local header whose version needed, 10, became the end of a line of Windows.
_COPIED_AS_TEXT = LocalHeader.SIGNATURE + b"\r\n\0"


class Chain(NamedTuple):
    """The entries at the beginning of a file, found by their local headers alone.

    Attributes:
        entry_count: Number of entries that are complete.
        end: Offset of the end of the last complete entry, in bytes.
        missing: Number of bytes of the next entry that would be after the end of the file.
        first_model: Offset of the entry of the first model; None if the chain has no default model.
        size: Size of the archive in bytes; None if the chain has no default model.
    """

    entry_count: int
    end: int
    missing: int = 0
    first_model: int | None = None
    size: int | None = None


def read_chain(file: File) -> Chain:
    """Follows the local headers from the beginning of a file to the default model, the last one."""
    offset = directory_size = 0
    first_model = None
    for count in range(layout.MAX_ENTRIES):
        placement = _placement(file, offset)
        if placement is None:
            return Chain(count, offset)
        if placement.end > file.size:
            return Chain(count, offset, placement.end - file.size)
        directory_size += len(placement.pack()[1])
        if placement.name.startswith(MODEL_PROTO.encode()):
            first_model = offset if first_model is None else first_model
            if placement.name == MODEL_PROTO.encode():
                end = layout.end_of_archive(count + 1, directory_size, placement.end)
                size = placement.end + directory_size + len(end)
                return Chain(count + 1, placement.end, 0, first_model, size)
        offset = placement.end
    return Chain(layout.MAX_ENTRIES, offset)


def _placement(file: File, offset: int) -> EntryLayout | None:
    """The entry with a local header at `offset`, or None."""
    local = _local_header(file, offset)
    return None if local is None else layout.layout_of_header(local, offset)


def _local_header(file: File, offset: int) -> LocalHeader | None:
    for size in (_USUAL_HEADER_SIZE, LocalHeader.MAX_SIZE):
        local = LocalHeader.unpack(file.read(offset, size))
        if local is not None:
            return local
    return None


def followed_archive(file: File) -> Chain | None:
    """The archive at the beginning of a file, before other bytes; None if there is none.

    Its end records and its directory are valid; models and local headers have not been compared.
    """
    chain = read_chain(file)
    return chain if _is_followed_archive(file, chain) else None


def _is_followed_archive(file: File, chain: Chain) -> bool:
    """True if a chain is an archive whose end records and directory are valid, and bytes follow."""
    if chain.size is None or chain.size >= file.size:
        return False
    return _fault(file, chain.size) is None


def _fault(file: File, size: int) -> ArchiveError | None:
    """The fault of the directory or the end records in the first `size` bytes, or None."""
    start = max(size - TAIL_SIZE, 0)
    try:
        bounds = locate(file.read(start, size - start), size, Strict())
        assert bounds is not None  # else `locate` has raised an error
        read_directory(file.read(bounds.offset, bounds.size), bounds, Strict())
    except ArchiveError as error:
        return without_traceback(error)
    return None


def _describe_rest(file: File, size: int) -> str:
    """Describes the bytes after an archive of this size: their number, and the first of them."""
    count = file.size - size
    first = file.read(size, min(count, _SHOWN_NBYTES))
    rest = "1 byte follows" if count == 1 else f"{count:,} bytes follow"
    which = ":" if count == len(first) else ", which begin with"
    return f"the archive ends at {size:,} bytes, and {rest} it{which} {first!r}"


def explain(file: File, error: ArchiveError, command: str, expected: str) -> str | None:
    """Explains the fault of a file and what helps, to replace an error's message; None if unknown.

    Args:
        file: The local file.
        error: The error raised while the file was read.
        command: The path of the file as a word of a command line; `""` if it has none.
        expected: See `recognition.recognised`.
    """
    if error.rule is not None and not _is_of_zip(error.rule):
        return None
    fault = _fault(file, file.size)
    # The error may be about another file, such as a source of an edit; or about what `convert`
    # alone requires of a zip.
    if fault is None and (error.rule is not None or expected != "a model"):
        return None
    chain = read_chain(file)
    if chain.size is not None and _is_followed_archive(file, chain):
        advice = f"; 'onnxarchive recover --cut {command}' cuts off what follows" if command else ""
        return _describe_rest(file, chain.size) + advice
    if file.read(0, len(_COPIED_AS_TEXT)) == _COPIED_AS_TEXT:
        return f"this is {expected} that was copied as text: {AGAIN}, as a binary file"
    missing = None if _has_end_record(file) else _missing(file, chain)
    if missing is not None:
        return f"{missing}; {INTERRUPTED}: {AGAIN}"
    from onnxarchive.sources.zip_file import read_zip  # opening an archive does not need it

    try:
        names = [*read_zip(file.view(), None)[0]]
    except UnsupportedFeatureError:
        return None
    except ArchiveFormatError:
        return f"{(fault or error).message}; {DAMAGED}" if chain.entry_count else None
    if MODEL_PROTO not in names or expected == "a model":
        return None
    return f"{_changed(file, names, command)} ({error.message})"


def _is_of_zip(rule: str) -> bool:
    """True for a rule that another tool's zip, or damage of the zip's records, breaks."""
    return rule.startswith("ZIP") or rule in MENDED_RULES


def _has_end_record(file: File) -> bool:
    """True if a file ends with an end record without comment."""
    end = file.read(max(file.size - EndRecord.SIZE, 0), EndRecord.SIZE)
    return EndRecord.unpack(end) is not None


def _missing(file: File, chain: Chain) -> str | None:
    """Says how many bytes a file lacks at its end; None if it is not known to lack any."""
    if chain.size is not None and chain.size > file.size:
        lost = chain.size - file.size
        return f"the file lacks the last {lost:,} of the {chain.size:,} bytes of the archive"
    if chain.missing:
        least = file.size + chain.missing
        return f"the file has only {file.size:,} bytes of an archive of {least:,} bytes or more"
    rest = file.read(chain.end, LocalHeader.MAX_SIZE)
    if chain.entry_count and chain.size is None and _is_cut_header(rest):
        return f"the file has only the first {file.size:,} bytes of an archive"
    return None


def _is_cut_header(rest: bytes) -> bool:
    """True if bytes up to the end of a file are the first bytes of a local header, or none."""
    is_begun = rest[: len(LocalHeader.SIGNATURE)] == LocalHeader.SIGNATURE[: len(rest)]
    return is_begun and LocalHeader.unpack(rest) is None


def _changed(file: File, names: list[str], command: str) -> str:
    """Describes a zip of these files, one of them the default model, that `convert` reads.

    Entries written by this library have an alignment field in their local header.
    """
    own: set[bytes] = set()
    offset = 0
    for _ in names:
        local = _local_header(file, offset)
        if local is None:
            break
        if _has_alignment(local):
            own.add(local.name)
        placement = layout.layout_of_header(local, offset)  # knows sizes of 4 GiB and more
        offset += local.packed_size + local.compressed_size
        if placement is not None:
            offset = placement.end
    others = [name for name in names if name.encode() not in own]
    convert = f"; 'onnxarchive convert {command} NEW.onnxa'" if command else ""
    if not own:
        advice = " makes an archive of it" if command else ""
        return f"another tool made this zip of the files of an archive{convert}{advice}"
    if others:
        advice = " leaves out other files, or with --assets keeps them as assets" if command else ""
        return f"another tool wrote {quoted_names(others)} to the archive{convert}{advice}"
    # Entries that were removed leave no trace of their names, and may be tensors.
    advice = " makes an archive of what is sound, if no tensor was removed" if command else ""
    return f"another tool changed the records of the archive{convert}{advice}"


def _has_alignment(local: LocalHeader) -> bool:
    try:
        fields = [*records.unpack_extra(local.extra)]
    except ValueError:
        return False
    return any(identifier == records.ALIGNMENT_EXTRA for identifier, _ in fields)
