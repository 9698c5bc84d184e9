"""Reads archives with other zip readers through one interface.

Each reader gives the name, size and CRC-32 that it lists for each entry, and the SHA-256 of the
data that it extracts. Every complaint is an error: a nonzero exit status, a wrong CRC-32, or output
on standard error. `READERS` states the known limits of each reader. The readers that are programs
in tools/zip_readers read many archives in one process.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

DIRECTORY: Final = Path(__file__).resolve().parent
ENVIRONMENT: Final = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC"}
# Seconds; enough for an archive of 4 GiB, or for hundreds of small archives.
TIMEOUT: Final = 600
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Extracted:
    """An entry as a reader lists and extracts it.

    Attributes:
        name: The listed name.
        nbytes: The listed size.
        crc32: The listed CRC-32; None if the reader lists none.
        sha256: Hexadecimal SHA-256 of the extracted data; None if no data was extracted.
    """

    name: str
    nbytes: int
    crc32: int | None
    sha256: str | None


# Name, size and CRC-32 of each entry, in the listed order.
Listing: TypeAlias = list[tuple[str, int, int | None]]


class ReaderError(Exception):
    """A reader failed or gave contradictory results; the message describes the fault."""


Outcome: TypeAlias = list[Extracted] | ReaderError
# Reads archives one after another; also extracts them if a directory is given.
ReadAll: TypeAlias = Callable[[Sequence[Path], "Path | None"], Iterator[Outcome]]


@dataclass(frozen=True)
class Limit:
    """A kind of archive that a reader cannot read correctly.

    Attributes:
        reason: Why the reader fails.
        applies: Takes the entries of an archive; returns True if the archive is of this kind.
    """

    reason: str
    applies: Callable[[Sequence[Extracted]], bool]


@dataclass(frozen=True)
class Reader:
    """A zip reader.

    Attributes:
        name: The reader's key in `READERS`.
        program: Required command, or None.
        read_all: Reads archives one after another.
        package: Required npm package, or None.
        library: Required shared library, or None.
        module: Required Perl module, or None.
        hides_crc32: Why the reader lists no CRC-32s; None if the reader lists CRC-32s.
        limits: Kinds of archives that the reader cannot read correctly.
    """

    name: str
    program: str | None
    read_all: ReadAll
    package: str | None = None
    library: str | None = None
    module: str | None = None
    hides_crc32: str | None = None
    limits: tuple[Limit, ...] = ()

    def missing(self) -> str | None:
        """Sentence about a missing program, package, library or module; None if none is missing."""
        if self.program is not None and shutil.which(self.program) is None:
            return f"{self.program} is not installed"
        if self.package is not None and not (DIRECTORY / "node_modules" / self.package).exists():
            return f"{self.package} is not installed (npm install --prefix {DIRECTORY})"
        if self.library is not None and not _can_be_loaded(self.library):
            return f"{self.library} is not installed"
        if (
            self.module is not None
            and subprocess.run(
                ["perl", f"-M{self.module}", "-e1"], capture_output=True, check=False
            ).returncode
        ):
            return f"{self.module} is not installed"
        return None

    def is_installed(self) -> bool:
        """True if all requirements of the reader are installed."""
        return self.missing() is None

    def read(self, path: Path, scratch: Path | None) -> list[Extracted]:
        """Lists and extracts one archive.

        Args:
            path: The archive.
            scratch: Existing directory for extracted files, which are removed afterwards. None to
                extract no files: the archive is listed, and tested if the reader has a test.

        Raises:
            ReaderError: The reader failed or complained.
        """
        (outcome,) = self.read_all([path], scratch)
        if isinstance(outcome, ReaderError):
            raise outcome
        return outcome


def _can_be_loaded(library: str) -> bool:
    """True if a shared library is installed."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# Readers that extract to files, one archive at a time


