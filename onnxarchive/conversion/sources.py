"""What can be converted, recognised by its content.

A source is a model whose large tensors are external, and the bytes of each of them, which stay
where they are until they are written. The large tensors of a single `.onnx` are external here, too:
their bytes are spans of that file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.archive import recovery
from onnxarchive.archive.reading import Archive
from onnxarchive.archive.referring import entry_data, referred
from onnxarchive.buffers.data import Data, Stored
from onnxarchive.conversion.places import (
    DataFile,
    DirectoryPlace,
    Place,
    ZipPlace,
    plain,
    sha1,
)
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    LockedError,
    Report,
    UnfinishedEditError,
    naming,
)
from onnxarchive.model import keys, proto, tensors, wire
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import ExternalData, Path, Site
from onnxarchive.storage.beneath import Root
from onnxarchive.storage.file_data import FileData
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat import foreign
from onnxarchive.zipformat.records import EndRecord, LocalHeader

# What torch.onnx up to 1.x puts into raw_data of a tensor whose bytes it writes to a file of the
# tensor's name (ExportTypes.ZIP_ARCHIVE, COMPRESSED_ZIP_ARCHIVE and DIRECTORY).
_TORCH_PLACEHOLDER = b"__EXTERNAL"
# onnx writes it into models that it has loaded; it says where they were, and is passed over.
_BASEPATH = frozenset({"basepath"})
_MAX_LISTED = 20
_MODEL_SUFFIX = ".onnx"
# What a zip begins with: an entry, or nothing but its end.
_ZIP_SIGNATURES = (LocalHeader.SIGNATURE, EndRecord.SIGNATURE)
# What file managers leave in zips and directories.
_APPLE_DOUBLE = "._"
_LITTER_FOLDER = "__MACOSX/"
_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")


@dataclass(frozen=True, slots=True)
class Source:
    """A model to be converted.

    Attributes:
        model: The model; large tensors are external.
        data: The bytes of each external tensor.
        assets: The bytes of each asset, by path without the prefix `assets/`.
        files: The paths of the files that it is read from.
        warnings: What was left out, a sentence each.
    """

    model: onnx.ModelProto
    data: Mapping[Path, Data]
    assets: Mapping[str, Data] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def resolve(self, site: Site) -> Data:
        """The bytes of an external tensor of the model."""
        return self.data[site.path]


@contextlib.contextmanager
def open_source(
    path: str | os.PathLike[str],
    *,
    verify_checksum: bool = False,
    temporary: str | None = None,
    archive: Archive | None = None,
) -> Iterator[Source]:
    """Opens what is to be converted; its files are mapped until the block ends.

    Args:
        path: A `.onnx`, whose external data is looked for in its directory and below; a directory
            or a zip with one model and its data files; an archive.
        verify_checksum: Whether to compare data files with the `checksum` that tensors name.
        temporary: The directory for files that have to be inflated; None for the system's.
        archive: An archive whose keys the external data of a `.onnx` may name, where there is no
            such file beside it.

    Raises:
        ArchiveFormatError: The file is not a model, or external data is missing, too short or
            outside the model's directory. Every such tensor is named.
        OSError: A file cannot be opened.
    """
    with contextlib.ExitStack() as resources, naming(path):
        opening = _Opening(os.fspath(path), resources, verify_checksum, temporary, archive)
        yield opening.directory() if os.path.isdir(path) else opening.file()


class _Opening:
    """Opens one source, of whatever kind."""

    def __init__(
        self,
        path: str,
        resources: contextlib.ExitStack,
        verify_checksum: bool,
        temporary: str | None,
        entries: Archive | None,
    ) -> None:
        self._path = path
        self._entries = entries
        self._resources = resources
        self._verify_checksum = verify_checksum
        self._temporary = temporary
        self._checksums: dict[DataFile, str] = {}

    def file(self) -> Source:
        """A `.onnx`, an archive, or a zip that another tool made."""
        model = FileData.kept_open(self._path, self._resources)
        view = model.view
        if bytes(view[: len(LocalHeader.SIGNATURE)]) in _ZIP_SIGNATURES:
            if self._entries is not None:  # whose user may have locked it, and wait for this one
                raise ArchiveFormatError(
                    "expected a .onnx or a directory, found an archive or another zip; "
                    "'onnxarchive export' makes a .onnx of it"
                )
            archive = self._strictly()
            return self._zip(view) if archive is None else self._archive(archive)
        root = self._root(os.path.dirname(self._path) or os.curdir)
        if not root.leads_to(os.path.basename(self._path), model.identity):
            raise ArchiveFormatError(
                "expected the model in its directory, found another file there; its directory was "
                "replaced while the model was opened"
            )
        place = DirectoryPlace(root)
        external = self._external(_parse(model), place)
        return Source(external.model, external.data, files=(self._path, *place.paths))

    def _strictly(self) -> Archive | None:
        """The file as an archive, every local header compared; None where it is not one."""
        try:
            with recovery.opened(self._path) as file:
                archive = self._resources.enter_context(Archive(file))
            for name in archive.entries:
                archive.read(name)
        except (LockedError, UnfinishedEditError):
            raise
        except ArchiveError:
            return None
        return archive

    def directory(self) -> Source:
        """A directory with one model and its data files."""
        place = DirectoryPlace(self._root(self._path))
        names = [name for name in place.names if not _is_litter(name)]
        source = self._whole(place, _only([name for name in names if _is_model(name)]), names)
        return replace(source, files=tuple(place.paths))

    def _root(self, directory: str) -> Root:
        return self._resources.enter_context(contextlib.closing(Root(directory)))

    def _archive(self, archive: Archive) -> Source:
        def stored(name: str) -> Data:
            return Stored(archive.read(name), archive.entries[name].crc32)

        if self._verify_checksum:
            for key, site in archive.sites.items():
                expected, found = tensors.checksum(site.tensor), sha1(stored(key))
                if expected not in (None, found):
                    raise ChecksumError(
                        f"{site}: expected SHA-1 {expected}, found {found}",
                        rule="DATA-6",
                        entry=key,
                    )
        data = {site.path: stored(key) for key, site in archive.sites.items()}
        assets = {path: stored(ASSET_PREFIX + path) for path in archive.assets}
        return Source(archive.model, data, assets, (self._path,))

    def _zip(self, view: memoryview) -> Source:
        """A zip with one model and its data files, all of them in a folder perhaps."""
        read = foreign.read(view)
        entries = [entry for entry in read.entries if not _is_litter(entry.name)]
        name = _only([entry.name for entry in entries if _is_model(entry.name)])
        folder = name[: name.rfind("/") + 1]
        inside = [entry for entry in entries if entry.name.startswith(folder)]
        moved = [replace(entry, name=entry.name.removeprefix(folder)) for entry in inside]
        place = ZipPlace(view, moved, self._temporary)
        source = self._whole(place, name.removeprefix(folder), place.names)
        taken = {entry.name for entry in inside}
        outside = [entry.name for entry in read.entries if entry.name not in taken]
        warnings = (*read.dropped, *_left_out(outside), *source.warnings)
        return replace(source, files=(self._path,), warnings=warnings)

    def _whole(self, place: Place, name: str, names: list[str]) -> Source:
        """A place with the model `name` and all of `names` that belongs to it."""
        file = _listed(place, name)
        if isinstance(file, FileData):
            file = FileData.kept_open(file.path, self._resources, file.root)
        external = self._external(_parse(file), place)
        used = external.locations | {name}
        rest = [other for other in names if other not in used]
        named = [other for other in rest if other.startswith(ASSET_PREFIX)]
        keys.check_names([*named, MODEL_PROTO], Report())
        assets: dict[str, Data] = {}
        for other in named:
            asset = _listed(place, other)
            assets[other.removeprefix(ASSET_PREFIX)] = asset.part(0, asset.nbytes)
        left_out = _left_out([other for other in rest if not other.startswith(ASSET_PREFIX)])
        return Source(external.model, external.data, assets, warnings=left_out)

    def _external(self, parsed: _Parsed, place: Place) -> _External:
        """Finds the bytes of every external tensor, or tells of all that are not there."""
        external = _External(parsed.model, {}, set())
        problems: list[ArchiveFormatError] = []
        for site in tensors.walk(parsed.model):
            try:
                self._find(site, parsed, place, external)
            except ArchiveFormatError as error:
                message = f"{site}: {error.message.removeprefix(f'{site}: ')}"
                problems.append(type(error)(message, rule=error.rule))
        _require_none(problems)
        return external

    def _find(self, site: Site, parsed: _Parsed, place: Place, external: _External) -> None:
        tensor = site.tensor
        is_external = tensor.data_location == tensors.EXTERNAL
        if (is_external and tensors.held_fields(tensor)) or (
            tensor.external_data and not is_external
        ):
            raise ArchiveFormatError(
                "expected its data in one place, found it in the model and in external_data"
            )
        if is_external:
            reference = tensors.external_data(site, Report(), also_allowed=_BASEPATH)
            assert reference is not None  # the report would have raised
        elif _is_torch_placeholder(site, place):
            reference = ExternalData(site.name, None, None, None)
            tensors.set_location(tensor, site.name)
        else:
            return
        if reference.location.startswith(wire.SPAN_LOCATION):
            embedded_type = tensors.stored_type(tensor)
            span = parsed.spans[int(reference.location.removeprefix(wire.SPAN_LOCATION))]
            if embedded_type is None:  # a segment, or an impossible shape: not ours to judge
                tensors.set_raw_data(tensor, b"".join(wire.decode(parsed.view, span)))
            elif span.is_raw:
                external.data[site.path] = parsed.file.part(span.offset, span.nbytes)
            else:
                nbytes = embedded_type.nbytes(tensor.dims)
                external.data[site.path] = _Embedded(parsed.view, span, nbytes)
            return
        data_type = tensors.external_type(site)
        nbytes = data_type.nbytes(tensor.dims)
        file = place.find(reference.location)
        if file is None and self._entries is not None:
            with contextlib.suppress(ArchiveFormatError):  # there is no such file, either
                key, _ = referred(site, self._entries)
                external.data[site.path] = entry_data(self._entries, key)
                return
        if file is None:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes in {reference.location!r}, found no such file"
            )
        if reference.length not in (None, nbytes):
            raise ArchiveFormatError(
                f"expected length {nbytes} for {data_type.name} of shape "
                f"{list(tensor.dims)}, found {reference.length} in external_data"
            )
        if not is_external and file.nbytes != nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes in {reference.location!r}, which torch.onnx wrote for "
                f"this tensor alone, found {file.nbytes}"
            )
        offset = reference.offset or 0
        if offset + nbytes > file.nbytes:
            raise ArchiveFormatError(
                f"expected {nbytes} bytes from offset {offset} of {reference.location!r}, found a "
                f"file of {file.nbytes} bytes"
            )
        if self._verify_checksum and reference.checksum is not None:
            found = self._sha1(file)
            if found != reference.checksum.lower():
                raise ChecksumError(
                    f"expected SHA-1 {reference.checksum} of {reference.location!r}, found {found}",
                    rule="DATA-6",
                )
        external.locations.add(plain(reference.location))
        external.data[site.path] = file.part(offset, nbytes)

    def _sha1(self, file: DataFile) -> str:
        if file not in self._checksums:
            self._checksums[file] = sha1(file.part(0, file.nbytes))
        return self._checksums[file]


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A model without its large tensors, which are spans of the serialized one.

    Attributes:
        model: The model.
        file: The file that has all of it.
        view: That file's bytes.
        spans: Where the tensors are in it.
    """

    model: onnx.ModelProto
    file: DataFile
    view: memoryview
    spans: tuple[wire.Span, ...]


