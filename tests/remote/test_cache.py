"""The cache of remote archives: what is downloaded, and what crashes, full disks and others do."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lock_calls
import pytest
import remote_files
from commands import run
from limits import umask
from models import entry_of, run_python, runnable_model
from mounts import attempt, mounted
from obstore.store import LocalStore, MemoryStore
from processes import at_once, started
from remote_archives import PATH, a_model, an_archive, arrays_of, require_equal, with_byte_flipped
from remote_files import DATA, PLACE, SIZE, STEM, URL, Remote, opened, require_right
from versions import is_older
from web_server import WebServer
from written import saved

import onnxarchive
from onnxarchive.errors import ArchiveFormatError, LockedError
from onnxarchive.files import locking
from onnxarchive.files.hidden_files import partial_path
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.paths import open_own
from onnxarchive.reading.archive import contents_of
from onnxarchive.remote import cache
from onnxarchive.remote.cache import cached_archives, clear, directory_of_cache
from onnxarchive.remote.stores import STALL
from onnxarchive.remote.urls import Address

Captured = pytest.CaptureFixture[str]
ARCHIVE = an_archive()

posix = pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a cache may be."""
    return tmp_path / "a cache"


def copy_in(directory: Path) -> Path:
    """The only archive in a cache."""
    (path,) = directory.glob("*.onnxa")
    return path


def complete(directory: Path) -> Path:
    """Makes a cache with a copy, and returns the copy's path."""
    opened(directory).close()
    return directory / f"{STEM}.onnxa"


def interrupt(directory: Path, count: int = 5, key: str = remote_files.KEY) -> Path:
    """Interrupts a download after some pieces, and returns the path of the partial file."""
    remote = Remote(key=key)
    seen: list[int] = []

    def stop(offset: int) -> None:
        if len(seen) == count:
            raise TimeoutError("too slow")
        seen.append(offset)

    remote.before = stop
    with pytest.raises(TimeoutError):
        opened(directory, remote)
    assert remote.is_closed
    return Path(partial_path(str(directory / f"{PLACE[:32]}-{key[:32]}.onnxa")))


# Opening


def test_a_copy_is_a_local_file_that_later_openings_share(directory: Path) -> None:
    assert require_right(directory) == SIZE
    assert require_right(directory) == 0
    with opened(directory) as first, opened(directory) as second:
        assert first.identity == second.identity
        assert Path(first.absolute_path) == copy_in(directory)
        view = first.view()
    assert bytes(view) == DATA
    assert view.readonly


def test_an_archive_is_downloaded_once_and_then_compared_by_one_request_without_a_body(
    web: WebServer, directory: Path
) -> None:
    web.files[PATH] = ARCHIVE
    for number in range(3):
        with onnxarchive.open(web.url(PATH), cache=directory) as archive:
            require_equal(archive.fetch(), arrays_of(a_model()))
            assert not archive.tensors["large1"].flags.owndata
            archive.verify()
            assert archive.path == web.url(PATH)
            require_equal(pickle.loads(pickle.dumps(archive)).fetch(), arrays_of(a_model()))
        assert len(web.requests) == 2 + number
        assert web.nbytes == len(ARCHIVE)
    assert web.requests[-1].headers["if-none-match"] == web.requests[1].headers["if-match"]


@pytest.mark.parametrize("takes", [onnxarchive.open, onnxarchive.session])
def test_a_download_into_the_cache_shows_its_progress(
    web: WebServer, directory: Path, takes: Any
) -> None:
    data = web.files[PATH] = saved(runnable_model(1 << 16))
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        takes(web.url(PATH), cache=directory, cache_progress=lambda *it: seen.append(it))
    assert seen[-1] == (len(data), len(data))
    assert [done for done, _ in seen].count(len(data)) == 1


def test_a_limit_on_models_holds_for_a_download(web: WebServer, directory: Path) -> None:
    web.files[PATH] = ARCHIVE
    with pytest.raises(ArchiveFormatError, match="MODEL-2"):
        onnxarchive.open(web.url(PATH), cache=directory, max_model_nbytes=100)
    assert web.nbytes < len(ARCHIVE)


