"""Files read by position and through a map, and files that are whole or untouched."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnxarchive import files, locking
from onnxarchive.errors import ArchiveFormatError, LockedError
from onnxarchive.files import (
    MappedFile,
    MemoryFile,
    Replacement,
    clone,
    new_directory,
    remove_abandoned,
    replacing,
    require_no_input,
    reserve,
    sync,
    sync_directory,
)
from onnxarchive.recovery import recover

CONTENT = bytes(range(256)) * 64

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's kinds of files and permissions")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["pread", "no pread"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Reads with os.pread, and as on Windows, which has none."""
    if request.param == "no pread":
        monkeypatch.delattr(os, "pread", raising=False)
    elif not hasattr(os, "pread"):
        pytest.skip("this system has no pread")
    return str(request.param)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a Python program in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


# Reading


def test_a_file_is_read_by_position(source: Path, reading: str) -> None:
    with MappedFile(source) as file:
        assert file.size == len(CONTENT)
        assert file.read(0, len(CONTENT)) == CONTENT
        assert file.read(300, 5) == CONTENT[300:305]
        assert file.read(7, 0) == b""
        assert file.read(0, 1) == CONTENT[:1]


def test_reading_past_the_end_gives_what_is_there(source: Path, reading: str) -> None:
    with MappedFile(source) as file:
        assert file.read(len(CONTENT) - 3, 10) == CONTENT[-3:]
        assert file.read(len(CONTENT), 10) == b""
        assert file.read(len(CONTENT) + 1000, 10) == b""
        assert b"".join(file.pieces(len(CONTENT) - 3, 10)) == CONTENT[-3:]
        assert list(file.pieces(len(CONTENT), 10)) == []


@given(st.integers(0, 70), st.integers(0, 70))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_span_is_read_as_it_is(source: Path, reading: str, offset: int, size: int) -> None:
    with MappedFile(source) as file:
        assert file.read(offset, size) == CONTENT[offset : offset + size]
        assert bytes(file.view()[offset : offset + size]) == CONTENT[offset : offset + size]


