"""Opens models of other tools, recognised by content.

A source has a model whose large tensors are external, and a `Data` object for each of these
tensors. The bytes are read later, while an archive is written. A large tensor inside a `.onnx`
becomes external, too: its `Data` object reads a span of the `.onnx`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import PurePosixPath
from typing import Final, TypeAlias

from onnxarchive.errors import ArchiveFormatError, Strict, quoted_names, with_path
from onnxarchive.files.data import Data, File, Range
from onnxarchive.files.data_files import DataFiles
from onnxarchive.files.file import MemoryFile
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import OutsideError, Root, final_path, from_utf8, in_utf8
from onnxarchive.model import keys
from onnxarchive.model.keys import ASSET_PREFIX, MODEL_PROTO, RESERVED_PREFIX
from onnxarchive.model.tensors import TensorRef
from onnxarchive.remote.location import Location
from onnxarchive.sources import compiled
from onnxarchive.sources.finder import Finder
from onnxarchive.sources.recognition import (
    MODEL_SUFFIX,
    is_hidden,
    is_left_out,
    is_litter,
    is_model_name,
)
from onnxarchive.sources.source import CompiledBinary, Source
from onnxarchive.sources.zip_file import read_zip

# A further directory into which symbolic links may lead; True for the model's folder `models--*`
# of a Hugging Face cache; False for no further directory.
FollowLinks: TypeAlias = bool | str | os.PathLike[str]

# In a Hugging Face cache, a model is a directory `models--ORGANISATION--NAME`. The files of a
# revision, below `snapshots/REVISION/`, are symbolic links to the files in `blobs/`.
SNAPSHOTS: Final = "snapshots"
_CACHED_PREFIX = "models--"
_REVISION_LEVELS = 2  # from the directory of a model down to the directory of a revision
_ASSETS = "assets"
_MAX_LISTED = 20
# The end of the names of files with a model in another precision, as exporters name them.
_PRECISION: Final = re.compile(
    "_(fp16|fp32|bf16|u?int[48]|q4|q4f16|q8|bnb4|quantized|o[1-4])$", re.IGNORECASE
)
_MAX_SEARCHED = 1000  # folders in which models are looked for to name them in a message
_MODEL = f"model ({MODEL_PROTO} or a file named *{MODEL_SUFFIX})"
_REMEDY = "; other_files=True (--assets) adds them as assets"
_NOT_SEARCHED = (
    "other files are not looked for beside a remote .onnx: name them as assets, or convert a copy "
    "of its directory"
)
# What else to do about a link that leads out of the directory of a source.
_FOLLOW_CACHE = (
    "convert with follow_links=True (--follow-links): the model is in a Hugging Face cache"
)
_FOLLOW_DIRECTORY = (
    "convert with follow_links=DIRECTORY (--follow-links DIRECTORY) to allow links to files "
    "below DIRECTORY"
)


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads the source of one model of another tool; see `onnxarchive.convert`.

    Each method raises:
        ArchiveFormatError: The file is not a model, or external data is missing, too short, outside
            the model's directory, or different from its `checksum`. The error names every faulty
            tensor. If symbolic links lead out of the directory, the error names only the first
            tensor with such a link.
        UnsupportedFeatureError: A zip has an unsupported feature, such as encryption.
        ValueError: A directory has several models; the error lists them.
        OSError: The model or a directory cannot be opened.

    Attributes:
        verify_checksum, follow_links, size_threshold: As for `convert`; a `size_threshold` of None
            is one that depends on an archive.
        other_files: True to include the other files of a zip, and not to warn about those of a
            directory, which `add_others` includes.
        tree: The directory in which the model was found, out of which no link in its path may lead,
            unless `follow_links` allows it; None for a model that the caller has named.
        temporary: The directory for temporary files; None for the system's.
        find_in_archive: Called if the location of a tensor names no file; returns the tensor's
            bytes or raises ArchiveFormatError.
    """

    verify_checksum: bool = False
    other_files: bool = False
    follow_links: FollowLinks = False
    size_threshold: int | None = None
    tree: str | None = None
    temporary: str | None = None
    find_in_archive: Callable[[TensorRef], Data] | None = None

    def require_in_tree(self, file: MappedFile) -> None:
        """Refuses the open file of a model outside `tree`, before anything of it is read."""
        self._require_in_tree(file.path, final_path(file.fileno(), file.absolute_path))

    def _require_in_tree(self, path: str, target: str) -> None:
        """Refuses a model at `path` whose path without links, `target`, is outside `tree`."""
        if self.tree is None:
            return
        tree, beside = Root(self.tree), self._root(os.path.dirname(path) or os.curdir)
        tree.linked, tree.remedy = beside.linked, beside.remedy
        tree.require_inside(target, os.path.relpath(path, self.tree))

    def read_onnx(self, file: MappedFile, data_files: DataFiles) -> Source:
        """The source in a `.onnx` with external data in its directory or below.

        `data_files` opens its data files, which the caller closes.
        """
        directory, name = os.path.split(file.path)
        root, files = self._directory(directory or os.curdir, data_files)
        if not file.is_at(os.path.join(root.path, name)):
            raise ArchiveFormatError(
                "the directory of the model was replaced while the model was opened; try again"
            )
        (source,) = files.read_models([file])
        source.compiled = files.look_for(source.compiled)
        source.directory = root.path
        source.files = (file.path, *_paths(root, files))
        return source

    def read_remote(self, model: memoryview, open_file: Callable[[str], File | None]) -> Source:
        """The source in a copy of a remote `.onnx`, whose data files `open_file` opens."""
        files = self._finder(open_file)
        (source,) = files.read_models([MemoryFile(model)])
        if self.other_files:
            source.warnings += (_NOT_SEARCHED,)
        source.compiled = tuple(
            [CompiledBinary(path, compiled.BESIDE_REMOTE) for path, _ in source.compiled]
        )
        return source

    def read_directory(self, path: str, data_files: DataFiles) -> Source:
        """The source in a directory: the files of one model or of an unpacked archive.

        `data_files` opens its files, which the caller closes.
        """
        root, files = self._directory(path, data_files)
        self._require_in_tree(path, root.path)
        names = [name for name in _models_and_assets(root) if not is_litter(name)]
        model = _only_of_directory(path, root, names)
        source = self._whole(files, model, names)
        source.directory = root.path
        source.files = _paths(root, files)
        return source

    def read_zip(self, view: memoryview) -> Source:
        """The source in a zip, whose files may all be in one folder; see `read_directory`."""
        entries, notes = read_zip(view, self.temporary)
        names = [name for name in entries if not is_litter(name)]
        model = _only_of_zip(names)
        folder = model[: model.rfind("/") + 1]
        inside = [name for name in names if name.startswith(folder)]
        found = {name.removeprefix(folder): entries[name] for name in inside}
        files = self._finder(found.get)
        source = self._whole(files, model.removeprefix(folder), sorted(found))
        outside = sorted(entries.keys() - {*inside})
        if self.other_files:
            binaries = {binary.path for binary in source.compiled if binary.fault is None}
            _add_others(source, files, found.keys() - files.found, binaries)
            source.left_out += (*outside,)
        else:
            notes += _left_out(outside)
        source.warnings = (*notes, *source.warnings)
        return source

    def add_others(
        self,
        source: Source,
        directory: str,
        used: Iterable[str],
        models: Iterable[Source],
        data_files: DataFiles,
    ) -> None:
        """Adds the other files of a directory to a source: all except those at the paths `used`.

        Used files are not added under other names either, such as those of hard links. The compiled
        binaries of the models in the directory are added whatever their names. `data_files` opens
        the files.
        """
        with with_path(directory):
            root, files = self._directory(directory, data_files)
            identities = {_identity(path) for path in used}
            others = [
                name
                for name in _paths_below(root)
                if _identity(root.joined(name)) not in identities
            ]
            _add_others(source, files, others, compiled.paths_below(root.path, models))
            source.files += _paths(root, files)

    def _directory(self, path: str, data_files: DataFiles) -> tuple[Root, Finder]:
        """A directory with the links that are allowed, and the finder of its files."""
        root = self._root(path)
        return root, self._finder(partial(_open_beneath, data_files, root))

    def _root(self, path: str) -> Root:
        """A directory with the links that are allowed."""
        root, follow_links = Root(path), self.follow_links
        cached = cached_model(root.path)
        if follow_links is True:
            root.linked = cached
        elif follow_links is not False:
            root.linked = Root(Location.of(follow_links).require_local()).path
        root.remedy = _FOLLOW_CACHE if cached and follow_links is False else _FOLLOW_DIRECTORY
        return root

    def _finder(self, open_file: Callable[[str], File | None]) -> Finder:
        return Finder(open_file, self.verify_checksum, self.size_threshold, self.find_in_archive)

    def _whole(self, files: Finder, name: str, names: list[str]) -> Source:
        """The source of the model `name`; further models and assets are found in `names`."""
        further_names = _further_models(names, name)
        source, *further = files.read_models([*map(files.listed_file, (name, *further_names))])
        source.further = dict(zip(map(keys.model_id, further_names), further, strict=True))
        binaries = [binary for model in (source, *further) for binary in model.compiled]
        assets = [path for path in names if path.startswith(ASSET_PREFIX)]
        assets = [path for path in assets if path not in files.found]
        keys.check_names([*assets, MODEL_PROTO], Strict())
        source.assets = {
            path.removeprefix(ASSET_PREFIX): Range.whole(files.listed_file(path)) for path in assets
        }
        # Looked for after the assets were listed, of which some may be these files. Those of the
        # further models are in the same folder.
        source.compiled = files.look_for(binaries)
        for model in further:
            model.compiled = ()
        if not self.other_files:
            named = {*files.found, *(binary.path for binary in source.compiled)}
            unused = [path for path in names if path not in named]
            source.warnings += _left_out(unused, _REMEDY)
        return source


