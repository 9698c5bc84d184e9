"""Files read by position and through a map, locked, and written at positions."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from lock_calls import is_free
from models import open_below
from processes import at_once

from onnxarchive.errors import ArchiveError, ArchiveFormatError, LockedError
from onnxarchive.files import clones_and_sync, data as data_module, locking
from onnxarchive.files.clones_and_sync import sync, sync_directory
from onnxarchive.files.data_files import spool
from onnxarchive.files.file import MemoryFile
from onnxarchive.files.local_file import MappedFile, PositionalWriter, locked_file
from onnxarchive.files.paths import require_no_input
from onnxarchive.files.replacement import Replacement

CONTENT = bytes(range(256)) * 64

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's kinds of files and permissions")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is open")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def with_and_without(call: str, other: str) -> Any:
    """A fixture that lets a test use a call of `os`, and then do without it as on Windows.

    Gives the name of the call that is used.
    """

    @pytest.fixture(params=[call, other])
    def fixture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param != call:
            monkeypatch.delattr(os, call, raising=False)
        elif not hasattr(os, call):
            pytest.skip(f"this system has no {call}")
        return str(request.param)

    return fixture


reading = with_and_without("pread", "read")
writing = with_and_without("pwrite", "write")


def read_at_most(monkeypatch: pytest.MonkeyPatch, reading: str, limit: int) -> None:
    """Lets a call read as few bytes at a time, as Linux reads at most 2 GiB."""
    original: Callable[..., bytes] = getattr(os, reading)
    monkeypatch.setattr(
        os, reading, lambda file, size, *offset: original(file, min(size, limit), *offset)
    )


def broken(*_: object) -> Any:
    """Takes the place of a call that fails."""
    raise OSError(errno.EIO, "broken")


# Reading


def test_a_file_is_read_by_position_and_past_its_end_gives_what_is_there(
    source: Path, reading: str
) -> None:
    with MappedFile(source) as file:
        size = file.size
        assert size == len(CONTENT)
        for offset, nbytes in ((0, size), (300, 5), (7, 0), (0, 1), (size - 3, 10)):
            assert file.read(offset, nbytes) == CONTENT[offset : offset + nbytes]
            assert b"".join(file.pieces(offset, nbytes)) == CONTENT[offset : offset + nbytes]
        assert file.read(size, 10) == file.read(size + 1000, 10) == b""
        assert list(file.pieces(size, 10)) == []


@pytest.mark.parametrize("limit", [1, 7])
def test_a_system_call_that_reads_less_than_asked_is_repeated(
    source: Path, reading: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at_most(monkeypatch, reading, limit)
    with MappedFile(source) as file:
        assert file.read(100, 50) == CONTENT[100:150]
        assert file.read(len(CONTENT) - 50, 100) == CONTENT[-50:]


def test_a_read_in_several_parts_holds_one_copy(
    source: Path, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 27
    os.truncate(source, size)
    read_at_most(monkeypatch, reading, 1 << 24)
    with MappedFile(source) as mapped:
        tracemalloc.start()
        try:
            assert len(mapped.read(0, size)) == size
            assert tracemalloc.get_traced_memory()[1] < 1.5 * size
        finally:
            tracemalloc.stop()


def test_pieces_are_no_larger_than_they_should_be(
    source: Path, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "READ_SIZE", 100)
    with MappedFile(source) as file:
        pieces = list(file.pieces(10, 250))
        assert [len(piece) for piece in pieces] == [100, 100, 50]
        assert b"".join(pieces) == CONTENT[10:260]
        assert list(file.pieces(10, 0)) == []


@pytest.mark.parametrize("holes", ["found", "not known to the file system", "found by no call"])
def test_zeros_are_distinguished_from_other_bytes_in_and_between_holes(
    source: Path, holes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 1 << 20
    with source.open("wb") as target:
        target.seek(2 * mib)
        target.write(b"1" + bytes(4095))
        target.truncate(4 * mib)
    if holes == "found by no call":
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
    elif holes == "not known to the file system":
        monkeypatch.setattr(os, "lseek", Mock(side_effect=OSError(errno.EINVAL, "no holes")))
    with MappedFile(source) as file:
        for offset, size, expected in (
            (0, 0, True),
            (0, 2 * mib, True),
            (0, 2 * mib + 1, False),
            (2 * mib, 0, True),
            (2 * mib, 1, False),
            (2 * mib + 1, 4 * mib, True),
            (0, 4 * mib, False),
            (3 * mib, mib, True),
            (5 * mib, mib, True),
        ):
            assert file.has_zeros_alone(offset, size) == expected, (offset, size)


def test_threads_that_read_at_once_get_their_own_bytes(source: Path, reading: str) -> None:
    wrong: list[int] = []

    def read(file: MappedFile, start: int) -> None:
        for offset in range(start, len(CONTENT), 97):
            if file.read(offset, 8) != CONTENT[offset : offset + 8]:
                wrong.append(offset)

    with MappedFile(source) as file:
        at_once(partial(read, file, start) for start in range(8))
    assert wrong == []


def test_a_view_is_the_whole_file_and_cannot_be_written(source: Path) -> None:
    with MappedFile(source) as file:
        view = file.view()
        assert view == CONTENT
        assert view.readonly
        assert file.view().obj is view.obj, "a file is mapped once"
        with pytest.raises(TypeError):
            view[0] = 1


def test_a_view_outlives_the_file(source: Path) -> None:
    file = MappedFile(source)
    view = file.view()
    file.close()
    del file
    source.unlink()
    assert view == CONTENT


def test_a_closed_file_cannot_be_read(source: Path, reading: str) -> None:
    with MappedFile(source) as file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(source))
    file.close()
    for read in (lambda: file.read(0, 1), file.view, file.fileno):
        with pytest.raises(ValueError, match="the file is closed"):
            read()


def require_closed(descriptor: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_file_without_references_is_closed(source: Path) -> None:
    file = MappedFile(source)
    descriptor = file.fileno()
    os.fstat(descriptor)
    del file
    require_closed(descriptor)


def test_an_empty_file_has_no_bytes(tmp_path: Path, reading: str) -> None:
    (tmp_path / "empty").touch()
    with MappedFile(tmp_path / "empty") as file:
        assert file.size == 0
        assert len(file.view()) == 0
        assert file.read(0, 10) == b""
        assert list(file.pieces(0, 10)) == []


def test_a_file_keeps_its_path_as_it_was_given(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    for path in ("source", Path("source")):
        with MappedFile(path) as file:
            assert file.path == "source"


@posix
def test_a_file_that_became_shorter_gives_less_and_is_not_mapped(
    source: Path, reading: str
) -> None:
    with MappedFile(source) as file:
        os.truncate(source, 100)
        assert file.read(90, 50) == CONTENT[90:100]
        assert b"".join(file.pieces(90, 50)) == CONTENT[90:100]
        with pytest.raises(ArchiveFormatError, match=f"expected {len(CONTENT)} bytes.*found 100"):
            file.view()


def test_a_file_that_became_longer_is_mapped_as_it_was(source: Path) -> None:
    with MappedFile(source) as file:
        with open(source, "ab") as appended:
            appended.write(b"more")
        assert file.view() == CONTENT


@posix
def test_a_file_that_was_replaced_is_read_and_mapped_as_it_was(source: Path) -> None:
    with MappedFile(source) as file:
        with Replacement(source) as replacement:
            replacement.writer.write(bytes(len(CONTENT)))
            replacement.commit()
        assert file.read(0, 300) == CONTENT[:300]
        assert file.view() == CONTENT


def test_bytes_in_memory_are_read_as_a_file_and_not_copied() -> None:
    data = bytearray(b"0123456789")
    file = MemoryFile(memoryview(data))
    assert (file.size, file.read(2, 3), file.read(99, 1)) == (10, b"234", b"")
    assert file.read(8, 9) == b"89"
    assert list(file.pieces(0, 10)) == [b"0123456789"]
    view = file.view(0, 10)
    data[0] = ord("x")
    assert bytes(view[:1]) == b"x"
    with pytest.raises(TypeError):
        view[0] = 1
    file.close()
    assert bytes(view[1:3]) == b"12"
    for read in (file.view, lambda: file.read(0, 1)):
        with pytest.raises(ValueError, match="closed"):
            read()


def test_a_file_says_where_it_was_opened_and_where_it_is_by_now(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    moved = source.with_name("moved")
    with MappedFile("source") as file:
        opened = os.path.realpath(source)
        assert file.present_path() == opened
        if os.name == "nt":  # which renames no open file
            return
        source.rename(moved)
        source.write_bytes(b"another")
        if sys.platform == "linux":
            assert file.present_path() == os.path.realpath(moved)
        moved.unlink()
        with pytest.raises(ArchiveError, match="replaced or removed"):
            file.present_path()


@posix
def test_a_file_says_where_it_is_without_symbolic_links(source: Path) -> None:
    (source.parent / "link").symlink_to("source")
    with MappedFile(source.parent / "link") as file:
        assert file.path == str(source.parent / "link")
        assert file.present_path() == os.path.realpath(source)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "missing")


def require_refused(path: Path | str, kind: str) -> None:
    with pytest.raises(ArchiveFormatError, match=f"expected a regular file, found {kind}") as got:
        MappedFile(path, rule="FILE-1")
    assert got.value.rule == "FILE-1"
    assert got.value.path == str(path)
    with pytest.raises(ArchiveFormatError) as got:
        MappedFile(path)
    assert got.value.rule is None


@posix
def test_a_file_that_is_not_regular_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is at most some 100 bytes
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path, kind in (
            *(("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket")),
            *(("/dev/null", "a device"), ("/dev/zero", "a device"), (".", "a directory")),
        ):
            require_refused(path, kind)


@posix
def test_a_descriptor_is_taken_over_even_if_its_path_is_gone(source: Path) -> None:
    descriptor = os.open(source, os.O_RDONLY)
    source.unlink()
    with MappedFile(source, descriptor=descriptor) as file:
        assert (file.path, bytes(file.view())) == (str(source), CONTENT)
    require_closed(descriptor)


@posix
def test_a_descriptor_of_a_directory_is_refused_and_closed(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(ArchiveFormatError, match="expected a regular file, found a directory"):
        MappedFile(tmp_path, descriptor=descriptor)
    require_closed(descriptor)


def next_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@posix
def test_a_refused_file_is_closed_even_while_the_error_is_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = next_descriptor()
    with pytest.raises(ArchiveFormatError) as caught:
        MappedFile(tmp_path / "pipe")
    assert next_descriptor() == before
    del caught


# Locking


def test_a_file_has_its_current_size_once_it_is_locked(source: Path) -> None:
    with MappedFile(source) as file, open(source, "r+b") as changed:
        changed.truncate(100)
        assert file.size == len(CONTENT)
        with file.locked(is_exclusive=False):
            assert file.size == 100
            with pytest.raises(LockedError), locking.exclusive(changed.fileno(), timeout=0):
                raise AssertionError("it was changed meanwhile")
        with locking.exclusive(changed.fileno(), timeout=0):
            pass


@posix
def test_a_file_that_is_closed_while_it_is_locked_unlocks_no_other_file(source: Path) -> None:
    other = source.with_name("other")
    other.touch()
    file = MappedFile(source, is_writable=True)
    with file.locked(is_exclusive=True):
        number = file.fileno()
        file.close()
        taken = MappedFile(other, is_writable=True)
        assert taken.fileno() != number
        assert taken.keep_locked()
    assert not is_free(other)
    assert is_free(source)
    taken.close()


def test_a_reopened_file_shares_the_lock_and_has_a_size_and_a_map_of_its_own(source: Path) -> None:
    with MappedFile(source, is_writable=True) as file, file.locked(is_exclusive=False):
        view = file.view()
        os.ftruncate(file.fileno(), 2 * len(CONTENT))
        with file.reopened() as again:
            assert (again.path, again.identity) == (file.path, file.identity)
            assert (file.size, again.size) == (len(CONTENT), 2 * len(CONTENT))
            assert bytes(again.view()) == CONTENT + bytes(len(CONTENT))
            assert not is_free(source)
            locking.unlock(again.fileno())
            assert is_free(source)
    assert view == CONTENT


def test_an_opened_file_is_locked_in_the_block_and_stays_open(source: Path) -> None:
    with locked_file(source, is_exclusive=True, is_writable=True) as file:
        assert not is_free(source)
    assert is_free(source)
    assert file.read(0, 3) == CONTENT[:3]
    file.close()


@posix
def test_an_opened_file_is_closed_if_the_block_raises(source: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked_file(source) as file:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="the file is closed"):
        file.fileno()


@linux
def test_the_file_that_has_the_path_when_it_is_locked_is_the_one_that_is_opened(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.shared
    other = source.with_name("other")
    other.write_bytes(b"another")

    def late(descriptor: int, timeout: float | None) -> contextlib.AbstractContextManager[object]:
        if other.exists():
            other.replace(source)
        return lock(descriptor, timeout)

    monkeypatch.setattr(locking, "shared", late)
    with locked_file(source) as file, file:
        assert file.read(0, 9) == b"another"
        assert file.is_at(source)
    assert open_below(source.parent) == []


@posix
def test_a_file_that_is_removed_while_its_lock_is_waited_for_is_missing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.shared

    def late(*arguments: Any) -> contextlib.AbstractContextManager[object]:
        source.unlink()
        return lock(*arguments)

    monkeypatch.setattr(locking, "shared", late)
    with pytest.raises(FileNotFoundError), locked_file(source):
        raise AssertionError("it is not there")


@posix
@pytest.mark.parametrize("is_writable", [True, None])
def test_a_file_is_opened_for_writing_if_asked_for(source: Path, is_writable: bool | None) -> None:
    with MappedFile(source, is_writable=is_writable) as file:
        file.write(1, b"new")
    assert source.read_bytes()[:5] == CONTENT[:1] + b"new" + CONTENT[4:5]


@posix
@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ETXTBSY])
def test_a_file_that_may_not_be_written_is_opened_for_reading_if_that_is_enough(
    source: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def refuse(path: str, flags: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(code, os.strerror(code), path)
        return open_file(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    with MappedFile(source, is_writable=None) as file:
        assert file.read(0, 3) == CONTENT[:3]
    with pytest.raises(OSError, match=os.strerror(code)):
        MappedFile(source, is_writable=True)


@pytest.mark.parametrize("is_exclusive", [True, False])
def test_the_error_of_a_lock_that_is_refused_names_the_file(
    source: Path, is_exclusive: bool
) -> None:
    with (
        MappedFile(source, is_writable=True) as holding,
        holding.locked(is_exclusive=True),
        MappedFile(source, is_writable=True) as file,
        pytest.raises(LockedError) as caught,
        file.locked(is_exclusive=is_exclusive, timeout=0),
    ):
        raise AssertionError("it was locked twice")
    assert caught.value.path == str(source)


# Files that are closed while they are used


@posix
def test_a_file_that_is_closed_while_a_thread_reads_it_gives_that_thread_its_own_bytes(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.parent / "other").write_bytes(bytes(len(CONTENT)))
    read = os.pread
    others: list[MappedFile] = []

    def late(descriptor: int, size: int, offset: int) -> bytes:
        file.close()
        others.append(MappedFile(source.parent / "other"))
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", late)
    file = MappedFile(source)
    assert file.read(0, 300) == CONTENT[:300]
    assert others


# Writing


def test_bytes_are_written_at_their_position(source: Path, writing: str) -> None:
    with MappedFile(source, is_writable=True) as file:
        file.write(3, b"new")
        file.write(len(CONTENT) + 2, memoryview(b"beyond"))
        file.write(0, b"")
    assert source.read_bytes() == CONTENT[:3] + b"new" + CONTENT[6:] + b"\0\0beyond"


@pytest.mark.parametrize("limit", [1, 7])
def test_a_write_that_takes_less_is_continued(
    source: Path, writing: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., int] = getattr(os, writing)
    monkeypatch.setattr(
        os, writing, lambda file, data, *offset: original(file, data[:limit], *offset)
    )
    with MappedFile(source, is_writable=True) as file:
        file.write(100, CONTENT[:50])
    assert source.read_bytes() == CONTENT[:100] + CONTENT[:50] + CONTENT[150:]


def test_pieces_are_written_one_after_another_and_at_once(source: Path) -> None:
    with MappedFile(source, is_writable=True) as file:
        writer = PositionalWriter(file, 10)
        assert writer.write(b"one") == 3
        assert source.read_bytes()[10:13] == b"one"
        assert writer.write(memoryview(b"two")) == 3
        assert writer.offset == 16
        writer.offset = 2
        writer.write(b"!")
    assert source.read_bytes() == CONTENT[:2] + b"!" + CONTENT[3:10] + b"onetwo" + CONTENT[16:]


@posix
def test_writing_to_a_closed_file_changes_no_other_file(source: Path) -> None:
    other = source.with_name("other")
    other.write_bytes(CONTENT)
    with MappedFile(source, is_writable=True) as file:
        writer = PositionalWriter(file)
        number = file.fileno()
    with MappedFile(other, is_writable=True) as taken:
        assert taken.fileno() == number
        with pytest.raises(ValueError, match="the file is closed"):
            writer.write(b"new")
    assert other.read_bytes() == CONTENT == source.read_bytes()


@posix
def test_a_file_that_is_closed_while_a_thread_writes_it_is_the_one_that_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = source.with_name("other")
    other.write_bytes(CONTENT)
    write = os.pwrite
    others: list[MappedFile] = []

    def late(descriptor: int, data: memoryview, offset: int) -> int:
        file.close()
        others.append(MappedFile(other, is_writable=True))
        return write(descriptor, data[:1], offset)

    monkeypatch.setattr(os, "pwrite", late)
    file = MappedFile(source, is_writable=True)
    PositionalWriter(file).write(b"new")
    assert source.read_bytes() == b"new" + CONTENT[3:]
    assert other.read_bytes() == CONTENT


@posix
def test_an_error_of_writing_names_the_file_which_is_closed_while_the_error_is_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", broken)
    file = MappedFile(source, is_writable=True)
    with pytest.raises(OSError, match="broken") as caught:
        file.write(0, b"new")
    assert caught.value.filename == str(source)
    file.close()
    if sys.platform == "linux":  # Windows removes no open file
        assert open_below(source.parent) == []
    assert caught.tb is not None


def test_a_writer_writes_nothing_beyond_its_end(source: Path) -> None:
    with MappedFile(source, is_writable=True) as file:
        writer = PositionalWriter(file, 10, 15)
        writer.write(b"12345")
        with pytest.raises(ArchiveError, match="go beyond offset 15"):
            writer.write(b"6")
        writer.write(b"")
    assert source.read_bytes() == CONTENT[:10] + b"12345" + CONTENT[15:]


# Inputs


@posix
def test_an_input_is_refused_as_a_target_under_any_of_its_names(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = source.parent
    (directory / "link").symlink_to("source")
    os.link(source, directory / "hard")
    monkeypatch.chdir(directory)
    for target in (source, "source", "./source", directory / "link", "hard"):
        with pytest.raises(ValueError, match="the target is also the input"):
            require_no_input(target, ["/dev/null", str(source)])


def test_a_missing_file_and_one_that_is_no_input_may_be_targets(source: Path) -> None:
    other = source.with_name("other")
    for _ in range(2):
        for inputs in ([source], [source.with_name("missing")], []):
            require_no_input(other, list(map(str, inputs)))
        other.write_bytes(CONTENT)


# Syncing, and temporary files


def test_a_file_is_synced_as_far_as_the_system_can(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, full_sync = Mock(), Mock()
    monkeypatch.setattr(os, "fsync", fsync)
    with MappedFile(source, is_writable=True) as file:
        plain, full = call(file.fileno()), call(file.fileno(), 51)
        monkeypatch.setattr(clones_and_sync, "fcntl", SimpleNamespace())
        sync(file)
        assert fsync.mock_calls == [plain]
        monkeypatch.setattr(
            clones_and_sync, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=full_sync)
        )
        sync(file)
        assert (fsync.mock_calls, full_sync.mock_calls) == ([plain], [full])
        full_sync.side_effect = OSError(errno.ENOTSUP, "not on this file system")
        sync(file)
        assert (fsync.mock_calls, full_sync.mock_calls) == ([plain] * 2, [full] * 2)


@posix
def test_a_directory_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = next_descriptor()
    sync_directory(str(tmp_path))
    monkeypatch.setattr(os, "fsync", broken)
    sync_directory(str(tmp_path))
    assert next_descriptor() == before


def test_an_error_while_spooling_names_the_source_and_not_the_temporary_file(
    tmp_path: Path,
) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"some")
        raise OSError(errno.EIO, "broken", "weights.data")

    with pytest.raises(OSError, match=r"broken: 'weights\.data'"):
        spool(pieces(), 8, os.fspath(tmp_path))
    assert list(tmp_path.iterdir()) == []