def test_a_newer_object_takes_the_place_of_the_copy(web: WebServer, directory: Path) -> None:
    web.files[PATH] = ARCHIVE
    url = web.url(PATH)
    with onnxarchive.open(url, cache=directory) as old:
        (first,) = directory.glob("*.onnxa")
        web.files[PATH] = saved(a_model(), assets={"text": b"new"})
        with onnxarchive.open(url, cache=directory) as new:
            assert dict(new.assets) == {"text": b"new"}
        assert old.tensors["large1"].nbytes > 0
        assert copy_in(directory) != first
    assert len([*directory.iterdir()]) == 2


def test_an_interrupted_download_of_an_older_object_is_removed(directory: Path) -> None:
    assert interrupt(directory, key="a" * 64).exists()
    require_right(directory)
    assert len([*directory.iterdir()]) == 2


@pytest.mark.parametrize(
    "command", ["ls", "info", "models list", "assets list", "metadata get", "cat"]
)
def test_a_command_that_lists_uses_a_copy_and_downloads_none(
    web: WebServer, directory: Path, command: str
) -> None:
    web.files[PATH] = ARCHIVE
    url = web.url(PATH)
    arguments = [
        *command.split(),
        url,
        *["labels.txt"] * (command == "cat"),
        "--cache-dir",
        str(directory),
    ]
    assert run(*arguments) == 0
    assert not directory.exists()
    onnxarchive.open(url, cache=directory).close()
    web.requests.clear()
    assert run(*arguments) == 0
    assert ["if-none-match" in it.headers for it in web.requests] == [True]


def test_an_object_without_a_validator_is_not_cached(directory: Path) -> None:
    remote = Remote(key=None)
    assert opened(directory, remote) is remote
    assert not [*directory.iterdir()]


def test_an_object_in_memory_is_not_cached(directory: Path) -> None:
    for data in (ARCHIVE, saved(a_model())):  # both have the ETag "0"
        store = MemoryStore()
        store.put("model.onnxa", data)
        with onnxarchive.open("model.onnxa", store=store, cache=directory) as archive:
            assert contents_of(archive).file.size == len(data)
    assert not directory.exists()


def test_a_store_of_files_is_cached(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "m.onnxa").write_bytes(ARCHIVE)
    for _ in range(2):
        store = LocalStore(tmp_path)
        with onnxarchive.open("m.onnxa", store=store, cache=directory) as archive:
            require_equal(archive.fetch(), arrays_of(a_model()))
    assert copy_in(directory).read_bytes() == ARCHIVE


def test_no_secret_is_in_the_cache(web: WebServer, directory: Path, capsys: Captured) -> None:
    web.files[PATH] = ARCHIVE
    url = web.url(PATH)
    for secret in ("secret1", "secret2"):  # with another signature it is the same object
        signed = url.replace("//", f"//user:{secret}@") + f"?X-Amz-Signature={secret}"
        onnxarchive.open(signed, cache=directory).close()
    written = [it for it in directory.iterdir() if it.name.endswith((".json", ".onnxa"))]
    assert len(written) == len([*directory.iterdir()]) == 2
    assert not [it for it in written if b"secret" in it.name.encode() + it.read_bytes()]
    assert run("cache", "list", "--cache-dir", directory) == 0
    assert f"\n{url} " in capsys.readouterr().out


# Errors


def test_an_interrupted_download_goes_on_with_what_has_not_arrived(directory: Path) -> None:
    interrupt(directory)
    (found,) = cached_archives(str(directory))
    assert found.present == 500_005 or 0 < found.present < SIZE
    assert not found.is_complete
    assert require_right(directory) == SIZE - found.present


def test_lost_pieces_of_a_download_are_an_error(directory: Path) -> None:
    remote = Remote()
    whole = remote.stream_ranges
    remote.stream_ranges = lambda ranges: (it for it in [*whole(ranges)][1:])  # type: ignore
    with pytest.raises(OSError, match=r"the server sent \d+ bytes too few") as caught:
        opened(directory, remote)
    assert caught.value.filename == URL
    assert 0 < require_right(directory) < SIZE


