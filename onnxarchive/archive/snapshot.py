"""State of an open archive: its entries, its models, and an index of one model's initializers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx

from onnxarchive.archive.contents import check_crc32, check_header, first_model, read_contents
from onnxarchive.buffers import checksums
from onnxarchive.buffers.checksums import Crc32
from onnxarchive.errors import (
    ModelNotFoundError,
    Report,
    TensorNotFoundError,
    shown,
    shown_names,
    with_path,
)
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef, TensorRefs
from onnxarchive.storage.random_access import RandomAccessFile, discarding_faults
from onnxarchive.zipformat.directory import Entry
from onnxarchive.zipformat.layout import MIN_ALIGNMENT
from onnxarchive.zipformat.local_header import check_local_header

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MAX_SHOWN_OWNERS = 8  # initializers of one name, in a message


class Snapshot:
    """State of an archive at the time it was opened.

    The file is closed when nothing refers to this object any more.

    Attributes:
        file: The open file.
        size: The size of the file in bytes, at the time the archive was opened.
        directory: The directory.
        entries: The entries by name.
        model_ids: The ids of all models; `""`, the id of the default model, is the first.
        refs: The chosen model's tensors that are stored outside, by key.
        verified: For each entry 1 if its local header was found to match the directory, else 0.
        first_model: Index of the first model's entry; the models are the last entries.
        alignment: Alignment in bytes, from the default model's local header.
    """

    def __init__(self, file: RandomAccessFile, model: str, max_model_nbytes: int) -> None:
        """Reads end records, directory and models, and the models' local headers.

        Raises:
            ModelNotFoundError: There is no model with the id `model`.
        """
        contents = read_contents(file, Report(), max_model_nbytes)
        self.model_ids = contents.models.keys()
        require_model(self.model_ids, model)
        self.file = file
        self.size = file.size
        self.directory = contents.directory
        self.entries = NamedEntries(contents.directory.entries)
        self._contents = contents
        self._found = contents.models[model]
        self.refs = self._found.refs
        entries = contents.directory.entries
        self.verified = bytearray(len(entries))
        self.first_model = first_model(entries)
        for number in range(self.first_model, len(entries)):
            # `read_contents` has compared the CRC-32s of the models.
            alignment = check_header(file, contents.directory, number, Report())
            self.verified[number] = 1
        assert alignment is not None  # else `Report` has raised an error
        self.alignment = alignment

    @property
    def model(self) -> onnx.ModelProto:
        """The chosen model. It is shared: the caller must not change it."""
        return self._found.model

    def model_of(self, model: str) -> onnx.ModelProto:
        """The model with this id. It is shared: the caller must not change it."""
        return self._contents.models[model].model

    def given_model(self, model: str) -> onnx.ModelProto:
        """The model with this id. If a caller changes it, `refs_of` still gives the old tensors."""
        self._contents.models[model].refs.keep()
        return self.model_of(model)

    def has_given(self, model: onnx.ModelProto) -> bool:
        """True if this object is one of the archive's models."""
        return any(found.model is model for found in self._contents.models.values())

    def refs_of(self, model: str) -> TensorRefs:
        """The tensors of a model that are stored outside, by key."""
        return self._contents.models[model].refs

    def all_refs(self, key: str) -> Sequence[TensorRef]:
        """The tensors with this key, at most one per model."""
        return self._contents.refs(key)

    @property
    def initializers(self) -> Mapping[str, int | TensorRef]:
        """The chosen model's initializers by name, without ambiguous names.

        An initializer is the index of its entry, or its ref if the model itself holds the data.
        """
        return self._named[0]

    @cached_property
    def _named(self) -> tuple[dict[str, int | TensorRef], dict[str, TensorRef]]:
        """`initializers`, and the refs of the initializers of subgraphs by name."""
        refs, index_of = self.refs, self.entries.index_of
        walked = tensors.walk_others(self.model) if self._found.has_inner else ()
        inner = [ref for ref in walked if ref.is_initializer]
        names = tensors.names(refs.initializers)
        number_of = {index: index_of[key] for key, index in refs.index_of.items()}
        found: dict[str, int | TensorRef] = {}
        for index, name in enumerate(names):
            number = number_of.get(index)
            found[name] = refs.initializer(index) if number is None else number
        keys = {id(ref.tensor): key for key, ref in refs.others.items()}
        for ref in inner:
            key = keys.get(id(ref.tensor))
            found[ref.name] = ref if key is None else index_of[key]
        if len(found) < len(names) + len(inner):
            counts = Counter([*names, *(ref.name for ref in inner)])
            found = {name: value for name, value in found.items() if counts[name] == 1}
        return found, {ref.name: ref for ref in inner}

    def is_in(self, file: RandomAccessFile) -> bool:
        """True if a locked file has the same size and directory, and so the same content."""
        packed, last = b"".join(self.directory.records), self.directory.entries[-1]
        offset = last.data_offset + last.nbytes
        return file.size == self.size and file.read(offset, len(packed)) == packed

    def locate(self, number: int) -> tuple[memoryview, int, int]:
        """An entry's data: a view, the offset of the data in the view, and the size, in bytes.

        If the file is not mapped, the view is of a copy, verified by its CRC-32.

        Raises:
            ArchiveFormatError: The entry's local header does not match the directory.
            ChecksumError: The CRC-32 of copied or fetched bytes does not match.
            ValueError: The archive is closed.
        """
        _, _, offset, nbytes, _ = self.directory.entries[number]
        if not self.file.is_mapped:
            (copy,) = self._copies([number])
            return copy, 0, nbytes
        view = self.file.reaching(offset + nbytes)
        if not self.verified[number]:
            self.fetch([number])
        return view, offset, nbytes

    def read(self, number: int) -> bytes:
        """The data of an entry, as a copy.

        Raises:
            ChecksumError: Its CRC-32 does not match the directory.
            ArchiveFormatError: Its local header does not match the directory.
            ValueError: The archive is closed.
        """
        if not self.file.is_mapped:
            (copy,) = self._copies([number])
            return bytes(copy)
        entry = self.directory.entries[number]
        if not self.verified[number]:
            self.fetch([number])
        with with_path(self.file.path):
            data = self.file.read(entry.data_offset, entry.nbytes)
            check_crc32(entry, len(data), checksums.crc32(data), Report())
        return data

    def require_header(self, number: int) -> None:
        """Compares an entry's local header with its directory record.

        Raises:
            ArchiveFormatError: They do not match.
        """
        with with_path(self.file.path):
            check_header(self.file, self.directory, number, Report())

    def locate_all(self, numbers: Sequence[int]) -> Iterator[tuple[memoryview, int, int]]:
        """As `locate` for many entries, which are fetched together."""
        if not self.file.is_mapped:
            return ((copy, 0, copy.nbytes) for copy in self._copies(numbers))
        self.fetch(numbers)
        return map(self.locate, numbers)

    def fetch(self, numbers: Sequence[int]) -> None:
        """Compares local headers of a mapped file; first fetches entries that the map lacks.

        The CRC-32 of fetched data is compared before the data is used.
        """
        with with_path(self.file.path), discarding_faults(self.file):
            if self.file.is_complete:
                for number in numbers:
                    if not self.verified[number]:
                        check_header(self.file, self.directory, number, Report())
                        self.verified[number] = 1
                return
            numbers = [number for number in numbers if not self.verified[number]]
            self.file.fetch(map(self._range, numbers))
            entries = self.directory.entries
            for number in numbers:
                if not self.file.is_verified(number):
                    entry = entries[number]
                    pieces = self.file.pieces(entry.data_offset, entry.nbytes)
                    found = Crc32.of(pieces)
                    check_crc32(entry, found.nbytes, found.value, Report())
                    self.file.set_verified(number)
                check_header(self.file, self.directory, number, Report())
                self.verified[number] = 1

    def _copies(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """Yields the data of entries of an unmapped file; compares local headers and CRC-32s."""
        entries, records = self.directory.entries, self.directory.records
        with with_path(self.file.path):
            copies = self.file.read_ranges(map(self._range, numbers))
            for number, copy in zip(numbers, copies, strict=True):
                entry = entries[number]
                header = entry.header_offset % MIN_ALIGNMENT
                begin = header + entry.data_offset - entry.header_offset
                data = copy[begin:].toreadonly()
                check_local_header(bytes(copy[header:begin]), entry, records[number], Report())
                check_crc32(entry, data.nbytes, checksums.crc32(data), Report())
                yield data

    def _range(self, number: int) -> tuple[int, int]:
        """Offset and size of the range to read for an entry's local header and data.

        The range begins up to 63 bytes before the header, so that the data is aligned in a copy.
        """
        _, begin, data_offset, nbytes, _ = self.directory.entries[number]
        begin -= begin % MIN_ALIGNMENT
        return begin, data_offset + nbytes - begin

    def asset_number(self, path: str) -> int:
        """The index of an asset's entry.

        Raises:
            TensorNotFoundError: There is no such asset.
        """
        number = self.entries.index_of.get(ASSET_PREFIX + path)
        if number is None:
            raise self.not_found(f"expected the path of an asset, found {shown(path)}")
        return number

    def not_found(self, message: str) -> TensorNotFoundError:
        """The error for a name that is not in the archive."""
        return TensorNotFoundError(message, path=self.file.path)

    def array(self, number: int) -> NDArray[Any]:
        """The tensor of an entry as an array; see `Archive.tensor_by_key`."""
        view, offset, _ = self.locate(number)
        return self._as_array(number, view, offset)

    def _as_array(self, number: int, view: memoryview, offset: int) -> NDArray[Any]:
        data_type, shape = self._found.kinds[self.entries.names[number]]
        return dtypes.as_array(view, dtypes.BY_NUMBER[data_type], shape, offset)

    def arrays(self, numbers: Sequence[int]) -> Iterator[NDArray[Any]]:
        """The tensors of several entries, which are fetched together."""
        for number, (view, offset, _) in zip(numbers, self.locate_all(numbers), strict=True):
            yield self._as_array(number, view, offset)

    def number(self, name: str) -> int | None:
        """Index of the entry of an initializer; None if the model itself holds it.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self.initializers.get(name)
        if found is None:
            raise self.not_found(self._why_not(name))
        return found if isinstance(found, int) else None

    def ref(self, name: str) -> TensorRef:
        """The tensor of an initializer.

        Raises:
            TensorNotFoundError: No initializer has this name, or several have it.
        """
        found = self.initializers.get(name)
        if found is None:
            raise self.not_found(self._why_not(name))
        if not isinstance(found, int):
            return found
        return self._named[1].get(name) or self.refs[self.entries.names[found]]

    def _why_not(self, name: str) -> str:
        """The message for the name of an initializer that is missing or ambiguous."""
        found = [ref for ref in tensors.walk(self.model) if ref.is_initializer and ref.name == name]
        if len(found) < 2:
            given = shown(name) if isinstance(name, str) else repr(name)
            return f"expected the name of an initializer, found {given}"
        keys = {ref.path: key for key, ref in self.refs.items()}
        owners = ", ".join(
            f"tensor_by_key({keys[ref.path]!r})" if ref.path in keys else f"model.{ref.where}"
            for ref in found[:_MAX_SHOWN_OWNERS]
        )
        more = f" or another one of the {len(found)}" if len(found) > _MAX_SHOWN_OWNERS else ""
        return f"several initializers have the name {shown(name)}; take {owners}{more}"


def require_model(models: Collection[str], model: str) -> None:
    """Checks that an archive has a model with this id.

    Args:
        models: The ids of the archive's models.
        model: The id.

    Raises:
        ModelNotFoundError: There is no model of this id.
    """
    if model not in models:
        raise ModelNotFoundError(
            f"expected the id of a model, one of {shown_names(models)}, found "
            f"{shown(model) if isinstance(model, str) else repr(model)}"
        )


class NamedEntries(Mapping[str, Entry]):
    """The entries of an archive by name; each is made when it is looked up.

    Attributes:
        names: The names, in the order of the archive.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Wraps `entries`; their names must be distinct."""
        self.names = [entry.name for entry in entries]
        self._entries = entries

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """The index of each entry by its name."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self.index_of[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.index_of

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> ValuesView[Entry]:
        """The entries, in the order of the archive."""
        return _Values(self)

    def __repr__(self) -> str:
        return f"<{len(self)} entries>"

    def _repr_html_(self) -> str:
        rows = (
            ([shown(entry.name), f"{entry.data_offset:,}"], entry.nbytes) for entry in self._entries
        )
        from onnxarchive.archive import html  # only notebooks need it

        return html.table(repr(self), ["name", "data offset"], rows, len(self))

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.names)


class _Values(ValuesView[Entry]):
    """The values of `NamedEntries`; iteration looks up no names."""

    _mapping: NamedEntries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._mapping._entries)
