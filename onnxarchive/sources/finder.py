"""Finds the bytes of a model's external tensors in the files beside the model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx

from onnxarchive.errors import (
    ArchiveFormatError,
    ChecksumError,
    Strict,
    shown,
    without_traceback,
)
from onnxarchive.files import locking
from onnxarchive.files.beneath import OutsideError
from onnxarchive.files.data import Data
from onnxarchive.files.file_data import FileData
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.tensors import ExternalData, TensorRef
from onnxarchive.sources.data_files import DataFile, DataFiles
from onnxarchive.sources.recognition import (
    HEAD_SIZE,
    HTML_PAGE,
    LFS_POINTER,
    Kind,
    ends_early,
    kind_of_head,
)
from onnxarchive.sources.serialized import Serialized
from onnxarchive.sources.source import Source, sha1, with_cleared_tail

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


_Range: TypeAlias = tuple[DataFile, int, int]  # a file, offset and size in bytes


class Finder:
    """Finds the bytes of external tensors of one or several models.

    Args:
        files: The files beside the models.
        verify_checksum: True to compare files with the `checksum` in a tensor's external data.
        elsewhere: Called if the location of a tensor names no file; returns the tensor's bytes or
            raises ArchiveFormatError.
    """

    def __init__(
        self,
        files: DataFiles,
        verify_checksum: bool,
        elsewhere: Callable[[TensorRef], Data] | None = None,
    ) -> None:
        self._files = files
        self._verify_checksum = verify_checksum
        self._elsewhere = elsewhere
        self._checksums: dict[DataFile, str] = {}
        self._kinds: dict[str, Kind | None] = {}  # of small or too short files, by location
        self._ranges: list[list[_Range]] = []  # for each model, those of its tensors

    def find(self, serialized: Serialized) -> Source:
        """Finds the bytes of every external tensor of a model, or reports all that is missing."""
        self._ranges.append([])
        data: list[Data] = []
        faults = _Faults()
        idle: list[TensorRef] = []  # tensors with `external_data` beside data in the model
        packed: list[TensorRef] = []
        cleared: dict[str, str] = {}
        for ref in tensors.walk(serialized.model):
            tensor = ref.tensor
            pairs = tensor.external_data
            span = serialized.span(tensor)
            if pairs and tensor.data_location != tensors.EXTERNAL and tensors.data_fields(tensor):
                idle.append(ref)
                tensor.ClearField("external_data")
            elif len(pairs) > 3 and any(map(tensors.names_packed, pairs)):
                packed.append(ref)
            try:
                tensor_data = self._data(ref) if span is None else serialized.data(ref, span)
            except OutsideError as error:  # one remedy helps all tensors
                raise OutsideError(f"{ref}: {error.message}", rule=error.rule) from None
            except ArchiveFormatError as error:
                faults.add(ref, error)
            else:
                if tensor_data is not None:
                    if tensor.data_type in tensors.CHECKED_TYPES:
                        tensor_data = with_cleared_tail(tensor_data, ref, cleared)
                    data.append(tensor_data)
                elif _clear_tail(tensor):
                    cleared[ref.where] = ref.name
        faults.require_none()
        self._limit_sharing()
        warnings = []
        if idle:
            warnings.append(f"external_data was left out beside data in the model: {_list(idle)}")
        if packed:
            warnings.append(
                "weights that ONNX Runtime packed were left out, onnxarchive.prepack packs them "
                f"again: {_list(packed)}"
            )
        return Source(serialized.model, data, True, warnings=tuple(warnings), cleared=cleared)

    def _data(self, ref: TensorRef) -> Data | None:
        """The data of a tensor; None if the tensor's message contains the data."""
        tensor = ref.tensor
        if tensor.data_location == tensors.EXTERNAL:
            data_type = tensors.external_type(ref)
            reference = tensors.external_data(ref, Strict(), also_allowed=_BASEPATH)
            assert reference is not None  # else `Strict()` would have raised an error
            return self._in_file(ref, data_type, reference)
        fault = tensors.misplaced(tensor)
        if fault is not None:
            raise ArchiveFormatError(fault)
        if self._is_torch_placeholder(ref):
            tensors.set_location(tensor, ref.name)
            whole = ExternalData(ref.name, None, None, None)
            return self._in_file(ref, tensors.external_type(ref), whole, is_alone=True)
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
            return self._files.find(ref.name) is not None
        return False

    def _in_file(
        self,
        ref: TensorRef,
        data_type: DataType,
        reference: ExternalData,
        *,
        is_alone: bool = False,
    ) -> Data:
        """The data of an external tensor; if `is_alone`, the data must be the whole file."""
        location, offset = reference.location, reference.offset or 0
        nbytes = data_type.nbytes(ref.tensor.dims[:])
        end = offset + nbytes
        file = self._files.find(location)
        if file is None:
            if self._elsewhere is not None:
                with contextlib.suppress(ArchiveFormatError):  # reported as a missing file
                    return self._elsewhere(ref)
            message = f"expected {end} bytes in {location!r}, found no such file; copy this file "
            raise _FileError(f"{message}along with the model", location, end)
        # Some writers state a length of 0 for "unknown".
        if reference.length and reference.length != nbytes:
            raise ArchiveFormatError(
                f"expected length {nbytes} for {data_type.name} of shape "
                f"{list(ref.tensor.dims)}, found {reference.length} in external_data"
            )
        self._require_data(file, location, offset, nbytes)
        if is_alone and file.nbytes != nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes in {location!r}, which torch.onnx wrote for this tensor "
                f"alone, found {file.nbytes}"
            )
        if self._verify_checksum and reference.checksum is not None:
            self._verify(file, location, reference.checksum)
        self._ranges[-1].append((file, offset, nbytes))
        return file.part(offset, nbytes)

    def _limit_sharing(self) -> None:
        """Refuses tensors that need far more bytes than the files have."""
        total = sum([nbytes for ranges in self._ranges for _, _, nbytes in ranges])
        if total <= _SHARED_NBYTES:
            return
        files = {file for ranges in self._ranges for file, _, _ in ranges}
        nbytes_in_files = sum(file.nbytes for file in files)
        limit = _SHARED_NBYTES + _MAX_SHARING * nbytes_in_files
        if total <= limit:
            return
        # Models share equal tensors with each other, but a model needs each of its own.
        counts: Counter[_Range] = Counter()
        for ranges in self._ranges:
            counts |= Counter(ranges)
        needed = sum(nbytes * count for (_, _, nbytes), count in counts.items())
        if needed > limit:
            raise ArchiveFormatError(
                f"expected external tensors of at most {limit} bytes in files of "
                f"{nbytes_in_files} bytes, found {needed} bytes: too many tensors name the "
                "same bytes; let the nodes share one initializer: onnx_ir's "
                "DeduplicateHashedInitializersPass merges equal ones; then use onnxarchive.save"
            )

    def _require_data(self, file: DataFile, location: str, offset: int, nbytes: int) -> None:
        """Refuses a file that ends before a tensor's data does, or that only stands for the data.

        The first bytes of a file are read only if it is too short, as small as a Git LFS pointer,
        or among the first files that are as small as an HTML page. No byte is read of an archive
        that this thread is editing.
        """
        end = offset + nbytes
        is_short = end > file.nbytes
        if location not in self._kinds:
            is_small = file.nbytes <= _MAX_PAGE_SIZE and len(self._kinds) < _MAX_RECOGNISED
            if not (is_short or is_small or file.nbytes <= _MAX_POINTER_SIZE):
                return
            is_edited = isinstance(file, FileData) and locking.is_held(file.identity)
            self._kinds[location] = (
                None if is_edited else kind_of_head(file.head(HEAD_SIZE), file.nbytes)
            )
        kind = self._kinds[location]
        if kind in (LFS_POINTER, HTML_PAGE) or (is_short and kind is not None):
            raise ArchiveFormatError(f"expected data in {location!r}, found {kind}")
        if is_short:
            raise _FileError(
                f"expected {nbytes} bytes from offset {offset} of {location!r}, found a file "
                f"of {file.nbytes} bytes, which {ends_early(end - file.nbytes)}",
                location,
                end,
            )

    def _verify(self, file: DataFile, location: str, expected: str) -> None:
        if file not in self._checksums:
            self._checksums[file] = sha1(file.part(0, file.nbytes))
        if self._checksums[file] != expected.lower():
            raise ChecksumError(
                f"expected SHA-1 {expected} of {location!r}, found {self._checksums[file]}",
                rule="DATA-6",
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


class _Faults:
    """The faults of a model's tensors; a file that many tensors lack is one fault."""

    def __init__(self) -> None:
        # The error of one of the tensors, a `_FileError` of the last one in the file; the tensors.
        self._faults: dict[object, tuple[ArchiveFormatError, list[TensorRef]]] = {}

    def add(self, ref: TensorRef, error: ArchiveFormatError) -> None:
        error = without_traceback(error)
        key = type(error), error.location if isinstance(error, _FileError) else error.message
        earlier, refs = self._faults.setdefault(key, (error, []))
        refs.append(ref)
        if isinstance(earlier, _FileError) and isinstance(error, _FileError):
            self._faults[key] = max(earlier, error, key=lambda fault: fault.end), refs

    def require_none(self) -> None:
        """Raises all faults in one error, a ChecksumError if they are all about checksums."""
        faults = list(self._faults.values())
        if not faults:
            return
        kinds = {type(error) for error, _ in faults}
        kind = ChecksumError if kinds == {ChecksumError} else ArchiveFormatError
        texts = [
            f"{_list(refs)}: {error.message.removeprefix(f'{refs[0]}: ')}"
            for error, refs in faults[:_MAX_LISTED]
        ]
        if len(faults) == 1:
            raise kind(texts[0], rule=faults[0][0].rule)
        count = sum(len(refs) for _, refs in faults)
        if len(faults) > _MAX_LISTED:
            texts.append(f"and {len(faults) - _MAX_LISTED:,} more faults")
        raise kind("\n  ".join((f"{count:,} tensors have faulty data:", *texts)))


def _list(refs: Sequence[TensorRef]) -> str:
    """Describes tensors by their number and some of their names."""
    if len(refs) == 1:
        return str(refs[0])
    names = [shown(ref.name) for ref in refs[:_MAX_NAMED]]
    return f"{len(refs):,} tensors ({', '.join(names)}{', ...' * (len(refs) > _MAX_NAMED)})"


def _clear_tail(tensor: onnx.TensorProto) -> bool:
    """Clears the unused bits of a tensor in the model; True if any was set."""
    if tensor.data_type not in tensors.CHECKED_TYPES or tensors.array_nbytes(tensor) is None:
        return False
    data_type = dtypes.BY_NUMBER[tensor.data_type]
    return data_type.tail_bits(tensor.dims) > 0 and tensors.clear_tail(tensor, data_type)
