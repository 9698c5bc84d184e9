"""Finds the bytes of a model's large tensors: in the model itself, and in files beside it."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError, ChecksumError, Strict, quoted, without_traceback
from onnxarchive.files.data import Data, File, Range, Streamed
from onnxarchive.files.paths import OutsideError
from onnxarchive.model import model_proto, serialization, tensors, wire
from onnxarchive.model.keys import PLAIN_PATH, is_plain_path
from onnxarchive.model.tensors import TensorRef
from onnxarchive.model.weights import SPAN_LOCATION, Span, decode, strip_weights
from onnxarchive.sources import compiled
from onnxarchive.sources.recognition import (
    HEAD_SIZE,
    HTML_PAGE,
    LFS_POINTER,
    FileKind,
    ends_early,
    kind_of_head,
    recognised,
)
from onnxarchive.sources.source import (
    MAX_PATH_SIZE,
    CompiledBinary,
    Source,
    require_initializer_count,
    sha1,
    with_cleared_tail,
)

# PyTorch 1.x (ExportTypes.ZIP_ARCHIVE, COMPRESSED_ZIP_ARCHIVE and DIRECTORY) stores this
# placeholder in raw_data, and the bytes in a file named after the tensor.
_TORCH_PLACEHOLDER = b"__EXTERNAL"
# `set_external_data` of onnx can write a pair with this key. The pair is ignored.
_BASEPATH = frozenset({"basepath"})
# Several tensors may name the same bytes, and each gets its own copy. So a small file could make an
# archive of any size. These limits allow shared constants, and layers with the same weights.
_SHARED_NBYTES = 1 << 28
_MAX_SHARING = 32
_MAX_POINTER_SIZE = 1 << 10  # a Git LFS pointer has fewer bytes
_MAX_PAGE_SIZE = 1 << 20  # assumed of HTML pages
_MAX_RECOGNISED = 64  # files; a server that gives pages gives them for all files
_MAX_LISTED = 20  # faults in a message
_MAX_NAMED = 3  # tensors of one fault
# Continues the advice about a missing file: a model may leave its data to each session by design.
_OR_GIVEN = (
    ", or keep the .onnx and give its data to each session: SessionOptions has "
    "add_external_initializers for values by name, and "
    "add_external_initializers_from_files_in_memory for files"
)
_MAX_DECODED = 8  # bytes of a number that takes one byte in a packed field


def _plain(location: str) -> str:
    """The location without `.` components, so that each file has a single path."""
    if len(location) > MAX_PATH_SIZE:
        raise ArchiveFormatError(
            f"expected a path of at most {MAX_PATH_SIZE} characters, found {quoted(location)}"
        )
    path = "/".join(part for part in location.split("/") if part != os.curdir)
    if not is_plain_path(path):
        raise ArchiveFormatError(f"expected {PLAIN_PATH}, found {quoted(location)}")
    return path


@dataclass(frozen=True, slots=True)
class _StrippedFile:
    """A serialized model without the data of its large tensors, which stays in the model's file.

    Attributes:
        data: The serialized model.
        file: The file with the complete model.
        view: The bytes of `file`.
        spans: Offset and encoding of each large tensor's data in `file`, by location in the model.
    """

    data: bytes
    file: File
    view: memoryview
    spans: Mapping[str, Span]


def _strip(file: File) -> _StrippedFile:
    if file.size >= model_proto.SIZE_LIMIT:  # before `view` inflates an entry of a zip
        raise ArchiveFormatError(
            f"expected a model of less than {model_proto.SIZE_LIMIT} bytes, found {file.size}; "
            "store its tensors as external data",
            rule="MODEL-2",
        )
    view = Range.whole(file).view()
    with recognised(view, expected="a model"):
        data, spans = strip_weights(view)
    by_location = {f"{SPAN_LOCATION}{number}": span for number, span in enumerate(spans)}
    return _StrippedFile(data, file, view, by_location)


def _parse(stripped: _StrippedFile) -> onnx.ModelProto:
    with recognised(stripped.view, expected="a model"):
        if wire.count_graphs(stripped.data) > 1:
            raise ArchiveFormatError(
                "the model has several graphs, which protobuf would merge; the file is two models "
                "in one"
            )
        try:
            model = serialization.parse(onnx.ModelProto, stripped.data)
        except DecodeError as error:
            raise ArchiveFormatError(
                f"this is no serialized ModelProto ({error}); the file is not a .onnx or is damaged"
            ) from None
        if not model.HasField("graph"):
            raise ArchiveFormatError(
                f"there is no graph in the {stripped.file.size} bytes of the file; it is not a "
                ".onnx"
            )
    model_proto.take_link_fingerprint(model)  # a link has one, a model in an archive has none
    return model


# The error of one of several tensors with the same fault, for a missing file that of the last
# tensor in the file; and the tensors.
_Fault: TypeAlias = tuple[ArchiveFormatError, list[TensorRef]]


@dataclass(slots=True)
class Finder:
    """Finds the files of a source by location, and in them the bytes of large tensors.

    The files are in a directory, a zip, or a model's folder in a store. Each file is looked up
    once.

    Attributes:
        open_file: Opens the file at a plain path; None if there is none.
        verify_checksum: True to compare files with the `checksum` in a tensor's external data.
        size_threshold: As in `convert`, to refuse too many tensors before their files are opened;
            None if it is unknown.
        find_in_archive: Called if the location of a tensor names no file; returns the tensor's
            bytes or raises ArchiveFormatError.
        found: The files that were found so far, by plain path.
    """

    open_file: Callable[[str], File | None]
    verify_checksum: bool
    size_threshold: int | None
    find_in_archive: Callable[[TensorRef], Data] | None
    found: dict[str, File] = field(default_factory=dict)
    _by_location: dict[str, File | None] = field(default_factory=dict)
    _checksums: dict[File, str] = field(default_factory=dict)
    # Of small or too short files, by location.
    _kinds: dict[str, FileKind | None] = field(default_factory=dict)
    # For each model, those of its tensors; and the size of all together.
    _ranges: list[list[Range]] = field(default_factory=list)
    _nbytes: int = 0

    def file(self, location: str) -> File | None:
        """The file of a location, or None."""
        if location not in self._by_location:
            path = _plain(location)
            file = self.found.get(path) or self.open_file(path)
            self._by_location[location] = file
            if file is not None:
                self.found[path] = file
        return self._by_location[location]

    def listed_file(self, path: str) -> File:
        """The file at a path that was listed."""
        file = self.file(path)
        if file is None:
            raise ArchiveFormatError(
                f"there is no file at {path!r}: it is a broken link or was removed"
            )
        return file

    def look_for(self, binaries: Iterable[CompiledBinary]) -> tuple[CompiledBinary, ...]:
        """Looks for compiled binaries, and returns them, each once, with the fault of each."""
        paths: dict[str, str | None] = {}
        for path, _ in binaries:
            try:
                path = _plain(path)
            except ArchiveFormatError:
                paths[path] = compiled.NOT_PLAIN
                continue
            is_there = True
            # A file that cannot be opened, such as a link that leads out, is there, too; the error
            # is for those who add it as an asset.
            with contextlib.suppress(ArchiveFormatError):
                is_there = self.file(path) is not None
            paths[path] = None if is_there else compiled.MISSING
        return tuple([CompiledBinary(path, fault) for path, fault in paths.items()])

    def read_models(self, models: Sequence[File]) -> list[Source]:
        """Parses files as the models of one source, and finds the bytes of their tensors.

        The messages of all models together are counted before a model is parsed (MODEL-3).
        """
        all_stripped = [*map(_strip, models)]
        if wire.have_more_messages([one.data for one in all_stripped], model_proto.MAX_MESSAGES):
            models_have = "all models together have" if len(models) > 1 else "the model has"
            raise ArchiveFormatError(
                f"{models_have} more than {model_proto.MAX_MESSAGES} messages, the limit",
                rule="MODEL-3",
            )
        sources = [*map(self._read_model, all_stripped)]
        if self._nbytes > _SHARED_NBYTES:
            self._limit_sharing()
        return sources

    def _read_model(self, stripped: _StrippedFile) -> Source:
        """Finds the bytes of every external tensor of a model, or reports all missing ones."""
        model = _parse(stripped)
        if self.size_threshold is not None:
            require_initializer_count(model, self.size_threshold)
        self._ranges.append([])
        data: list[Data] = []
        faults: dict[object, _Fault] = {}
        idle: list[TensorRef] = []  # tensors with `external_data` beside data in the model
        packed: list[TensorRef] = []
        cleared: dict[str, str] = {}
        for ref in tensors.walk(model):
            tensor = ref.tensor
            pairs = tensor.external_data
            span = stripped.spans.get(pairs[0].value) if len(pairs) == 1 else None
            if pairs and tensor.data_location != tensors.EXTERNAL and tensors.data_fields(tensor):
                idle.append(ref)
                tensor.ClearField("external_data")
            elif len(pairs) > 3 and any(map(tensors.names_packed, pairs)):
                packed.append(ref)
            try:
                tensor_data = self._data(ref) if span is None else _inside(stripped, ref, span)
            except OutsideError as error:  # one remedy helps all tensors
                raise OutsideError(f"{ref}: {error.message}", rule=error.rule) from None
            except ArchiveFormatError as error:
                _add_fault(faults, ref, error)
            else:
                if tensor_data is not None:
                    if tensor.data_type in tensors.CHECKED_TYPES:
                        tensor_data = with_cleared_tail(tensor_data, ref, cleared)
                    data.append(tensor_data)
                elif tensors.clear_tail(tensor):
                    cleared[ref.where] = ref.name
        if faults:
            raise _together([*faults.values()])
        warnings = []
        if idle:
            warnings.append(f"external_data was left out beside data in the model: {_list(idle)}")
        if packed:
            warnings.append(
                "weights that ONNX Runtime packed were left out, onnxarchive.prepack packs them "
                f"again: {_list(packed)}"
            )
        return Source(
            model,
            data,
            True,
            warnings=tuple(warnings),
            compiled=compiled.binaries_of(model, stripped.data),
            cleared=cleared,
        )

    def _data(self, ref: TensorRef) -> Data | None:
        """The data of a tensor; None if the tensor's message contains the data."""
        tensor = ref.tensor
        if tensor.data_location == tensors.EXTERNAL:
            return self._in_file(ref)
        if tensor.external_data:
            raise ArchiveFormatError(
                "data_location is not EXTERNAL, although there is external_data; set it, or clear "
                "external_data"
            )
        if self._is_torch_placeholder(ref):
            tensors.set_location(tensor, ref.name)
            return self._in_file(ref, is_alone=True)
        return None

    def _is_torch_placeholder(self, ref: TensorRef) -> bool:
        tensor = ref.tensor
        if tensor.raw_data != _TORCH_PLACEHOLDER:
            return False
        if tensors.stored_nbytes(tensor) != len(_TORCH_PLACEHOLDER):
            return True
        # A tensor of this size may hold these bytes by chance. They are a placeholder only if a
        # file has the tensor's name.
        with contextlib.suppress(ArchiveFormatError):
            return self.file(ref.name) is not None
        return False

    def _in_file(self, ref: TensorRef, *, is_alone: bool = False) -> Data:
        """The data of an external tensor; if `is_alone`, the data must be the whole file."""
        data_type = tensors.external_type(ref)
        reference = tensors.external_data(ref, Strict(), also_allowed=_BASEPATH)
        assert reference is not None  # else `Strict()` would have raised an error
        tensors.require_no_address(ref)
        location, offset = reference.location, reference.offset or 0
        nbytes = data_type.nbytes(ref.tensor.dims[:])
        end = offset + nbytes
        file = self.file(location)
        if file is None:
            if self.find_in_archive is not None:
                with contextlib.suppress(ArchiveFormatError):  # reported as a missing file
                    return self.find_in_archive(ref)
            raise _MissingFileError(
                f"the data file {location!r}, of {end} bytes or more, is missing; copy this file "
                "along with the model",
                location,
                end,
            )
        # Some writers state a length of 0 for "unknown".
        if reference.length and reference.length != nbytes:
            raise ArchiveFormatError(
                f"expected length {nbytes} for {data_type.name} of shape "
                f"{list(ref.tensor.dims)}, found {reference.length} in external_data"
            )
        self._require_data(file, location, offset, nbytes)
        if is_alone and file.size != nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes in {location!r}, which torch.onnx wrote for this tensor "
                f"alone, found {file.size}"
            )
        if self.verify_checksum and reference.checksum is not None:
            self._verify(file, location, reference.checksum)
        data = Range(file, offset, nbytes)
        self._ranges[-1].append(data)
        self._nbytes += nbytes
        return data

    def _limit_sharing(self) -> None:
        """Refuses tensors that need far more bytes than the files have."""
        files = {data.file for ranges in self._ranges for data in ranges}
        nbytes_in_files = sum(file.size for file in files)
        limit = _SHARED_NBYTES + _MAX_SHARING * nbytes_in_files
        if self._nbytes <= limit:
            return
        # Models share equal tensors with each other, but a model needs each of its own.
        counts: Counter[Range] = Counter()
        for ranges in self._ranges:
            counts |= Counter(ranges)
        needed = sum(data.nbytes * count for data, count in counts.items())
        if needed > limit:
            raise ArchiveFormatError(
                f"expected external tensors of at most {limit} bytes in files of "
                f"{nbytes_in_files} bytes, found {needed} bytes: too many tensors name the "
                "same bytes; let the nodes share one initializer: onnx_ir's "
                "DeduplicateHashedInitializersPass merges equal ones; then use onnxarchive.save"
            )

    def _require_data(self, file: File, location: str, offset: int, nbytes: int) -> None:
        """Refuses a file that ends before a tensor's data does, or that only replaces the data.

        Such a file is a Git LFS pointer or an HTML page. The first bytes of a file are read only if
        it is too short, as small as a Git LFS pointer, or among the first files that are as small
        as an HTML page. No byte is read of an archive that this thread is editing.
        """
        end = offset + nbytes
        is_short = end > file.size
        if location not in self._kinds:
            is_small = file.size <= _MAX_PAGE_SIZE and len(self._kinds) < _MAX_RECOGNISED
            if not (is_short or is_small or file.size <= _MAX_POINTER_SIZE):
                return
            self._kinds[location] = (
                None if file.is_held else kind_of_head(file.head(HEAD_SIZE), file.size)
            )
        kind = self._kinds[location]
        if kind in (LFS_POINTER, HTML_PAGE) or (is_short and kind is not None):
            raise ArchiveFormatError(f"expected data in {location!r}, found {kind}")
        if is_short:
            raise _FileError(
                f"expected {nbytes} bytes from offset {offset} of {location!r}, found a file "
                f"of {file.size} bytes, which {ends_early(end - file.size)}",
                location,
                end,
            )

    def _verify(self, file: File, location: str, expected: str) -> None:
        if file not in self._checksums:
            self._checksums[file] = sha1(Range.whole(file))
        if self._checksums[file] != expected.lower():
            raise ChecksumError(
                f"expected SHA-1 {expected} of {location!r}, found {self._checksums[file]}",
                rule="DATA-6",
            )