@pytest.mark.parametrize("limit", [1, 7])
def test_a_read_that_gives_less_is_continued(
    source: Path, reading: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "pread" if reading == "pread" else "read"
    original: Callable[..., bytes] = getattr(os, name)
    # As Linux reads at most 2 GiB at a time.
    monkeypatch.setattr(
        os, name, lambda descriptor, size, *offset: original(descriptor, min(size, limit), *offset)
    )
    with MappedFile(source) as file:
        assert file.read(100, 50) == CONTENT[100:150]
        assert file.read(len(CONTENT) - 50, 100) == CONTENT[-50:]


def test_pieces_are_no_larger_than_they_should_be(
    source: Path, reading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_SIZE", 100)
    with MappedFile(source) as file:
        pieces = list(file.pieces(10, 250))
        assert [len(piece) for piece in pieces] == [100, 100, 50]
        assert b"".join(pieces) == CONTENT[10:260]
        assert list(file.pieces(10, 0)) == []


def test_threads_that_read_at_once_get_their_own_bytes(source: Path, reading: str) -> None:
    wrong: list[int] = []

    def read(file: MappedFile, start: int) -> None:
        for offset in range(start, len(CONTENT), 97):
            if file.read(offset, 8) != CONTENT[offset : offset + 8]:
                wrong.append(offset)

    with MappedFile(source) as file:
        threads = [threading.Thread(target=read, args=(file, start)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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


def test_a_closed_file_is_read_no_more(source: Path, reading: str) -> None:
    file = MappedFile(source)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="the file is closed"):
        file.read(0, 1)
    with pytest.raises(ValueError, match="the file is closed"):
        file.view()


def test_a_file_is_closed_where_its_block_ends(source: Path) -> None:
    with MappedFile(source) as file:
        pass
    with pytest.raises(ValueError, match="the file is closed"):
        file.read(0, 1)


def test_a_file_that_is_forgotten_is_closed(source: Path) -> None:
    file = MappedFile(source)
    descriptor = file._descriptor
    os.fstat(descriptor)
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_empty_file_has_no_bytes(tmp_path: Path, reading: str) -> None:
    (tmp_path / "empty").touch()
    with MappedFile(tmp_path / "empty") as file:
        assert file.size == 0
        assert len(file.view()) == 0
        assert file.read(0, 10) == b""
        assert list(file.pieces(0, 10)) == []


def test_the_path_is_kept_as_it_was_given(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    with MappedFile("source") as file:
        assert file.path == "source"
    with MappedFile(Path("source")) as file:
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
        with replacing(source) as other:
            other.write(bytes(len(CONTENT)))
        assert file.read(0, 300) == CONTENT[:300]
        assert file.view() == CONTENT


def test_bytes_in_memory_are_read_as_a_file_and_not_copied() -> None:
    data = bytearray(b"0123456789")
    file = MemoryFile(memoryview(data))
    assert (file.size, file.read(2, 3), file.read(8, 9), file.read(99, 1)) == (
        10,
        b"234",
        b"89",
        b"",
    )
    assert list(file.pieces(0, 10)) == [b"0123456789"]
    view = file.view()
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
        assert set(file.paths()) == {opened}
        if os.name == "nt":  # which renames no open file
            return
        source.rename(moved)
        source.write_bytes(b"another")
        paths = list(file.paths())
        assert paths[0] == opened
        if sys.platform == "linux":
            assert paths[1:] == [os.path.realpath(moved)]
            status = os.stat(paths[1])
            assert file.identity == (status.st_dev, status.st_ino)
        moved.unlink()
        assert next(file.paths()) == opened
    assert list(MemoryFile(memoryview(b"")).paths()) == []


@posix
def test_a_file_says_where_it_is_without_symbolic_links(source: Path) -> None:
    (source.parent / "link").symlink_to("source")
    with MappedFile(source.parent / "link") as file:
        assert file.path == str(source.parent / "link")
        assert set(file.paths()) == {os.path.realpath(source)}


def test_a_file_is_unchanged_as_long_as_its_block_runs_and_knows_its_size_then(
    source: Path,
) -> None:
    with MappedFile(source) as file, open(source, "r+b") as changed:
        changed.truncate(100)
        assert file.size == len(CONTENT)
        with file.unchanged():
            assert file.size == 100
            with pytest.raises(LockedError), locking.exclusive(changed.fileno(), timeout=0):
                raise AssertionError("it was changed meanwhile")
        with locking.exclusive(changed.fileno(), timeout=0):
            pass
    memory = MemoryFile(memoryview(b"0123"))
    with memory.unchanged():
        assert memory.size == 4


def test_an_open_file_gives_its_descriptor(source: Path) -> None:
    with MappedFile(source) as file:
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(source))
    with pytest.raises(ValueError, match="the file is closed"):
        file.fileno()


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


def test_a_directory_is_refused(tmp_path: Path) -> None:
    require_refused(tmp_path, "a directory")


@posix
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    require_refused(tmp_path / "pipe", "a pipe")


@posix
@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_a_device_is_refused(path: str) -> None:
    require_refused(path, "a device")


@posix
def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is at most some 100 bytes
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        require_refused(Path("socket"), "a socket")


@posix
def test_a_link_to_a_pipe_is_refused_as_the_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    require_refused(tmp_path / "link", "a pipe")


def next_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@posix
def test_what_is_refused_is_not_left_open(tmp_path: Path) -> None:
    before = next_descriptor()
    require_refused(tmp_path, "a directory")
    assert next_descriptor() == before


# Replacing


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    os.umask(before)
    yield lambda mask: void(os.umask(mask))
    os.umask(before)


def void(_: object) -> None:
    """Nothing."""


def test_a_new_file_is_there_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with replacing(target) as file:
        file.write(b"new")
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["target"]


def test_an_existing_file_is_what_it_was_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with replacing(target) as file:
        file.write(b"new")
        file.flush()
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["target"]


def write_and_raise(target: Path, error: type[BaseException]) -> None:
    with replacing(target) as file:
        file.write(b"new")
        raise error("halfway")


@pytest.mark.parametrize("error", [ValueError, OSError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_target_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with pytest.raises(error):
        write_and_raise(target, error)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["target"]


def test_an_error_leaves_no_new_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="halfway"):
        write_and_raise(tmp_path / "target", ValueError)
    assert names(tmp_path) == []


def test_a_replacement_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    replacement = Replacement(tmp_path / "target")
    replacement.file.close()  # or Python warns of it
    assert len(names(tmp_path)) == 1
    del replacement
    assert names(tmp_path) == []


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_replacement_that_cannot_be_committed_leaves_nothing(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "it fails")

    target = tmp_path / "target"
    target.write_bytes(b"old")
    replacement = Replacement(target)
    replacement.file.write(b"new")
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="it fails"):
        replacement.commit()
    assert replacement.file.closed
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["target"]


def test_a_discarded_replacement_can_be_discarded_again(tmp_path: Path) -> None:
    replacement = Replacement(tmp_path / "target")
    replacement.discard()
    replacement.discard()
    assert names(tmp_path) == []


def test_discarding_what_was_committed_leaves_the_target(tmp_path: Path) -> None:
    replacement = Replacement(tmp_path / "target")
    replacement.file.write(b"new")
    replacement.commit()
    replacement.discard()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_the_file_is_synced_before_it_gets_its_name_and_its_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("sync directory" if is_directory else "sync file")
        if not is_directory:
            assert os.fstat(descriptor).st_size == 3, "what is buffered is not synced"
        fsync(descriptor)

    def traced_replace(source: str, target: str) -> None:
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    with replacing(tmp_path / "target") as file:
        file.write(b"new")
    assert calls == ["sync file", "rename"] + ["sync directory"] * (os.name == "posix")


@posix
def test_nothing_is_left_open_by_a_replacement(tmp_path: Path) -> None:
    before = next_descriptor()
    for _ in range(2):
        with replacing(tmp_path / "target") as file:
            file.write(b"new")
    with pytest.raises(ValueError, match="halfway"):
        write_and_raise(tmp_path / "target", ValueError)
    assert next_descriptor() == before


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o444])
def test_the_permission_bits_of_a_target_are_kept(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    target.chmod(mode)
    with replacing(target) as file:
        file.write(b"new")
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert target.read_bytes() == b"new"


@posix
@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_permission_bits_of_a_new_file_are_those_that_the_umask_leaves(
    tmp_path: Path, umask: Callable[[int], None], mask: int, mode: int
) -> None:
    umask(mask)
    with replacing(tmp_path / "target") as file:
        file.write(b"new")
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == mode


@posix
def test_a_link_stays_a_link_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to("there/file")
    with replacing(link) as file:
        # It is written beside the file, which may be on another disk than the link.
        assert len(names(there)) == 2
        assert names(tmp_path) == ["link", "there"]
        file.write(b"new")
    assert link.is_symlink()
    assert (there / "file").read_bytes() == b"new"
    assert names(there) == ["file"]


@posix
def test_a_link_that_leads_nowhere_leads_to_the_new_file_then(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    with replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


@posix
def test_a_link_that_leads_to_itself_is_an_os_error(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"), replacing(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert names(tmp_path) == ["link"]


@posix
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_that_is_not_followed_is_replaced_and_what_it_leads_to_stays(
    tmp_path: Path, exists: bool
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    if exists:
        (there / "file").write_bytes(b"old")
        (there / "file").chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to("there/file")
    with replacing(link, follow_links=False) as file:
        assert len(names(tmp_path)) == 3
        assert link.is_symlink()
        file.write(b"new")
    assert names(tmp_path) == ["link", "there"]
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"
    assert names(there) == ["file"] * exists
    if exists:
        assert (there / "file").read_bytes() == b"old"
        assert stat.S_IMODE(link.stat().st_mode) == 0o640


@posix
def test_a_link_that_is_not_followed_may_lie_behind_another_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "directory").symlink_to("there")
    (tmp_path / "there" / "link").symlink_to("nowhere")
    with replacing(tmp_path / "directory" / "link", follow_links=False) as file:
        file.write(b"new")
    assert names(tmp_path) == ["directory", "there"]
    assert names(tmp_path / "there") == ["link"]
    assert (tmp_path / "there" / "link").read_bytes() == b"new"


@posix
def test_a_link_to_a_directory_is_refused_also_where_it_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(IsADirectoryError):
        Replacement(tmp_path / "link", follow_links=False)
    assert names(tmp_path) == ["link", "there"]


@posix
def test_another_name_of_the_target_keeps_what_it_was(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    os.link(target, tmp_path / "other")
    with replacing(target) as file:
        file.write(b"new")
    assert (tmp_path / "other").read_bytes() == b"old"


def test_a_target_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        Replacement(tmp_path / "target")
    assert caught.value.filename == str(tmp_path / "target")
    assert names(tmp_path) == ["target"]


@posix
def test_a_target_that_is_a_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(FileExistsError, match="is not a regular file"):
            Replacement(target)
    assert names(tmp_path) == ["pipe"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_target_in_a_directory_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Replacement(tmp_path / "missing" / "target")


def test_a_target_in_a_file_is_refused(source: Path) -> None:
    with pytest.raises(NotADirectoryError):
        Replacement(source / "target")
    assert source.read_bytes() == CONTENT


@posix
def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        with replacing(tmp_path / name) as file:
            file.write(b"new")
        assert (tmp_path / name).read_bytes() == b"new"
        (tmp_path / name).unlink()
    with pytest.raises(OSError, match="too long"), replacing(tmp_path / ("n" * 256)):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("follow_links", [True, False])
def test_a_relative_path_is_the_one_that_it_was_when_it_was_given(
    tmp_path: Path, follow_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    with replacing("target", follow_links=follow_links) as file:
        file.write(b"new")
        monkeypatch.chdir(tmp_path / "second")
    assert (tmp_path / "first" / "target").read_bytes() == b"new"
    assert names(tmp_path / "second") == []


def test_two_at_once_do_not_meet_and_the_last_one_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    first, second = Replacement(target), Replacement(target)
    first.file.write(b"first")
    second.file.write(b"second")
    second.commit()
    assert target.read_bytes() == b"second"
    first.commit()
    assert target.read_bytes() == b"first"
    assert names(tmp_path) == ["target"]


def is_free(path: Path) -> bool:
    with open(path, "r+b") as file:
        return locking.try_exclusive(file.fileno())


def test_a_file_is_locked_until_it_has_its_name_and_all_is_done(tmp_path: Path) -> None:
    target = tmp_path / "target"
    seen = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        assert not target.exists()
        yield
        assert target.read_bytes() == b"new"
        seen.append((names(tmp_path), is_free(target)))

    replacement = Replacement(target)
    (temporary,) = names(tmp_path)
    assert not is_free(tmp_path / temporary)
    replacement.file.write(b"new")
    replacement.commit(around)
    assert seen == [(["target"], os.name == "nt")]
    assert is_free(target)
    assert replacement.file.closed


def test_what_is_to_be_done_then_is_not_done_where_nothing_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "it fails")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        yield
        done.append(1)

    def replace() -> None:
        with replacing(tmp_path / "target", around=around) as file:
            file.write(b"new")

    done: list[int] = []
    replace()
    assert done == [1]
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="it fails"):
        replace()
    assert done == [1]


def test_a_name_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    # What another process of this number on another machine may have left in a shared directory.
    probe = Replacement(tmp_path / "target")
    (taken,) = names(tmp_path)
    probe.discard()
    stem, _, number = taken.removesuffix(".tmp").rpartition("-")
    others = [f"{stem}-{int(number) + step}.tmp" for step in (1, 2)]
    for other in others:
        (tmp_path / other).write_bytes(b"of another")
    with replacing(tmp_path / "target") as file:
        file.write(b"new")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "target"):
        raise ZeroDivisionError
    assert (tmp_path / "target").read_bytes() == b"new"
    for other in others:
        assert (tmp_path / other).read_bytes() == b"of another"


# Full disks. A limit on the size of files is what a full disk is, to a process of its own.

LIMITED = """
    import errno, resource, signal, sys
    from onnxarchive.files import Replacement, new_directory, replacing

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""


@pytest.fixture
def allocating(tmp_path: Path) -> Iterator[BinaryIO]:
    """A new file on a file system that can set blocks aside."""
    if files._fallocate() is None:
        pytest.skip("fallocate is Linux's")
    with replacing(tmp_path / "target") as file:
        found = files._file_system(file.fileno())
        if found not in files._RESERVING:
            pytest.skip(f"{found}, the file system of {tmp_path}, is not asked for room")
        yield file


def test_blocks_are_set_aside_and_the_size_stays(allocating: BinaryIO, tmp_path: Path) -> None:
    reserve(allocating, 1 << 20)
    status = os.fstat(allocating.fileno())
    assert (status.st_size, status.st_blocks >= (1 << 20) // 512) == (0, True)
    allocating.write(CONTENT)
    allocating.flush()
    assert os.fstat(allocating.fileno()).st_size == len(CONTENT)


def test_more_than_a_file_system_holds_is_refused(allocating: BinaryIO) -> None:
    with pytest.raises(OSError, match=r"File too large|No space left"):
        reserve(allocating, 1 << 62)


@pytest.fixture
def on_ext4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_file_system", lambda descriptor: "ext4")


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_told_when_blocks_are_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda: lambda descriptor, nbytes: error)
    with open(tmp_path / "file", "xb") as file:
        with pytest.raises(OSError, match=os.strerror(error)):
            reserve(file, 1)
        reserve(file, 0)


@pytest.mark.usefixtures("on_ext4")
@pytest.mark.parametrize(
    "fallocate", [None, lambda descriptor, nbytes: errno.EOPNOTSUPP], ids=["none", "unsupported"]
)
def test_where_nothing_can_be_set_aside_writing_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallocate: Callable[[int, int], int] | None
) -> None:
    monkeypatch.setattr(files, "_fallocate", lambda: fallocate)
    with replacing(tmp_path / "target") as file:
        reserve(file, len(CONTENT))
        file.write(CONTENT)
    assert (tmp_path / "target").read_bytes() == CONTENT


@pytest.mark.parametrize("kind", ["btrfs", "zfs", "nfs4", "overlay", None])
def test_file_systems_that_compress_or_are_not_known_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    asked: list[int] = []

    def allocate(descriptor: int, nbytes: int) -> int:
        asked.append(nbytes)
        return 0

    monkeypatch.setattr(files, "_fallocate", lambda: allocate)
    with open(tmp_path / "file", "xb") as file:
        monkeypatch.setattr(files, "_file_system", lambda descriptor: kind)
        reserve(file, 1)
        assert asked == []
        monkeypatch.setattr(files, "_file_system", lambda descriptor: "xfs")
        reserve(file, 2)
        assert asked == [2]


def test_the_file_system_is_the_one_that_the_system_tells(tmp_path: Path) -> None:
    program = shutil.which("findmnt")
    if program is None:
        pytest.skip("findmnt is not installed")
    told = subprocess.run(
        [program, "-n", "-o", "FSTYPE", "-T", tmp_path], capture_output=True, text=True, check=True
    )
    with open(tmp_path / "file", "xb") as file:
        found = files._file_system(file.fileno())
    if found is None:
        pytest.skip(f"{told.stdout.strip()} gives its files another device than its mount has")
    assert found == told.stdout.strip()


def test_a_python_without_ctypes_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert files._fallocate.__wrapped__() is None


def test_another_system_than_linux_sets_nothing_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert files._fallocate.__wrapped__() is None


@posix
@pytest.mark.parametrize("size", [100_001, 1_000_000])
def test_a_full_disk_leaves_the_target_and_nothing_else(tmp_path: Path, size: int) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    program = (
        LIMITED
        + """
    try:
        with replacing(sys.argv[1]) as file:
            file.write(bytes(int(sys.argv[2])))
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        print("refused", error.filename)
    """
    )
    done = run(program, target, str(size))
    assert (done.stdout.split(), done.stderr) == (["refused", str(target)], "")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["target"]


@posix
def test_a_disk_that_is_full_when_the_last_bytes_are_written_leaves_nothing(
    tmp_path: Path,
) -> None:
    # They stand in the buffer until the replacement is committed.
    program = (
        LIMITED
        + """
    try:
        with replacing(sys.argv[1]) as file:
            file.write(bytes(99_999))
            file.flush()
            file.write(b"22")
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        print("refused", error.filename)
    """
    )
    done = run(program, tmp_path / "target")
    assert (done.stdout.split(), done.stderr) == (["refused", str(tmp_path / "target")], "")
    assert names(tmp_path) == []


@posix
def test_a_full_disk_leaves_no_directory(tmp_path: Path) -> None:
    program = (
        LIMITED
        + """
    try:
        with new_directory(sys.argv[1]) as made:
            for name in "ab":
                with open(f"{made}/{name}", "wb", buffering=0) as file:
                    file.write(bytes(100_000))
                    file.write(bytes(1 if name == "b" else 0))
    except OSError as error:
        assert error.errno == errno.EFBIG, error
        print("refused")
    """
    )
    done = run(program, tmp_path / "target")
    assert (done.stdout, done.stderr) == ("refused\n", "")
    assert names(tmp_path) == []


@posix
def test_a_process_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    program = """
    import signal, sys
    from onnxarchive.files import Replacement

    replacement = Replacement(sys.argv[1])
    replacement.file.write(b"new")
    signal.raise_signal(signal.SIGINT)
    """
    done = run(program, tmp_path / "target")
    assert "KeyboardInterrupt" in done.stderr
    assert names(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_child_that_ends_leaves_the_replacement_of_its_parent(tmp_path: Path) -> None:
    program = """
    import os, sys
    from onnxarchive.files import Replacement

    replacement = Replacement(sys.argv[1])
    replacement.file.write(b"new")
    replacement.file.flush()
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    replacement.commit()
    """
    done = run(program, tmp_path / "target")
    assert done.stderr == ""
    assert (tmp_path / "target").read_bytes() == b"new"


# Inputs


@posix
def test_an_input_is_no_target_under_whatever_name(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = source.parent
    (directory / "link").symlink_to("source")
    os.link(source, directory / "hard")
    monkeypatch.chdir(directory)
    for target in (source, "source", "./source", directory / "link", "hard"):
        with pytest.raises(ValueError, match="expected another file than the input"):
            require_no_input(target, ["/dev/null", str(source)])


def test_another_file_is_a_target_and_a_missing_one_too(source: Path) -> None:
    other = source.parent / "other"
    require_no_input(other, [str(source)])
    other.write_bytes(CONTENT)
    require_no_input(other, [str(source)])
    require_no_input(other, [str(source.parent / "missing")])
    require_no_input(other, [])


# Directories


def test_a_new_directory_is_there_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_directory(target) as made:
        (Path(made) / "file").write_bytes(b"new")
        assert not target.exists()
    assert names(tmp_path) == ["target"]
    assert names(target) == ["file"]


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with new_directory(target) as made:
        (Path(made) / "file").write_bytes(b"new")
        assert names(target) == []
    assert names(tmp_path) == ["target"]
    assert names(target) == ["file"]


def fill_and_raise(target: Path, error: type[BaseException]) -> None:
    with new_directory(target) as made:
        (Path(made) / "folder").mkdir()
        (Path(made) / "folder" / "file").write_bytes(b"new")
        raise error("halfway")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_leaves_no_directory(
    tmp_path: Path, error: type[BaseException], is_there: bool
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with pytest.raises(error):
        fill_and_raise(target, error)
    assert names(tmp_path) == ["target"] * is_there
    assert not is_there or names(target) == []


def test_a_directory_that_holds_something_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError, match="the directory is not empty"), new_directory(target):
        raise AssertionError("it was refused too late")
    assert names(tmp_path) == ["target"]
    assert (target / "file").read_bytes() == b"old"


def test_a_directory_that_fills_meanwhile_is_left(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def fill_both() -> None:
        with new_directory(target) as made:
            (Path(made) / "file").write_bytes(b"new")
            target.mkdir()
            (target / "file").write_bytes(b"of another")

    with pytest.raises(OSError, match="not empty"):
        fill_both()
    assert names(tmp_path) == ["target"]
    assert (target / "file").read_bytes() == b"of another"


def test_a_file_where_the_directory_should_be_is_refused(source: Path) -> None:
    with pytest.raises(OSError, match=r"(?i)not a directory"), new_directory(source):
        raise AssertionError("it was refused too late")
    assert source.read_bytes() == CONTENT
    assert names(source.parent) == ["source"]


@posix
def test_a_link_to_an_empty_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with new_directory(tmp_path / "link") as made:
        (Path(made) / "file").write_bytes(b"new")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "there") == ["file"]


@posix
def test_the_permission_bits_of_a_new_directory_are_those_that_the_umask_leaves(
    tmp_path: Path, umask: Callable[[int], None]
) -> None:
    umask(0o027)
    with new_directory(tmp_path / "target"):
        pass
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o750


# What killed processes leave

SAVER = """
    import sys
    import numpy as np, onnx, onnxarchive
    from onnx import numpy_helper

    def progress(done, total):
        if done < total:
            print("amid", flush=True)
            sys.stdin.readline()

    tensor = numpy_helper.from_array(np.ones(5 << 20, np.float32), "w")  # 20 MiB
    graph = onnx.GraphProto(name="graph", initializer=[tensor])
    model = onnx.ModelProto(
        ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=21)], graph=graph
    )
    onnxarchive.save(model, sys.argv[1], progress=progress)
"""


@contextlib.contextmanager
def amid_a_save(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has written some MiB of an archive, and waits."""
    command = [sys.executable, "-c", textwrap.dedent(SAVER), str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "amid\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("name", ["model.onnxa", "m" * 255, "a model [1]*.onnxa"])
def test_what_a_killed_save_leaves_is_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with amid_a_save(path) as process:
        process.kill()
        process.wait()
    (left,) = names(tmp_path)
    assert (tmp_path / left).stat().st_size > 8 << 20
    recovery = recover(path)  # which was never there
    assert not recovery.is_rolled_back
    assert recovery.removed == (os.path.join(os.path.realpath(tmp_path), left),)
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError) as caught:
        recover(path)
    assert caught.value.filename == str(path)


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.onnxa"
    with amid_a_save(path) as process:
        (left,) = names(tmp_path)
        assert remove_abandoned(path) == []
        with pytest.raises(FileNotFoundError):
            recover(path)
        assert names(tmp_path) == [left]
        process.communicate("\n" * 9)
        assert process.returncode == 0
    assert names(tmp_path) == ["model.onnxa"]
    assert recover(path).removed == ()
    assert path.stat().st_size > 20 << 20


def test_what_this_process_writes_stays(tmp_path: Path) -> None:
    path = tmp_path / "target"
    with replacing(path) as file:
        file.write(b"new")
        assert remove_abandoned(path) == []
    assert path.read_bytes() == b"new"


@posix
def test_what_only_looks_like_an_abandoned_file_stays(tmp_path: Path) -> None:
    stay = [
        ".target.1-1.tmp.bak",
        ".target.1-1",
        ".target.-1.tmp",
        ".target.1-.tmp",
        ".target.a-1.tmp",
        ".target.onnxa.1-1.tmp",
        ".targets.1-1.tmp",
        "target.1-1.tmp",
        ".Target.1-1.tmp",
        "x.target.1-1.tmp",
        "target",
        "target-journal",
    ]
    for name in stay:
        (tmp_path / name).write_bytes(b"of somebody")
    (tmp_path / ".target.2-1.tmp").symlink_to("target")
    (tmp_path / ".target.2-2.tmp").symlink_to("nowhere")
    (tmp_path / ".target.2-3.tmp").mkdir()
    os.mkfifo(tmp_path / ".target.2-4.tmp")
    before = names(tmp_path)
    (tmp_path / ".target.1-1.tmp").write_bytes(b"abandoned")
    (tmp_path / ".target.23-456.tmp").write_bytes(b"")
    removed = [
        os.path.join(os.path.realpath(tmp_path), f".target.{n}.tmp") for n in ("1-1", "23-456")
    ]
    assert remove_abandoned(tmp_path / "target") == removed
    assert names(tmp_path) == before
    assert remove_abandoned(tmp_path / "target") == []


@posix
def test_what_is_abandoned_is_looked_for_beside_what_a_link_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    left = tmp_path / "there" / ".file.1-1.tmp"
    monkeypatch.chdir(tmp_path)
    left.touch()
    assert remove_abandoned("link") == [os.path.realpath(left.parent) + "/.file.1-1.tmp"]
    monkeypatch.chdir("there")
    left.touch()
    assert remove_abandoned("file") == [os.path.realpath(left.parent) + "/.file.1-1.tmp"]


def test_in_a_directory_that_is_missing_nothing_is_abandoned_but_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_abandoned(tmp_path / "missing" / "target")


# The file system


def test_a_clone_has_all_bytes_or_there_is_none(source: Path, tmp_path: Path) -> None:
    with MappedFile(source) as file, open(tmp_path / "target", "xb") as target:
        is_cloned = clone(file, target)
    assert (tmp_path / "target").read_bytes() == (CONTENT if is_cloned else b"")


def test_there_is_no_clone_on_a_system_without_ioctl(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    with MappedFile(source) as file, open(tmp_path / "target", "xb") as target:
        assert not clone(file, target)


def test_a_file_is_synced_as_far_as_the_system_can(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    fails = False

    def full_sync(descriptor: int, command: int) -> None:
        calls.append((descriptor, command))
        if fails:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(os, "fsync", calls.append)
    with open(source, "r+b") as file:
        monkeypatch.setattr(files, "fcntl", SimpleNamespace())
        sync(file.fileno())
        assert calls == [file.fileno()]
        calls.clear()
        monkeypatch.setattr(files, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=full_sync))
        sync(file.fileno())
        assert calls == [(file.fileno(), 51)]
        calls.clear()
        fails = True
        sync(file.fileno())
        assert calls == [(file.fileno(), 51), file.fileno()]


@posix
def test_a_directory_that_cannot_be_synced_is_no_error_but_a_broken_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.EINVAL

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    sync_directory(str(tmp_path))
    before = next_descriptor()
    monkeypatch.setattr(os, "fsync", fail)
    sync_directory(str(tmp_path))
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync_directory(str(tmp_path))
    assert next_descriptor() == before


@posix
def test_a_directory_that_may_be_written_and_not_listed_is_not_synced() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o333)
        done = run(
            """
            import os, sys
            from onnxarchive.files import replacing, sync_directory

            if os.geteuid() == 0:
                os.seteuid(65534)
            with replacing(sys.argv[1] + "/target") as file:
                file.write(b"new")
            sync_directory(sys.argv[1])
            """,
            directory,
        )
        os.chmod(directory, 0o700)
        assert done.returncode == 0, done.stderr
        assert (Path(directory) / "target").read_bytes() == b"new"


def test_an_error_of_what_is_spooled_names_what_is_read_and_not_the_temporary_file(
    tmp_path: Path,
) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(b"some")
        raise OSError(errno.EIO, "broken", "weights.data")

    with pytest.raises(OSError, match=r"broken: 'weights\.data'"):
        files.spool(pieces(), os.fspath(tmp_path))
    assert list(tmp_path.iterdir()) == []