@pytest.mark.parametrize("count", [0, 5])
def test_a_download_that_fails_verification_leaves_nothing(directory: Path, count: int) -> None:
    if count:
        interrupt(directory, count)
    with pytest.raises(ArchiveFormatError, match="expected other bytes"):
        opened(directory, data=bytes(SIZE))
    assert not [it for it in directory.iterdir() if it.suffix != ".json"]
    assert require_right(directory) == SIZE


def test_a_changed_byte_of_an_archive_is_found_and_not_kept(
    web: WebServer, directory: Path
) -> None:
    entry = entry_of(ARCHIVE, "large1")
    web.files[PATH] = with_byte_flipped(ARCHIVE, entry.data_offset)
    with pytest.raises(onnxarchive.ChecksumError, match=r"/m\.onnxa: entry 'large1'.*CRC-32"):
        onnxarchive.load(web.url(PATH), cache=directory)
    assert not [it for it in directory.iterdir() if it.suffix != ".json"]


@posix
@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    uses: list[Callable[[], object]] = [
        lambda: opened(directory),
        lambda: opened(directory, reads=False),
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
    with umask(0):
        opened(directory / "below").close()
    assert (directory / "below").stat().st_mode & 0o777 == 0o700
    modes = {it.stat().st_mode & 0o777 for it in (directory / "below").iterdir()}
    assert modes == {0o600}


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    with opened(True) as file:
        assert file.read(0, 5) == DATA[:5]
    assert copy_in(tmp_path / "own" / "onnxarchive").name == f"{STEM}.onnxa"


@pytest.mark.skipif(
    is_older("platformdirs", "4.11.15"), reason="older versions of platformdirs take it"
)
def test_a_relative_directory_of_the_environment_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert directory_of_cache() == str(tmp_path / ".cache" / "onnxarchive")


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


def test_a_full_disk_is_an_error_that_keeps_what_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with mounted("small", small, "size=800k,mode=700", "-t", "tmpfs"):
        with pytest.raises(OSError, match=r"bytes are needed, \d+ are free") as caught:
            opened(small)
        assert caught.value.errno == errno.ENOSPC
        assert cached_archives(str(small))[0].present == 0
        monkeypatch.setattr("onnxarchive.remote.downloads.require_space", lambda *_: None)
        with pytest.raises(OSError, match=rf"keeps \d+ of {SIZE} bytes, and the next") as caught:
            opened(small)
        assert caught.value.errno == errno.ENOSPC
        present = cached_archives(str(small))[0].present
        assert present > 0
        assert attempt(["mount", "-o", "remount,size=10m", str(small)]) is None
        assert require_right(small) == SIZE - present


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
    assert out == f"{errno.EFBIG} {directory / STEM}.onnxa\n"
    require_right(directory)


# Damage by others


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, SIZE - 1),
        lambda path: os.truncate(path, SIZE + 1),
        lambda path: path.unlink(),
    ],
    ids=["empty", "cut", "longer", "removed"],
)
def test_a_copy_of_a_wrong_size_is_downloaded_again(
    directory: Path, damage: Callable[[Path], None]
) -> None:
    damage(complete(directory))
    assert require_right(directory) == SIZE


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 50_000, b"{}", b'{"url":1,"version":{}}'])
def test_a_damaged_description_is_written_again(
    directory: Path, content: bytes, capsys: Captured
) -> None:
    path = complete(directory).with_suffix(".json")
    path.write_bytes(content)
    assert run("cache", "list", "--cache-dir", directory) == 0
    assert f"(damaged: {STEM}.onnxa)" in capsys.readouterr().out
    require_right(directory)
    assert cached_archives(str(directory))[0].url in (URL, None)


@posix
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: os.mkfifo(path), "a pipe"),
        (lambda path: path.symlink_to(path.parent / "missing"), "a symbolic link"),
    ],
)
def test_a_pipe_or_link_in_the_place_of_a_copy_is_refused_and_not_followed(
    directory: Path, make: Callable[[Path], None], kind: str
) -> None:
    path = complete(directory)
    path.unlink()
    make(path)
    with pytest.raises(FileExistsError, match=f"found {kind}; remove it") as caught:
        opened(directory)
    assert caught.value.filename == str(path)
    assert not (directory / "missing").exists()