def output_of(*command: str | Path, piped: Path | None = None) -> str:
    """Runs a command and returns its standard output.

    Args:
        *command: The command.
        piped: File to send to the command through a pipe; None for no input.

    Raises:
        ReaderError: The exit status is not 0, standard error is not empty, or time ran out.
    """
    arguments = [str(part) for part in command]
    source = None
    if piped is not None:
        source = subprocess.Popen(["cat", piped], stdout=subprocess.PIPE)
    try:
        done = subprocess.run(
            arguments,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL if source is None else source.stdout,
            capture_output=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReaderError(f"{arguments[0]} took more than {TIMEOUT} s") from None
    finally:
        if source is not None and source.stdout is not None:
            source.stdout.close()
            source.wait()
    output = done.stdout.decode(errors="backslashreplace")
    errors = done.stderr.decode(errors="backslashreplace")
    if done.returncode or errors:
        raise ReaderError(
            f"{arguments}: status {done.returncode}\n{output[-2000:]}{errors[-2000:]}"
        )
    return output


def require(is_met: bool, expectation: str, found: str) -> None:
    """Raises ReaderError unless `is_met`."""
    if not is_met:
        raise ReaderError(f"expected {expectation}, found:\n{found[-2000:]}")


def by_zipfile(path: Path, directory: Path | None) -> Listing:
    """Python's zipfile."""
    try:
        with zipfile.ZipFile(path) as opened:
            damaged = opened.testzip()
            require(damaged is None, "every CRC-32 to match", str(damaged))
            require(opened.comment == b"", "no comment", repr(opened.comment))
            if directory is not None:
                opened.extractall(directory)
            return [(info.filename, info.file_size, info.CRC) for info in opened.infolist()]
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ReaderError(str(error)) from error


def by_unzip(path: Path, directory: Path | None) -> Listing:
    """Info-ZIP's unzip."""
    # unzip takes the name of an archive as a pattern.
    archive = glob.escape(str(path))
    tested = output_of("unzip", "-t", archive)
    require("No errors detected" in tested, "no errors", tested)
    if directory is not None:
        output_of("unzip", "-q", archive, "-d", directory)
    lines = re.findall(
        r"^ *(\d+)  Stored +\d+ +0% [-0-9]+ [:0-9]+ ([0-9a-f]{8})  (.+)$",
        output_of("unzip", "-v", archive),
        re.MULTILINE,
    )
    return [(name, int(size), int(crc, 16)) for size, crc, name in lines]


def by_7z(path: Path, directory: Path | None) -> Listing:
    """7-Zip."""
    tested = output_of("7z", "t", path)
    require("Everything is Ok" in tested, "that everything is ok", tested)
    require("Warning" not in tested, "no warning", tested)
    if directory is not None:
        output_of("7z", "x", f"-o{directory}", path)
    # The details begin after a line that consists of 10 dashes.
    _, details = output_of("7z", "l", "-slt", path).split("\n----------\n", 1)
    listing: Listing = []
    for block in details.strip().split("\n\n"):
        fields = dict(line.split(" = ", 1) for line in block.split("\n") if " = " in line)
        crc = int(fields["CRC"], 16) if fields.get("CRC") else None
        listing.append((fields["Path"], int(fields["Size"]), crc))
    return listing


def by_bsdtar(path: Path, directory: Path | None) -> Listing:
    """Runs libarchive's bsdtar on the file: bsdtar reads the directory."""
    if directory is not None:
        output_of("bsdtar", "-xf", path, "-C", directory)
    return _bsdtar_listing(output_of("bsdtar", "-tvf", path))


def by_bsdtar_from_a_pipe(path: Path, directory: Path | None) -> Listing:
    """Runs libarchive's bsdtar on a pipe: bsdtar reads local headers only."""
    if directory is not None:
        output_of("bsdtar", "-xf", "-", "-C", directory, piped=path)
    return _bsdtar_listing(output_of("bsdtar", "-tvf", "-", piped=path))


def _bsdtar_listing(output: str) -> Listing:
    lines = re.findall(
        r"^-\S+ +\d+ +\S+ +\S+ +(\d+) \w{3} [ \d]\d +[\d:]+ (.+)$", output, re.MULTILINE
    )
    return [(_unescaped(name), int(size), None) for size, name in lines]


def _unescaped(name: str) -> str:
    r"""Decodes the octal escapes, such as \342, of the bytes that bsdtar cannot print."""
    octal = re.compile(rb"\\([0-7]{3})")
    return octal.sub(lambda found: bytes([int(found[1], 8)]), name.encode()).decode()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a regular file.

    Raises:
        ReaderError: The path is no regular file.
    """
    require(stat.S_ISREG(path.lstat().st_mode), f"{path.name!r} as a regular file", str(path))
    path.chmod(0o600)  # the permissions that the archive states may forbid reading
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def files_in(directory: Path) -> list[str]:
    """The paths of all files below a directory, relative to the directory, in any order."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory)
        for name in names
    ]


def extracting(
    read: Callable[[Path, Path | None], Listing],
) -> ReadAll:
    """Returns a function that calls `read` for each of many archives."""

    def read_one(path: Path, directory: Path | None) -> list[Extracted]:
        listing = read(path, directory)
        if directory is None:
            return [Extracted(*listed, None) for listed in listing]
        names = {name for name, _, _ in listing}
        written = set(files_in(directory))
        require(
            names == written,
            "the names listed and the files extracted to be the same",
            f"only listed: {sorted(names - written)}, only extracted: {sorted(written - names)}",
        )
        return [
            Extracted(name, nbytes, crc32, file_sha256(directory / name))
            for name, nbytes, crc32 in listing
        ]

    def read_all(paths: Sequence[Path], scratch: Path | None) -> Iterator[Outcome]:
        for path in paths:
            try:
                if scratch is None:
                    yield read_one(path.absolute(), None)
                else:
                    with tempfile.TemporaryDirectory(dir=scratch) as directory:
                        yield read_one(path.absolute(), Path(directory))
            except ReaderError as error:
                yield error

    return read_all


