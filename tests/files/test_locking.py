"""Locks: waiting, timeouts, and file systems without locks."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import edits
import lock_calls
import numpy as np
import onnx
import pytest
from byte_locks import LOCKED_BYTE, lock_bytes_alone
from edits import replace_model
from interruptions import interrupt
from models import documented_model
from processes import started
from written import saved

import onnxarchive
from onnxarchive.editing.recover import recover
from onnxarchive.errors import LockedError
from onnxarchive.files import locking
from onnxarchive.files.hidden_files import remove_abandoned
from onnxarchive.files.local_file import MappedFile

if sys.platform != "win32":
    import fcntl

flock = pytest.mark.skipif(sys.platform == "win32", reason="flock is taken away")
TIMEOUTS = (0, 0.2)
KINDS = ("shared", "exclusive")

Lock: TypeAlias = Callable[[int], contextlib.AbstractContextManager[None]]

kinds = pytest.mark.parametrize("kind", KINDS)
locks = pytest.mark.parametrize("lock", [locking.shared, locking.exclusive])
_Result = TypeVar("_Result")

# Takes a lock, says so, and keeps it.
HOLDER = """
import os, sys, time
from onnxarchive.files import locking

kind, path = sys.argv[1:]
descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
with getattr(locking, kind)(descriptor):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def held(kind: str, path: Path) -> Iterator[Callable[[], None]]:
    """A lock of another thread, which acts as that of another process; gives what releases it."""
    with another(path) as descriptor, ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as it:
        thread.submit(it.enter_context, getattr(locking, kind)(descriptor)).result()
        yield lambda: thread.submit(it.close).result()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    with another(path) as descriptor:
        yield descriptor