# Several at once


def test_readers_keep_a_copy_that_is_removed(directory: Path) -> None:
    with opened(directory) as file:
        view = file.view()
        assert len(clear(str(directory))) == 1
        assert not [*directory.iterdir()]
        assert require_right(directory) == SIZE
        assert bytes(view) == DATA == file.read(0, SIZE)


def test_several_threads_download_an_archive_once(directory: Path) -> None:
    remotes = [Remote(piece_size=20_000) for _ in range(6)]
    found = []
    for remote in remotes:
        remote.before = lambda offset: time.sleep(0.0005)

    def read(remote: Remote) -> None:
        with cache.open_cached(Address(URL), directory, remote_files.reading(DATA)) as file:
            found.append(file.read(0, SIZE) == DATA)

    waiting = iter(remotes)
    with pytest.MonkeyPatch.context() as patch:
        origin = SimpleNamespace(is_lasting=True, identity=PLACE)
        patch.setattr(cache, "origin_of", lambda *_: origin)
        patch.setattr(cache, "RemoteFile", lambda *_: next(waiting))
        at_once(partial(read, it) for it in remotes)
    assert found == [True] * 6
    assert sum(remote.nbytes_asked for remote in remotes) == SIZE


def test_another_download_is_waited_for_while_its_bytes_arrive(
    directory: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "time", vars(locking)["time"])  # that of the clock
    path = interrupt(directory)
    with MappedFile(path, descriptor=open_own(str(path), 0o600)) as other:
        other.keep_locked()
        with pytest.raises(LockedError, match="another process or thread is downloading"):
            opened(directory)
        assert STALL < clock.now < STALL + 1
        assert clear(str(directory)) == []  # it is in use
        assert path.exists()
    assert 0 < require_right(directory) < SIZE


def test_a_copy_that_is_removed_while_it_is_opened_is_made_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(directory)

    def remove_and_open(path: str, mode: int) -> int:
        monkeypatch.undo()
        os.unlink(path)
        return open_own(path, mode)

    monkeypatch.setattr(cache, "open_own", remove_and_open)
    assert require_right(directory) == SIZE


