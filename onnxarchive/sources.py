"""What can be converted: a `.onnx`, alone or with external data.

A source is a model whose large tensors are external, and the bytes of each of them as views of
mapped files, so that converting reads every byte where it lies. The large tensors of a single
`.onnx` are external here, too: their bytes are spans of that file.
"""

from __future__ import annotations

import contextlib
import ntpath
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx
from google.protobuf.message import DecodeError

from onnxarchive.errors import ArchiveFormatError, Report, naming
from onnxarchive.files import MappedFile
from onnxarchive.model import dtypes, tensors, wire
from onnxarchive.model.tensors import ExternalData, Path, Site
from onnxarchive.zipformat import writer

# onnx writes it into models that it has loaded; it says where they were, and is passed over.
_BASEPATH = frozenset({"basepath"})
_MAX_LISTED_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Source:
    """A model to be converted.

    Attributes:
        model: The model; large tensors are external.
        data: The bytes of each external tensor in pieces, which can be gone through again.
        files: The paths of the files that it is read from.
    """

    model: onnx.ModelProto
    data: Mapping[Path, Iterable[memoryview]]
    files: tuple[str, ...]

    def resolve(self, site: Site) -> Iterable[memoryview]:
        """The bytes of an external tensor of the model."""
        return self.data[site.path]


@contextlib.contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Opens what is to be converted; its files are mapped until the block ends.

    Args:
        path: A `.onnx` file. External data is looked for in its directory and below.

    Raises:
        ArchiveFormatError: The file is not a model, or external data is missing, too short or
            outside the model's directory. Every such tensor is named.
        OSError: The file cannot be opened.
    """
    with contextlib.ExitStack() as resources, naming(path):
        embedded = resources.enter_context(MappedFile(path)).view()
        hollow = wire.hollow(embedded)
        try:
            model = onnx.ModelProto.FromString(hollow.skeleton)
        except DecodeError as error:
            raise ArchiveFormatError(
                f"expected a serialized ModelProto, found: {error}; the file is not a .onnx or is "
                "damaged"
            ) from None
        if not model.HasField("graph"):
            raise ArchiveFormatError(
                f"expected a model with a graph, found none in {len(embedded)} bytes; the file is "
                "not a .onnx"
            )
        data_files = _DataFiles(os.path.dirname(os.fspath(path)) or os.curdir, resources)
        data: dict[Path, Iterable[memoryview]] = {}
        problems: list[str] = []
        for site in tensors.walk(model):
            if site.tensor.data_location != tensors.EXTERNAL:
                continue
            try:
                reference = tensors.external_data(site, Report(), also_allowed=_BASEPATH)
                assert reference is not None  # the report would have raised
                if reference.location.startswith(wire.SPAN_LOCATION):
                    index = int(reference.location.removeprefix(wire.SPAN_LOCATION))
                    data[site.path] = _Embedded(embedded, hollow.spans[index])
                else:
                    data[site.path] = data_files.find(site, reference)
            except ArchiveFormatError as error:
                problems.append(error.message)
        _require_none(problems)
        yield Source(model, data, (os.fspath(path), *data_files.paths))


def _require_none(problems: list[str]) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise ArchiveFormatError(problems[0])
    listed = problems[:_MAX_LISTED_PROBLEMS]
    if len(listed) < len(problems):
        listed.append(f"and {len(problems) - len(listed)} more")
    raise ArchiveFormatError("\n  ".join([f"{len(problems)} tensors have no data:", *listed]))


class _Embedded:
    """The bytes of a tensor that stand in a serialized model, decoded as they are gone through."""

    def __init__(self, model: memoryview, span: wire.Span) -> None:
        self._model = model
        self._span = span

    def __iter__(self) -> Iterator[memoryview]:
        return wire.decode(self._model, self._span)


class _DataFiles:
    """The external data files of a model, each mapped once; none is outside its directory."""

    def __init__(self, directory: str, resources: contextlib.ExitStack) -> None:
        self._directory = os.path.realpath(directory)
        self._resources = resources
        self._views: dict[str, memoryview] = {}
        self.paths: list[str] = []

    def find(self, site: Site, reference: ExternalData) -> Iterable[memoryview]:
        """The bytes that a tensor's external data names, as views."""
        view = self._view(site, reference.location)
        data_type = tensors.stored_type(site.tensor)
        if data_type is None:
            raise ArchiveFormatError(
                f"{site}: expected external data of a fixed-width type and a possible shape, found "
                f"data type {site.tensor.data_type} and dims "
                f"{list(site.tensor.dims[: dtypes.MAX_RANK + 1])}"
            )
        nbytes = data_type.nbytes(site.tensor.dims)
        if reference.length not in (None, nbytes):
            raise ArchiveFormatError(
                f"{site}: expected length {nbytes} for {data_type.name} of shape "
                f"{list(site.tensor.dims)}, found {reference.length} in external_data"
            )
        offset = reference.offset or 0
        if offset + nbytes > len(view):
            raise ArchiveFormatError(
                f"{site}: expected {nbytes} bytes from offset {offset} of "
                f"{reference.location!r}, found a file of {len(view)} bytes"
            )
        return list(writer.pieces(view[offset : offset + nbytes]))

    def _view(self, site: Site, location: str) -> memoryview:
        if location not in self._views:
            path = self._contained_path(site, location)
            try:
                file = self._resources.enter_context(MappedFile(path))
            except FileNotFoundError:
                raise ArchiveFormatError(
                    f"{site}: expected its external data in {location!r}, found no such file in "
                    f"{self._directory}"
                ) from None
            except ArchiveFormatError as error:
                raise ArchiveFormatError(
                    f"{site}: its external data is in {location!r}: {error.message}"
                ) from None
            self._views[location] = file.view()
            self.paths.append(path)
        return self._views[location]

    def _contained_path(self, site: Site, location: str) -> str:
        """The file of a location, all symbolic links followed."""
        components = location.split("/")
        if (
            not location
            or "\0" in location
            or "\\" in location
            or os.pardir in components
            or os.path.isabs(location)
            or ntpath.splitdrive(location)[0]
            or location.startswith("/")
        ):
            raise ArchiveFormatError(
                f"{site}: expected the location of external data as a relative path with slashes "
                f"and no '..', found {location!r}"
            )
        path = os.path.realpath(os.path.join(self._directory, *components))
        if os.path.commonpath([path, self._directory]) != self._directory:
            raise ArchiveFormatError(
                f"{site}: expected its external data inside the model's directory "
                f"{self._directory}, found {location!r} to be a link to {path}; copy the file "
                "there in its place"
            )
        return path
