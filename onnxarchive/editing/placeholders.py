"""Messages of assigned models, whose external tensors are entries or data from elsewhere.

In a message of an edit, the location of an external tensor is the key of an entry of the archive,
or a placeholder for data that is read from another file or object when the edit is written.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import onnx

from onnxarchive.errors import ArchiveError, ArchiveFormatError, with_path
from onnxarchive.files.data import Data
from onnxarchive.files.file_data import FileData
from onnxarchive.files.filesystem import require_no_input
from onnxarchive.files.local_file import MappedFile
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, tensors
from onnxarchive.model.copying import with_locations
from onnxarchive.model.keys import is_model
from onnxarchive.model.tensors import LazyData, TensorRef
from onnxarchive.reading.archive import Archive, owner_of
from onnxarchive.reading.opening import open
from onnxarchive.sources.models import open_model
from onnxarchive.sources.recognition import is_zip
from onnxarchive.sources.source import Source
from onnxarchive.writing.saving import split
from onnxarchive.writing.stored_entries import (
    EntryData,
    entry_of,
    referred_data,
    referred_key,
    verified_data,
)

if TYPE_CHECKING:
    from onnxarchive.writing.saving import Model

    AssignedModel: TypeAlias = Model | Archive | str | os.PathLike[str]

_PLACEHOLDER = "\0"  # no key begins with this character
_OF_ANOTHER = (
    "expected an external tensor of this archive, found one of another edit; assign the path of "
    "the model, whose tensors are copied"
)


def is_placeholder(location: str) -> bool:
    """True if a location stands for data from elsewhere."""
    return location.startswith(_PLACEHOLDER)


class Placeholders:
    """The data from elsewhere of an edit, by the placeholder that stands for it.

    Args:
        archive: The archive that is edited.
        file: Its file.
        resources: Closes files that assigned models are read from.
        timeout: Seconds to wait for the lock of an archive at an assigned path; None waits without
            limit. Another process may edit that archive, and wait for this one.
    """

    def __init__(
        self,
        archive: Archive,
        file: MappedFile,
        resources: contextlib.ExitStack,
        timeout: float | None,
    ) -> None:
        self._archive = archive
        self._file = file
        self._resources = resources
        self._timeout = timeout
        self._data: dict[str, Data] = {}
        self._prefix = _PLACEHOLDER + os.urandom(8).hex()  # messages of other edits have another
        self._states: dict[tuple[int, int], tuple[FileData, tuple[int, int]]] = {}

    def _add(self, data: Data) -> str:
        """The placeholder for data."""
        placeholder = f"{self._prefix}/{len(self._data)}"
        self._data[placeholder] = data
        return placeholder

    def watch(self, data: Data) -> None:
        """Remembers the state of a file that is read when the edit is written."""
        if isinstance(data, FileData) and data.identity not in self._states:
            self._states[data.identity] = data, data.state()

    def require_unchanged(self) -> None:
        """Refuses files that were written to since they were assigned.

        Raises:
            ArchiveFormatError: A file has changed, or another file has its path.
            OSError: A file cannot be opened any more.
        """
        for data, state in self._states.values():
            if data.state() != state:
                raise ArchiveFormatError(
                    "expected a file that stays as it was assigned until the edit ends, found it "
                    "changed; assign it again",
                    path=os.path.join("" if data.root is None else data.root.path, data.path),
                )

    def data(self, ref: TensorRef) -> Data:
        """The bytes of an external tensor: from elsewhere, or those of an entry of the archive.

        Raises:
            ArchiveFormatError: The location is neither a placeholder of this edit nor a key of the
                archive.
        """
        location = tensors.location(ref.tensor)
        if location is None or not is_placeholder(location):
            return entry_of(self._archive, referred_key(self._archive, ref), ref)
        if location not in self._data:
            raise ArchiveFormatError(f"{ref}: {_OF_ANOTHER}")
        nbytes = tensors.external_type(ref).nbytes(ref.tensor.dims)
        return LazyData(nbytes, partial(tensors.resolved, self._data[location]), ref)

    def message(self, model: AssignedModel, *, is_new: bool) -> onnx.ModelProto:
        """The message of an assigned model; a ModelProto is its own message.

        Args:
            model: The model.
            is_new: True if the archive had no model to replace, and the message is none of the
                edit. Then a ModelProto must have no external tensors, or belong to the archive.

        Raises:
            ValueError: The external tensors of a ModelProto are those of another archive, or of
                none.
            TypeError: `model` is no model.
            ArchiveFormatError: The file at a path is not a model, or its data is missing.
            OSError: The file at a path cannot be read.
        """
        if isinstance(model, onnx.ModelProto):
            self._require_own(model, is_new)
            return model
        if isinstance(model, Archive):
            return self._of_archive(model)
        if isinstance(model, str | os.PathLike):
            return self._of_path(model, is_new)
        return self._of_split(model)

    def _require_own(self, model: onnx.ModelProto, is_new: bool) -> None:
        owner = owner_of(model)
        for ref in tensors.walk(model):
            key = tensors.location(ref.tensor)
            if key is None:
                continue
            if is_placeholder(key) and key not in self._data:
                raise ValueError(f"{self._archive.path}: {ref}: {_OF_ANOTHER}")
            if is_new if owner is None else not self._has_entry(owner, key):
                archive = "an unknown archive" if owner is None else owner.path
                raise ValueError(
                    f"{self._archive.path}: {ref}: expected an external tensor of this archive, "
                    f"found one of {archive}; assign the open archive or its path, whose tensors "
                    "are copied"
                )

    def _has_entry(self, archive: Archive, key: str) -> bool:
        """True if an entry of an archive at the same path is still an entry of this archive."""
        own, entry = self._archive.entries.get(key), archive.entries.get(key)
        return (
            own is not None
            and entry is not None
            and (own.nbytes, own.crc32) == (entry.nbytes, entry.crc32)
            and archive.contents.is_at(self._file.absolute_path)
        )

    def _of_archive(self, archive: Archive) -> onnx.ModelProto:
        refs = archive.contents.models[archive.model_id].refs
        locations = {
            ref.path: self._add(entry_of(archive, key, read=_data_of))
            for key, ref in refs.items()
            if not self._has_entry(archive, key)
        }
        return with_locations(archive.model, locations)

    def _of_path(self, path: str | os.PathLike[str], is_new: bool) -> onnx.ModelProto:
        require_no_input(self._file.absolute_path, [os.fspath(path)])
        if not os.path.isdir(path):
            with MappedFile(path) as file:
                is_archive = is_zip(file.read(0, 4))
            if is_archive:
                opened = self._resources.enter_context(open(path, timeout=self._timeout))
                return self._of_archive(opened)
        elsewhere = None if is_new else partial(referred_data, self._archive)
        source = self._resources.enter_context(open_model(path, elsewhere=elsewhere))
        with with_path(path):
            return self._of_source(source)

    def _of_source(self, source: Source) -> onnx.ModelProto:
        """The message of a source; data that is an entry of the archive is referred to by key.

        A `.onnx` written by `link`, for example, has such data.

        Raises:
            ArchiveFormatError: The bytes of a tensor overlap the archive's models or directory.
        """
        entries = [entry for entry in self._archive.entries.values() if not is_model(entry.name)]
        name_of = {(entry.data_offset, entry.nbytes): entry.name for entry in entries}
        end = max((entry.data_offset + entry.nbytes for entry in entries), default=0)
        for ref, data in zip(tensors.external(source.model), source.data, strict=True):
            key = data.name if isinstance(data, EntryData) else None
            self.watch(data)
            if isinstance(data, FileData) and data.identity == self._file.identity:
                key = name_of.get((data.offset, data.nbytes))
                if key is None and data.nbytes and data.offset + data.nbytes > end:
                    raise ArchiveFormatError(
                        f"{ref}: expected external data in a tensor of the archive, found "
                        f"{data.nbytes} bytes at offset {data.offset}, in a model or the directory"
                    )
            tensors.set_location(ref.tensor, key or self._add(data))
        return source.model

    def _of_split(self, model: Model) -> onnx.ModelProto:
        parts = split(model, DEFAULT_SIZE_THRESHOLD)
        assert not isinstance(parts, onnx.ModelProto)
        refs = tensors.external(parts.proto)
        for ref, entry, data in zip(refs, parts.entries, parts.source().data, strict=True):
            archive, key = entry or (None, "")
            if archive is None or not self._has_entry(archive, key):
                key = self._add(data)
            tensors.set_location(ref.tensor, key)
        return parts.proto


def _data_of(archive: Archive, key: str) -> EntryData:
    try:
        return verified_data(archive, key)
    except ArchiveError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{archive.path}: expected the archive that was assigned to an edit to stay open until "
            "the edit ends, found it closed"
        ) from error
