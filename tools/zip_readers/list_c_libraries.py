"""Reads archives with C libraries, through ctypes: zlib's minizip, and libzip.

Reads paths from standard input, one a line, and prints a line of JSON for each: the "entries" as
[name, size, CRC-32, SHA-256], or an "error". The arguments are a name in READERS, and "list" or
"extract".
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from ctypes import Structure, byref, c_char_p, c_int, c_uint64, c_ulong, c_void_p
from typing import Final, TypeAlias

Entry: TypeAlias = tuple[str, int, int, str | None]
NAME_NBYTES: Final = 1 << 15
PIECE_NBYTES: Final = 1 << 20
LIBZIP_RDONLY: Final = 16
LIBZIP_RAW_NAMES: Final = 64


class MinizipGlobal(Structure):
    """unz_global_info64."""

    _fields_ = (("entries", c_uint64), ("comment_nbytes", c_ulong))


class MinizipEntry(Structure):
    """unz_file_info64."""

    _fields_ = (
        ("before_crc32", c_ulong * 5),
        ("crc32", c_ulong),
        ("compressed_nbytes", c_uint64),
        ("nbytes", c_uint64),
        ("after_nbytes", c_ulong * 6),
        ("date", c_int * 6),
    )


class LibzipEntry(Structure):
    """zip_stat_t."""

    _fields_ = (
        ("valid", c_uint64),
        ("name", c_char_p),
        ("index", c_uint64),
        ("nbytes", c_uint64),
        ("compressed_nbytes", c_uint64),
        ("time", c_ulong),
        ("crc32", ctypes.c_uint32),
        ("methods", ctypes.c_uint16 * 2),
        ("flags", ctypes.c_uint32),
    )


def require(is_met: object, step: str) -> None:
    """Raises ValueError with the name of the failed step unless `is_met`."""
    if not is_met:
        raise ValueError(f"{step} failed")


def digest_of(read: Callable[..., int], file: c_void_p) -> str:
    """The SHA-256 of the data that `read` reads from an open entry, piece by piece."""
    digest = hashlib.sha256()
    piece = ctypes.create_string_buffer(PIECE_NBYTES)
    while (count := read(file, piece, c_uint64(PIECE_NBYTES))) > 0:
        digest.update(memoryview(piece)[:count])
    require(count == 0, "reading")
    return digest.hexdigest()


def by_minizip(path: str, extracts: bool) -> Iterator[Entry]:
    """Lists the entries of an archive; reads their data if `extracts`."""
    library = ctypes.CDLL("libminizip.so.1")
    library.unzOpen64.restype = c_void_p
    file = c_void_p(library.unzOpen64(path.encode()))
    require(file, "unzOpen64")
    try:
        archive = MinizipGlobal()
        require(library.unzGetGlobalInfo64(file, byref(archive)) == 0, "unzGetGlobalInfo64")
        for index in range(archive.entries):
            step = library.unzGoToNextFile if index else library.unzGoToFirstFile
            require(step(file) == 0, f"going to entry {index}")
            entry, name = MinizipEntry(), ctypes.create_string_buffer(NAME_NBYTES)
            described = library.unzGetCurrentFileInfo64(
                file, byref(entry), name, c_ulong(NAME_NBYTES), None, c_ulong(0), None, c_ulong(0)
            )
            require(described == 0, "unzGetCurrentFileInfo64")
            digest = None
            if extracts:
                require(library.unzOpenCurrentFile(file) == 0, "unzOpenCurrentFile")
                digest = digest_of(library.unzReadCurrentFile, file)
                require(library.unzCloseCurrentFile(file) == 0, "comparing the CRC-32")
            yield name.value.decode(), entry.nbytes, entry.crc32, digest
    finally:
        library.unzClose(file)


def by_libzip(path: str, extracts: bool) -> Iterator[Entry]:
    """Lists the entries of an archive; reads their data if `extracts`."""
    library = ctypes.CDLL("libzip.so.4")
    library.zip_open.restype = library.zip_fopen_index.restype = c_void_p
    library.zip_get_num_entries.restype = library.zip_fread.restype = ctypes.c_int64
    file = c_void_p(library.zip_open(path.encode(), LIBZIP_RDONLY, byref(c_int())))
    require(file, "zip_open")
    try:
        for index in map(c_uint64, range(library.zip_get_num_entries(file, 0))):
            entry = LibzipEntry()
            described = library.zip_stat_index(file, index, LIBZIP_RAW_NAMES, byref(entry))
            require(described == 0, "zip_stat_index")
            digest = None
            if extracts:
                data = c_void_p(library.zip_fopen_index(file, index, 0))
                require(data, "zip_fopen_index")
                digest = digest_of(library.zip_fread, data)
                require(library.zip_fclose(data) == 0, "zip_fclose")
            yield entry.name.decode(), entry.nbytes, entry.crc32, digest
    finally:
        library.zip_discard(file)


READERS: Final = {"minizip": by_minizip, "libzip": by_libzip}


def main() -> None:
    """Prints a line for each path of standard input."""
    reader, extracts = READERS[sys.argv[1]], sys.argv[2] == "extract"
    for line in sys.stdin:
        try:
            found: dict[str, object] = {"entries": list(reader(line.rstrip("\n"), extracts))}
        except (ValueError, OSError) as error:
            found = {"error": str(error)}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