def _parse(file: DataFile) -> _Parsed:
    if file.nbytes >= proto.SIZE_LIMIT:  # before a zip's is inflated
        raise ArchiveFormatError(
            f"expected a model of less than {proto.SIZE_LIMIT} bytes, found {file.nbytes}; store "
            "its tensors as external data",
            rule="MODEL-2",
        )
    view = file.view
    hollow = wire.hollow(view)
    if wire.has_more_messages(hollow.skeleton, proto.MAX_MESSAGES):
        raise ArchiveFormatError(
            f"expected a model of at most {proto.MAX_MESSAGES} messages, found more", rule="MODEL-3"
        )
    if wire.occurrences(hollow.skeleton, "graph") > 1:
        raise ArchiveFormatError(
            "expected one graph, found several, which protobuf would merge; the file is two models "
            "in one"
        )
    try:
        model = onnx.ModelProto.FromString(hollow.skeleton)
    except DecodeError as error:
        raise ArchiveFormatError(
            f"expected a serialized ModelProto, found: {error}; the file is not a .onnx or is "
            "damaged"
        ) from None
    if not model.HasField("graph"):
        raise ArchiveFormatError(
            f"expected a model with a graph, found none in {len(view)} bytes; the file is not a "
            ".onnx"
        )
    proto.take_link_fingerprint(model)  # a link, of which the archive's model is wanted
    return _Parsed(model, file, view, hollow.spans)


