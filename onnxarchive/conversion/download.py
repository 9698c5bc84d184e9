"""`download`: copies a remote archive to a local file."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import unquote

from onnxarchive.errors import with_path
from onnxarchive.files.paths import require_file_names
from onnxarchive.files.progress import Progress
from onnxarchive.files.replacement import Replacement
from onnxarchive.reading.archive import open_recognised
from onnxarchive.remote.downloads import download_object
from onnxarchive.remote.location import (
    normal_digest,
    require_local_target,
    require_no_misspelled_url,
)
from onnxarchive.remote.objects import open_to_download
from onnxarchive.remote.origins import origin_of
from onnxarchive.remote.urls import Address, local_path


def download(
    url: str,
    path: str | os.PathLike[str] | None = None,
    *,
    progress: Progress | None = None,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    sha256: str | None = None,
) -> str:
    """Copies a remote archive to a file, and verifies every byte.

    The file appears when it is complete and passes `Archive.verify`. If the old file is being
    edited, the call waits. The hidden file `.NAME.download` beside the file keeps the bytes of an
    interrupted download. The next call resumes the download if the object has the same strong ETag
    or version, or else restarts it.

    Some downloads always restart: on a file system without locks, from an object that
    `onnxarchive.open` would not cache, and from a server that does not answer requests for ranges
    of bytes; a UserWarning then says so.

    Args:
        url: The archive.
        path: The file to write or replace, or a directory: the file name then comes from the path
            of the URL. None means the working directory.
        progress: As in `save`.
        store: An obstore store; `url` is then a path in it.
        storage_options: As in `open`.
        sha256: The SHA-256 of the file, 64 hexadecimal digits, as `sha256sum` prints it, compared
            before the file appears; None to compare none.

    Returns:
        The path of the file.

    Raises:
        ArchiveFormatError: The object is not an archive, or breaks a rule.
        ChecksumError: Bytes do not match their CRC-32, or the file does not match `sha256`; the
            partial download is removed.
        FileExistsError: `path` is not a regular file; the partial file is not one, belongs to
            another user or has a second name; or a name that comes from the URL is a link.
        LockedError: Another process or thread is downloading to this file, or edits the old file
            for more than 30 seconds; the partial download is kept.
        UnsupportedFeatureError: `path` is a URL; or on Windows, the name that comes from the URL is
            not allowed for a file.
        ObjectChangedError: The object changed during the download; the partial download is removed.
        OSError: A request failed, or the file cannot be written. If the disk has too little free
            space, the error is raised before the download begins.
        ValueError: An option is wrong, `path` begins with `~`, or `path` names no file and the URL
            has no file name.

    Example:
        onnxarchive.download("models/model.onnxa", "copy.onnxa", store=store)
    """
    sha256 = normal_digest(sha256)
    if store is None:
        url = local_path(url)
        require_no_misspelled_url(url)
    address = Address(url, store, storage_options)
    path = path_of(address, path)
    origin = origin_of(address)
    with (
        Replacement(path, resumes=True) as replacement,
        closing(open_to_download(origin)) as remote,
    ):
        download_object(remote, replacement, open_recognised, progress, sha256).close()
    return os.path.realpath(path)


def path_of(address: Address, path: str | os.PathLike[str] | None) -> str:
    """The path of the file to write, for the address of the archive and `download`'s `path`."""
    if path is not None:
        path = require_local_target(path)
    if path is None or os.path.isdir(path):
        name = address.name.rstrip("/").rpartition("/")[2]
        if address.store is None and address.is_web:
            name = unquote(name)
        if name in ("", os.curdir, os.pardir) or os.path.basename(name) != name or "\0" in name:
            raise ValueError(
                f"{address.name}: the URL does not end with a file name; give a path, too"
            )
        with with_path(address.name):
            require_file_names([name])
        path = os.path.join(path or os.curdir, name)
        if os.path.islink(path):  # perhaps somebody else's, who wants another file overwritten
            problem = (
                "the name that comes from the URL is a symbolic link; give its path to follow it"
            )
            raise FileExistsError(errno.EEXIST, problem, path)
    return os.fspath(path)