def _models_and_assets(root: Root) -> list[str]:
    """The paths of files that may be models or assets, sorted.

    They are the files in the directory itself and below `assets`; if `__MODEL_PROTO` exists, also
    folders with names reserved for later format versions.
    """
    files, reserved = [], []
    for entry in root.scan(""):
        name = in_utf8(entry.name)
        if _leads_to(entry.is_file):
            files.append(name)
        elif name == _ASSETS and _leads_to(entry.is_dir):
            paths = _paths_below(root, _ASSETS, is_read=lambda _: True)
            files += [path for path in paths if not path.endswith("/")]
        elif name.startswith(RESERVED_PREFIX):
            reserved.append(f"{name}/")
    return sorted(files + reserved if MODEL_PROTO in files else files)


def _paths_below(
    root: Root,
    folder: str = "",
    *,
    is_read: Callable[[str], bool] = lambda path: not is_hidden(f"{path}/"),
    max_folders: int | None = None,
) -> Iterator[str]:
    """Yields the paths of files and, ending with a slash, of links to folders and folders not read.

    Args:
        root: The directory.
        folder: The folder to begin with.
        is_read: True for the path of a folder to read; by default for those that are not hidden.
        max_folders: At most this many folders are read, without those that cannot be; for a hint.
    """
    folders = [folder]
    skipped = () if max_folders is None else (OSError,)
    for folder in islice(folders, max_folders):  # the loop appends to `folders`
        with contextlib.suppress(*skipped):
            for entry in root.scan(folder):
                name = in_utf8(entry.name)
                path = f"{folder}/{name}" if folder else name
                if not _leads_to(entry.is_dir):
                    yield path
                elif entry.is_symlink() or not is_read(path):
                    yield f"{path}/"
                else:
                    folders.append(path)