@dataclass(frozen=True, slots=True)
class _External:
    """A model, the bytes of its external tensors, and the locations where they were found."""

    model: onnx.ModelProto
    data: dict[Path, Data]
    locations: set[str]


class _Embedded:
    """A tensor's numbers in a serialized model, decoded to its bytes as they are gone through."""

    def __init__(self, model: memoryview, span: wire.Span, nbytes: int) -> None:
        self._model = model
        self._span = span
        self.nbytes = nbytes
        self.crc32 = None

    def __iter__(self) -> Iterator[memoryview]:
        return wire.decode(self._model, self._span)


def _listed(place: Place, name: str) -> DataFile:
    """A file that was in the list of the place's files."""
    file = place.find(name)
    if file is None:
        raise ArchiveFormatError(
            f"expected a file at {name!r}, found none: it is a link to nothing, or is gone"
        )
    return file


def _require_none(problems: list[ArchiveFormatError]) -> None:
    """Raises all problems of a model in one error."""
    if not problems:
        return
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else ArchiveFormatError
    messages = [problem.message for problem in problems]
    if len(messages) == 1:
        raise kind(messages[0], rule=problems[0].rule)
    raise kind("\n  ".join([f"{len(messages)} tensors have faulty data:", *messages]))


def _is_torch_placeholder(site: Site, place: Place) -> bool:
    tensor = site.tensor
    if tensor.raw_data != _TORCH_PLACEHOLDER:
        return False
    data_type = tensors.stored_type(tensor)
    if data_type is None or data_type.nbytes(tensor.dims) != len(_TORCH_PLACEHOLDER):
        return True
    # A tensor of as many bytes may be these by chance: then no file is named after it.
    with contextlib.suppress(ArchiveFormatError):
        return place.find(site.name) is not None
    return False


