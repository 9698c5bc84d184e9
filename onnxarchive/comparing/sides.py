"""The two sides that `diff` compares: models of an archive or another source, and their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeAlias

import onnx

from onnxarchive.comparing.values import parts_of
from onnxarchive.conversion.convert import open_source
from onnxarchive.errors import ArchiveFormatError, ChecksumError, with_path
from onnxarchive.files.data import Crc32, Data, crc32 as checksum
from onnxarchive.model import tensors
from onnxarchive.model.keys import ASSET_PREFIX
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, contents_of, open_location
from onnxarchive.reading.views import require_model
from onnxarchive.remote.location import Location
from onnxarchive.sources.reader import SourceReader
from onnxarchive.sources.source import Source

_PIECE_SIZE: Final = 2 << 20  # bytes that are compared at a time


@dataclass(slots=True)
class Digest:
    """Bytes of a tensor or asset.

    `sha256` is set only if `diff` found other bytes with the same size and CRC-32.
    """

    nbytes: int
    crc32: int
    pieces: Callable[[], Iterator[bytes]]
    sha256: str | None = None

    def __str__(self) -> str:
        sha256 = "" if self.sha256 is None else f", SHA-256 {self.sha256}"
        return f"{self.nbytes:,} bytes, CRC-32 {self.crc32:#010x}{sha256}"


# The contents of the tensors of each model by path, except strings, by model id; the contents of
# assets by name with the id None.
DigestsById: TypeAlias = dict[str | None, dict[Any, Digest]]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sources that `diff` compares.

    Attributes:
        path: Its name for messages.
        models: Its models by id; large tensors are external.
        is_archive: False for a source of another kind, whose assets are not compared.
        contents: Gives the contents of the models with these ids, and of the assets.
    """

    path: str
    models: Mapping[str, onnx.ModelProto]
    is_archive: bool
    contents: Callable[[Iterable[str], bool], DigestsById]


def open_side(location: Location, model: str | None, resources: contextlib.ExitStack) -> Side:
    """Opens an archive (without downloading it into a cache) or another source of `convert`."""
    try:
        archive = resources.enter_context(open_location(location, model))
    except ArchiveFormatError as error:
        # An archive of a later version, or a damaged one, is not read as a source of another kind.
        if error.rule == "VERSION-1" or isinstance(error, ChecksumError):
            raise
    else:
        return Side(archive.path, archive.models, True, partial(_of_archive, archive))
    resources.enter_context(with_path(location.name))
    source = open_source(location, resources, SourceReader())
    sources = {"": source, **source.further}
    if model is not None:
        require_model(sources, model)
    models = {id: each.model for id, each in sources.items()}
    return Side(location.name, models, False, partial(_of_sources, sources))


def _of_archive(archive: Archive, ids: Iterable[str], has_assets: bool) -> DigestsById:
    @cache
    def entry_content(name: str) -> Digest:
        entry = archive.entries[name]
        return Digest(entry.nbytes, entry.crc32, partial(_entry_pieces, archive, name))

    assets = archive.assets if has_assets else ()
    by_id: DigestsById = {None: {name: entry_content(ASSET_PREFIX + name) for name in assets}}
    for id in ids:
        keys = {ref.path: key for key, ref in contents_of(archive).models[id].refs.items()}
        outside = {path: entry_content(key) for path, key in keys.items()}
        by_id[id] = outside | _in_model(archive.models[id], outside)
    return by_id


def _of_sources(sources: Mapping[str, Source], ids: Iterable[str], has_assets: bool) -> DigestsById:
    by_id: DigestsById = {None: {}}
    for id in ids:
        model, refs = sources[id].model, tensors.external(sources[id].model)
        outside: dict[Any, Digest] = {}
        for ref, data in zip(refs, sources[id].data, strict=True):
            outside[ref.path] = Digest(data.nbytes, _crc32(data), partial(_source_pieces, data))
        by_id[id] = outside | _in_model(model, outside)
    return by_id


def _crc32(data: Data) -> int:
    """The CRC-32 of data; computed from all bytes if it is unknown."""
    if data.crc32 is not None:
        return data.crc32
    crc = Crc32()
    for _ in crc(data.pieces()):
        pass
    return crc.value


def _in_model(model: onnx.ModelProto, outside: Mapping[Any, Digest]) -> dict[Any, Digest]:
    """The contents of the tensors, except strings, that a model holds."""
    contents = {}
    for ref in tensors.walk(model):
        if ref.path not in outside and tensors.stored_type(ref.tensor) is not None:
            with contextlib.suppress(ArchiveFormatError):  # too few or too many bytes
                data = tensors.raw_data(ref)
                contents[ref.path] = Digest(
                    data.nbytes, checksum(data), partial(_inner_pieces, ref)
                )
    return contents


def _source_pieces(data: Data) -> Iterator[bytes]:
    sizes = (min(_PIECE_SIZE, data.nbytes - begin) for begin in range(0, data.nbytes, _PIECE_SIZE))
    return parts_of(data.pieces(), sizes)


def _entry_pieces(archive: Archive, name: str) -> Iterator[bytes]:
    entry = archive.entries[name]
    # Reading 0 bytes of a remote file begins a stream at the local header.
    next(iter(contents_of(archive).file.pieces(entry.header_offset, 0)), None)
    contents_of(archive).require_header(name)
    end = entry.data_offset + entry.nbytes
    # Not `Contents.pieces`, which raises a ChecksumError: damaged bytes are a difference to report.
    # And `diff` compares two lists of pieces one by one, so pieces must have equal sizes.
    for offset in range(entry.data_offset, end, _PIECE_SIZE):
        nbytes = min(_PIECE_SIZE, end - offset)
        piece = contents_of(archive).file.read(offset, nbytes)
        if len(piece) != nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes at offset {offset}, found a file truncated to "
                f"{offset + len(piece)} bytes",
                path=archive.path,
            )
        yield piece


def _inner_pieces(ref: TensorRef) -> Iterator[bytes]:
    data = tensors.raw_data(ref)
    for offset in range(0, data.nbytes, _PIECE_SIZE):
        yield bytes(data[offset : offset + _PIECE_SIZE])
