"""The block cache: what is fetched, and what is left after crashes, full disks and damage."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lock_calls
import pytest
import remote_files
from commands import run
from models import run_python
from mounts import attempt, mounted
from obstore.store import LocalStore, MemoryStore
from processes import started
from remote_files import DATA, KEY, SIZE, URL, Remote, data_of, opened, require_right

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.remote.cache import (
    BLOCK_SIZE,
    cached_archives,
    clear,
    directory_of_cache,
    open_cached,
)
from onnxarchive.remote.objects import open_object
from onnxarchive.remote.stores import StoreOrigin
from onnxarchive.storage import locking

Captured = pytest.CaptureFixture[str]

posix = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a cache may be."""
    return tmp_path / "a cache"


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def damaged(directory: Path) -> Path:
    """The file of a cache with all blocks; it is to be damaged."""
    with opened(directory) as file:
        file.fetch([(0, SIZE)])
        file.set_verified(3)
    return only_file(directory)


# Reading


def test_a_size_that_no_disk_holds_is_refused_before_its_state_takes_memory(tmp_path: Path) -> None:
    remote = Remote()
    remote.size = 1 << 60
    with pytest.raises(OSError, match="at most 17592186044416 bytes") as caught:
        opened(tmp_path / "cache", remote)
    assert caught.value.filename == URL


def test_blocks_are_fetched_once_and_by_one_call(directory: Path) -> None:
    remote = Remote()
    with opened(directory, remote) as file:
        ranges = [(SIZE - 5, 5), (5, 10), (BLOCK_SIZE * 3, BLOCK_SIZE), (17, 1)]
        file.fetch(ranges)
        (asked,) = remote.asked
        lead = SIZE % BLOCK_SIZE
        assert asked == [
            (0, lead),
            (lead + 2 * BLOCK_SIZE, 2 * BLOCK_SIZE),
            (SIZE - BLOCK_SIZE, BLOCK_SIZE),
        ]
        for offset, size in ranges:
            assert file.read(offset, size) == DATA[offset : offset + size]
            assert bytes(file.reaching(offset + size)[offset : offset + size]) == file.read(
                offset, size
            )
        assert len(remote.asked) == 1
    remote = Remote()
    with opened(directory, remote) as file:
        file.fetch(ranges)
        assert not remote.asked