def is_model_file(path: str) -> bool:
    """Whether a file's content is a model, or a zip with one; a fault in it is not looked for.

    Raises:
        OSError: The file cannot be opened.
    """
    try:
        with MappedFile(path) as file:
            view = file.view()
            if bytes(view[: len(LocalHeader.SIGNATURE)]) not in _ZIP_SIGNATURES:
                return wire.is_model(view)
            names = [entry.name for entry in foreign.read(view).entries]
    except ArchiveError:
        return False
    return any(_is_model(name) for name in names)


def _is_model(name: str) -> bool:
    base = name[name.rfind("/") + 1 :]
    return base == MODEL_PROTO or base.lower().endswith(_MODEL_SUFFIX)


def _only(names: list[str]) -> str:
    """The one model, or the one that lies in fewer folders than the others."""
    depth = min((name.count("/") for name in names), default=0)
    names = [name for name in names if name.count("/") == depth]
    if len(names) != 1:
        found = ", ".join(map(repr, names[:_MAX_LISTED])) or "none"
        raise ArchiveFormatError(
            f"expected one model, {MODEL_PROTO} or a file named *{_MODEL_SUFFIX}, found {found}"
        )
    return names[0]


def _is_litter(name: str) -> bool:
    base = name[name.rfind("/") + 1 :]
    return name.startswith(_LITTER_FOLDER) or base in _LITTER or base.startswith(_APPLE_DOUBLE)


def _left_out(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    listed = ", ".join(names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (f"left out, since no tensor names them: {listed}{more}",)
