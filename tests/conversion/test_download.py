from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import faults
import lock_calls
import pytest
from models import entry_of, model_of, raw_tensor, runnable_model
from obstore.store import MemoryStore
from processes import started, wait_until
from remote_archives import PATH, PLACES, an_archive, changes_after, sends, with_byte_flipped
from web_server import Answer, Request, WebServer
from written import files_below, saved

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, LockedError, ObjectChangedError
from onnxarchive.cli import main
from onnxarchive.files import paths
from onnxarchive.files.local_file import MappedFile
from onnxarchive.remote import downloads, objects

ARCHIVE = an_archive()
posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's kinds of files, links and locks")


@pytest.fixture
def url(web: WebServer) -> str:
    web.files[PATH] = ARCHIVE
    return web.url(PATH)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", objects.END_SIZE)
    monkeypatch.setattr(objects, "GAP_SIZE", 0)


def asked(web: WebServer) -> int:
    """How many bytes were asked for, without those of the end."""
    total = 0
    for it in web.ranges():
        first, _, last = it.removeprefix("bytes=").partition("-")
        total += int(last) + 1 - int(first) if first else 0
    return total


def first_bytes(web: WebServer) -> list[int]:
    """The first byte of each range that was asked for, without those of the end."""
    firsts = [it.removeprefix("bytes=").partition("-")[0] for it in web.ranges()]
    return [int(first) for first in firsts if first]


def require_downloaded(url: str, target: Path) -> None:
    """Downloads the archive; requires that the directory has it and nothing else."""
    onnxarchive.download(url, target)
    assert target.read_bytes() == ARCHIVE
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("kind", ["web", "file URL", "memory URL", "store"])
def test_a_downloaded_file_has_the_bytes_of_the_object_and_is_verified(
    kind: str, folder: Path, tmp_path: Path, web: WebServer
) -> None:
    source, access = PLACES[kind](ARCHIVE, tmp_path, web)
    target = folder / "mit Leerzeichen.onnxa"
    done: list[tuple[int, int]] = []
    found = onnxarchive.download(source, target, progress=lambda *it: done.append(it), **access)
    assert found == str(target)
    assert target.read_bytes() == ARCHIVE
    assert files_below(folder) == {target.name}
    assert done[-1][0] == done[-1][1] > len(ARCHIVE) - 5000
    assert done == sorted(done)
    assert os.stat(target).st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_download_requests_every_byte_once(web: WebServer, url: str, folder: Path) -> None:
    require_downloaded(url, folder / "m.onnxa")
    assert asked(web) == len(ARCHIVE) - objects.END_SIZE
    assert len(web.requests) == 2  # one of them to open it