def _leads_to(is_kind: Callable[[], bool]) -> bool:
    """The result of `is_file` or `is_dir` of a directory entry; False if the call fails."""
    try:
        return is_kind()
    except OSError:  # such as a loop of links; opening the entry reports this
        return False


def _open_beneath(data_files: DataFiles, root: Root, path: str) -> File | None:
    """Opens a file of a directory for `Finder`; links are followed if `root` allows it."""
    try:
        return data_files.open(path, root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OutsideError:
        raise
    except ArchiveFormatError as error:
        raise ArchiveFormatError(f"{error.message} at {path!r}") from None
    except OSError as error:
        raise ArchiveFormatError(f"cannot read {path!r}: {error.strerror}") from None


def cached_model(path: str) -> str | None:
    """The directory of the cached model that has `path`, absolute and without links, in a revision.

    None if `path` is in no revision of a cached model.
    """
    parts = path.split(os.sep)
    for levels in range(_REVISION_LEVELS, len(parts)):
        if parts[-levels] == SNAPSHOTS and parts[-levels - 1].startswith(_CACHED_PREFIX):
            return os.sep.join(parts[:-levels])
    return None


def is_cached_model(path: str, folders: Iterable[str]) -> bool:
    """True if `path`, a directory that contains `folders`, is a model's directory in a cache."""
    name = os.path.basename(os.path.abspath(path))
    return SNAPSHOTS in folders and name.startswith(_CACHED_PREFIX)


def _paths(root: Root, files: Finder) -> tuple[str, ...]:
    """The paths of the files of a directory that were found so far."""
    return tuple(map(root.joined, files.found))


def _identity(path: str) -> object:
    """A value that all paths of one file share; the path itself if it leads to no file."""
    with contextlib.suppress(OSError):  # opening the file reports this
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return path


def _add_others(
    source: Source, files: Finder, names: Iterable[str], binaries: Collection[str]
) -> None:
    """Adds other files to a source, as assets or as files that are left out.

    `binaries` are the paths of compiled binaries, which are added whatever their names.
    """
    left_out: list[str] = []
    below_assets = {ASSET_PREFIX + path for path in source.assets}
    for name in sorted({*names, *binaries}):
        if name not in binaries and is_left_out(name):
            left_out.append(name)
            continue
        if name in binaries and name in below_assets:
            continue
        path = name.removeprefix(ASSET_PREFIX)
        if path in source.assets:
            raise ArchiveFormatError(
                f"{path!r} and {ASSET_PREFIX + path!r} are both the asset {path!r}; remove one of "
                "them"
            )
        source.assets[path] = Range.whole(files.listed_file(name))
        source.others += (path,)
    source.left_out = tuple(left_out)
    asset_names = [ASSET_PREFIX + path for path in source.assets]
    keys.check_names([*asset_names, MODEL_PROTO], Strict())


def _uppermost(names: list[str]) -> list[str]:
    """The names of models at the smallest folder depth."""
    depth = min((name.count("/") for name in names), default=0)
    return [name for name in names if name.count("/") == depth]


def _only_of_zip(names: list[str]) -> str:
    """The only model at the smallest folder depth among the names of files in a zip."""
    models = _uppermost([name for name in names if is_model_name(name)])
    if len(models) > 1:
        raise ArchiveFormatError(
            f"expected one {_MODEL}, found {quoted_names(models)}; 'onnxarchive convert ONE.onnx "
            "NEW.onnxa --model ID=OTHER.onnx' packs several models, and --all-models those of a "
            "directory"
        )
    if not models:
        raise ArchiveFormatError(f"there is no {_MODEL}")
    return models[0]


def _only_of_directory(path: str, root: Root, names: list[str]) -> str:
    """The only model at the smallest folder depth among the names of files in a directory.

    Raises:
        ValueError: There are several, or others in folders below; the error lists them.
        ArchiveFormatError: There is none.
    """
    uppermost = _uppermost([name for name in names if is_model_name(name)])
    if len(uppermost) == 1:
        return uppermost[0]
    models = [*map(PurePosixPath, _models_below(root, _MAX_SEARCHED))]
    if not models:
        raise ArchiveFormatError(f"there is no {_MODEL}")
    where = "" if uppermost else " in folders below"
    count = f"{len(models):,}{where}"
    lines = [f"{path}: expected one {_MODEL}, found {count} (bytes with their data):"]
    lines += [f"{_nbytes_with_data(root, model):>17,}  {model}" for model in models[:_MAX_LISTED]]
    if len(models) > _MAX_LISTED:
        lines.append(f"and {len(models) - _MAX_LISTED:,} more")
    one = shlex.quote(os.path.join(path, *map(from_utf8, models[0].parts)))
    lines.append(f"'onnxarchive convert {one} NEW.onnxa' converts one of them")
    raise ValueError("\n".join([*lines, _command_for_all(path, root, models)]))


def _nbytes_with_data(root: Root, model: PurePosixPath) -> int:
    """The size of a model and of the files that exporters name after it, as `model.onnx_data`."""
    nbytes = 0
    with contextlib.suppress(OSError):  # it may have been removed
        for entry in root.scan("" if len(model.parts) == 1 else str(model.parent)):
            if in_utf8(entry.name).startswith(model.name) and _leads_to(entry.is_file):
                nbytes += entry.stat().st_size
    return nbytes


def _command_for_all(path: str, root: Root, models: list[PurePosixPath]) -> str:
    """The command that makes one archive of all models of a directory, or one of each."""
    name = shlex.quote(path)
    first = next((model for model in models if not _PRECISION.search(model.stem)), models[0])
    include = f"*{MODEL_SUFFIX}" if _PRECISION.search(first.stem) else None
    for default in (None, str(first)):
        try:
            repository = _repository(path, root.path, models, default, include)
        except (ValueError, ArchiveFormatError):
            continue
        command = f"onnxarchive convert {name} NEW.onnxa --all-models"
        command += "" if default is None else f" --default {shlex.quote(default)}"
        command += "" if include is None else f" --include {shlex.quote(include)}"
        if not repository.left_out:
            return f"'{command} --assets' converts all of them to one archive"
        return (
            f"'{command} --assets' converts {len(repository.models)} of them to one archive, "
            "without further precisions (--include PATTERN chooses others)"
        )
    return f"'onnxarchive convert {name} --output-dir NEW' makes an archive of each"


def _models_below(root: Root, max_folders: int | None = None) -> list[str]:
    """The models in a directory and in folders below it; see `_paths_below`."""
    paths = _paths_below(root, max_folders=max_folders)
    return sorted(path for path in paths if is_model_name(path) and not is_litter(path))


@dataclass(frozen=True, slots=True)
class Repository:
    """The models in a directory and below it.

    Attributes:
        path: The path of the directory.
        directory: The same, without links.
        models: The path of each model that becomes one of the archive, by its id.
        left_out: The other models: their paths in the directory, sorted.
    """

    path: str
    directory: str
    models: Mapping[str, str]
    left_out: tuple[str, ...]


def models_of_repository(
    directory: str | os.PathLike[str],
    default: str | None = None,
    include: str | Collection[str] | None = None,
) -> Repository:
    """Finds the models in a directory and below it, and gives them ids.

    An id is the file's name without `.onnx`, in lower case, with `_` for other characters than
    letters and digits.

    Args:
        directory: The directory.
        default: The model that gets the id `""`: its path in the directory, or its file's name with
            or without `.onnx`. None means `model.onnx`, or the only model.
        include: A pattern of file names, such as `*_fp16.onnx`, or several. None means `*.onnx`
            without the files of further precisions, such as `model_fp16.onnx`.

    Raises:
        ValueError: Two models get the same id, no model or several are the default one, or a file
            name gives no id.
        ArchiveFormatError: There is no model.
    """
    root = Root(os.fspath(directory))
    below = [*map(PurePosixPath, _models_below(root))]
    return _repository(os.fspath(directory), root.path, below, default, include)


def _repository(
    directory: str,
    real_directory: str,
    below: list[PurePosixPath],
    default: str | None,
    include: str | Collection[str] | None,
) -> Repository:
    """As `models_of_repository`, given the paths of the models below a directory.

    `real_directory` is the path of the directory without links.
    """
    paths = _chosen(below, include)
    chosen = _default(paths, default, directory)
    models = {"": os.path.join(directory, *map(from_utf8, chosen.parts))}
    for file in paths:
        if file == chosen:
            continue
        identifier = re.sub("[^a-z0-9]", "_", file.stem.lower())
        path = os.path.join(directory, *map(from_utf8, file.parts))
        if not keys.is_model_id(identifier):
            raise ValueError(f"{path}: expected a file name that gives {keys.MODEL_ID}; rename it")
        if identifier in models:
            raise ValueError(
                f"{models[identifier]} and {path} would both get the id {identifier!r}; choose "
                "with include=PATTERN (--include PATTERN)"
            )
        models[identifier] = path
    in_archive = {*paths}
    left_out = tuple([str(path) for path in below if path not in in_archive])
    return Repository(directory, real_directory, models, left_out)


def _chosen(
    below: Iterable[PurePosixPath], include: str | Collection[str] | None
) -> list[PurePosixPath]:
    """The models below a directory that become models of the archive."""
    onnx_files = [path for path in below if path.suffix.lower() == MODEL_SUFFIX]
    if include is None:
        usual = [path for path in onnx_files if path.suffix == MODEL_SUFFIX]
        paths = [path for path in usual if not _PRECISION.search(path.stem)]
    else:
        patterns = [include] if isinstance(include, str) else include
        paths = [path for path in onnx_files if any(fnmatchcase(path.name, it) for it in patterns)]
    if paths:
        return paths
    names = quoted_names(map(str, onnx_files))
    hint = ""
    if onnx_files and include is None:
        hint = f"; {names} become models only if a pattern of --include matches them"
    elif onnx_files:
        hint = f"; {names} match no pattern of --include"
    raise ArchiveFormatError(f"there is no file named *{MODEL_SUFFIX}{hint}")


def _default(paths: list[PurePosixPath], default: str | None, directory: str) -> PurePosixPath:
    """The one of the models that gets the id `""`."""
    wanted = "model.onnx" if default is None else default
    defaults = [path for path in paths if wanted == str(path)]
    defaults = defaults or [path for path in paths if wanted in (path.name, path.stem)]
    if default is None and len(paths) == 1:
        defaults = paths
    if len(defaults) != 1:
        raise ValueError(
            f"{directory}: expected one default model {wanted!r} among "
            f"{quoted_names(map(str, paths))}, found {len(defaults)}; name it with default=NAME "
            "(--default NAME)"
        )
    return defaults[0]


def _further_models(names: list[str], default: str) -> list[str]:
    """The names of the further models of an unpacked archive; empty for other sources."""
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