@contextlib.contextmanager
def another(path: Path) -> Iterator[int]:
    """The file, opened once more: with locks of its own, even in one process."""
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def elsewhere(act: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls a function in another thread, which has locks of its own."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(act, *arguments).result()


def locked_at_once(descriptor: int) -> bool:
    """Takes the exclusive lock until the file is closed, if nobody else has one."""
    with contextlib.suppress(LockedError):
        return locking.keep_exclusive(descriptor, 0)
    return False


def is_free(path: Path) -> bool:
    with another(path) as descriptor:
        return elsewhere(locked_at_once, descriptor)


def require_locked(act: Callable[[], object]) -> LockedError:
    with pytest.raises(LockedError, match="the file is locked by a process") as caught:
        act()
    return caught.value


def take(descriptor: int, timeout: float | None) -> None:
    with locking.exclusive(descriptor, timeout):
        pass


def share(descriptor: int) -> None:
    with locking.shared(descriptor):
        pass


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def require_waiting(waiting: Future[Any]) -> None:
    with pytest.raises(TimeoutError):
        waiting.result(0.2)


# Two locks of a file


@pytest.mark.parametrize("timeout", TIMEOUTS)
@kinds
def test_an_exclusive_lock_excludes_every_other_lock(
    path: Path, descriptor: int, kind: str, timeout: float
) -> None:
    with held(kind, path) as let_go:
        require_locked(lambda: take(descriptor, timeout))
        assert not locked_at_once(descriptor)
        let_go()
        take(descriptor, timeout)
        assert locked_at_once(descriptor)


@flock
def test_readers_share_a_lock(path: Path, descriptor: int) -> None:
    with held("shared", path), locking.shared(descriptor), another(path) as third:
        share(third)
        assert not is_free(path)


@pytest.mark.parametrize(
    ("kind", "take_once"),
    [
        *((kind, partial(take, timeout=it)) for kind in KINDS for it in (None, 30)),
        ("exclusive", share),
    ],
)
def test_a_lock_waits_for_one_that_excludes_it(
    path: Path,
    descriptor: int,
    threads: ThreadPoolExecutor,
    kind: str,
    take_once: Callable[[int], object],
) -> None:
    with held(kind, path) as let_go:
        waiting = threads.submit(take_once, descriptor)
        require_waiting(waiting)
        let_go()
        waiting.result(30)
    assert is_free(path)


@kinds
def test_the_lock_of_a_process_that_is_killed_is_free(
    path: Path, descriptor: int, threads: ThreadPoolExecutor, kind: str
) -> None:
    with started([sys.executable, "-c", HOLDER, kind, path]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        require_locked(lambda: take(descriptor, 0))
        waiting = threads.submit(take, descriptor, None)
        require_waiting(waiting)
        process.kill()
        waiting.result(30)


# One process


@locks
def test_a_lock_is_released_when_its_block_ends_or_raises(
    path: Path, descriptor: int, lock: Lock
) -> None:
    with lock(descriptor):
        assert not is_free(path)
    assert is_free(path)
    with pytest.raises(ZeroDivisionError), lock(descriptor):
        raise ZeroDivisionError
    assert is_free(path)


@locks
def test_the_lock_of_a_file_that_is_closed_in_the_block_is_released(path: Path, lock: Lock) -> None:
    descriptor = os.open(path, os.O_RDWR)
    with lock(descriptor):
        os.close(descriptor)
        assert is_free(path)


def test_a_lock_taken_without_waiting_is_kept_until_the_file_is_closed(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    assert locked_at_once(descriptor)
    assert not is_free(path)
    os.close(descriptor)
    assert is_free(path)


@locks
def test_a_lock_whose_block_ends_in_another_thread_is_released(
    path: Path, descriptor: int, lock: Lock
) -> None:
    block = lock(descriptor)
    block.__enter__()
    elsewhere(block.__exit__, None, None, None)
    assert is_free(path)
    take(descriptor, 0)


def test_a_thread_whose_lock_another_one_took_over_still_knows_its_own(path: Path) -> None:
    # An edit lets go of the lock before its block ends, and the next editor may be in between.
    with another(path) as first, another(path) as second:
        lock = locking.exclusive(first)
        elsewhere(lock.__enter__)
        locking.unlock(first)
        with locking.exclusive(second):
            elsewhere(lock.__exit__, None, None, None)
            with another(path) as third, pytest.raises(LockedError, match="finish the edit first"):
                take(third, None)


# Archives


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(documented_model("old"), path)
    return path


def read_model(path: Path) -> str:
    with onnxarchive.open(path) as archive:
        return str(archive.model.doc_string)


def replace(path: Path, **options: Any) -> None:
    replace_model(path, documented_model("new"), **options)


def test_a_reader_waits_for_a_writer_and_sees_what_was_written(
    archive: Path, threads: ThreadPoolExecutor
) -> None:
    with held("exclusive", archive) as let_go:
        waiting = threads.submit(read_model, archive)
        require_waiting(waiting)
        with open(archive, "r+b") as file:  # what the holder of the lock would do
            file.write(saved(documented_model("newer and longer")))
        let_go()
        assert waiting.result(30) == "newer and longer"


@flock
def test_readers_open_an_archive_at_once_and_keep_no_lock(archive: Path) -> None:
    with held("shared", archive):
        for timeout in (None, *TIMEOUTS):
            onnxarchive.open(archive, timeout=timeout).close()
        assert read_model(archive) == "old"
    with onnxarchive.open(archive) as first, onnxarchive.open(archive) as second:
        assert is_free(archive)
        assert first.model == second.model


WRITER = """
    import sys
    import onnxarchive

    path, count, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    for number in range(count):
        with onnxarchive.edit(path) as edit:
            edit.metadata[f"{name}{number}"] = "x"
"""


def test_writers_at_once_lose_nothing_of_one_another(archive: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), archive, 20]
    with started([*command, "a"]) as one, started([*command, "b"]) as other:
        while one.poll() is None or other.poll() is None:
            assert read_model(archive) == "old"
        assert (one.returncode, other.returncode) == (0, 0), (one.stderr, other.stderr)
    with onnxarchive.open(archive) as opened:
        assert set(opened.metadata) == {f"{name}{number}" for name in "ab" for number in range(20)}
    assert os.listdir(archive.parent) == [archive.name]


# Interrupts and timeouts


@pytest.mark.skipif(sys.platform == "win32", reason="calls of POSIX are interrupted")
@pytest.mark.parametrize("is_writable", [True, False])
@kinds
def test_an_interrupt_while_a_lock_is_taken_leaves_no_lock(
    archive: Path, kind: str, is_writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int, called: str, call: Callable[[], object]) -> None:
        call()
        if called == kind:
            raise KeyboardInterrupt

    with MappedFile(archive, is_writable=is_writable) as file:
        lock_calls.watch(monkeypatch, interrupted)
        with pytest.raises(KeyboardInterrupt), file.locked(is_exclusive=kind == "exclusive"):
            pytest.fail("the block begins")
        monkeypatch.undo()
        assert is_free(archive)


@pytest.mark.parametrize(
    ("timeout", "error", "found"),
    [
        ("x", TypeError, "timeout: expected a number of seconds or None, found 'x'"),
        *(
            (it, ValueError, "expected a timeout of 0 seconds or more, found")
            for it in (-1, -0.001, float("nan"))
        ),
    ],
)
def test_a_timeout_is_none_or_a_number_that_is_not_negative(
    archive: Path, timeout: Any, error: type[Exception], found: str
) -> None:
    left = archive.with_name(f".{archive.name}.onnxarchive-1.tmp")
    left.write_bytes(archive.read_bytes())
    for act in (
        lambda: onnxarchive.open(archive, timeout=timeout),
        lambda: edits.document(archive, timeout=timeout),
        lambda: onnxarchive.convert(archive, archive, timeout=timeout),
        lambda: onnxarchive.export(archive, archive.with_name("other"), timeout=timeout),
        lambda: onnxarchive.save(documented_model("new"), archive, timeout=timeout),
        lambda: recover(archive, timeout=timeout),
    ):
        with pytest.raises(error, match=found):
            act()
    assert read_model(archive) == "old"
    assert recover(archive).removed == (str(left),)


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_locked_target_is_named_as_the_caller_named_it(
    archive: Path, through_a_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(archive.parent)
    name = archive.name
    if through_a_link:
        name = "link.onnxa"
        os.symlink(archive.name, name)
    model = documented_model("new")
    onnx.save(model, "other.onnx")
    with held("exclusive", archive):
        for act in (
            lambda: onnxarchive.save(model, name, timeout=0),
            lambda: onnxarchive.convert("other.onnx", name, timeout=0),
        ):
            assert require_locked(act).path == name


def test_locking_a_closed_file_for_reading_is_an_error(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.close(descriptor)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        share(descriptor)


@flock
def test_a_reader_learns_why_it_has_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MappedFile(path) as file:
        with file.locked(is_exclusive=False):
            assert file.lock_failure is None
        with held("exclusive", path), file.locked(is_exclusive=False, timeout=0):
            assert isinstance(file.lock_failure, LockedError)
        lock_calls.refuse(monkeypatch, errno.EIO)
        with file.locked(is_exclusive=False):
            assert isinstance(file.lock_failure, OSError)
            assert file.lock_failure.errno == errno.EIO


# File systems without locks


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@pytest.fixture(params=NO_LOCKS, ids=[errno.errorcode[code] for code in NO_LOCKS])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A file system without locks, with each error that such file systems raise."""
    if sys.platform == "win32":
        pytest.skip("calls of POSIX are taken away")
    code = int(request.param)
    lock_calls.refuse(monkeypatch, code)
    return code


def test_writers_change_nothing_on_a_file_system_without_locks(
    archive: Path, no_locks: int
) -> None:
    before = archive.read_bytes()
    for act in (
        lambda: replace(archive),
        lambda: replace(archive, timeout=0),
        lambda: recover(archive),
    ):
        with pytest.raises(OSError, match=os.strerror(no_locks)) as caught:
            act()
        assert caught.value.errno == no_locks
    assert archive.read_bytes() == before
    assert os.listdir(archive.parent) == [archive.name]


def test_no_file_is_taken_for_abandoned_on_a_file_system_without_locks(
    path: Path, descriptor: int, no_locks: int
) -> None:
    left = path.with_name(".file.onnxarchive-1.tmp")
    left.write_bytes(b"of a process that may live")
    assert not locked_at_once(descriptor)
    assert remove_abandoned(path) == []
    assert left.exists()


@flock
@pytest.mark.parametrize("code", [errno.EIO, errno.EBADF])
def test_an_error_of_a_lock_is_not_taken_for_a_file_system_without_locks(
    descriptor: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_calls.refuse(monkeypatch, code)
    for timeout in (None, 0):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            take(descriptor, timeout)
        assert caught.value.errno == code


# Network file systems


def twice(path: Path) -> None:
    edits.document(path, "newer")
    edits.document(path, "new")


def edit(path: Path) -> None:
    with onnxarchive.edit(path) as edit:
        edit.model.doc_string = "new"
        edit.tensors["w"].tobytes()


def lesser(doc_string: str) -> onnx.ModelProto:
    made = documented_model(doc_string)
    made.graph.initializer[0].name = "v"
    return made


def documented(found: onnx.ModelProto) -> onnx.ModelProto:
    found.doc_string = "new"
    return found


def replace_by_a_link(path: Path) -> None:
    link = path.with_name("link.onnx")
    onnxarchive.link(path, link)
    linked = onnx.load(link, load_external_data=False)
    onnx.save(documented(linked), link)
    replace_model(path, link)
    link.unlink()


def convert_other(path: Path) -> None:
    other = path.with_name("other.onnx")
    onnx.save(documented_model("new"), other)
    onnxarchive.convert(other, path)
    other.unlink()


def recover_an_edit(path: Path) -> None:
    path.write_bytes(interrupt(path, edits.document).states["new end begun"])
    assert recover(path).is_rolled_back


# What opens, edits and replaces an archive, and what its doc_string is then.
EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "open": (read_model, "old"),
    "twice": (twice, "new"),
    "edit": (edit, "new"),
    "replace_model": (replace, "new"),
    "replace_model by a link": (replace_by_a_link, "new"),
    "with copy": (partial(replace, copy=True), "new"),
    "with compact": (lambda path: replace_model(path, lesser("new"), compact=True), "new"),
    "replace_tensor": (
        lambda path: edits.replace_tensor(path, "w", np.zeros(300, np.float32)),
        "old",
    ),
    "transform": (lambda path: onnxarchive.transform(path, path, documented), "new"),
    "save": (lambda path: onnxarchive.save(documented_model("new"), path), "new"),
    "convert": (convert_other, "new"),
    "recover": (recover, "old"),
    "recover an edit": (recover_an_edit, "old"),
    "check": (lambda path: onnxarchive.check(path, full=True), "old"),
}


@pytest.fixture
def nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks as NFS has them: one that is exclusive needs a descriptor that may write."""
    if sys.platform == "win32":
        pytest.skip("flock is taken away")
    flock_of_others = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        needed = {fcntl.LOCK_EX: os.O_RDONLY, fcntl.LOCK_SH: os.O_WRONLY}
        if needed.get(operation & ~fcntl.LOCK_NB) == access:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock_of_others(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)


@pytest.mark.parametrize("system", ["nfs", "cifs", "windows"])
@pytest.mark.parametrize(("act", "doc_string"), EDITS.values(), ids=EDITS)
def test_archives_are_opened_and_edited_on_every_system(
    archive: Path,
    system: str,
    act: Callable[[Path], object],
    doc_string: str,
    request: pytest.FixtureRequest,
) -> None:
    found = request.getfixturevalue(system)
    act(archive)
    assert is_free(archive)
    assert read_model(archive) == doc_string
    assert list(onnxarchive.check(archive, full=True)) == []
    assert os.listdir(archive.parent) == [archive.name]
    # No call was refused as on CIFS, and one byte alone was locked as on Windows.
    assert set(found or ()) == ({LOCKED_BYTE} if system == "windows" else set())


@pytest.mark.usefixtures("nfs")
def test_an_abandoned_file_on_nfs_is_removed(archive: Path) -> None:
    left = archive.with_name(f".{archive.name}.onnxarchive-1.tmp")
    left.write_bytes(archive.read_bytes()[:100])
    assert recover(archive).removed == (os.path.realpath(left),)


@pytest.mark.usefixtures("nfs")
def test_a_file_on_nfs_that_may_not_be_written_is_replaced_and_not_edited(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open
    content = archive.read_bytes()

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, flags, *mode)

    with monkeypatch.context() as unwritable:
        unwritable.setattr(os, "open", refuse)
        assert read_model(archive) == "old"
        for copy, reason in ((False, "Permission denied"), (True, "without write permission")):
            with pytest.raises(OSError, match=reason) as caught:
                replace(archive, copy=copy)
            assert caught.value.filename == str(archive)
        assert archive.read_bytes() == content
        onnxarchive.save(documented_model("new"), archive)
    assert read_model(archive) == "new"
    assert os.listdir(archive.parent) == [archive.name]


@pytest.fixture
def cifs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Locks as CIFS has them: what another open file has locked is not read, nor written.

    Gives the calls that are refused.
    """
    if sys.platform == "win32":
        pytest.skip("flock is taken away")
    refused: list[str] = []
    opened: dict[int, int] = {}  # which open file each descriptor is of
    locked: dict[tuple[int, int], dict[int, int]] = {}  # by file, then by open file
    numbers = itertools.count()
    open_file, dup, close_file = os.open, os.dup, os.close
    lock, mapped = fcntl.flock, mmap.mmap

    def holders(descriptor: int) -> dict[int, int]:
        status = os.fstat(descriptor)
        return locked.setdefault((status.st_dev, status.st_ino), {})

    def open_(*arguments: Any) -> int:
        descriptor = open_file(*arguments)
        opened[descriptor] = next(numbers)
        return descriptor

    def copy(descriptor: int) -> int:
        new = dup(descriptor)
        opened[new] = opened[descriptor]
        return new

    def close(descriptor: int) -> None:
        number = opened.pop(descriptor, None)
        if number is not None and number not in opened.values():
            for each in locked.values():
                each.pop(number, None)
        close_file(descriptor)

    def flock(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        if operation & fcntl.LOCK_UN:
            holders(descriptor).pop(opened[descriptor], None)
        else:
            holders(descriptor)[opened[descriptor]] = operation & ~fcntl.LOCK_NB

    def require(descriptor: int, name: str, *, changes: bool) -> None:
        for number, kind in holders(descriptor).items():
            if number != opened.get(descriptor) and (changes or kind == fcntl.LOCK_EX):
                refused.append(name)
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            require(descriptor, name, changes=name not in ("read", "pread"))
            return function(descriptor, *arguments)

        return call

    class Map(mmap.mmap):
        def __new__(cls, descriptor: int, *arguments: Any, **options: Any) -> Any:
            require(descriptor, "mmap", changes=False)
            return mapped(descriptor, *arguments, **options)

    monkeypatch.delattr(fcntl, "F_OFD_SETLK", raising=False)
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(mmap, "mmap", Map)
    for name in ("read", "pread", "write", "pwrite", "ftruncate"):
        monkeypatch.setattr(os, name, guarded(name, getattr(os, name)))
    for name, call in {"open": open_, "dup": copy, "close": close}.items():
        monkeypatch.setattr(os, name, call)
    return refused


def test_a_locked_file_on_cifs_is_read_through_no_other_descriptor(
    archive: Path, cifs: list[str]
) -> None:
    with MappedFile(archive) as other, MappedFile(archive, is_writable=True) as file:
        with file.locked(is_exclusive=True):
            assert file.read(0, 2) == b"PK"
            for read in (partial(other.read, 0, 2), partial(other.view, 0, 2)):
                with pytest.raises(PermissionError):
                    read()
            with file.reopened() as again:
                assert bytes(again.view()[:2]) == b"PK"
        assert other.read(0, 2) == b"PK"
    assert cifs == ["pread", "mmap", "pread"]


# Windows, whose locks of bytes are those of Linux here


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are locked and unlocked."""
    return lock_bytes_alone(monkeypatch)


@flock
@locks
def test_on_windows_a_byte_beyond_the_end_of_any_file_is_locked(
    path: Path, descriptor: int, windows: list[int], lock: Lock
) -> None:
    os.lseek(descriptor, 3, os.SEEK_SET)
    with lock(descriptor):
        assert os.read(descriptor, 2) == b"te"
        with another(path) as second:
            for timeout in TIMEOUTS:
                require_locked(partial(elsewhere, take, second, timeout))
            assert not elsewhere(locked_at_once, second)
            assert os.lseek(second, 0, os.SEEK_CUR) == 0
    assert os.read(descriptor, 2) == b"nt"
    assert set(windows) == {LOCKED_BYTE}
    assert is_free(path)


@flock
def test_on_windows_a_lock_is_waited_for(
    path: Path, descriptor: int, windows: list[int], threads: ThreadPoolExecutor
) -> None:
    with another(path) as second:
        with locking.exclusive(descriptor):
            waiting = [threads.submit(take, second, None), threads.submit(share, second)]
            for each in waiting:
                require_waiting(each)
        for each in waiting:
            each.result(30)


@flock
def test_on_windows_a_thread_that_reads_moves_no_lock(
    path: Path, windows: list[int], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both need the one position that a descriptor has.
    monkeypatch.delattr(os, "pread")
    module: Any = vars(locking)["msvcrt"]
    lock = module.locking
    readers: list[Future[bytes]] = []

    def late(*arguments: int) -> None:
        readers.append(threads.submit(file.read, 0, 7))
        wait(readers, 0.2)
        lock(*arguments)

    monkeypatch.setattr(module, "locking", late)
    with MappedFile(path, is_writable=True) as file:
        with file.locked(is_exclusive=True):
            pass
        assert [reader.result(30) for reader in readers] == [b"content"] * 2
    assert set(windows) == {LOCKED_BYTE}


@flock
def test_on_windows_an_archive_that_another_process_has_locked_is_not_edited(
    archive: Path, windows: list[int]
) -> None:
    with another(archive) as other, locking.exclusive(other):
        require_locked(lambda: elsewhere(lambda: replace(archive, timeout=0)))
    assert read_model(archive) == "old"
    assert len(windows) > 3
