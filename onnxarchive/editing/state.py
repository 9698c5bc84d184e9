"""The changes of an edit while its block runs, and the data of assigned models.

In a message of an edit, the location of an external tensor is the key of an entry of the archive,
or a placeholder for data that is read from another file or object when the edit is written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import onnx

from onnxarchive.errors import ArchiveFormatError, with_path
from onnxarchive.files.data import Data, File, Made
from onnxarchive.files.data_files import DataFiles
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import require_no_input
from onnxarchive.files.progress import Progress
from onnxarchive.model import DEFAULT_SIZE_THRESHOLD, tensors
from onnxarchive.model.copying import copied
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, archive_of_model, contents_of, open
from onnxarchive.reading.contents import Contents
from onnxarchive.reading.views import require_model
from onnxarchive.remote.location import Location
from onnxarchive.sources.reader import SourceReader
from onnxarchive.sources.recognition import is_zip
from onnxarchive.sources.source import Source, TensorData
from onnxarchive.writing.archive_models import assets_of, data_of_entry, sources_of
from onnxarchive.writing.save import split
from onnxarchive.zipformat.directory import Entry

if TYPE_CHECKING:
    from onnxarchive.writing.save import Model

    AssignedModel: TypeAlias = Model | Archive | str | os.PathLike[str]

_PLACEHOLDER = "\0"  # no key begins with this character
_OF_ANOTHER = (
    "it is an external tensor of another edit, not of this archive; assign the path of the model, "
    "whose tensors are copied"
)


def is_placeholder(location: str) -> bool:
    """True if the location of an external tensor is a placeholder and not a key."""
    return location.startswith(_PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class EditOptions:
    """Options of an edit; see `onnxarchive.edit`."""

    compact: bool
    copy: bool
    size_threshold: int | None
    convert_attribute: bool | None
    timeout: float | None
    progress: Progress | None


@dataclass(slots=True)
class Draft:
    """A model as an edit will leave it.

    Attributes:
        message: The model. Before the first look-up it is the archive's, which must not be changed.
        origin: Id of the model in the archive; None for a model that the edit adds.
        elements: New elements of initializers, by name.
        index: The initializers of `message` by name, as of the last look-up.
    """

    message: onnx.ModelProto
    origin: str | None
    elements: dict[str, TensorData] = field(default_factory=dict)
    index: dict[str, list[TensorRef]] = field(default_factory=dict)


class EditState:
    """The changes of an edit.

    Attributes:
        archive: The archive as before the edit.
        contents: Its contents.
        file: Its file.
        options: The options of the edit.
        model_id: Id of the model for `Edit.model`.
        drafts: Every model, by id.
        assets: The data of every asset, by path.
        old_assets: The assets as before the edit.
        files: Opens the files of assigned models and assets.
        is_open: False after the block.
        nbytes_written: Number of bytes written to the archive; 0 before it is written.
    """

    def __init__(
        self, archive: Archive, options: EditOptions, resources: contextlib.ExitStack
    ) -> None:
        contents = contents_of(archive)
        self.archive, self.contents = archive, contents
        self.file = contents.local_file
        self.options = options
        self.model_id = archive.model_id
        self.drafts = {id: Draft(old.model, id) for id, old in contents.models.items()}
        self.old_assets: Mapping[str, Data] = assets_of(contents)
        self.assets = dict(self.old_assets)
        # Windows replaces no open file, and a link that is assigned leads to the archive itself.
        self.files = resources.enter_context(DataFiles(keeps_open=os.name != "nt"))
        self.is_open = True
        self.nbytes_written = 0
        self._resources = resources  # closes files that assigned models are read from
        self._data: dict[str, Data] = {}  # by placeholder
        self._prefix = _PLACEHOLDER + os.urandom(8).hex()  # messages of other edits have another
        self._states: dict[File, Hashable] = {}

    def require_open(self) -> EditState:
        """These changes; a ValueError if the block has ended."""
        if not self.is_open:
            raise ValueError(
                f"{self.archive.path}: this edit has ended; begin another one with onnxarchive.edit"
            )
        return self

    def end(self) -> None:
        """Refuses further uses."""
        self.is_open = False

    @property
    def removes_model(self) -> bool:
        """True if a model of the archive was removed; renaming or replacing does not count."""
        origins = {draft.origin for draft in self.drafts.values()}
        return not origins.issuperset(self.contents.models)

    def draft(self, id: str) -> Draft:
        """The model with this id; a ModelNotFoundError if there is none."""
        if id not in self.drafts:
            with with_path(self.archive.path):
                require_model(sorted(self.drafts), id)
        return self.drafts[id]

    def data(self, ref: TensorRef) -> Data:
        """The bytes of an external tensor: those of an entry of the archive, or from elsewhere."""
        location = tensors.location(ref.tensor)
        if location is None or not is_placeholder(location):
            return data_of_entry(self.contents, ref)
        if location not in self._data:
            raise ArchiveFormatError(f"{ref}: {_OF_ANOTHER}")
        tensors.external_type(ref)  # refuses data in the tensor, too
        return self._data[location]

    def watch(self, data: Data) -> None:
        """Remembers the state of a file that holds data, for `require_unchanged_files`."""
        if data.position is None or data.crc32 is not None:  # the latter is compared when read
            return
        file = data.position.file
        if file not in self._states:
            self._states[file] = file.state()

    def require_unchanged_files(self) -> None:
        """Refuses files that were written to since they were assigned."""
        for file, state in self._states.items():
            if file.state() != state:
                raise ArchiveFormatError(
                    "the file was changed after it was assigned to the edit; assign it again",
                    path=file.path,
                )

    # Assigned models

    def message(self, model: AssignedModel, *, is_new: bool) -> onnx.ModelProto:
        """The message of an assigned model; a ModelProto is its own message.

        Args:
            model: The model; if it is a ModelProto, none of the edit's.
            is_new: True if it replaces no model. Then a ModelProto must have no external tensors,
                or belong to the archive.
        """
        if isinstance(model, onnx.ModelProto):
            self._require_own(model, is_new)
            return model
        if isinstance(model, Archive):
            return self._of_archive(model)
        if isinstance(model, str | os.PathLike):
            return self._of_path(model, is_new)
        parts = split(model, DEFAULT_SIZE_THRESHOLD)
        assert not isinstance(parts, onnx.ModelProto)
        return self._of_source(parts.source())

    def _require_own(self, model: onnx.ModelProto, is_new: bool) -> None:
        """Refuses a model with external tensors of another archive, or perhaps of another one."""
        owner = archive_of_model(model)
        for ref in tensors.walk(model):
            key = tensors.location(ref.tensor)
            if key is None:
                continue
            if is_placeholder(key) and key not in self._data:
                raise ValueError(f"{self.archive.path}: {ref}: {_OF_ANOTHER}")
            is_foreign = is_new if owner is None else not self._has_entry(contents_of(owner), key)
            if is_foreign:
                archive = "an unknown archive" if owner is None else owner.path
                raise ValueError(
                    f"{self.archive.path}: {ref}: it is an external tensor of {archive}, not of "
                    "this archive; assign the open archive or its path, whose tensors are copied"
                )

    def _has_entry(self, contents: Contents, key: str) -> bool:
        """True if another object for this archive has this entry, and it is still the same."""
        own, entry = self.archive.entries.get(key), contents.entries.get(key)
        return (
            own is not None
            and entry is not None
            and (own.nbytes, own.crc32) == (entry.nbytes, entry.crc32)
            and contents.is_at(self.file.absolute_path)
        )

    def _of_archive(self, archive: Archive) -> onnx.ModelProto:
        (source,) = sources_of(contents_of(archive), {"": copied(archive.model)}).values()
        return self._of_source(source)

    def _of_path(self, path: str | os.PathLike[str], is_new: bool) -> onnx.ModelProto:
        path = Location.of(path).require_local()
        require_no_input(self.file.absolute_path, [path])
        find_in_archive = None if is_new else partial(data_of_entry, self.contents)
        reader = SourceReader(find_in_archive=find_in_archive)
        with with_path(path):
            if os.path.isdir(path):
                return self._of_source(reader.read_directory(path, self.files))
            file = self._resources.enter_context(MappedFile(path))
            if not is_zip(file.read(0, 4)):
                return self._of_source(reader.read_onnx(file, self.files))
        # Another process may edit that archive, and wait for this one.
        archive = open(path, timeout=self.options.timeout)
        return self._of_archive(self._resources.enter_context(archive))

    def _of_source(self, source: Source) -> onnx.ModelProto:
        """The message of a source; data that is an entry of the archive is referred to by key.

        A `.onnx` written by `link`, for example, has such data.
        """
        entries, count = [*self.archive.entries.values()], self.contents.first_model
        entry_at = {(entry.data_offset, entry.nbytes): entry for entry in entries[:count]}
        end = entries[count].header_offset
        for ref, data in zip(tensors.external(source.model), source.data, strict=True):
            self.watch(data)
            key = self._own_key(ref, data, entry_at, end)
            if key is None:
                if data.crc32 is not None and data.position is not None:
                    data = Made(data.nbytes, partial(_of_open, data, data.position.file))
                key = f"{self._prefix}/{len(self._data)}"
                self._data[key] = data
            tensors.set_location(ref.tensor, key)
        return source.model

    def _own_key(
        self, ref: TensorRef, data: Data, entry_at: Mapping[tuple[int, int], Entry], end: int
    ) -> str | None:
        """The key of the archive's entry that has this data; None if none has.

        Args:
            ref: The tensor of the data.
            data: The data.
            entry_at: The entries but the models, by offset and size of their data in bytes.
            end: The offset where they end.
        """
        position = data.position
        if position is None or not position.file.has_path(self.file.absolute_path):
            return None
        entry = entry_at.get((position.offset, data.nbytes))
        if data.crc32 is not None:  # an entry of this archive, perhaps as it was before an edit
            return None if entry is None or entry.crc32 != data.crc32 else entry.name
        if position.file.identity != self.file.identity:
            return None
        if entry is None and data.nbytes and position.offset + data.nbytes > end:
            raise ArchiveFormatError(
                f"{ref}: its external data, {data.nbytes} bytes at offset {position.offset} of the "
                "archive, is in a model or the directory, not in a tensor"
            )
        return None if entry is None else entry.name


def _of_open(data: Data, file: File) -> Data:
    """The data of an entry of an assigned archive; a ValueError if that archive is closed."""
    try:
        file.read(0, 0)
    except ValueError as error:
        raise ValueError(
            f"{file.path}: the archive was closed before the end of the edit to which it was "
            "assigned; close it later"
        ) from error
    return data
