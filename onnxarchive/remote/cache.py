"""Cache: keeps verified copies of remote archives, as local files that processes share.

A cache is a directory, which on POSIX systems only its owner can enter. Each version of an object
has two files there, whose common name is a hash of the object's identity, and one of identity,
validator and size:

- `NAME.json`: the object's URL and version, written before the download begins; and the SHA-256 of
  the archive if a caller has compared it, so that the copy is not read again for this (not on file
  systems without locks),
- `NAME.onnxa`: the archive. It gets this name when it is complete and verified; before, it is the
  hidden file of a resumable download (see `downloads`), which only one process writes at a time.

When an archive has been downloaded, older versions of the object are removed. Processes that have a
file open, or mapped, keep it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import stat
import time
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Final, cast

from onnxarchive.errors import (
    ArchiveFormatError,
    LockedError,
    UnsupportedFeatureError,
    quoted,
    requires_library,
)
from onnxarchive.files import attributes
from onnxarchive.files.clones_and_sync import sync
from onnxarchive.files.data import File, closing_on_error
from onnxarchive.files.hidden_files import partial_path, remove_unlocked
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import open_own, require_no_tilde
from onnxarchive.files.progress import Progress
from onnxarchive.files.replacement import Replacement
from onnxarchive.remote.downloads import (
    Read,
    arrived_nbytes,
    download_object,
    require_digest,
    sha256_of,
)
from onnxarchive.remote.failures import NoRangesError
from onnxarchive.remote.objects import RemoteFile, WholeObject
from onnxarchive.remote.origins import Origin, Version, origin_of
from onnxarchive.remote.stores import STALL
from onnxarchive.remote.urls import Address, local_path, url_without_secrets

_WAIT: Final = 0.1  # seconds between two looks at the download of another process
_HASH_LENGTH: Final = 32  # hexadecimal digits of a hash in the name of a file
_NAME: Final = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.json")
# What to do if there is no copy to compare with a digest.
_DOWNLOAD: Final = "onnxarchive.download takes sha256, too, and writes a file"
_OWN_MODE: Final = 0o700
_OWN_FILE_MODE: Final = 0o600


def open_cached(
    address: Address,
    cache: str | os.PathLike[str] | bool,
    read: Read | None,
    progress: Progress | None = None,
    sha256: str | None = None,
) -> File:
    """Opens the copy of a remote archive, after downloading it if there is none.

    If there is a copy, one request without a body asks whether the object is still the same. From a
    server without ranges, the object is downloaded, too; if its versions cannot be distinguished,
    each call downloads it, and warns.

    Args:
        address: The archive.
        cache: The directory, created with mode 0700 if missing. True for the user's cache.
        read: Opens a file as an archive, to verify it. None to download nothing.
        progress: Called with the bytes that have arrived and the bytes in all.
        sha256: The digest that the archive must have, in lower case; None to compare none.

    Returns:
        The copy, whose `path` is the name of the object. Or the object itself: if there is no copy
        and `read` is None; if it is unknown which server it comes from, as in a store of the
        caller; or if its versions cannot be distinguished, since it has neither a strong ETag nor a
        version id.

    Raises:
        ArchiveFormatError: The object is not an archive, or breaks a rule; nothing is kept.
        ChecksumError: The archive has another digest. A download is not kept; a copy that existed
            before is kept, since it has the bytes of the server.
        UnsupportedFeatureError: There is a digest, and no copy to compare with it.
        ObjectChangedError: The object has changed during the download; nothing is kept.
        LockedError: Another process downloads the archive, and no byte has arrived for 30 seconds.
        PermissionError: The directory belongs to another user, or others may enter it (POSIX).
        OSError: A request failed, or the directory cannot be written, as on a full disk.
    """
    origin = origin_of(address)
    if not origin.is_lasting:
        _refuse_digest(sha256, origin.name, f"this object is not cached; {_DOWNLOAD}")
        return RemoteFile(origin)
    directory = directory_of_cache(cache)
    prefix = origin.identity[:_HASH_LENGTH]
    if read is not None:
        os.makedirs(directory, _OWN_MODE, exist_ok=True)
    copies = [copy for copy in cached_archives(directory, prefix) if copy.is_complete]
    versions = [copy.version for copy in copies if copy.version and copy.version.validator]
    remote = _object(origin, versions[0] if versions else None, read)
    key = remote.cache_key()
    if key is None and not isinstance(remote, WholeObject):
        _refuse_digest(sha256, remote.path, f"the server states no ETag; {_DOWNLOAD}")
        return remote
    if key is None:
        key = os.urandom(_HASH_LENGTH // 2).hex()  # so that no later opening takes the copy
        warnings.warn(
            f"{remote.path}: the server states no ETag, so the file is downloaded each time that "
            "it is opened",
            stacklevel=2,
        )
    path = os.path.join(directory, f"{prefix}-{key[:_HASH_LENGTH]}.onnxa")
    with contextlib.ExitStack() as opened:
        opened.enter_context(contextlib.closing(remote))
        copy = _open_copy(path, remote, read, progress, sha256)
        if copy is None:
            _refuse_digest(sha256, remote.path, f"this function makes none; {_DOWNLOAD}")
            opened.pop_all()
            return cast("RemoteFile", remote)  # since `read` is None
        if sha256 is not None:
            with closing_on_error(copy):
                _require_digest(sha256, copy, path, remote)
    copy.path = remote.path
    for older in cached_archives(directory, prefix):
        if older.path != path:
            with contextlib.suppress(OSError):  # Windows removes no open file
                _remove(older)
    return copy


def _refuse_digest(sha256: str | None, name: str, problem: str) -> None:
    """Refuses a digest if there is no copy to compare with it."""
    if sha256 is not None:
        raise UnsupportedFeatureError(
            f"there is no copy in the cache to compare with sha256; {problem}", path=name
        )


def _require_digest(
    sha256: str, copy: MappedFile, path: str, remote: RemoteFile | WholeObject
) -> None:
    """Refuses a copy with another digest; reads it only if the description has no digest yet."""
    found = None
    with contextlib.suppress(FileNotFoundError, ArchiveFormatError):  # removed; no file
        described = _cached_archive(_json_path(path)).sha256
        if copy.is_at(path):  # else the description is that of another copy
            found = described
    if found is None:
        found = sha256_of(copy)
        # In a cache that can only be read, the copy is compared again the next time.
        with contextlib.suppress(OSError, LockedError), Replacement(path, resumes=True) as download:
            # No other copy gets this path while the download is locked; without locks, one may.
            if download.is_resumable and copy.is_at(path):
                _describe(path, remote, found)
    command = shlex.join(
        ["onnxarchive", "cache", "clear", remote.path, "--cache-dir", os.path.dirname(path)]
    )
    remedy = f"compare the digest with that of the publisher; '{command}' removes this copy"
    require_digest(sha256, found, remote.path, remedy)


def _object(origin: Origin, known: Version | None, read: Read | None) -> RemoteFile | WholeObject:
    """The object; one of a server without ranges if it may be downloaded."""
    if read is None:
        return RemoteFile(origin, known)
    with contextlib.suppress(NoRangesError):
        return RemoteFile(origin, known)
    return WholeObject(origin)


def directory_of_cache(cache: str | os.PathLike[str] | bool = True) -> str:
    """The directory of a cache; True gives `onnxarchive` in the user's cache directory.

    Raises:
        OSError: The user has no home directory, as in a container, and no cache directory.
    """
    if not isinstance(cache, bool):
        require_no_tilde(cache)
        return os.path.abspath(os.fsdecode(local_path(cache)))
    with requires_library("platformdirs", "find the user's cache directory"):
        from platformdirs import user_cache_dir
    try:
        directory = user_cache_dir("onnxarchive", appauthor=False)
    except RuntimeError:  # of platformdirs; older versions return "~/.cache/onnxarchive"
        directory = ""
    if not os.path.isabs(directory):
        raise OSError(
            "there is no home directory for the user's cache; give the cache a directory: "
            "cache=DIR (--cache-dir DIR)"
        )
    return directory


def _open_copy(
    path: str,
    remote: RemoteFile | WholeObject,
    read: Read | None,
    progress: Progress | None,
    sha256: str | None,
) -> MappedFile | None:
    """Opens a copy, after downloading it if it is missing; None if it may not be downloaded.

    Waits for the download of another process while its bytes arrive.
    """
    seen, since = None, time.monotonic()
    while (copy := _complete(path, remote.size)) is None and read is not None:
        try:
            replacement = Replacement(path, resumes=True)
        except LockedError:
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                written = os.stat(partial_path(path)).st_mtime_ns
                if written != seen:
                    seen, since = written, time.monotonic()
            if time.monotonic() - since > STALL:
                raise
            time.sleep(_WAIT)
            continue
        with replacement:
            if os.path.lexists(path):  # another process has just completed it
                continue
            # A copy is verified once, so it has to survive a power failure.
            sync(replacement.file, "choose a cache on another file system")
            # Who completes the copy has described it under the same lock, so a digest of the
            # description is that of the copy, also if this process is killed. Without locks, two
            # downloads may each describe the copy of the other.
            _describe(path, remote, sha256 if replacement.is_resumable else None)
            try:
                copy = download_object(remote, replacement, read, progress, sha256)
            except ArchiveFormatError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_json_path(path))
                raise
            attributes.set_mode(copy.fileno(), path, _OWN_FILE_MODE)
        return copy
    return copy


def _complete(path: str, size: int) -> MappedFile | None:
    """Opens a complete copy; None if there is none, or one that somebody has damaged."""
    if not os.path.lexists(path):
        return None
    file = MappedFile(path, descriptor=open_own(path, _OWN_FILE_MODE))
    if file.size == size:
        with contextlib.suppress(OSError):  # removed meanwhile, perhaps
            os.utime(path)  # the time of the last use
        return file
    file.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return None


def _describe(path: str, remote: RemoteFile | WholeObject, sha256: str | None) -> None:
    """Writes the description of a copy."""
    description = {"url": remote.path, "version": asdict(remote.version), "sha256": sha256}
    with Replacement(_json_path(path)) as described:
        described.set_mode(_OWN_FILE_MODE)
        described.writer.write(json.dumps(description).encode())
        described.commit()


def _json_path(path: str) -> str:
    return path.removesuffix(".onnxa") + ".json"


def _require_private(directory: str) -> None:
    """On POSIX, refuses a directory that belongs to another user or grants others permissions."""
    status = os.stat(directory)
    mode = stat.S_IMODE(status.st_mode)
    if os.name == "posix" and (status.st_uid != os.geteuid() or mode & ~_OWN_MODE & 0o777):
        raise PermissionError(
            errno.EACCES,
            f"expected a directory of user {os.geteuid()} with mode 0700, found one of user "
            f"{status.st_uid} with mode {mode:04o}; use another directory, or change its mode",
            directory,
        )


@dataclass(frozen=True, slots=True)
class CachedArchive:
    """An archive in a cache.

    Attributes:
        path: Path of the archive; missing unless it `is_complete`.
        url: The URL of the archive, without credentials; None if its description is damaged.
        version: The version of the object; None if the description is damaged.
        present: Number of bytes that have arrived.
        used: The time of the last use, in seconds since the epoch.
        sha256: The SHA-256 of the archive; None if no caller has compared it.
    """

    path: str
    url: str | None
    version: Version | None
    present: int
    used: float
    sha256: str | None = None

    @property
    def nbytes(self) -> int:
        """The size of the archive in bytes."""
        return self.present if self.version is None else self.version.size

    @property
    def is_complete(self) -> bool:
        """True if all bytes have arrived and were verified."""
        return self.version is not None and os.path.lexists(self.path)


def cached_archives(directory: str, prefix: str = "") -> list[CachedArchive]:
    """Lists the archives of a cache whose names begin with `prefix`, the last used ones first."""
    if not os.path.lexists(directory):
        return []
    _require_private(directory)
    archives = []
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.startswith(prefix) and _NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError, ArchiveFormatError):  # removed; no file
                archives.append(_cached_archive(path))
    return sorted(archives, key=lambda archive: archive.used, reverse=True)


def _cached_archive(json_path: str) -> CachedArchive:
    with MappedFile(json_path) as file:
        used = file.status().st_mtime
        try:
            described = json.loads(file.read(0, file.size))
            url, version = str(described["url"]), Version(**described["version"])
            sha256 = described.get("sha256")
            if not isinstance(version.size, int) or version.size < 0:
                raise ValueError
            if not isinstance(sha256, str | None):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            url, version, sha256 = None, None, None
    path = json_path.removesuffix(".json") + ".onnxa"
    present = 0
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        return CachedArchive(path, url, version, status.st_size, status.st_mtime, sha256)
    if version is not None:
        with contextlib.suppress(OSError), MappedFile(partial_path(path)) as file:
            present, used = arrived_nbytes(file, version.size), file.status().st_mtime
    return CachedArchive(path, url, version, present, used, sha256)


def _remove(archive: CachedArchive) -> bool:
    """Removes an archive; False if another process is downloading it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(archive.path)
    unfinished = partial_path(archive.path)
    if os.path.lexists(unfinished) and not remove_unlocked(unfinished):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_json_path(archive.path))
    return True


def clear(directory: str, urls: Collection[str] = ()) -> list[CachedArchive]:
    """Removes archives of a cache, and returns them; files that are open can still be read.

    Archives that another process is downloading are kept.

    Args:
        directory: The directory of the cache.
        urls: URLs of the archives to remove, with all versions; if empty, all archives are removed.

    Raises:
        ValueError: A URL has no archive in the cache.
        OSError: A file cannot be removed, as on Windows while it is open.
    """
    archives = cached_archives(directory)
    shown_urls = {url_without_secrets(url) for url in urls}
    unknown = sorted(shown_urls - {archive.url for archive in archives})
    if unknown:
        raise ValueError(
            f"the cache {directory} has no archive of the URL {quoted(unknown[0])}; "
            "'onnxarchive cache list' lists those that it has"
        )
    return [
        archive
        for archive in archives
        if (not urls or archive.url in shown_urls) and _remove(archive)
    ]
