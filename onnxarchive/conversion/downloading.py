"""`download`: copies a remote archive to a local file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from onnxarchive.archive.reading import Archive
from onnxarchive.buffers.counting import Progress
from onnxarchive.errors import ArchiveFormatError, with_path
from onnxarchive.remote.cache import PartialFile
from onnxarchive.remote.objects import RemoteFile, open_object
from onnxarchive.remote.urls import shown_url
from onnxarchive.sources.recognition import recognised
from onnxarchive.storage.files import MappedFile, make_file, opened
from onnxarchive.storage.replacement import replacing

_LOCK = "lock"  # a file in the directory of a download


def download(
    url: str,
    path: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Copies a remote archive to a file, and verifies every byte.

    The file appears when it is complete and passes `Archive.verify`. The hidden directory
    `.NAME.download` beside the file keeps the bytes of an interrupted download; the next call
    resumes the download if the object has the same strong ETag or version, or else restarts it.

    Args:
        url: The archive.
        path: The file to write or replace. Or a directory: the file name then comes from the URL.
            None for the working directory.
        progress: Called with the bytes done and the bytes in all; True shows a bar.
        store: An obstore store; `url` is then a path in it.
        storage_options: As for `onnxarchive.open`.

    Returns:
        The path of the file.

    Raises:
        ArchiveFormatError: The object is not an archive, or breaks a rule.
        ChecksumError: Bytes do not match their CRC-32; the partial download is removed.
        LockedError: Another process or thread is downloading to this file.
        ObjectChangedError: The object changed during the download.
        OSError: A request failed, or the file cannot be written.
        ValueError: An option is wrong, or `path` names no file and the URL has no file name.

    Example:
        onnxarchive.download("models/model.onnxa", "copy.onnxa", store=store)
    """
    target = target_of(shown_url(url), path)
    with open_object(url, store=store, storage_options=storage_options) as remote:
        key = remote.cache_key()
        if key is None:
            _download_once(remote, target, progress)
        else:
            _download(remote, key, target, progress)
    return target


def target_of(url: str, path: str | os.PathLike[str] | None) -> str:
    """The absolute path of the file to write, without symbolic links."""
    name = unquote(url.rstrip("/").rpartition("/")[2])
    if path is None or os.path.isdir(path):
        if name in ("", os.curdir, os.pardir) or os.path.basename(name) != name:
            raise ValueError(f"{url}: expected a URL that ends with a file name; give a path, too")
        path = os.path.join(path or os.curdir, name)
    return os.path.realpath(path)


def partial_directory(target: str) -> str:
    """The hidden directory of an unfinished download."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.download")


def _download(remote: RemoteFile, key: str, target: str, progress: Progress | None) -> None:
    """Completes a partial file beside the target, verifies it and moves it to the target."""
    directory = partial_directory(target)
    os.makedirs(directory, 0o700, exist_ok=True)
    lock = os.path.join(directory, _LOCK)
    with contextlib.suppress(FileExistsError):
        make_file(lock).close()
    with (
        with_path(target),
        opened(lock, is_exclusive=True, is_writable=True, timeout=0) as locked,
        locked,
    ):
        try:
            with PartialFile(remote, key, directory) as partial, recognised(partial):
                Archive(partial).verify(progress)
                partial.move(target)
            # The other files are partial files of other versions of the object.
            for name in set(os.listdir(directory)) - {_LOCK}:
                os.unlink(os.path.join(directory, name))
        except ArchiveFormatError:
            partial.discard()
            raise
        finally:
            if os.listdir(directory) == [_LOCK]:
                with contextlib.suppress(PermissionError):  # Windows removes no open file
                    os.unlink(lock)
                    os.rmdir(directory)


def _download_once(remote: RemoteFile, target: str, progress: Progress | None) -> None:
    """Downloads an object that has no cache key, so the download cannot be resumed later."""
    with recognised(remote):  # what is not an archive is refused before it is downloaded
        Archive(remote)
    with replacing(target) as replacement, with_path(remote.path):
        for piece in remote.stream(0, remote.size):
            replacement.file.write(piece)
        with MappedFile(target, descriptor=os.dup(replacement.fileno())) as file:
            Archive(file).verify(progress)
