"""Opens models of other tools, recognised by content.

A source has a model whose large tensors are external, and a `Data` object for each of these
tensors. The bytes are read later, while an archive is written. A large tensor inside a `.onnx`
becomes external, too: its `Data` object reads a span of the `.onnx`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Final, TypeAlias

from onnxarchive.errors import (
    ArchiveFormatError,
    Strict,
    with_path,
)
from onnxarchive.files.beneath import OutsideError, Root
from onnxarchive.files.data import Data, Stored
from onnxarchive.files.file_data import FileData
from onnxarchive.model import keys
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO
from onnxarchive.model.tensors import TensorRef
from onnxarchive.sources.finder import Finder
from onnxarchive.sources.other_files import divided, is_hidden, is_litter, levels_in_cache
from onnxarchive.sources.places import DataFile, DirectoryPlace, Place
from onnxarchive.sources.recognition import is_model_name, is_zip
from onnxarchive.sources.serialized import parse_files
from onnxarchive.sources.source import Source, listing
from onnxarchive.sources.zip_file import ZipPlace, read_zip

# A further directory into which symbolic links may lead; True for the model's folder `models--*`
# of a Hugging Face cache; False for no further directory.
FollowLinks: TypeAlias = bool | str | os.PathLike[str]

_MAX_LISTED = 20
# The end of the names of files with a model in another precision, as exporters name them.
_PRECISION: Final = re.compile(
    "_(fp16|fp32|bf16|u?int[48]|q4|q4f16|q8|bnb4|quantized|o[1-4])$", re.IGNORECASE
)
_MAX_SEARCHED = 1000  # folders in which models are looked for to name them in a message
_MODEL_SUFFIX = ".onnx"
_EXPECTED_MODEL = f"expected one model ({MODEL_PROTO} or a file named *{_MODEL_SUFFIX})"
_REMEDY = "; other_files=True (--assets) adds them as assets"
_NOT_SEARCHED = (
    "other files are not looked for beside a remote .onnx: name them as assets, or convert a copy "
    "of its directory"
)


@contextlib.contextmanager
def open_model(
    path: str | os.PathLike[str],
    *,
    verify_checksum: bool = False,
    temporary: str | None = None,
    follow_links: FollowLinks = False,
    elsewhere: Callable[[TensorRef], Data] | None = None,
    other_files: bool = False,
) -> Iterator[Source]:
    """Opens a model of another tool; the model's data can be read until the block ends.

    Args:
        path: A `.onnx` with external data in its directory or below, or a directory or zip with the
            files of one model or of an unpacked archive.
        verify_checksum: True to compare the SHA-1 of each data file with the `checksum` of the
            tensors in the file.
        temporary: The directory for temporary files; None for the system's.
        follow_links: A further directory into which symbolic links may lead; True for the model's
            folder `models--*` of a Hugging Face cache; False for none.
        elsewhere: Called if the location of a tensor names no file; returns the tensor's bytes or
            raises ArchiveFormatError. If `elsewhere` is given, zips are refused.
        other_files: True to include the other files of the directory or zip.

    Raises:
        ArchiveFormatError: The file is not a model, or external data is missing, too short, outside
            the model's directory, or different from its `checksum`. The error names every faulty
            tensor. If symbolic links lead out of the directory, the error names only the first
            tensor with such a link.
        UnsupportedFeatureError: A zip has an unsupported feature, such as encryption.
        OSError: The model or a directory cannot be opened.
    """
    with contextlib.ExitStack() as resources, with_path(path):
        opening = _Opening(
            os.fspath(path),
            resources,
            verify_checksum,
            temporary,
            other_files,
            follow_links,
            elsewhere,
        )
        try:
            yield opening.directory() if os.path.isdir(path) else opening.file()
        except OutsideError as error:
            if error.path is not None:  # of another source, which is read in the block
                raise
            raise OutsideError(f"{error.message}, or {opening.remedy()}") from None


def read_copy(
    copy: memoryview,
    place: Place,
    *,
    verify_checksum: bool = False,
    temporary: str | None = None,
    other_files: bool = False,
) -> Source:
    """The source in a copy of a remote `.onnx` or zip; see `open_model`.

    Args:
        copy: The bytes of the file.
        place: The files with the external data of a `.onnx`.
        verify_checksum: As for `open_model`.
        temporary: As for `open_model`.
        other_files: As for `open_model`; refused with a warning for a `.onnx`.
    """
    nothing = contextlib.ExitStack()  # no file is kept open
    opening = _Opening("", nothing, verify_checksum, temporary, other_files)
    if is_zip(copy):
        source = opening.zipped(copy)
        source.files = ()
    else:
        (source,) = opening.models([Stored(copy)], place)
        source.warnings += (_NOT_SEARCHED,) * other_files
    return source


@dataclass(slots=True)
class _Opening:
    """Opens one source of any kind; the attributes are as for `open_model`."""

    path: str
    resources: contextlib.ExitStack
    verify_checksum: bool
    temporary: str | None
    other_files: bool
    follow_links: FollowLinks = False
    elsewhere: Callable[[TensorRef], Data] | None = None
    finder: Finder | None = None  # of all models of the source

    def file(self) -> Source:
        """The source in a file: a `.onnx`, or a zip that another tool made."""
        model = FileData.kept_open(self.path, self.resources)
        if is_zip(model.view):
            if self.elsewhere is not None:  # the zip may be the archive that the caller has locked
                raise ArchiveFormatError(
                    "expected a .onnx or a directory, found a zip; 'onnxarchive export' makes a "
                    ".onnx of an archive"
                )
            return self.zipped(model.view)
        root = self._root(os.path.dirname(self.path) or os.curdir)
        if not root.leads_to(os.path.basename(self.path), model.identity):
            raise ArchiveFormatError(
                "expected the model in its directory, found another file there; its directory was "
                "replaced while the model was opened"
            )
        place = DirectoryPlace(root)
        (source,) = self.models([model], place)
        names = {os.path.basename(self.path)}
        source.others, source.left_out = self._others(place, names, {})
        source.files = (self.path, *place.paths)
        return source

    def directory(self) -> Source:
        """The source in a directory: the files of one model or of an unpacked archive."""
        root = self._root(self.path)
        place = DirectoryPlace(root)
        names = [name for name in place.names if not is_litter(name)]
        models = [name for name in names if is_model_name(name)]
        if not models:
            raise _no_model(_models_below(root, _MAX_SEARCHED))
        source = self._whole(place, _only(models), names)
        source.files = tuple(place.paths)
        return source

    def others(self) -> tuple[dict[str, Data], tuple[str, ...]]:
        """The files of a directory to include, by path, and the names of those to leave out."""
        return self._others(DirectoryPlace(self._root(self.path)), (), ())

    def remedy(self) -> str:
        """How to convert a source whose links lead out of its directory."""
        is_directory = os.path.isdir(self.path)
        directory = os.path.realpath(self.path if is_directory else os.path.dirname(self.path))
        if self.follow_links is False and levels_in_cache(directory) is not None:
            return (
                "convert with follow_links=True (--follow-links): the model is in a Hugging Face "
                "cache"
            )
        return (
            "convert with follow_links=DIRECTORY (--follow-links DIRECTORY) to allow links to "
            "files below DIRECTORY"
        )

    def _root(self, directory: str) -> Root:
        root = Root(directory)
        if self.follow_links is True:
            levels = levels_in_cache(root.path)
            if levels is not None:
                root.linked = os.path.normpath(os.path.join(root.path, *[os.pardir] * levels))
        elif self.follow_links is not False:
            root.linked = Root(os.fspath(self.follow_links)).path
        return root

    def zipped(self, view: memoryview) -> Source:
        """The source in a zip, whose files may all be in one folder; see `directory`."""
        files, notes = read_zip(view, self.temporary)
        names = [name for name in files if not is_litter(name)]
        model = _only([name for name in names if is_model_name(name)])
        folder = model[: model.rfind("/") + 1]
        inside = [name for name in names if name.startswith(folder)]
        place = ZipPlace({name.removeprefix(folder): files[name] for name in inside})
        source = self._whole(place, model.removeprefix(folder), place.names)
        outside = sorted(files.keys() - {*inside})
        if self.other_files:
            source.left_out += (*outside,)
        else:
            notes += _left_out(outside)
        source.files = (self.path,)
        source.warnings = (*notes, *source.warnings)
        return source

    def _whole(self, place: Place, name: str, names: list[str]) -> Source:
        """The source of the model `name`; assets and further models are found in `names`."""
        further_names = _further_models(names, name)
        files: list[DataFile] = []
        for model in (name, *further_names):
            file = _listed(place, model)
            if isinstance(file, FileData):
                file = FileData.kept_open(file.path, self.resources, file.root)
            files.append(file)
        source, *further = self.models(files, place)
        used = self._locations() | {name, *further_names}
        asset_names = [path for path in names if path.startswith(ASSET_PREFIX)]
        asset_names = [path for path in asset_names if path not in used]
        keys.check_names([*asset_names, MODEL_PROTO], Strict())
        source.further = dict(zip(map(keys.model_id, further_names), further, strict=True))
        source.assets = {
            path.removeprefix(ASSET_PREFIX): _whole_file(place, path) for path in asset_names
        }
        used.update(asset_names)
        if not self.other_files:
            unused = [path for path in names if path not in used]
            source.warnings += _left_out(unused, _REMEDY)
        source.others, source.left_out = self._others(place, used, source.assets)
        return source

    def _others(
        self, place: Place, used: Collection[str], assets: Collection[str]
    ) -> tuple[dict[str, Data], tuple[str, ...]]:
        """The other files to include, by path, and the names of other files to leave out.

        Args:
            place: The place.
            used: Names of the files that are models or assets of the source.
            assets: Paths of the assets of the source, without the prefix `assets/`.
        """
        if not self.other_files:
            return {}, ()
        used = self._locations() | set(used)
        names, left_out = divided(name for name in place.all_names if name not in used)
        others: dict[str, Data] = {}
        for name in names:
            path = name.removeprefix(ASSET_PREFIX)
            if path in assets or path in others:
                raise ArchiveFormatError(
                    f"expected one file for the asset {path!r}, found {path!r} and "
                    f"{ASSET_PREFIX + path!r}; remove one of them"
                )
            others[path] = _whole_file(place, name)
        asset_names = [ASSET_PREFIX + path for path in (*assets, *others)]
        keys.check_names([*asset_names, MODEL_PROTO], Strict())
        return others, tuple(left_out)

    def _locations(self) -> set[str]:
        """The names of the data files of all models that were read."""
        return set() if self.finder is None else {*self.finder.locations}

    def models(self, files: Sequence[DataFile], place: Place) -> list[Source]:
        """The models in files, with the data of their tensors in files of `place`."""
        self.finder = finder = Finder(place, self.verify_checksum, self.elsewhere)
        return [finder.find(serialized) for serialized in parse_files(files)]


def _listed(place: Place, name: str) -> DataFile:
    """The file `name`, which `place` has listed."""
    file = place.find(name)
    if file is None:
        raise ArchiveFormatError(
            f"expected a file at {name!r}, found none: it is a broken link or was removed"
        )
    return file


def _whole_file(place: Place, name: str) -> Data:
    file = _listed(place, name)
    return file.part(0, file.nbytes)


def _only(names: list[str]) -> str:
    """The only model at the smallest folder depth."""
    depth = min((name.count("/") for name in names), default=0)
    names = [name for name in names if name.count("/") == depth]
    if not names:
        raise _no_model()
    if len(names) > 1:
        raise ArchiveFormatError(
            f"{_EXPECTED_MODEL}, found {listing(names)}; 'onnxarchive convert ONE.onnx NEW.onnxa "
            "--model ID=OTHER.onnx' packs several models, and --all-models those of a directory"
        )
    return names[0]


def _no_model(below: Sequence[str] = ()) -> ArchiveFormatError:
    remedy = ""
    if below:
        remedy = f"; folders below have {listing(below)}: convert one of these"
        remedy += ", or all with --all-models" * (len(below) > 1)
    return ArchiveFormatError(f"{_EXPECTED_MODEL}, found none{remedy}")


def _models_below(root: Root, max_folders: int | None = None) -> list[str]:
    """The models in a directory and in folders below it.

    Hidden folders and links to folders are not searched.

    Args:
        root: The directory.
        max_folders: For a hint: at most this many folders are searched, and those that cannot be
            read are left out.

    Raises:
        OSError: A folder cannot be read, and `max_folders` is None.
    """
    models: list[str] = []
    folders = [""]
    skipped = () if max_folders is None else (OSError,)
    for folder in islice(folders, max_folders):  # the loop appends to `folders`
        with contextlib.suppress(*skipped):
            for entry in root.scan(folder):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not entry.is_dir(follow_symlinks=False):
                    models += [name] if is_model_name(name) else []
                elif not is_hidden(f"{name}/"):
                    folders.append(name)
    return sorted(models)


def models_of_repository(
    directory: str | os.PathLike[str],
    default: str | None = None,
    include: str | Collection[str] | None = None,
) -> dict[str, str]:
    """The paths of the models in a directory and below it, by the ids that they get.

    An id is the file's name without `.onnx`, in lower case, with `_` for other characters than
    letters and digits.

    Args:
        directory: The directory.
        default: The model that gets the id `""`: its path in the directory, or its file's name with
            or without `.onnx`. None means `model.onnx`, or the only model.
        include: A pattern of file names, such as `*_fp16.onnx`, or several. None means all files
            but those of further precisions, such as `model_fp16.onnx`.

    Raises:
        ValueError: Two models get the same id, no model or several are the default one, or a file
            name gives no id.
        ArchiveFormatError: There is no model.
    """
    below = _models_below(Root(os.fspath(directory)))
    onnx_files = [name for name in below if name.endswith(_MODEL_SUFFIX)]
    bases = {name: name[name.rfind("/") + 1 :] for name in onnx_files}
    stems = {name: base.removesuffix(_MODEL_SUFFIX) for name, base in bases.items()}
    if include is None:
        names = [name for name in onnx_files if not _PRECISION.search(stems[name])]
    else:
        patterns = [include] if isinstance(include, str) else include
        names = [
            name
            for name in onnx_files
            if any(fnmatchcase(bases[name], pattern) for pattern in patterns)
        ]
    if not names:
        hint = f"; {listing(onnx_files)} match no pattern of --include" if onnx_files else ""
        raise ArchiveFormatError(f"expected a file named *{_MODEL_SUFFIX}, found none{hint}")
    wanted = "model.onnx" if default is None else default
    defaults = [wanted] if wanted in names else []
    defaults = defaults or [name for name in names if wanted in (bases[name], stems[name])]
    if default is None and len(names) == 1:
        defaults = names
    if len(defaults) != 1:
        raise ValueError(
            f"{os.fspath(directory)}: expected one default model {wanted!r} among "
            f"{listing(names)}, found {len(defaults)}; name it with default= (--default)"
        )
    models = {"": os.path.join(directory, *defaults[0].split("/"))}
    for name in names:
        if name in defaults:
            continue
        identifier = re.sub("[^a-z0-9]", "_", stems[name].lower())
        path = os.path.join(directory, *name.split("/"))
        if not keys.is_model_id(identifier):
            raise ValueError(f"{path}: expected a file name that gives {keys.MODEL_ID}; rename it")
        if identifier in models:
            raise ValueError(
                f"expected models with different ids, found {models[identifier]} and {path}, both "
                f"with the id {identifier!r}; choose with include= (--include)"
            )
        models[identifier] = path
    return models


def other_files_of(
    directory: str | os.PathLike[str], follow_links: FollowLinks = False
) -> tuple[dict[str, Data], tuple[str, ...]]:
    """The files of a directory that may become assets, and the names of those left out.

    Args:
        directory: The directory; hidden folders and links to folders are left out.
        follow_links: As for `open_model`.
    """
    nothing = contextlib.ExitStack()  # each file is opened when it is read
    opening = _Opening(os.fspath(directory), nothing, False, None, True, follow_links)
    with with_path(directory):
        try:
            return opening.others()
        except OutsideError as error:
            raise OutsideError(f"{error.message}, or {opening.remedy()}") from None


def _further_models(names: list[str], default: str) -> list[str]:
    """The names of the further models of an unpacked archive; empty for other sources.

    Raises:
        ArchiveFormatError: A name is reserved for later versions of the format, or further models
            exist without a default model.
    """
    if default != MODEL_PROTO:
        for name in names:
            if name.startswith(keys.FURTHER_MODEL_PREFIX):
                raise ArchiveFormatError(
                    f"expected {MODEL_PROTO} beside {name!r}, found {default!r}; give the path of "
                    "each model: 'onnxarchive convert ONE NEW.onnxa --model ID=OTHER'"
                )
        return []
    own = sorted(name for name in names if name.startswith(MODEL_PROTO[:2]) and name != MODEL_PROTO)
    keys.check_names([*own, MODEL_PROTO], Strict())
    return own


def _left_out(names: list[str], remedy: str = "") -> tuple[str, ...]:
    if not names:
        return ()
    listed = ", ".join(names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (f"left out, since no tensor names them{remedy}: {listed}{more}",)