@pytest.mark.parametrize("size", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
@pytest.mark.parametrize("part_size", [1000, 1 << 20])
def test_files_of_any_size_are_read(directory: Path, size: int, part_size: int) -> None:
    data = data_of(size)
    assert len(require_right(directory, data, part_size=part_size)) == (size > 0)
    assert not require_right(directory, data)


def test_reads_end_with_the_file(directory: Path) -> None:
    with opened(directory) as file:
        assert file.read(SIZE - 3, 10) == DATA[-3:]
        assert file.read(SIZE, 10) == file.read(SIZE + 10 * BLOCK_SIZE, 1) == b""
        assert file.reaching(SIZE).readonly
        assert file.reaching(0).nbytes == SIZE


def test_the_end_that_opening_reads_is_one_block(directory: Path) -> None:
    remote = Remote()
    with opened(directory, remote) as file:
        file.hold(SIZE - BLOCK_SIZE)
        assert file.read(SIZE - 100, 100) == DATA[-100:]
    assert remote.asked == [[(SIZE - BLOCK_SIZE, BLOCK_SIZE)]]


def test_the_end_is_not_read_again_from_a_store(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "model.onnxa").write_bytes(DATA)
    opening = open_object("model.onnxa", store=LocalStore(tmp_path))
    with open_cached(opening, directory) as file:
        with patch.object(StoreOrigin, "get", None):
            file.hold(SIZE - BLOCK_SIZE)
            assert file.read(SIZE - 100, 100) == DATA[-100:]
            assert bytes(file.reaching(SIZE)[-100:]) == DATA[-100:]
        assert file.read(0, SIZE) == DATA
    with (
        open_cached(open_object("model.onnxa", store=LocalStore(tmp_path)), directory) as file,
        patch.object(StoreOrigin, "get", None),
    ):
        assert file.read(0, SIZE) == DATA


def test_several_ranges_and_pieces_are_fetched_at_once(directory: Path) -> None:
    remote = Remote()
    with opened(directory, remote) as file:
        ranges = [(0, 10), (SIZE // 2, 10)]
        assert [*map(bytes, file.read_ranges(ranges))] == [DATA[:10], DATA[SIZE // 2 :][:10]]
        assert len(remote.asked) == 1
        assert b"".join(map(bytes, file.pieces(3, SIZE))) == DATA[3:]
        assert len(remote.asked) == 2


def test_an_object_without_a_validator_is_not_cached(directory: Path) -> None:
    remote = Remote(key=None)
    assert open_cached(remote, directory) is remote  # type: ignore[arg-type]
    assert not directory.exists()


class Handler(BaseHTTPRequestHandler):
    """Answers requests for ranges of `DATA`."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        begin = int(first) if first else SIZE - int(last)
        end = int(last) + 1 if first else SIZE
        self.send_response(206)
        self.send_header("ETag", '"one"')
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{SIZE}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self.wfile.write(DATA[begin:end])

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_no_secret_is_in_the_cache(directory: Path, capsys: Captured) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    host = f"127.0.0.1:{server.server_port}"
    try:
        for secret in ("secret1", "secret2"):  # with another signature it is the same object
            url = f"http://user:{secret}@{host}/model.onnxa?X-Amz-Signature={secret}"
            with open_cached(open_object(url), directory) as file:
                assert file.read(0, SIZE) == DATA
    finally:
        server.shutdown()
        server.server_close()
    path = only_file(directory)
    assert b"secret" not in path.name.encode() + path.read_bytes()
    assert run("cache", "ls", "--directory", directory) == 0
    assert f"\nhttp://{host}/model.onnxa " in capsys.readouterr().out


def test_an_object_in_memory_is_not_cached(directory: Path) -> None:
    files = []
    for data in (DATA, bytes(SIZE)):  # both have the ETag "0"
        store = MemoryStore()
        store.put("model.onnxa", data)
        files.append(open_object("model.onnxa", store=store))
        assert open_cached(files[-1], directory) is files[-1]
    assert files[0].identity != files[1].identity
    assert not directory.exists()


def test_each_version_has_a_file_of_its_own(directory: Path) -> None:
    other = bytes(reversed(DATA))
    for _ in range(2):
        require_right(directory)
        require_right(directory, other, key="f" * 64)
    assert len([*directory.iterdir()]) == 2


def test_what_was_verified_is_known_to_later_readers(directory: Path) -> None:
    with opened(directory) as file, opened(directory) as other:
        assert not file.is_verified(70_000)
        file.set_verified(70_000)
        assert other.is_verified(70_000)
        assert not other.is_verified(69_999)
        assert not other.is_verified(70_001)
    with opened(directory) as file:
        assert file.is_verified(70_000)
    require_right(directory)


def test_the_file_is_sparse(directory: Path) -> None:
    size = 1 << 40
    remote = Remote(b"")
    remote.size = size
    with opened(directory, remote) as file:
        assert file.local.size == size
        assert only_file(directory).stat().st_size > size
        assert only_file(directory).stat().st_blocks * 512 < 16 << 20
        assert not file.is_verified(1)


def test_closing_closes_the_object_and_keeps_views(directory: Path) -> None:
    remote = Remote()
    with opened(directory, remote) as file:
        file.fetch([(0, SIZE)])
        view = file.reaching(SIZE)
    assert remote.is_closed
    assert bytes(view) == DATA
    with pytest.raises(ValueError, match="closed"):
        file.fetch([(0, 1)])


def test_bytes_that_failed_a_check_are_fetched_again_by_the_next_reader(directory: Path) -> None:
    with opened(directory, Remote(bytes(SIZE))) as file:
        assert not any(file.read(0, SIZE))
        file.discard()
        assert not any(file.read(0, SIZE))
        require_right(directory)
        file.discard()  # the file of another reader stays
        file.discard()
    assert not require_right(directory)


def test_a_file_that_cannot_be_removed_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: str) -> None:
        raise PermissionError(errno.EACCES, "open", path)  # as on Windows

    with opened(tmp_path / "cache") as file:
        file.read(0, SIZE)
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", unlink)
            file.discard()
    assert require_right(tmp_path / "cache") == [[(0, SIZE)]]


# Errors


def test_an_error_keeps_the_blocks_that_arrived_whole(directory: Path) -> None:
    remote = Remote(part_size=BLOCK_SIZE // 2)
    count = 0

    def fail(offset: int) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise TimeoutError("too slow")

    remote.before = fail
    with opened(directory, remote) as file, pytest.raises(TimeoutError):
        file.fetch([(0, SIZE)])
    (found,) = cached_archives(str(directory))
    assert 0 < found.present <= 11 * BLOCK_SIZE // 2
    (asked,) = require_right(directory)
    assert sum(size for _, size in asked) == SIZE - found.present


def test_a_block_that_is_not_whole_is_not_shown(directory: Path) -> None:
    remote = Remote(part_size=BLOCK_SIZE // 3)
    first = opened(directory, remote)
    second = opened(directory)
    seen = []

    def look(offset: int) -> None:
        seen.append(offset)
        if len(seen) == 2:
            assert second.read(0, SIZE) == DATA

    remote.before = look
    with first, second:
        first.fetch([(0, SIZE)])
    assert len(seen) > 2


def test_a_block_that_another_has_completed_is_not_written(directory: Path) -> None:
    remote = Remote(bytes(SIZE), part_size=BLOCK_SIZE // 3)  # of a server that sends wrong bytes
    first = opened(directory, remote)
    seen = []

    def read_all(offset: int) -> None:
        seen.append(offset)
        if len(seen) == 5:
            require_right(directory)

    remote.before = read_all
    with first:
        first.fetch([(0, SIZE)])
        assert first.read(0, SIZE) == DATA
    assert not require_right(directory)


def test_parts_that_lack_bytes_leave_their_blocks_missing(directory: Path) -> None:
    remote = Remote()
    whole = remote.parts
    with opened(directory, remote) as file:
        with (
            patch.object(remote, "parts", lambda ranges: [*whole(ranges)][1:]),
            pytest.raises(OSError, match=r"expected .* more bytes, found none") as caught,
        ):
            file.fetch([(0, SIZE)])
        assert caught.value.filename == URL
    (asked,) = require_right(directory)
    assert asked


def test_bytes_that_were_not_asked_for_are_not_written(directory: Path) -> None:
    remote = Remote()
    with opened(directory, remote) as file:
        file.fetch([(0, SIZE)])
        _overwrite(only_file(directory), STATE + 5, b"\0")  # block 5 is missing
        start = SIZE - 6 * BLOCK_SIZE
        wider = bytes(10) + DATA[start : start + BLOCK_SIZE] + bytes(SIZE)
        given = [(0, memoryview(bytes(start))), (start - 10, memoryview(wider))]
        with patch.object(remote, "parts", lambda ranges: given):
            file.fetch([(0, SIZE)])
    assert not require_right(directory)


@posix
@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    uses: list[Callable[[], object]] = [
        lambda: opened(directory),
        lambda: cached_archives(str(directory)),
        lambda: clear(str(directory)),
    ]
    for use in uses:
        with pytest.raises(PermissionError, match=f"0700, found .* mode {mode:04o}") as caught:
            use()
        assert caught.value.filename == str(directory)
    assert not [*directory.iterdir()]


@posix
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may give a directory away")
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    with pytest.raises(PermissionError, match=r"of user 0 .* found one of user 65534"):
        opened(directory)


@posix
def test_a_new_directory_and_its_files_are_the_users_own(directory: Path) -> None:
    before = os.umask(0)
    try:
        opened(directory / "below").close()
    finally:
        os.umask(before)
    assert (directory / "below").stat().st_mode & 0o777 == 0o700
    assert only_file(directory / "below").stat().st_mode & 0o777 == 0o600


def test_a_file_in_the_place_of_the_directory_is_refused(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(FileExistsError, match="a cache"):
        opened(directory)


def test_the_users_directory_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert directory_of_cache() == str(tmp_path / ".cache" / "onnxarchive")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert directory_of_cache() == str(tmp_path / ".cache" / "onnxarchive")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    with open_cached(Remote(), True) as file:  # type: ignore[arg-type]
        assert file.read(0, 5) == DATA[:5]
    assert only_file(tmp_path / "own" / "onnxarchive").name.startswith(KEY)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(mode=0o700)
    target.mkdir(mode=0o700)
    with mounted(source, target, "bind,ro"):
        for directory in (target, target / "below"):
            with pytest.raises(OSError, match="Read-only file system") as caught:
                opened(directory)
            assert str(caught.value.filename).startswith(str(target))


# Full disks


def test_a_full_disk_is_an_error_and_the_cache_stays_right(tmp_path: Path) -> None:
    if not hasattr(os, "geteuid") or os.geteuid():
        pytest.skip("only root may mount")
    small = tmp_path / "small"
    small.mkdir()
    problem = attempt(["mount", "-t", "tmpfs", "-o", "size=640k,mode=700", "small", str(small)])
    if problem is not None:
        pytest.skip(f"nothing can be mounted: {problem}")
    try:
        with opened(small) as file, pytest.raises(OSError, match=KEY) as caught:
            file.fetch([(0, SIZE)])
        assert caught.value.errno == errno.ENOSPC
        (found,) = cached_archives(str(small))
        remote = Remote()
        with opened(small, remote) as file:
            with pytest.raises(OSError, match=KEY):
                file.fetch([(0, SIZE)])
            file.set_verified(1 << 20)
            assert not file.is_verified(1 << 20)
            (asked,) = remote.asked
            assert sum(size for _, size in asked) == SIZE - found.present
            missing = {at for begin, size in asked for at in range(begin, begin + size)}
            for offset in {*range(0, SIZE, 1000)} - missing:
                assert file.read(offset, 1) == DATA[offset : offset + 1]
        assert attempt(["mount", "-o", "remount,size=10m", str(small)]) is None
        require_right(small)
    finally:
        assert attempt(["umount", str(small)]) is None


@posix
def test_an_archive_that_is_too_large_for_the_file_system_is_an_error(directory: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from remote_files import opened
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    opened(Path(sys.argv[1]))
except OSError as error:
    print(error.errno, error.filename)
"""
    out = run_python(program, directory)
    assert out == f"{errno.EFBIG} {only_file(directory)}\n"
    require_right(directory)


# Damage by others


STATE = SIZE + (16 << 10)  # where the blocks' bytes begin, after the header
DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "cut in the bytes": lambda path: os.truncate(path, SIZE // 2),
    "cut before the state": lambda path: os.truncate(path, SIZE),
    "cut in the header": lambda path: os.truncate(path, SIZE + 10),
    "cut in the blocks' bytes": lambda path: os.truncate(path, STATE + 4),
    "replaced by a part": lambda path: path.write_bytes(DATA[: SIZE // 2] + bytes(SIZE)),
    "removed": lambda path: path.unlink(),
    "replaced by garbage": lambda path: path.write_bytes(data_of(2 * SIZE)),
    "replaced by zeros": lambda path: path.write_bytes(bytes(2 * SIZE)),
    "garbage in the header": lambda path: _overwrite(path, SIZE + 3, b"\xff"),
    "nesting in the header": lambda path: _overwrite(path, SIZE, b"[" * 10_000),
    "garbage in the blocks' bytes": lambda path: _overwrite(path, STATE, data_of(11)),
}


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_fetched_anew(directory: Path, damage: str) -> None:
    DAMAGES[damage](damaged(directory))
    (asked,) = require_right(directory)
    assert asked == [(0, SIZE)]
    with opened(directory) as file:
        assert not file.is_verified(3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 10 * SIZE),
        lambda path: os.truncate(path, STATE + 11),
        lambda path: _overwrite(path, STATE + 11, b"\x07" * 100),
    ],
    ids=["grown", "cut before the entries' bytes", "garbage in the entries' bytes"],
)
def test_damage_behind_the_blocks_is_harmless(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    damage(damaged(directory))
    assert not require_right(directory)
    with opened(directory) as file:
        assert not file.is_verified(0)


def test_the_file_of_another_version_in_its_place_is_not_read(directory: Path) -> None:
    require_right(directory, bytes(reversed(DATA)), key="f" * 64)
    only_file(directory).rename(directory / f"{KEY}.{SIZE}.blocks")
    (asked,) = require_right(directory)
    assert asked == [(0, SIZE)]


def test_a_pipe_in_its_place_is_refused(directory: Path) -> None:
    path = damaged(directory)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FileExistsError, match="found a pipe; remove it") as caught:
        opened(directory)
    assert caught.value.filename == str(path)


@posix
def test_a_link_in_its_place_is_refused_and_not_followed(directory: Path, tmp_path: Path) -> None:
    path = damaged(directory)
    path.unlink()
    path.symlink_to(tmp_path / "missing")
    with pytest.raises(FileExistsError, match="found a symbolic link; remove it") as caught:
        opened(directory)
    assert caught.value.filename == str(path)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("size", [0, SIZE // 2, SIZE])
def test_truncation_of_an_open_file_is_noticed(directory: Path, size: int) -> None:
    path = damaged(directory)
    with opened(directory) as file:
        os.truncate(path, size)
        for read in (lambda: file.fetch([(5, 1)]), lambda: file.read(5, 1)):
            with pytest.raises(ArchiveFormatError, match=f"{KEY}.*truncated"):
                read()
    require_right(directory)


# Several at once


def test_readers_keep_a_file_that_is_removed(directory: Path) -> None:
    with opened(directory) as file:
        view = file.reaching(SIZE)
        file.fetch([(0, SIZE // 2)])
        assert len(clear(str(directory))) == 1
        require_right(directory)
        file.fetch([(0, SIZE)])
        assert bytes(view) == DATA
    assert not require_right(directory)


def test_a_file_that_is_removed_while_it_is_opened_is_made_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(directory)
    lock = locking.keep_exclusive

    def remove_and_lock(descriptor: int) -> None:
        path.unlink()
        lock(descriptor)
        monkeypatch.undo()

    monkeypatch.setattr(locking, "keep_exclusive", remove_and_lock)
    with opened(directory) as file:
        assert file.read(0, SIZE) == DATA
    assert not require_right(directory)


def test_a_file_system_without_locks_has_caches(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_calls.refuse(monkeypatch, errno.ENOSYS)
    require_right(directory)
    assert not require_right(directory)


# Reads at random through a cache that others use and clear, and compares each byte.
READER = """
import random, sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from remote_files import DATA, SIZE, Remote, opened

from onnxarchive.errors import ArchiveError
from onnxarchive.remote.cache import clear

chance = random.Random()
end = time.monotonic() + 1
rounds = 0
while time.monotonic() < end:
    remote = Remote(part_size=chance.randrange(10_000, 300_000))
    remote.before = lambda offset: time.sleep(chance.choice([0, 0, 0.001]))
    with opened(Path(sys.argv[1]), remote) as file:
        for _ in range(5):
            offset = chance.randrange(SIZE)
            size = chance.randrange(SIZE - offset + 1)
            file.fetch([(offset, size)])
            assert file.reaching(SIZE)[offset : offset + size] == DATA[offset : offset + size]
            if size:
                file.set_verified(7)
    if not chance.randrange(10):
        clear(sys.argv[1])
    rounds += 1
print(rounds)
"""


def test_processes_share_a_cache(directory: Path) -> None:
    tests = os.path.dirname(remote_files.__file__)
    command = [sys.executable, "-W", "error", "-c", READER, directory, tests]
    with started(command) as first, started(command) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, "")
            assert int(out) > 0
    require_right(directory)


def test_threads_share_a_cached_file(directory: Path) -> None:
    remote = Remote(part_size=20_000)
    remote.before = lambda offset: time.sleep(0.0005)
    problems = []
    with opened(directory, remote) as file:

        def read(seed: int) -> None:
            chance = random.Random(seed)
            for _ in range(20):
                offset = chance.randrange(SIZE)
                if file.read(offset, 50_000) != DATA[offset : offset + 50_000]:
                    problems.append(offset)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not problems
    require_right(directory)


# Crashes


@posix
def test_a_fault_at_any_call_leaves_at_worst_blocks_to_fetch(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """A process is killed at any call, a call fails, or the power fails."""
    result = json.loads(run_python("import cache_faults; cache_faults.main()", tmp_path))
    assert result["problems"] == []
    assert {"write", "truncate", "sync", "unlink"} <= {*result["calls"]}
    outcomes = result["outcomes"]
    assert outcomes["killed"] > len(result["calls"])
    assert outcomes["OSError"] == 4 * len(result["calls"])
    assert outcomes["power failure, complete"] > 0
    assert outcomes["power failure, in part"] > 0
    record_property("faults tried", sum(outcomes.values()))


@posix
def test_a_killed_fetch_goes_on_where_it_was(directory: Path) -> None:
    program = """
import sys, time
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from remote_files import SIZE, Remote, opened
from onnxarchive.remote import cache

cache.SYNC_SIZE = 1
remote = Remote()
remote.before = lambda offset: (print(offset, flush=True), time.sleep(0.02))
opened(Path(sys.argv[1]), remote).fetch([(0, SIZE)])
"""
    tests = os.path.dirname(remote_files.__file__)
    with started([sys.executable, "-c", program, directory, tests]) as process:
        assert process.stdout is not None
        for _ in range(8):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (asked,) = require_right(directory)
    assert 0 < sum(size for _, size in asked) < SIZE


# ls and clear


def test_ls_shows_what_is_cached(directory: Path, capsys: Captured) -> None:
    with opened(directory) as file:
        file.fetch([(0, 1), (SIZE - 1, 1)])
    os.utime(only_file(directory), (0, 1_000_000_000))
    require_right(directory, b"other", key="f" * 64)
    (directory / "mine.txt").write_bytes(b"")
    (directory / f"{'e' * 64}.{SIZE}.blocks").write_bytes(b"garbage")
    os.utime(directory / f"{'e' * 64}.{SIZE}.blocks", (0, 0))
    assert run("cache", "ls", "--directory", directory) == 0
    header, *rows, blank, summary = capsys.readouterr().out.splitlines()
    present = SIZE % BLOCK_SIZE + BLOCK_SIZE
    assert header.split() == ["URL", "bytes", "present", "last", "used"]
    assert [row.split()[:3] for row in rows[:2]] == [
        [URL, "5", "5"],
        [URL, f"{SIZE:,}", f"{present:,}"],
    ]
    assert rows[1].split()[3].startswith("2001-09-")
    assert "damaged" in rows[2]
    assert (blank, len(rows)) == ("", 3)
    assert summary.startswith(f"3 archives with {present + 5:,} bytes")
    assert run("cache", "ls", "--json", "--directory", directory) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(it["url"], it["nbytes"], it["present"]) for it in result["archives"]] == [
        (URL, 5, 5),
        (URL, SIZE, present),
        (None, SIZE, 0),
    ]


def test_opening_counts_as_a_use(directory: Path) -> None:
    path = damaged(directory)
    os.utime(path, (0, 0))
    opened(directory).close()
    (found,) = cached_archives(str(directory))
    assert abs(found.used - time.time()) < 60


def test_clear_removes_only_what_the_cache_made(directory: Path, capsys: Captured) -> None:
    path = damaged(directory)
    others = [
        directory / "mine.txt",
        directory / f"{KEY}.{SIZE}.blocks.bak",
        directory / f"{'a' * 64}.5.blocks",
    ]
    for other in others[:2]:
        other.write_bytes(b"")
    others[2].mkdir()
    assert run("cache", "clear", "--directory", directory) == 0
    assert capsys.readouterr().out.startswith(f"removed 1 archive with {SIZE:,} bytes")
    assert sorted(directory.iterdir()) == sorted(others)
    assert not path.exists()
    assert run("cache", "clear", "--directory", directory) == 0


def test_clear_removes_the_archives_of_a_url(directory: Path, capsys: Captured) -> None:
    other = Remote(b"other", key="f" * 64)
    other.path = "https://models.example/other.onnxa"
    damaged(directory)
    opened(directory, other).close()
    command = ("cache", "clear", "--json", "--directory", directory)
    assert run(*command, "https://models.example/none.onnxa") == 2
    assert "none.onnxa" in capsys.readouterr().err
    assert run(*command, URL + "?X-Amz-Signature=secret") == 0
    assert [it["url"] for it in json.loads(capsys.readouterr().out)["archives"]] == [URL]
    (left,) = cached_archives(str(directory))
    assert left.url == other.path


def test_a_missing_cache_is_empty(directory: Path, capsys: Captured) -> None:
    assert run("cache", "ls", "--directory", directory) == 0
    assert run("cache", "clear", "--directory", directory) == 0
    assert capsys.readouterr().err == ""
    assert not directory.exists()