def _inside(stripped: _StrippedFile, ref: TensorRef, span: Span) -> Data | None:
    """The bytes of a tensor whose data is a span of the model's file.

    None if type and shape do not determine the number of bytes. Then the bytes are put into the
    tensor; the plan of the archive checks them.
    """
    nbytes, is_raw = tensors.stored_nbytes(ref.tensor), span.data_type is None
    if nbytes is None:
        tensors.set_raw_data(ref.tensor, b"".join(decode(stripped.view, span)))
        return None
    # One byte of a varint, or of packed numbers, may give several bytes.
    is_possible = nbytes == span.nbytes if is_raw else nbytes <= _MAX_DECODED * span.nbytes
    if not is_possible:
        raise ArchiveFormatError(
            f"expected {nbytes} bytes, as its shape and data type need, found {span.nbytes}"
        )
    if is_raw:
        return Range(stripped.file, span.offset, nbytes)
    return Streamed(nbytes, partial(_decoded, ref, nbytes, stripped.view, span))


def _decoded(ref: TensorRef, nbytes: int, model: memoryview, span: Span) -> Iterator[memoryview]:
    """Yields the numbers of a tensor in a serialized model as bytes, which must be `nbytes`."""
    decoded_nbytes = 0
    for piece in decode(model, span):
        decoded_nbytes += len(piece)
        if decoded_nbytes <= nbytes:  # more are counted for the message, but not collected
            yield piece
    if decoded_nbytes != nbytes:
        raise ArchiveFormatError(
            f"{ref}: expected {nbytes} bytes, as its shape and data type need, found "
            f"{decoded_nbytes}"
        )