def test_a_cache_works_on_a_file_system_without_locks(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_calls.refuse(monkeypatch, errno.ENOSYS)
    assert require_right(directory) == SIZE
    assert require_right(directory) == 0


def running(program: str, directory: Path) -> Any:
    """Runs a program that finds the helpers of tests; its argument is the directory."""
    helpers = f"import sys; sys.path.insert(0, {os.path.dirname(remote_files.__file__)!r})"
    return started([sys.executable, "-W", "error", "-c", f"{helpers}\n{program}", directory])


# Opens through a cache that others use and clear, and compares each byte.
READER = """
import random, time
from pathlib import Path
from remote_files import DATA, SIZE, Remote, opened
from onnxarchive.remote.cache import clear

chance = random.Random()
end = time.monotonic() + 1
rounds = 0
while not rounds or time.monotonic() < end:
    remote = Remote(piece_size=chance.randrange(10_000, 300_000))
    remote.before = lambda offset: time.sleep(chance.choice([0, 0, 0.001]))
    with opened(Path(sys.argv[1]), remote) as file:
        assert file.view() == DATA
    if not chance.randrange(3):
        clear(sys.argv[1])
    rounds += 1
print(rounds)
"""


@pytest.mark.sweep
def test_processes_share_a_cache(directory: Path) -> None:
    with running(READER, directory) as first, running(READER, directory) as second:
        for process in (first, second):
            out, err = process.communicate(timeout=280)
            assert (process.returncode, err) == (0, "")
            assert int(out) > 0
    require_right(directory)


# Crashes


@posix
def test_a_fault_at_any_call_leaves_a_cache_that_is_right(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """A process is killed at any call, or a call fails; then the archive is opened twice."""
    result = json.loads(run_python("import cache_faults; cache_faults.main()", tmp_path))
    assert result["problems"] == []
    assert {"write", "truncate", "sync", "rename", "unlink"} <= {*result["calls"]}
    assert result["outcomes"]["killed"] > len(result["calls"])
    record_property("faults tried", sum(result["outcomes"].values()))


@posix
def test_a_killed_download_continues_where_it_stopped(directory: Path) -> None:
    program = """
import time
from pathlib import Path
from remote_files import Remote, opened
pauses = iter([0] * 7 + [280])
remote = Remote()
remote.before = lambda offset: (print(offset, flush=True), time.sleep(next(pauses)))
opened(Path(sys.argv[1]), remote)
"""
    with running(program, directory) as process:
        assert process.stdout is not None
        for _ in range(8):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert 0 < require_right(directory) <= SIZE - 600_000


# ls and clear


def test_ls_shows_what_is_cached(directory: Path, capsys: Captured) -> None:
    os.utime(complete(directory), (0, 1_000_000_000))
    interrupt_other = Remote(b"other", key="e" * 64, place="e" * 64)
    interrupt_other.before = lambda offset: 1 / 0
    with pytest.raises(ZeroDivisionError):
        opened(directory, interrupt_other)
    (directory / "mine.txt").write_bytes(b"")
    damaged = directory / f"{'d' * 32}-{'d' * 32}.json"
    damaged.write_bytes(b"garbage")
    os.utime(damaged, (0, 0))
    assert run("cache", "list", "--cache-dir", directory) == 0
    header, *rows, blank, summary = capsys.readouterr().out.splitlines()
    assert header.split() == ["URL", "bytes", "present", "last", "used"]
    assert [row.split()[:3] for row in rows[:2]] == [
        [URL, "5", "0"],
        [URL, f"{SIZE:,}", f"{SIZE:,}"],
    ]
    assert rows[1].split()[3].startswith("2001-09-")
    assert "damaged" in rows[2]
    assert (blank, len(rows)) == ("", 3)
    assert summary.startswith(f"3 archives with {SIZE:,} bytes")
    assert run("cache", "list", "--json", "--cache-dir", directory) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(it["url"], it["nbytes"], it["present"]) for it in result["archives"]] == [
        (URL, 5, 0),
        (URL, SIZE, SIZE),
        (None, 0, 0),
    ]


def test_opening_counts_as_a_use(directory: Path) -> None:
    os.utime(complete(directory), (0, 0))
    opened(directory).close()
    (found,) = cached_archives(str(directory))
    assert abs(found.used - time.time()) < 60


def test_clear_removes_only_what_the_cache_made(directory: Path, capsys: Captured) -> None:
    complete(directory)
    others = [
        directory / "mine.txt",
        directory / f"{STEM}.json.bak",
        directory / f"{'a' * 32}-{'b' * 32}.json",
    ]
    for other in others[:2]:
        other.write_bytes(b"")
    others[2].mkdir()
    assert run("cache", "clear", "--cache-dir", directory) == 0
    assert capsys.readouterr().out.startswith(f"removed 1 archive with {SIZE:,} bytes")
    assert sorted(directory.iterdir()) == sorted(others)
    assert run("cache", "clear", "--cache-dir", directory) == 0


def test_clear_removes_the_archives_of_a_url(directory: Path, capsys: Captured) -> None:
    other = Remote(b"other", key="e" * 64, place="e" * 64)
    other.path = "https://models.example/other.onnxa"
    complete(directory)
    opened(directory, other).close()
    command = ("cache", "clear", "--json", "--cache-dir", directory)
    assert run(*command, "https://models.example/none.onnxa") == 2
    assert "none.onnxa" in capsys.readouterr().err
    assert run(*command, URL + "?X-Amz-Signature=secret") == 0
    assert [it["url"] for it in json.loads(capsys.readouterr().out)["archives"]] == [URL]
    (left,) = cached_archives(str(directory))
    assert left.url == other.path


def test_a_missing_cache_is_empty(directory: Path, capsys: Captured) -> None:
    assert run("cache", "list", "--cache-dir", directory) == 0
    assert run("cache", "clear", "--cache-dir", directory) == 0
    assert capsys.readouterr().err == ""
    assert not directory.exists()