# Readers that read many archives in one process, extract to memory, and print JSON


def printing(*command: str | Path) -> ReadAll:
    """Makes a reader from a program that takes paths and prints a line of JSON for each."""

    def read_all(paths: Sequence[Path], scratch: Path | None) -> Iterator[Outcome]:
        mode = "list" if scratch is None else "extract"
        try:
            done = subprocess.run(
                [*map(str, command), mode],
                env=ENVIRONMENT,
                input="".join(f"{path.absolute()}\n" for path in paths).encode(),
                capture_output=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            error = ReaderError(f"{command[0]} took more than {TIMEOUT} s")
            yield from (error for _ in paths)
            return
        lines = done.stdout.decode().split("\n")[:-1]
        if done.returncode or done.stderr or len(lines) != len(paths):
            # All archives get this error, since any of them may have crashed the process.
            error = ReaderError(
                f"{command[0]}: status {done.returncode}, {len(lines)} results for {len(paths)} "
                f"archives: {done.stderr.decode()[-2000:]}"
            )
            yield from (error for _ in paths)
            return
        for line in lines:
            found = json.loads(line)
            if "error" in found:
                yield ReaderError(found["error"])
            else:
                yield [Extracted(*entry) for entry in found["entries"]]

    return read_all


# The limits below are those of bsdtar 3.6.2, unzip 6.0, minizip 1.1 and Node.js 20.
# tests/format/test_differential.py tests each limit.
_LISTED_AS_TAR: Final = (
    "bsdtar lists a zip like a tar, without CRC-32s; extraction checks the CRC-32s"
)
_SATURATED_SIZE: Final = Limit(
    "unzip takes the size 0xFFFFFFFF for a saturated value, and misreads the size of the next "
    "entry",
    lambda entries: any(entry.nbytes == 0xFFFFFFFF for entry in entries),
)
_NO_ZIP64_FIELDS: Final = Limit(
    "on 64-bit Linux, minizip 1.1 ignores the Zip64 fields of entries: it cannot read sizes and "
    "header offsets of 4 GiB or more",
    lambda entries: sum(entry.nbytes for entry in entries) >= (1 << 32) - (1 << 20),
)
_IN_MEMORY: Final = Limit(
    "Node.js cannot read a file of 2 GiB or more into memory at once",
    lambda entries: sum(entry.nbytes for entry in entries) >= 1 << 31,
)


def _of_library(name: str, library: str, **options: Any) -> Reader:
    """A reader that calls a C library."""
    read_all = printing(sys.executable, DIRECTORY / "list_c_libraries.py", name)
    return Reader(name, None, read_all, library=library, **options)


def _of_package(name: str, *script: str, package: str | None = None, **options: Any) -> Reader:
    """A reader that is a script for Node.js and calls an npm package, by default `name`."""
    read_all = printing("node", DIRECTORY / script[0], *script[1:])
    return Reader(name, "node", read_all, package or name, **options)


READERS: Final[Mapping[str, Reader]] = {
    reader.name: reader
    for reader in (
        Reader("zipfile", None, extracting(by_zipfile)),
        Reader("unzip", "unzip", extracting(by_unzip), limits=(_SATURATED_SIZE,)),
        Reader("7z", "7z", extracting(by_7z)),
        *(
            Reader(name, "bsdtar", extracting(read), hides_crc32=_LISTED_AS_TAR)
            for name, read in (("bsdtar", by_bsdtar), ("bsdtar-pipe", by_bsdtar_from_a_pipe))
        ),
        _of_library("minizip", "libminizip.so.1", limits=(_NO_ZIP64_FIELDS,)),
        _of_library("libzip", "libzip.so.4"),
        Reader("go", "go", printing("go", "run", DIRECTORY / "list_zip.go")),
        Reader("perl", "perl", printing("perl", DIRECTORY / "list_zip.pl"), module="Archive::Zip"),
        Reader("java-file", "java", printing("java", DIRECTORY / "ListZip.java", "file")),
        Reader("java-stream", "java", printing("java", DIRECTORY / "ListZip.java", "stream")),
        _of_package("yauzl", "list_yauzl.mjs"),
        _of_package("zip.js", "list_zip_js.mjs", package="@zip.js/zip.js"),
        _of_package("unzipper", "list_unzipper.mjs"),
        *(
            _of_package(
                name, "list_in_memory.mjs", name, hides_crc32=hides_crc32, limits=(_IN_MEMORY,)
            )
            for name, hides_crc32 in (
                ("adm-zip", None),
                ("fflate", "fflate ignores CRC-32s"),
                ("jszip", "jszip compares CRC-32s with the data, and lists none"),
            )
        ),
    )
}