class _FileError(ArchiveFormatError):
    """A data file is missing, or ends before the end of a tensor's data.

    Attributes:
        location: The location of the file.
        end: Offset of the end of the tensor's data in the file, in bytes.
    """

    def __init__(self, message: str, location: str, end: int) -> None:
        super().__init__(message)
        self.location = location
        self.end = end


class _MissingFileError(_FileError):
    """A data file is missing."""


def _add_fault(faults: dict[object, _Fault], ref: TensorRef, error: ArchiveFormatError) -> None:
    """Adds the fault of a tensor; a missing file is one fault of all tensors that need it."""
    error = without_traceback(error)
    key = type(error), error.location if isinstance(error, _FileError) else error.message
    earlier, refs = faults.setdefault(key, (error, []))
    refs.append(ref)
    if isinstance(earlier, _FileError) and isinstance(error, _FileError):
        faults[key] = max(earlier, error, key=lambda fault: fault.end), refs


def _together(faults: list[_Fault]) -> ArchiveFormatError:
    """One error for all faults of a model; a ChecksumError if all are about checksums."""
    kinds = {type(error) for error, _ in faults}
    kind = ChecksumError if kinds == {ChecksumError} else ArchiveFormatError
    texts: list[str] = []
    is_explained = False
    for error, refs in faults[:_MAX_LISTED]:
        text = f"{_list(refs)}: {error.message.removeprefix(f'{refs[0]}: ')}"
        if isinstance(error, _MissingFileError) and not is_explained:
            text += _OR_GIVEN  # for the first file alone, since it is long
            is_explained = True
        texts.append(text)
    if len(faults) == 1:
        return kind(texts[0], rule=faults[0][0].rule)
    count = sum(len(refs) for _, refs in faults)
    if len(faults) > _MAX_LISTED:
        texts.append(f"and {len(faults) - _MAX_LISTED:,} more faults")
    return kind("\n  ".join((f"{count:,} tensors have faulty data:", *texts)))


def _list(refs: Sequence[TensorRef]) -> str:
    """Describes tensors by their number and some of their names."""
    if len(refs) == 1:
        return str(refs[0])
    names = [quoted(ref.name) for ref in refs[:_MAX_NAMED]]
    if len(refs) > _MAX_NAMED:
        names.append("...")
    return f"{len(refs):,} tensors ({', '.join(names)})"