def test_a_download_is_named_by_its_url(
    web: WebServer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/a/gr%C3%B6%C3%9Fe%201.onnxa"] = ARCHIVE
    signed = web.url("/a/gr%C3%B6%C3%9Fe%201.onnxa?sig=SECRET#x")
    assert onnxarchive.download(signed, folder) == str(folder / "größe 1.onnxa")
    monkeypatch.chdir(folder)
    assert onnxarchive.download(url) == str(folder / "m.onnxa")
    assert files_below(folder) == {"größe 1.onnxa", "m.onnxa"}
    for path in ("/..%2f", "/..", "/a/%2e%2e", "/a%2fb", "/a%2f..%2fb", "/a%00b"):
        with pytest.raises(ValueError, match="the URL does not end with a file name"):
            onnxarchive.download(web.url(path), folder)


@pytest.mark.parametrize("sign", ["=SECRET%3D&Expires=1", "=SECRET%2Fus-east-1%2Fs3/aws4_request"])
def test_the_query_of_a_url_is_in_no_name_and_on_no_terminal(
    web: WebServer,
    url: str,
    folder: Path,
    sign: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(["download", f"{url}?Signature{sign}"]) == 0
    out, err = capsys.readouterr()
    assert "SECRET" not in out + err
    assert files_below(folder) == {"m.onnxa"}


@posix
def test_a_key_of_a_store_is_used_as_file_name_unchanged(folder: Path) -> None:
    store = MemoryStore()
    store.put("a/m%20?x#1.onnxa", ARCHIVE)
    path = onnxarchive.download("a/m%20?x#1.onnxa", folder, store=store)
    assert path == str(folder / "m%20?x#1.onnxa")
    assert (folder / "m%20?x#1.onnxa").read_bytes() == ARCHIVE


@posix
@pytest.mark.parametrize("is_there", [True, False])
def test_a_name_from_the_url_is_not_followed_as_a_link(
    web: WebServer, url: str, folder: Path, tmp_path: Path, is_there: bool
) -> None:
    other = tmp_path / "other"
    if is_there:
        other.write_bytes(b"old")
    (folder / "m.onnxa").symlink_to(other)
    with pytest.raises(FileExistsError, match="symbolic link") as caught:
        onnxarchive.download(url, folder)
    assert caught.value.filename == str(folder / "m.onnxa")
    assert other.exists() is is_there
    assert not is_there or other.read_bytes() == b"old"
    assert not web.requests


def test_an_existing_file_is_replaced_and_a_link_is_followed(
    url: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "m.onnxa").write_bytes(b"old")
    (tmp_path / "link").symlink_to(folder / "m.onnxa")
    assert onnxarchive.download(url, tmp_path / "link") == str(folder / "m.onnxa")
    assert (tmp_path / "link").is_symlink()
    assert (folder / "m.onnxa").read_bytes() == ARCHIVE


def put_directory(path: Path, _: Path) -> None:
    path.mkdir()
    (path / "file").write_bytes(b"kept")


def put_file_of_another_user(path: Path, _: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    path.touch()
    os.chown(path, 12345, -1)


# Each puts something at a path; the second argument is another directory with a file.
OBSTACLES: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, other: path.symlink_to(other / "file"),
    "a link that leads nowhere": lambda path, other: path.symlink_to(other / "missing"),
    "a link to a directory": lambda path, other: path.symlink_to(other),
    "another name": lambda path, other: path.hardlink_to(other / "file"),
    "a directory": put_directory,
    "a pipe": lambda path, _: os.mkfifo(path),
    "a file of another user": put_file_of_another_user,
}


@posix
@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("has_dir_fd", [True, False])
def test_a_link_or_other_file_in_place_of_the_partial_file_is_refused_and_untouched(
    web: WebServer,
    url: str,
    folder: Path,
    tmp_path: Path,
    obstacle: str,
    has_dir_fd: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paths, "HAS_DIR_FD", has_dir_fd)
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_bytes(b"kept")
    (folder / "m.onnxa").write_bytes(b"old")
    OBSTACLES[obstacle](folder / ".m.onnxa.download", other)
    before = files_below(tmp_path)
    with pytest.raises(FileExistsError, match=r"expected a regular file .* remove it") as caught:
        onnxarchive.download(url, folder / "m.onnxa")
    assert caught.value.filename == str(folder / ".m.onnxa.download")
    assert files_below(tmp_path) == before
    assert (other / "file").read_bytes() == b"kept"
    assert (folder / "m.onnxa").read_bytes() == b"old"
    assert not web.requests


@posix
def test_a_target_that_is_no_file_is_refused_before_any_request(
    web: WebServer, url: str, folder: Path
) -> None:
    os.mkfifo(folder / "pipe")
    with contextlib.suppress(PermissionError):
        os.mknod(folder / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    for special in list(folder.iterdir()):
        before = special.stat()
        with pytest.raises(FileExistsError, match="is not a regular file") as caught:
            onnxarchive.download(url, special)
        assert caught.value.filename == str(special)
        assert special.stat().st_ino == before.st_ino
    with pytest.raises(IsADirectoryError, match=r"new' does not exist; create it first"):
        onnxarchive.download(url, f"{folder / 'new'}/")
    assert not web.requests


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_mode_and_owner_of_a_file_are_kept(
    web: WebServer, url: str, folder: Path, mode: int
) -> None:
    target = folder / "m.onnxa"
    target.write_bytes(b"old")
    target.chmod(mode)
    if not os.geteuid():
        os.chown(target, 12345, 12345)
    before = target.stat()
    onnxarchive.download(url, target)
    after = target.stat()
    for field in ("st_mode", "st_uid", "st_gid"):
        assert getattr(after, field) == getattr(before, field)
    assert target.read_bytes() == ARCHIVE


@posix
@pytest.mark.parametrize("has_old_file", [True, False])
def test_an_unfinished_download_is_the_users_own_and_a_new_file_is_as_the_umask_says(
    web: WebServer, url: str, folder: Path, has_old_file: bool
) -> None:
    target = folder / "m.onnxa"
    if has_old_file:
        target.write_bytes(b"old")
    interrupt(url, target, old=b"old" if has_old_file else None)
    assert (folder / ".m.onnxa.download").stat().st_mode & 0o777 == 0o600
    target.unlink(missing_ok=True)
    onnxarchive.download(url, target)
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_a_file_that_is_edited_is_not_replaced(web: WebServer, url: str, folder: Path) -> None:
    target = folder / "m.onnxa"
    target.write_bytes(b"old")
    with MappedFile(target, is_writable=True) as file, file.locked(is_exclusive=True):
        with pytest.raises(LockedError, match="finish the edit first") as caught:
            onnxarchive.download(url, target)
        assert caught.value.path == str(target)
        assert target.read_bytes() == b"old"
    web.requests.clear()
    require_downloaded(url, target)
    assert asked(web) == 0  # the partial file was complete


@pytest.mark.parametrize("with_validator", [True, False])
@pytest.mark.parametrize("part", ["large2", "assets/folder/big.bin", "__MODEL_PROTO"])
def test_damaged_bytes_are_an_error_and_nothing_is_left(
    web: WebServer, url: str, folder: Path, part: str, with_validator: bool
) -> None:
    (folder / "m.onnxa").write_bytes(b"old")
    entry = entry_of(ARCHIVE, part)
    sends(web, with_byte_flipped(ARCHIVE, entry.data_offset + entry.nbytes // 2))
    if not with_validator:
        without_etag(web)
    with pytest.raises(ArchiveFormatError, match=rf"/m\.onnxa: .*{part}"):
        onnxarchive.download(url, folder / "m.onnxa")
    assert (folder / "m.onnxa").read_bytes() == b"old"
    web.change = lambda _, answer: answer
    if not with_validator:
        without_etag(web)
    require_downloaded(url, folder / "m.onnxa")


def test_a_file_with_another_digest_gets_no_name_and_nothing_is_left(
    url: str, folder: Path
) -> None:
    target = folder / "m.onnxa"
    target.write_bytes(b"old")
    digest = hashlib.sha256(ARCHIVE).hexdigest()
    wrong = hashlib.sha256().hexdigest()
    message = rf"/m\.onnxa: expected the SHA-256 {wrong}, found {digest}; nothing was kept; compare"
    with pytest.raises(ChecksumError, match=message) as caught:
        onnxarchive.download(url, target, sha256=wrong)
    assert caught.value.path == url
    assert target.read_bytes() == b"old"
    assert files_below(folder) == {"m.onnxa"}
    interrupt(url, target, old=b"old")
    onnxarchive.download(url, target, sha256=digest.upper())
    assert target.read_bytes() == ARCHIVE


def without_etag(web: WebServer) -> None:
    inner = web.change

    def change(request: Request, answer: Answer) -> Answer:
        answer = inner(request, answer)
        return Answer(answer.status, {**answer.headers, "ETag": None}, answer.body)

    web.change = change


def test_an_object_that_is_no_archive_is_not_downloaded(web: WebServer, folder: Path) -> None:
    web.files["/page"] = b"<html>" * 100_000
    with pytest.raises(ArchiveFormatError, match=r"/page: .*found an HTML page; "):
        onnxarchive.download(web.url("/page"), folder / "m.onnxa")
    with pytest.raises(FileNotFoundError):
        onnxarchive.download(web.url("/missing"), folder / "m.onnxa")
    assert len(web.requests) <= 3
    assert files_below(folder) == set()


def interrupt(url: str, target: Path, old: bytes | None = None, *, after: int = 600_000) -> None:
    """Downloads a bit more than the first `after` bytes."""

    def stop(done: int, _: int) -> None:
        if done > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        onnxarchive.download(url, target, progress=stop)
    assert (target.read_bytes() if target.exists() else None) == old


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_download_continues_where_it_stopped(
    web: WebServer, url: str, folder: Path
) -> None:
    interrupt(url, folder / "m.onnxa")
    with MappedFile(folder / ".m.onnxa.download") as file:
        arrived = downloads.logged_pieces(file, len(ARCHIVE))
    assert sum(end - begin for begin, end in arrived) > 600_000
    web.requests.clear()
    require_downloaded(url, folder / "m.onnxa")
    # The server may get requests of the interrupted download late; they are for other bytes.
    for first in first_bytes(web):
        assert not [it for it in arrived if it[0] <= first < it[1]]


@pytest.mark.usefixtures("small_parts")
def test_an_expired_signature_is_named_and_a_new_one_continues_the_download(
    web: WebServer, url: str, folder: Path
) -> None:
    has_expired = threading.Event()

    def progress(done: int, _: int) -> None:
        if done > 400_000:
            has_expired.set()

    def expire(request: Request, answer: Answer) -> Answer:
        start = request.range.removeprefix("bytes=").partition("-")[0]
        if not start or int(start) < 800_000:
            return answer
        has_expired.wait(60)
        return Answer(403, {}, [b"<Error><Code>AccessDenied</Code></Error>"])

    web.change = expire
    message = r"HTTP status 403, AccessDenied\); .* not expired, .* signature .* keeps \d+ of"
    with pytest.raises(PermissionError, match=message) as caught:
        onnxarchive.download(f"{url}?X-Amz-Signature=SECRET", folder, progress=progress)
    assert "SECRET" not in str(caught.value)
    web.change = lambda _, answer: answer
    web.requests.clear()
    require_downloaded(f"{url}?X-Amz-Signature=OTHER", folder / "m.onnxa")
    # The server may get requests of the first download late.
    web.requests = [it for it in web.requests if it.path.endswith("OTHER")]
    assert asked(web) < len(ARCHIVE) - 400_000


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("rest", [b"", bytes(100), b"[" * 20_000])
@pytest.mark.parametrize(
    ("size", "begins_anew"),  # the mark is damaged, or only the log
    [
        *((size, True) for size in (0, 400_000, len(ARCHIVE) + 31)),
        *((size, False) for size in (len(ARCHIVE) + 32, len(ARCHIVE) + 100, -3)),
    ],
)
def test_a_damaged_partial_file_is_continued_as_far_as_it_is_right(
    web: WebServer, url: str, folder: Path, size: int, begins_anew: bool, rest: bytes
) -> None:
    interrupt(url, folder / "m.onnxa")
    unfinished = folder / ".m.onnxa.download"
    unfinished.write_bytes(unfinished.read_bytes()[:size] + rest)
    web.requests.clear()
    require_downloaded(url, folder / "m.onnxa")
    assert not begins_anew or asked(web) >= len(ARCHIVE) - objects.END_SIZE


@pytest.mark.usefixtures("small_parts")
def test_damaged_bytes_of_a_partial_file_are_an_error_and_the_next_download_starts_over(
    url: str, folder: Path
) -> None:
    interrupt(url, folder / "m.onnxa")
    unfinished = folder / ".m.onnxa.download"
    with onnxarchive.open(ARCHIVE) as archive, MappedFile(unfinished, is_writable=True) as file:
        weights = [it for it in archive.entries.values() if it.name.startswith("large")]
        damaged = next(
            offset
            for begin, end in downloads.logged_pieces(file, len(ARCHIVE))
            for offset in range(begin, end)
            if any(0 <= offset - it.data_offset < it.nbytes for it in weights)
        )
        file.write(damaged, bytes([ARCHIVE[damaged] ^ 1]))
    with pytest.raises(ChecksumError, match=r"m\.onnxa: entry 'large"):
        onnxarchive.download(url, folder / "m.onnxa")
    assert files_below(folder) == set()
    require_downloaded(url, folder / "m.onnxa")


@pytest.mark.usefixtures("small_parts")
def test_a_copy_of_a_partial_file_is_not_continued(
    web: WebServer, url: str, folder: Path, tmp_path: Path
) -> None:
    interrupt(url, folder / "m.onnxa")
    copy = tmp_path / ".m.onnxa.download"  # as in a cloned repository
    copy.write_bytes((folder / ".m.onnxa.download").read_bytes())
    web.requests.clear()
    onnxarchive.download(url, tmp_path / "m.onnxa")
    assert asked(web) >= len(ARCHIVE) - objects.END_SIZE
    assert not copy.exists()


@posix
@pytest.mark.parametrize("name", ["m" * 255, "ä" * 127])
def test_the_longest_name_can_be_downloaded_and_has_its_own_partial_file(
    web: WebServer, url: str, folder: Path, name: str
) -> None:
    interrupt(url, folder / name)
    interrupt(url, folder / name[:-1])
    assert len(files_below(folder)) == 2
    for target in (folder / name, folder / name[:-1]):
        onnxarchive.download(url, target)
        assert target.read_bytes() == ARCHIVE
    assert files_below(folder) == {name, name[:-1]}


def test_a_download_succeeds_even_if_its_partial_file_cannot_be_removed(
    web: WebServer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, **_: Any) -> None:
        raise OSError(errno.EBUSY, "it is in use", path)

    for name in ("unlink", "remove", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    assert onnxarchive.download(url, folder / "m.onnxa") == str(folder / "m.onnxa")
    assert (folder / "m.onnxa").read_bytes() == ARCHIVE


@posix
def test_on_a_file_system_without_locks_an_interrupted_download_starts_over(
    web: WebServer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_calls.refuse(monkeypatch, errno.ENOSYS)
    interrupt(url, folder / "m.onnxa")
    assert files_below(folder) == set()
    require_downloaded(url, folder / "m.onnxa")


@pytest.mark.usefixtures("small_parts")
def test_a_new_version_of_the_object_starts_the_download_over(
    web: WebServer, url: str, folder: Path
) -> None:
    changes_after(web, 4)
    with pytest.raises(ObjectChangedError, match=r"/m\.onnxa: "):
        onnxarchive.download(url, folder / "m.onnxa")
    assert not (folder / "m.onnxa").exists()
    web.change = lambda _, answer: answer
    web.files[PATH] = other = saved(runnable_model(1 << 20))
    web.requests.clear()
    onnxarchive.download(url, folder / "m.onnxa")
    # The first download may have had requests under way.
    web.requests = [it for it in web.requests if web.answer(it).status != 412]
    assert asked(web) == len(other) - objects.END_SIZE
    assert (folder / "m.onnxa").read_bytes() == other
    assert list(folder.iterdir()) == [folder / "m.onnxa"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_the_error_of_an_object_that_changes_says_that_nothing_is_kept(
    web: WebServer, url: str, folder: Path, count: int, is_resumed: bool
) -> None:
    target = folder / "m.onnxa"
    target.write_bytes(b"old")
    if is_resumed:
        interrupt(url, target, old=b"old")
    changes_after(web, count)
    with pytest.raises(ObjectChangedError, match="what had arrived was removed") as caught:
        onnxarchive.download(url, target)
    assert "open it again" not in str(caught.value)
    assert "the servers of the address send different ETags" in str(caught.value)
    assert (caught.value.path, target.read_bytes()) == (url, b"old")
    assert files_below(folder) == {target.name}


@pytest.mark.usefixtures("small_parts")
def test_a_cache_keeps_no_bytes_of_an_object_that_changes(
    web: WebServer, url: str, folder: Path
) -> None:
    changes_after(web, 4)
    with pytest.raises(ObjectChangedError, match="what had arrived was removed"):
        onnxarchive.load(url, cache=folder / "cache")
    assert not [name for name in files_below(folder) if not name.endswith(".json")]
    web.change = lambda _, answer: answer
    web.files[PATH] = ARCHIVE
    with onnxarchive.open(url, cache=folder / "cache") as archive:
        assert archive.assets["labels.txt"] == b"cat\n"


@pytest.mark.parametrize("with_validator", [True, False])
def test_an_interrupted_command_says_if_something_has_arrived(
    web: WebServer,
    url: str,
    folder: Path,
    with_validator: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("onnxarchive.reading.archive.Archive.verify", interrupted)
    if not with_validator:
        without_etag(web)
    assert main(["download", url, str(folder / "m.onnxa")]) == 130
    assert ("to resume the download" in capsys.readouterr().err) is with_validator
    assert (files_below(folder) != set()) is with_validator


def test_one_download_runs_at_a_time(web: WebServer, url: str, folder: Path) -> None:
    errors: list[BaseException] = []

    def second(_: int, __: int) -> None:
        if not errors:
            with pytest.raises(LockedError, match=r"m\.onnxa: .*downloading") as caught:
                onnxarchive.download(url, folder / "m.onnxa")
            errors.append(caught.value)

    onnxarchive.download(url, folder / "m.onnxa", progress=second)
    assert len(errors) == 1
    assert files_below(folder) == {"m.onnxa"}


def test_a_full_disk_is_an_error_and_the_next_download_continues(
    web: WebServer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = MappedFile.write

    def write(self: Any, offset: int, data: Any) -> None:
        if 200_000 < offset < len(ARCHIVE) - objects.END_SIZE:
            raise OSError(errno.ENOSPC, "No space left on device", self.path)
        whole(self, offset, data)

    monkeypatch.setattr(objects, "PART_SIZE", objects.END_SIZE)
    monkeypatch.setattr(MappedFile, "write", write)
    with pytest.raises(OSError, match="No space left") as caught:
        onnxarchive.download(url, folder / "m.onnxa")
    assert caught.value.errno == errno.ENOSPC
    kept = folder / ".m.onnxa.download"
    assert re.search(
        rf"{re.escape(str(kept))} keeps \d+ of {len(ARCHIVE)} bytes", str(caught.value)
    )
    assert set(folder.iterdir()) == {kept}
    monkeypatch.setattr(MappedFile, "write", whole)
    require_downloaded(url, folder / "m.onnxa")


def test_a_download_that_does_not_fit_the_disk_does_not_begin(
    web: WebServer, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, small_parts: None
) -> None:
    def free(nbytes: int) -> None:
        usage = SimpleNamespace(total=1 << 40, free=nbytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    free(len(ARCHIVE) - 1)
    with pytest.raises(OSError, match=rf"{len(ARCHIVE)} bytes are needed, .* free: '") as caught:
        onnxarchive.download(url, folder / "m.onnxa")
    assert caught.value.errno == errno.ENOSPC
    assert asked(web) == 0
    assert list(folder.iterdir()) == []

    free(len(ARCHIVE))
    interrupt(url, folder / "m.onnxa")
    free(0)
    with pytest.raises(OSError, match="bytes are needed, 0 are free; ") as caught:
        onnxarchive.download(url, folder / "m.onnxa")
    kept, needed = (
        int(re.search(rf"(\d+) {words}", str(caught.value))[1])  # type: ignore[index]
        for words in (f"of {len(ARCHIVE)} bytes", "bytes are needed")
    )
    assert kept + needed == len(ARCHIVE)
    free(needed)
    require_downloaded(url, folder / "m.onnxa")


SLOW = """
import sys
from onnxarchive.cli import main
from onnxarchive.remote import objects
from onnxarchive.files.local_file import MappedFile
objects.PART_SIZE = objects.END_SIZE
objects.GAP_SIZE = 0
sys.exit(main(["download", *sys.argv[1:]]))
"""


@pytest.mark.tool
@pytest.mark.skipif(os.name == "nt", reason="sends signals")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_a_download_that_a_signal_ended_continues_where_it_stopped(
    web: WebServer, url: str, folder: Path, number: str
) -> None:
    released = threading.Event()

    def change(request: Request, answer: Answer) -> Answer:
        first = request.range.removeprefix("bytes=").partition("-")[0]
        if first and int(first) > 600_000:
            released.wait(280)
        return answer

    def is_written() -> bool:
        with MappedFile(folder / ".m.onnxa.download") as file:
            return downloads.arrived_nbytes(file, len(ARCHIVE)) >= 3 * objects.END_SIZE

    web.change = change
    command = [sys.executable, "-c", SLOW, url.replace("//", "//me:SECRET@"), folder / "m.onnxa"]
    with started(command) as process:
        wait_until(lambda: web.nbytes >= 5 * objects.END_SIZE, process)
        wait_until(is_written, process)
        process.send_signal(signal.Signals[number])
        wait_until(lambda: process.poll() is not None)
        out, err = process.communicate()
    released.set()
    assert not (folder / "m.onnxa").exists()
    assert "SECRET" not in out + err
    assert "Traceback" not in err
    if number == "SIGINT":
        assert process.returncode == 130
        assert "run the same command to resume" in err
    web.change = lambda _, answer: answer
    web.requests.clear()
    with started(command) as process:
        out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert asked(web) <= len(ARCHIVE) - 3 * objects.END_SIZE
    assert (folder / "m.onnxa").read_bytes() == ARCHIVE
    assert list(folder.iterdir()) == [folder / "m.onnxa"]


# Errors at any call

# Some parts of `END_SIZE`: a first one, others and a last one. More would reach the same code.
SHORT = saved(model_of(*(raw_tensor(it, dims=(80_000,), seed=1) for it in "ab")), size_threshold=0)


@pytest.mark.sweep
@pytest.mark.skipif(os.name != "posix", reason="catches the calls of POSIX systems")
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("start", ["nothing", "a file", "a partial file"])
def test_a_system_call_that_fails_leaves_the_old_file_and_a_download_that_can_continue(
    web: WebServer, folder: Path, start: str
) -> None:
    web.files[PATH] = SHORT
    url, target = web.url(PATH), folder / "m.onnxa"

    def prepare() -> None:
        for path in folder.iterdir():
            path.unlink()
        if start == "a file":
            target.write_bytes(b"old")
        elif start == "a partial file":
            interrupt(url, target, after=250_000)

    def content() -> bytes | None:
        return target.read_bytes() if target.exists() else None

    def download(path: Path) -> None:
        try:
            onnxarchive.download(url, path)
        except OSError as error:
            assert error.filename == str(target)
            raise

    prepare()
    old, calls = content(), faults.Calls()
    assert faults.attempt(download, target, calls) == "done"
    kinds = Counter(call.kind for call in calls.log)
    assert kinds.keys() >= {"write", "truncate", "sync", "rename"}
    assert kinds["write"] >= 2 * (3 if start != "a partial file" else 1)  # each with its log
    for at, way in faults.faults(calls.log, set(faults.WAYS) - set(faults.KILLS)):
        prepare()
        outcome = faults.attempt(download, target, faults.Calls(at, way))
        assert outcome in ("done", "OSError")
        assert content() == (SHORT if outcome == "done" else old), (at, way)
        left = files_below(folder) - {"m.onnxa", ".m.onnxa.download"}
        onnxarchive.download(url, target)
        assert content() == SHORT
        assert files_below(folder) - left == {"m.onnxa"}
        assert not left or calls.log[at].kind == "unlink"
