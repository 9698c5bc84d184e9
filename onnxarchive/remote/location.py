"""`Location`: the source or the target of a function, local or remote."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict, Unpack

from onnxarchive.errors import UnsupportedFeatureError, quoted
from onnxarchive.files.data import Buffer, File, as_bytes
from onnxarchive.files.file import BinaryFile, MemoryFile, SupportsSeek
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import require_no_tilde
from onnxarchive.files.progress import Progress
from onnxarchive.remote.urls import Address, is_url, local_path, misspelled_url, url_without_secrets

if TYPE_CHECKING:
    from onnxarchive.remote.downloads import Read

_DIGEST: Final = re.compile("[0-9a-fA-F]{64}")

# A path, a URL, the bytes of an archive, or a seekable binary file object.
Openable: TypeAlias = str | os.PathLike[str] | Buffer | SupportsSeek


class Access(TypedDict, total=False):
    """Options for reaching remote archives; see `onnxarchive.open`.

    Local files ignore them, except that a digest is refused if nothing would be compared with it.
    """

    store: Any
    storage_options: Mapping[str, Any] | None
    cache: str | os.PathLike[str] | bool | None
    cache_progress: Progress | None
    sha256: str | None


def require_known(options: Iterable[str], known: Collection[str]) -> None:
    """Refuses options with unknown names, such as misspelled arguments, by a TypeError."""
    for name in options:
        if name not in known:
            from difflib import get_close_matches  # only this error needs it

            nearest = get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"this function has no argument {name!r}{hint}")


def normal_digest(sha256: str | None) -> str | None:
    """The SHA-256 given by a caller, in lower case; None without one."""
    if sha256 is None:
        return None
    if not isinstance(sha256, str):
        raise TypeError(f"expected a SHA-256 as a str, found {type(sha256).__name__}")
    if not _DIGEST.fullmatch(sha256):
        raise ValueError(f"expected a SHA-256 of 64 hexadecimal digits, found {quoted(sha256)}")
    return sha256.lower()


def require_no_digest(access: Access) -> None:
    """Refuses a digest, for functions that write an archive or read several."""
    if access.get("sha256") is not None:
        raise ValueError(
            "sha256=DIGEST (--sha256) is that of one archive that is read; download it first with "
            "onnxarchive.download, which takes sha256, and pass the file"
        )


def require_no_misspelled_url(path: str) -> None:
    """Refuses a path that seems to be a URL; an error about a path would show its password."""
    if (url := misspelled_url(path)) is not None:
        raise UnsupportedFeatureError(
            f"expected a path, or a URL with its scheme and '://', found {quoted(url)} in another "
            "spelling; pass a URL as a string, since pathlib changes it"
        )


def require_local_target(target: str | os.PathLike[str]) -> str:
    """The path of a target of a function that writes local files only.

    A URL other than a file URL is refused, and so is a path that begins with `~`.
    """
    path = local_path(target)
    require_no_tilde(path)
    if is_url(path):
        raise UnsupportedFeatureError(
            "expected a local path to write to, found a URL; write to a local path, then copy the "
            "result to the store",
            path=url_without_secrets(path),
        )
    require_no_misspelled_url(path)
    return path


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """A local path, a URL, a key in a store, bytes, or a file object.

    The modules and libraries for remote locations are imported when such a location is used.

    Attributes:
        source: The location as the caller gave it.
        path: The local path, also that of a file URL; None for other locations.
        url: The URL or the key; None for other locations.
        access: Options for remote locations.
    """

    source: Any
    path: str | None
    url: str | None
    access: Access

    @classmethod
    def of(cls, source: object, **access: Unpack[Access]) -> Location:
        """The location of a source or a target; a misspelled option is refused for every kind."""
        require_known(access, Access.__optional_keys__)
        location = cls._of(source, access)
        if normal_digest(access.get("sha256")) is not None:
            _require_cache(location)
        return location

    @classmethod
    def _of(cls, source: object, access: Access) -> Location:
        if not isinstance(source, str | os.PathLike):
            return cls(source, None, None, access)
        if is_url(source) or access.get("store") is not None:
            return cls(source, None, os.fspath(source), access)
        path = local_path(source)
        require_no_misspelled_url(path)
        return cls(source, path, None, access)

    def at(self, address: str | os.PathLike[str]) -> Location:
        """Another location with the same options."""
        return Location.of(address, **self.access)

    @property
    def address(self) -> str:
        """The path, the URL or the key, with secrets; others are refused."""
        address = self.path if self.url is None else self.url
        if address is None:
            raise TypeError(f"expected a path or a URL, found {type(self.source).__name__}")
        return address

    @property
    def name(self) -> str:
        """The name for messages, without secrets; `"-"` for bytes and file objects."""
        if self.url is None:
            return "-" if self.path is None else self.path
        return self.remote.name

    @property
    def remote(self) -> Address:
        """The address of a remote object."""
        access = self.access
        return Address(self.address, access.get("store"), access.get("storage_options"))

    def __repr__(self) -> str:
        return f"Location.of({self.name!r})"

    def require_local(self) -> str:
        """The path of a local file; other locations are refused."""
        if self.path is not None:
            return self.path
        kind = "a URL" if is_url(self.source) else "bytes, a file object or a path in a store"
        raise UnsupportedFeatureError(
            f"expected a local file, found {kind}; onnxarchive.download copies a remote archive to "
            "a file, and onnxarchive.save writes a changed one back",
            path=None if self.url is None else self.name,
        )

    def open(self, read: Read | None = None) -> File:
        """Opens the file, without a lock.

        Args:
            read: Opens a file as an archive, to verify one that is downloaded into a cache. None to
                download nothing; a copy in the cache is used if it is there.

        Raises:
            ImportError: The library for the URL is missing.
            TypeError: The source is of another type than `Openable`.
            ValueError: A file object is not seekable or not binary, or an option is wrong.
            OSError: The file cannot be opened.
        """
        source = self.source
        if self.path is not None:
            return MappedFile(self.path)
        cache = self.access.get("cache")
        if isinstance(cache, str | os.PathLike):
            require_local_target(cache)
        if self.url is not None and cache is not None and cache is not False:
            from onnxarchive.remote.cache import open_cached

            progress = self.access.get("cache_progress")
            sha256 = normal_digest(self.access.get("sha256"))
            return open_cached(self.remote, cache, read, progress, sha256)
        if self.url is not None:
            from onnxarchive.remote.objects import RemoteFile
            from onnxarchive.remote.origins import origin_of

            return RemoteFile(origin_of(self.remote))
        if isinstance(source, bytes | bytearray | memoryview):
            return MemoryFile(as_bytes(source))
        if hasattr(source, "read"):
            return BinaryFile(source)
        raise TypeError(
            "expected a path, a URL, bytes or a binary file object, found "
            f"{type(source).__module__}.{type(source).__qualname__}"
        )

    def open_beside(self, location: str) -> File:
        """Opens another remote file by its location, a plain path relative to this one's folder.

        Thousands of files may be open at a time, so the end of a large file is not kept in memory.
        """
        from onnxarchive.remote.objects import RemoteFile
        from onnxarchive.remote.origins import origin_of

        return RemoteFile(origin_of(self.remote.beside(location)), keeps_end=False)

    def exists(self) -> bool:
        """True if the file or the remote object exists; asks only for the object's attributes."""
        if self.url is None:
            return self.path is not None and os.path.lexists(self.path)
        from onnxarchive.remote.background import run
        from onnxarchive.remote.origins import origin_of

        origin = origin_of(self.remote)
        try:
            run(origin.name, origin.version)
        except FileNotFoundError:
            return False
        return True


def _require_cache(location: Location) -> None:
    """Refuses the digest of an archive that is not downloaded into a cache."""
    if location.url is None:
        raise ValueError(
            f"{location.name}: sha256=DIGEST (--sha256) is for remote archives, which are "
            "downloaded; compare a local file with sha256sum, or in Python with "
            "hashlib.file_digest"
        )
    if location.access.get("cache") in (None, False):
        raise ValueError(
            f"{location.name}: sha256=DIGEST (--sha256) needs cache=True (--cache), since ranges "
            "cannot be compared with it; or download the archive with onnxarchive.download, which "
            "takes sha256, too"
        )
