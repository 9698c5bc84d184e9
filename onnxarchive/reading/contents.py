"""Reads the directory and the models of an archive, and on request the data of entries.

End records, directory and models are read by position, not from a map: if the file is truncated
meanwhile, reading raises an error instead of SIGBUS.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import onnx

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    Report,
    Strict,
    TensorNotFoundError,
    UnfinishedEditError,
    UnsupportedFeatureError,
    quoted,
)
from onnxarchive.files import local_file
from onnxarchive.files.data import (
    Crc32,
    Data,
    File,
    Position,
    Spool,
    copy_of,
    crc32,
    difference,
    pieces,
)
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import ProgressCounter
from onnxarchive.model import keys, model_proto, references, tensors
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.model.references import CheckedModel
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive_file import require_finished
from onnxarchive.zipformat.directory import EMPTY, Directory, Entry, read_directory
from onnxarchive.zipformat.end_records import SEARCHED_SIZE, TAIL_SIZE, check_false_ends, locate
from onnxarchive.zipformat.layout import MIN_ALIGNMENT
from onnxarchive.zipformat.local_header import check_local_header

MAX_MODEL_NBYTES = model_proto.SIZE_LIMIT - 1
_Value = TypeVar("_Value", covariant=True)


class Contents:
    """An archive at the time it was opened: directory, models, and ways to the bytes of entries.

    The file is closed when nothing refers to this object any more.

    Attributes:
        file: The open file.
        size: The size of the file in bytes, when it was read.
        directory: The central directory.
        models: The readable models by id. The default model (`""`) is first; the others are in the
            order of their ids.
        first_model: Index of the first model's entry, if no rule is broken; the models are last.
        entries: The entries by name, if no rule is broken.
        max_model_nbytes: Limit in bytes on all models together, with which they were read.
        edited: The models of an edit of this archive.
        strict: Raises broken rules as errors that name the file.
    """

    def __init__(
        self,
        file: File,
        directory: Directory,
        models: Mapping[str, CheckedModel],
        max_model_nbytes: int = MAX_MODEL_NBYTES,
    ) -> None:
        self.max_model_nbytes = max_model_nbytes
        self.file = file
        self.size = file.size
        self.directory = directory
        self.models = models
        self.first_model = len(directory.entries) - len(models)
        self.entries = NamedEntries(directory.entries)
        self.edited: list[onnx.ModelProto] = []
        # For each entry 1 if its local header was found to match the directory, else 0.
        self._verified = bytearray(len(directory.entries))
        self.strict = Strict(file.path)

    @property
    def path(self) -> str:
        """The name of the file for messages."""
        return self.file.path

    @cached_property
    def alignment(self) -> int:
        """Alignment in bytes, from the default model's local header.

        The local headers of all models are compared with the directory.

        Raises:
            ArchiveFormatError: One does not match.
        """
        for number in range(self.first_model, len(self.entries)):
            alignment = self.check_header(number, self.strict)
        assert alignment is not None  # else `self.strict` has raised an error
        return alignment

    @property
    def local_file(self) -> MappedFile:
        """The open local file with the archive's bytes: the archive itself, or its cached copy.

        Raises:
            UnsupportedFeatureError: The archive is neither in a local file nor in a cache.
        """
        if isinstance(self.file, MappedFile):
            return self.file
        raise UnsupportedFeatureError(
            "expected a local file, found an archive in memory, in a file object or at a URL; "
            "'onnxarchive download' copies a remote archive to a file",
            path=self.file.path,
        )

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """True if `path` is the path of the archive's local file, or leads to the same file."""
        return self.file.has_path(os.fsdecode(path))

    def require_current(
        self,
        path: str | os.PathLike[str],
        file: MappedFile | None = None,
        *,
        remedy: str = "open it again",
    ) -> None:
        """Refuses to replace the archive if another object or process has edited it since `open`.

        Args:
            path: The file to replace; a path other than the archive's is never refused.
            file: The locked file at `path`, or None to open the file. On some file systems only the
                descriptor that holds the lock can read the file.
            remedy: What the message advises.

        Raises:
            ArchiveError: The directory of the archive has changed.
            OSError: The archive is gone, or cannot be read.
        """
        if self.is_at(path):
            with MappedFile(path) if file is None else contextlib.nullcontext(file) as current:
                # A file of the same size with the same directory has the same content.
                last, packed = self.directory.entries[-1], b"".join(self.directory.records)
                end = current.read(last.data_offset + last.nbytes, len(packed))
                if current.size != self.size or end != packed:
                    raise self._changed(remedy)

    @contextlib.contextmanager
    def unedited(self) -> Iterator[None]:
        """Locks out editors during the block, unless the path now leads to another file or to none.

        Raises:
            ArchiveError: The directory has changed since the archive was opened, or an edit is
                unfinished.
        """
        file = self.file
        if not (isinstance(file, MappedFile) and file.is_at(file.absolute_path)):
            yield
            return
        try:
            with local_file.locked_file(file.absolute_path) as current, current:
                if isinstance(current.lock_failure, LockedError):
                    raise current.lock_failure
                require_finished(current)
                self.require_current(file.absolute_path, current)
                yield
        except (LockedError, UnfinishedEditError) as error:
            raise self._changed() from error

    def _changed(self, remedy: str = "open it again") -> ArchiveError:
        return ArchiveError(
            f"the archive has been changed since it was opened; {remedy}", path=self.file.path
        )

    def has_model(self, model: onnx.ModelProto) -> bool:
        """True if this object is one of the archive's models, or of an edit of them."""
        models = [checked.model for checked in self.models.values()]
        return any(model is own for own in (*models, *self.edited))

    def refs(self, key: str) -> Sequence[TensorRef]:
        """The tensors with this key; at most one from each model."""
        if len(self.models) == 1:
            (checked,) = self.models.values()
            return [checked.refs[key]] if key in checked.refs else []
        return self._refs.get(key, [])

    @cached_property
    def _refs(self) -> Mapping[str, list[TensorRef]]:
        refs: defaultdict[str, list[TensorRef]] = defaultdict(list)
        for checked in self.models.values():
            for key, ref in checked.refs.items():
                refs[key].append(ref)
        return refs

    def check_header(self, number: int, report: Report) -> int | None:
        """Compares an entry's local header with its directory record; see `check_local_header`."""
        entry = self.directory.entries[number]
        header = self.file.read(entry.header_offset, entry.data_offset - entry.header_offset)
        return check_local_header(header, entry, self.directory.records[number], report)

    def check_data(self, number: int, report: Report, counter: ProgressCounter) -> None:
        """Reads the data of an entry once, in pieces, and checks the rules about the data.

        They are ZIP-15, DATA-6, TENSOR-4 and TENSOR-5.
        """
        entry = self.directory.entries[number]
        refs = self.refs(entry.name)
        stream = checked_pieces(entry, self.file.pieces(entry.data_offset, entry.nbytes), report)
        # By DATA-8, the tensor has the same type in all models.
        if refs and tensors.array_nbytes(refs[0].tensor) is not None:
            stream = tensors.checked(refs[0], stream, report, entry=entry.name)
        checksums = [(ref, tensors.checksum(ref.tensor)) for ref in refs]
        stated = [(ref, checksum) for ref, checksum in checksums if checksum is not None]
        import hashlib  # opening an archive does not need it

        sha1 = hashlib.sha1(usedforsecurity=False)
        for piece in counter(stream):
            if stated:
                sha1.update(piece)
        for ref, checksum in stated:
            if checksum != sha1.hexdigest():
                report.broken(
                    "DATA-6",
                    f"{ref}: expected the checksum {sha1.hexdigest()}, found {quoted(checksum)}",
                    entry=entry.name,
                )

    def require_header(self, name: str) -> None:
        """Compares an entry's local header with its directory record, unless that was done."""
        number = self.entries.index_of[name]
        if not self._verified[number]:
            self.check_header(number, self.strict)
            self._verified[number] = 1

    def model(self, name: str) -> memoryview:
        """A copy of the bytes of a model's entry.

        Raises:
            ArchiveError: The model was edited after the archive was opened.
        """
        entry = self.entries[name]
        data = self.file.read(entry.data_offset, entry.nbytes)
        if (len(data), crc32(data)) != (entry.nbytes, entry.crc32):
            raise self._changed()
        return memoryview(data)

    def view(self, name: str) -> memoryview:
        """The data of an entry: a view; if the file is not mapped, a copy verified by its CRC-32.

        The entry's local header is compared with the directory.
        """
        if not self.file.is_mapped:
            (copy,) = self._copies([name])
            return copy
        _, _, offset, nbytes, _ = self.entries[name]
        view = self.file.view(offset, nbytes)
        self.require_header(name)
        return view

    def views(self, names: Iterable[str]) -> Iterator[memoryview]:
        """As `view` for many entries; a remote file is read by several requests at a time."""
        return map(self.view, names) if self.file.is_mapped else self._copies([*names])

    def verified(self, names: Sequence[str]) -> Iterator[memoryview]:
        """As `views`, compared with their CRC-32s."""
        for name, data in zip(names, self.views(names), strict=True):
            if self.file.is_mapped:  # else `views` has compared them
                check_crc32(self.entries[name], len(data), crc32(data), self.strict)
            yield data

    def parts(self, name: str, ranges: Sequence[tuple[int, int]]) -> memoryview:
        """Ranges (offset and size) of an entry's data, joined in a copy; compares no CRC-32.

        The entry's local header is compared first. No other bytes are read.

        Raises:
            ArchiveFormatError: The file has become shorter.
        """
        number, entry = self.entries.index_of[name], self.entries[name]
        if not self._verified[number]:
            header_size = entry.data_offset - entry.header_offset
            # Unlike this, `File.read` of a remote file may read up to the end of the file.
            (header,) = self.file.read_ranges([(entry.header_offset, header_size)])
            record = self.directory.records[number]
            check_local_header(bytes(header), entry, record, self.strict)
            self._verified[number] = 1
        begin, expected = entry.data_offset, sum(nbytes for _, nbytes in ranges)
        copies = self.file.read_ranges((begin + offset, size) for offset, size in ranges)
        if len(ranges) == 1:
            (data,) = copies  # not copied again
        else:
            data = memoryview(b"".join(copies))
        if len(data) != expected:
            message = f"expected {expected} bytes of its data, found {len(data)}"
            raise ArchiveFormatError(
                f"entry {quoted(name)}: {message}; the file has become shorter",
                entry=name,
                path=self.path,
            )
        return data

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yields the data of an entry in pieces, read from the file.

        The local header is compared first, and the CRC-32 after the last piece.
        """
        self.require_header(name)
        entry = self.entries[name]
        read = self.file.pieces(entry.data_offset, entry.nbytes)
        yield from checked_pieces(entry, read, self.strict)

    def _copies(self, names: Sequence[str]) -> Iterator[memoryview]:
        """Yields the data of entries of an unmapped file; compares local headers and CRC-32s.

        Each range that is read begins up to 63 bytes before the header, so that the data is aligned
        in its copy.
        """
        entries = [self.entries[name] for name in names]
        starts = [entry.header_offset // MIN_ALIGNMENT * MIN_ALIGNMENT for entry in entries]
        ranges = (
            (start, entry.data_offset + entry.nbytes - start)
            for start, entry in zip(starts, entries, strict=True)
        )
        copies = self.file.read_ranges(ranges)
        for entry, start, copy in zip(entries, starts, copies, strict=True):
            header = bytes(copy[entry.header_offset - start : entry.data_offset - start])
            data = copy[entry.data_offset - start :].toreadonly()
            record = self.directory.records[self.entries.index_of[entry.name]]
            check_local_header(header, entry, record, self.strict)
            check_crc32(entry, data.nbytes, crc32(data), self.strict)
            yield data

    def not_found(
        self, message: str, name: object = None, names: Iterable[str] = ()
    ) -> TensorNotFoundError:
        """The error for a name that is not in the archive; `names` are the names that are."""
        return TensorNotFoundError(message, path=self.file.path, name=name, names=names)


class EntryData:
    """The bytes of an entry as data to write, compared with their CRC-32 whenever they are read.

    The size and the CRC-32 are those in the directory.
    """

    __slots__ = ("contents", "crc32", "name", "nbytes")
    is_constant: ClassVar[bool] = False

    def __init__(self, contents: Contents, name: str) -> None:
        entry = contents.entries[name]
        self.contents, self.name = contents, name
        self.nbytes, self.crc32 = entry.nbytes, entry.crc32

    @property
    def position(self) -> Position:
        """See `Data.position`."""
        return Position(self.contents.file, self.contents.entries[self.name].data_offset)

    def pieces(self) -> Iterator[memoryview]:
        """See `Data.pieces`; the local header is compared first."""
        contents = self.contents
        if not contents.file.is_mapped:
            return contents.pieces(self.name)
        view = contents.view(self.name)  # of a large entry, nothing is copied
        return checked_pieces(contents.entries[self.name], pieces(view), contents.strict)

    def view(self) -> memoryview:
        """See `Data.view`."""
        (view,) = self.contents.verified([self.name])
        return view

    def fetch(self, most_copied: int, spool: Spool) -> Data:
        """See `Data.fetch`; the bytes are read once, since their CRC-32 is known."""
        return copy_of(self) if self.nbytes <= most_copied else self


class NamedMapping(Mapping[str, _Value]):
    """Values of an archive by name; IPython completes the names.

    Subclasses look values up, and say in `_index` which names there are.
    """

    _index: Any  # a mapping by name

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._index

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class NamedEntries(NamedMapping[Entry]):
    """The entries of an archive by name, in the order of the archive.

    Attributes:
        index_of: The index of each entry by its name.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Wraps `entries`; their names must be distinct."""
        self._entries = entries
        self._index = self.index_of = {entry.name: index for index, entry in enumerate(entries)}

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self.index_of[name]]

    def __repr__(self) -> str:
        return f"<{len(self)} entries>"

    def _repr_html_(self) -> str:
        rows = (
            ([quoted(entry.name), f"{entry.data_offset:,}"], entry.nbytes)
            for entry in self._entries
        )
        from onnxarchive.reading import html  # only notebooks need it

        return html.table(repr(self), ["name", "data offset"], rows, len(self))


def read_entries(file: File) -> Sequence[Entry]:
    """The entries of an archive; only the directory is read, and no model.

    Raises:
        ArchiveFormatError: The file is no archive, or its directory breaks a rule.
    """
    strict = Strict(file.path)
    bounds = locate(file.read(max(file.size - TAIL_SIZE, 0), TAIL_SIZE), file.size, strict)
    assert bounds is not None  # else `strict` has raised an error
    return read_directory(file.read(bounds.offset, bounds.size), bounds, strict).entries


def read_contents(file: File, report: Report, max_model_nbytes: int = MAX_MODEL_NBYTES) -> Contents:
    """Reads all of an archive except local headers and the data of tensors and assets.

    If all models together have more than `max_model_nbytes` bytes, none is read (MODEL-2).
    """
    end = file.read(max(file.size - SEARCHED_SIZE, 0), SEARCHED_SIZE)
    bounds = locate(end, file.size, report)
    if bounds is None:
        return Contents(file, EMPTY, {})
    directory = read_directory(file.read(bounds.offset, bounds.size), bounds, report)
    named = keys.check_names(directory.names, report, are_all=directory.is_whole)
    entries, directory_end = directory.entries, bounds.offset + bounds.size
    check_false_ends(
        end,
        file.size,
        bounds.offset,
        directory_end,
        [entry.name for entry in entries],
        [entry.header_offset for entry in entries],
        report,
    )
    data = _read_models(file, entries, report, max_model_nbytes)
    size_of = dict(zip(directory.names, directory.sizes, strict=True))
    sizes = {key: size_of[key] for key in named}
    checked = check_models(data, sizes, report, are_all=directory.is_whole)
    models = {keys.model_id(name): model for name, model in checked.items()}
    return Contents(file, directory, models, max_model_nbytes)


def _read_models(
    file: File,
    entries: Sequence[Entry],
    report: Report,
    max_model_nbytes: int,
) -> dict[str, bytes]:
    """The bytes of each model by entry name, the default model first; {} if MODEL-2 is broken."""
    first = len(entries)
    while first and keys.is_model(entries[first - 1].name):
        first -= 1
    # By name, so the default model is first: its name is a prefix of the others.
    models = {entry.name: entry for entry in sorted(entries[first:])}
    sizes = {name: entry.nbytes for name, entry in models.items()}
    if not check_model_sizes(sizes, max_model_nbytes, report):
        return {}
    data = dict.fromkeys(models, b"")
    # Read from the end, since a remote file keeps bytes that lead to its end.
    for entry in reversed(entries[first:]):
        if models[entry.name] is entry:
            data[entry.name] = file.read(entry.data_offset, entry.nbytes)
    for name, entry in models.items():
        check_crc32(entry, len(data[name]), crc32(data[name]), report)
    return data


def check_model_sizes(sizes: Mapping[str, int], max_model_nbytes: int, report: Report) -> bool:
    """Compares model sizes with the limit of the format, and the sum with the caller's (MODEL-2).

    Returns True if all sizes, by the names of entries, are within both limits.
    """
    faults = {
        name: f"expected at most {MAX_MODEL_NBYTES} bytes, found {nbytes} bytes"
        for name, nbytes in sizes.items()
        if nbytes > MAX_MODEL_NBYTES
    }
    total = sum(sizes.values())
    if total > max_model_nbytes and not faults:
        faults[MODEL_PROTO] = (
            f"expected models of at most {max_model_nbytes} bytes in all (max_model_nbytes), found "
            f"{total} bytes"
        )
    for name, fault in faults.items():
        report.broken("MODEL-2", fault, entry=name)
    return not faults


def check_models(
    data: Mapping[str, bytes],
    sizes: Mapping[str, int | None],
    report: Report,
    *,
    are_all: bool = True,
) -> dict[str, CheckedModel]:
    """Parses models, and compares their tensors with the entries of the archive.

    The arguments are those of `references.check_all_references`, with the bytes of each model in
    place of the model, the default one first.

    Returns:
        The models by entry name, up to the first one that is not valid.
    """
    if len(data) > 1 and not model_proto.check_messages_together(data.values(), report):
        return {}
    models: dict[str, onnx.ModelProto] = {}
    for name, serialized in data.items():
        model = model_proto.parse(serialized, report, name)
        if model is None:
            # If a model is malformed, `check_messages_together` returns True without counting all
            # messages. So the later models are not parsed: they may have too many messages.
            break
        models[name] = model
    return references.check_all_references(
        models, sizes, report, are_all=are_all, are_all_models=len(models) == len(data) > 0
    )


def checked_pieces(
    entry: Entry, stream: Iterable[bytes | memoryview], report: Report
) -> Iterator[memoryview]:
    """Yields the bytes of an entry, then compares their size and CRC-32 (ZIP-15)."""
    checksum = Crc32()
    for piece in checksum(stream):
        yield memoryview(piece)
    check_crc32(entry, checksum.nbytes, checksum.value, report)


def check_crc32(entry: Entry, nbytes: int, crc: int, report: Report) -> None:
    """Compares the size and CRC-32 of an entry's data with the central directory (ZIP-15)."""
    fault = difference((entry.nbytes, entry.crc32), (nbytes, crc))
    if fault is not None:
        report.broken("ZIP-15", fault, entry=entry.name)
