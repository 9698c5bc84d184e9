"""Lists what lies beside a model, and judges it by name: assets, litter, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING

from onnxarchive.model.keys import MODEL_PROTO, RESERVED_PREFIX

if TYPE_CHECKING:
    from onnxarchive.files.beneath import Root

# Files that file managers and Python add to zips and directories.
_APPLE_DOUBLE = "._"
_LITTER_FOLDERS = ("__MACOSX", "__pycache__")
_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")
# Other models with their data files, and weights in the formats of other libraries.
_WEIGHTS = (
    "*.onnx*",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.tflite",
)
_ASSETS = "assets"


def is_litter(name: str) -> bool:
    """True for litter, such as `.DS_Store`, and for files in a top-level litter folder."""
    base = name[name.rfind("/") + 1 :]
    in_folder = name.partition("/")[0] in _LITTER_FOLDERS
    return in_folder or base in _LITTER or base.startswith(_APPLE_DOUBLE)


def is_hidden(name: str) -> bool:
    """True for litter, files in litter folders at any level, and paths with a hidden component."""
    parts = name.split("/")
    return is_litter(name) or any(part.startswith(".") or part in _LITTER_FOLDERS for part in parts)


def divided(names: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Divides files into files to include and files to leave out.

    Left out are hidden files, litter, other models, files of weights, and folders that were not
    read.

    Args:
        names: Paths relative to the model's directory; a folder that was not read ends with a
            slash.
    """
    others: list[str] = []
    left_out: list[str] = []
    for name in names:
        base = name[name.rfind("/") + 1 :].lower()
        is_weights = any(fnmatchcase(base, pattern) for pattern in _WEIGHTS)
        (left_out if not base or is_hidden(name) or is_weights else others).append(name)
    return others, (*left_out,)


def models_and_assets(root: Root) -> list[str]:
    """The paths of files that may be models or assets, sorted.

    They are the files in the directory itself and below `assets`; if `__MODEL_PROTO` exists, also
    folders with names reserved for later format versions.
    """
    files, reserved = [], []
    for entry in root.scan(""):
        if _leads_to(entry.is_file):
            files.append(entry.name)
        elif entry.name == _ASSETS and _leads_to(entry.is_dir):
            paths = paths_below(root, _ASSETS, is_read=lambda _: True)
            files += [path for path in paths if not path.endswith("/")]
        elif entry.name.startswith(RESERVED_PREFIX):
            reserved.append(f"{entry.name}/")
    return sorted(files + reserved if MODEL_PROTO in files else files)


def paths_below(
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
        is_read: True for the path of a folder that is read; without it, hidden ones are not.
        max_folders: For a hint: at most this many folders are read, and those that cannot be read
            are left out.
    """
    folders = [folder]
    skipped = () if max_folders is None else (OSError,)
    for folder in islice(folders, max_folders):  # the loop appends to `folders`
        with contextlib.suppress(*skipped):
            for entry in root.scan(folder):
                path = f"{folder}/{entry.name}" if folder else entry.name
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
