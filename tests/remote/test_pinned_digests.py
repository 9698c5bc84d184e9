"""A digest that pins a remote archive: what is compared when, and what is refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lock_calls
import pytest
import remote_files
from commands import error_of, output_of, run
from models import flip_byte, runnable_model
from obstore.store import MemoryStore
from remote_archives import PATH, an_archive
from web_server import Answer, WebServer
from written import files_below, saved

import onnxarchive
from onnxarchive import ChecksumError, LockedError, UnsupportedFeatureError
from onnxarchive.files.replacement import Replacement
from onnxarchive.remote import cache, downloads

ARCHIVE = saved(runnable_model())
DIGEST = hashlib.sha256(ARCHIVE).hexdigest()
OTHER = an_archive()
WRONG = hashlib.sha256(OTHER).hexdigest()
MISMATCH = rf"/m\.onnxa: expected the SHA-256 {WRONG}, found {DIGEST}; .*compare the digest"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def url(web: WebServer) -> str:
    web.files[PATH] = ARCHIVE
    return web.url(PATH)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where a cache may be."""
    return tmp_path / "cache"


def copy_in(directory: Path) -> Path:
    (path,) = directory.glob("*.onnxa")
    return path


def without_ranges(web: WebServer) -> None:
    def change(request: Any, answer: Answer) -> Answer:
        return Answer(200, answer.headers | {"Content-Range": None}, [web.files[PATH]])

    web.change = change


TAKERS: dict[str, Callable[..., Any]] = {
    "open": onnxarchive.open,
    "load": onnxarchive.load,
    "session": onnxarchive.session,
    "session_options": onnxarchive.session_options,
    "link": lambda url, **access: onnxarchive.link(url, access["cache"] / "link.onnx", **access),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_only_a_download_with_the_digest_enters_the_cache(
    url: str, directory: Path, taker: str
) -> None:
    with pytest.raises(ChecksumError, match=MISMATCH) as caught:
        TAKERS[taker](url, cache=directory, sha256=WRONG)
    assert caught.value.path == url
    assert files_below(directory) == set()
    TAKERS[taker](url, cache=directory, sha256=DIGEST.upper())
    assert copy_in(directory).read_bytes() == ARCHIVE


@pytest.mark.filterwarnings("ignore:.*ranges of bytes")
def test_a_stream_of_a_server_without_ranges_is_compared_as_it_arrives(
    web: WebServer, url: str, directory: Path, tmp_path: Path
) -> None:
    without_ranges(web)
    for take in (
        lambda digest: onnxarchive.open(url, cache=directory, sha256=digest).close(),
        lambda digest: onnxarchive.download(url, tmp_path / "d.onnxa", sha256=digest),
    ):
        with pytest.raises(ChecksumError, match=MISMATCH):
            take(WRONG)
        assert files_below(tmp_path) & {"d.onnxa", ".d.onnxa.download"} == set()
        take(DIGEST)
    assert copy_in(directory).read_bytes() == (tmp_path / "d.onnxa").read_bytes() == ARCHIVE


@pytest.mark.filterwarnings("ignore:.*ranges of bytes")
@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_page_in_place_of_the_archive_is_named(
    web: WebServer, url: str, directory: Path, has_ranges: bool
) -> None:
    web.files[PATH] = b"<!doctype html>" * 1000
    if not has_ranges:
        without_ranges(web)
    with pytest.raises(onnxarchive.ArchiveFormatError, match="found an HTML page"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)
    assert files_below(directory) == set()


@pytest.mark.parametrize("was_downloaded_with_it", [True, False])
def test_a_copy_is_read_for_its_digest_once(
    web: WebServer,
    url: str,
    directory: Path,
    was_downloaded_with_it: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if was_downloaded_with_it:
        with monkeypatch.context() as patch:
            patch.setattr("onnxarchive.remote.cache.sha256_of", None)  # reads a copy
            onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    else:
        onnxarchive.open(url, cache=directory).close()
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    flip_byte(copy_in(directory), 1000)  # another reading would find this
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    with pytest.raises(ChecksumError, match=MISMATCH):
        onnxarchive.open(url, cache=directory, sha256=WRONG)
    assert web.nbytes == len(ARCHIVE)  # a copy was used each time


def test_a_copy_that_was_cached_without_a_digest_is_compared_and_stays(
    web: WebServer, url: str, directory: Path, capsys: Captured
) -> None:
    onnxarchive.open(url, cache=directory).close()
    with pytest.raises(ChecksumError, match=MISMATCH) as caught:
        onnxarchive.open(url, cache=directory, sha256=WRONG)
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    web.files["/other.onnxa"] = OTHER
    other = web.url("/other.onnxa")
    onnxarchive.open(other, cache=directory).close()
    assert url in output_of(capsys, "cache", "list", "--cache-dir", directory)
    command = re.search(r"'onnxarchive (cache clear .*)' removes this copy", str(caught.value))
    assert command is not None
    assert run(*command[1].split()) == 0
    assert [copy.url for copy in cache.cached_archives(str(directory))] == [other]


def test_a_copy_in_a_cache_that_can_only_be_read_is_compared_each_time(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.open(url, cache=directory).close()

    def refuse(path: str, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(cache, "Replacement", refuse)
    for _ in range(2):
        onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
        with pytest.raises(ChecksumError, match=MISMATCH):
            onnxarchive.open(url, cache=directory, sha256=WRONG)
    flip_byte(copy_in(directory), 1000)
    with pytest.raises(ChecksumError, match=f"expected the SHA-256 {DIGEST}, found"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


def test_a_damaged_copy_does_not_have_the_digest(url: str, directory: Path) -> None:
    onnxarchive.open(url, cache=directory).close()
    flip_byte(copy_in(directory), 1000)
    with pytest.raises(ChecksumError, match=f"expected the SHA-256 {DIGEST}, found"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


def test_a_copy_of_a_wrong_size_is_downloaded_and_compared_again(
    web: WebServer, url: str, directory: Path
) -> None:
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    os.truncate(copy_in(directory), 100)
    onnxarchive.open(url, cache=directory).close()  # describes the new copy without a digest
    flip_byte(copy_in(directory), 1000)
    with pytest.raises(ChecksumError):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


@pytest.mark.parametrize("value", [1, [], {}])
def test_a_damaged_record_of_a_digest_is_not_trusted(
    url: str, directory: Path, value: object
) -> None:
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    record = copy_in(directory).with_suffix(".json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": value}))
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    assert copy_in(directory).read_bytes() == ARCHIVE


def test_a_newer_object_with_another_digest_is_refused_and_the_copy_stays(
    web: WebServer, url: str, directory: Path
) -> None:
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    web.files[PATH] = OTHER
    with pytest.raises(ChecksumError, match=f"SHA-256 {DIGEST}, found {WRONG}"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)
    assert copy_in(directory).read_bytes() == ARCHIVE
    onnxarchive.open(url, cache=directory, sha256=WRONG).close()
    assert copy_in(directory).read_bytes() == OTHER


def test_an_interrupted_download_continues_and_is_compared_as_a_whole(
    url: str, directory: Path
) -> None:
    def stop(done: int, _: int) -> None:
        raise KeyboardInterrupt

    for digest in (WRONG, DIGEST):
        with pytest.raises(KeyboardInterrupt):
            onnxarchive.open(url, cache=directory, cache_progress=stop, sha256=DIGEST)
        if digest == WRONG:
            with pytest.raises(ChecksumError, match=MISMATCH):
                onnxarchive.open(url, cache=directory, sha256=digest)
            assert files_below(directory) == set()
        else:
            onnxarchive.open(url, cache=directory, sha256=digest).close()


# What is refused

FORMS: list[Any] = ["", "abc", DIGEST[1:], f"{DIGEST}0", f" {DIGEST}", f"{DIGEST[1:]}g", "٣" * 64]
FORMS += [f"sha256:{DIGEST}", f"{DIGEST}\n"]


@pytest.mark.parametrize("digest", FORMS)
def test_a_malformed_digest_is_refused_before_any_request(
    web: WebServer, url: str, directory: Path, digest: str
) -> None:
    for take in (onnxarchive.open, onnxarchive.load, onnxarchive.check):
        with pytest.raises(ValueError, match="expected a SHA-256 of 64 hexadecimal digits, found"):
            take(url, cache=directory, sha256=digest)
    with pytest.raises(ValueError, match="expected a SHA-256 of 64 hexadecimal digits, found"):
        onnxarchive.download(url, directory, sha256=digest)
    with pytest.raises(TypeError, match="expected a SHA-256 as a str, found bytes"):
        onnxarchive.open(url, cache=directory, sha256=bytes.fromhex(DIGEST))  # type: ignore[arg-type]
    assert web.requests == []
    assert not directory.exists()


@pytest.mark.parametrize("no_cache", [None, False])
def test_a_digest_without_a_cache_is_refused(web: WebServer, url: str, no_cache: Any) -> None:
    for take in (onnxarchive.open, onnxarchive.load, onnxarchive.session, onnxarchive.check):
        with pytest.raises(ValueError, match=r"/m\.onnxa: sha256=.* needs cache=True .*download"):
            take(url, cache=no_cache, sha256=DIGEST)
    assert web.requests == []


def test_a_digest_of_a_local_source_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    path.write_bytes(ARCHIVE)
    for source in (path, path.as_uri(), ARCHIVE):
        with pytest.raises(ValueError, match=r"remote archives.* compare .* with sha256sum"):
            onnxarchive.open(source, cache=tmp_path, sha256=DIGEST)
    with (
        onnxarchive.open(path) as archive,
        pytest.raises(ValueError, match="sha256=DIGEST"),
    ):
        onnxarchive.session(archive, sha256=DIGEST)


def test_a_function_that_downloads_nothing_compares_a_copy_or_refuses(
    web: WebServer, url: str, directory: Path, tmp_path: Path
) -> None:
    takers: list[Callable[..., object]] = [
        onnxarchive.check,
        lambda it, **access: onnxarchive.extract(it, tmp_path / "extracted", **access),
        lambda it, **access: onnxarchive.export(it, tmp_path / "m.onnx", **access),
    ]
    for take in takers:
        with pytest.raises(
            UnsupportedFeatureError, match=r"no copy in the cache to compare .*; "
        ) as it:
            take(url, cache=directory, sha256=DIGEST)
        assert it.value.path == url
    onnxarchive.open(url, cache=directory).close()
    web.requests.clear()
    for take in takers:
        with pytest.raises(ChecksumError, match=MISMATCH):
            take(url, cache=directory, sha256=WRONG)
        take(url, cache=directory, sha256=DIGEST)
    assert len(web.requests) == 2 * len(takers)


def test_a_digest_of_an_object_that_is_not_cached_is_refused(
    web: WebServer, url: str, directory: Path
) -> None:
    store = MemoryStore()
    store.put("m.onnxa", ARCHIVE)
    with pytest.raises(UnsupportedFeatureError, match=r"m\.onnxa: .* not cached; .*download"):
        onnxarchive.open("m.onnxa", store=store, cache=directory, sha256=DIGEST)
    web.change = lambda _, answer: Answer(
        answer.status, answer.headers | {"ETag": None}, answer.body
    )
    with pytest.raises(UnsupportedFeatureError, match=r"the server states no ETag; .*download"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


def test_functions_that_write_or_compare_archives_take_no_digest(
    url: str, directory: Path, tmp_path: Path
) -> None:
    target = tmp_path / "new.onnxa"
    options: Any = {"cache": directory, "sha256": DIGEST}
    takers: list[Callable[[], object]] = [
        lambda: onnxarchive.convert(url, target, **options),
        lambda: onnxarchive.convert_many([url], tmp_path / "many", **options),
        lambda: onnxarchive.diff(url, url, **options),
        lambda: onnxarchive.save(runnable_model(), url, **options),
    ]
    for take in takers:
        with pytest.raises(ValueError, match="of one archive that is read; download it first"):
            take()
    assert files_below(tmp_path) == set()


def test_a_copy_that_is_replaced_while_it_is_hashed_leaves_no_record(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_files.opened(directory).close()
    copy = copy_in(directory)
    record = copy.with_suffix(".json")
    before = record.read_bytes()
    hashed = downloads.sha256_of

    def replace_and_hash(file: Any) -> str:
        other = copy.with_suffix(".other")
        other.write_bytes(bytes(remote_files.SIZE))
        other.replace(copy)
        return hashed(file)

    monkeypatch.setattr(cache, "sha256_of", replace_and_hash)
    right = hashlib.sha256(remote_files.DATA).hexdigest()
    remote_files.opened(directory, sha256=right).close()
    assert record.read_bytes() == before


def test_the_record_of_a_newer_copy_is_not_trusted_for_an_older_one(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.open(url, cache=directory).close()
    flip_byte(copy_in(directory), 1000)
    open_copy = cache._open_copy

    def open_and_replace(*arguments: Any) -> Any:
        copy = open_copy(*arguments)
        monkeypatch.undo()
        cache.clear(str(directory))
        onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
        return copy

    monkeypatch.setattr(cache, "_open_copy", open_and_replace)
    with pytest.raises(ChecksumError, match=f"expected the SHA-256 {DIGEST}, found"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


def test_a_digest_is_recorded_while_no_download_can_replace_the_copy(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.open(url, cache=directory).close()
    copy, describe, described = copy_in(directory), cache._describe, []

    def describe_locked(*arguments: Any) -> None:
        with pytest.raises(LockedError):
            Replacement(copy, resumes=True)
        described.append(arguments[-1])
        describe(*arguments)

    monkeypatch.setattr(cache, "_describe", describe_locked)
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    assert described == [DIGEST]
    assert files_below(directory) == {copy.name, copy.with_suffix(".json").name}


@pytest.mark.skipif(os.name == "nt", reason="calls of POSIX are taken away")
def test_without_locks_no_digest_is_recorded(
    url: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_calls.refuse(monkeypatch, errno.ENOSYS)
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    onnxarchive.open(url, cache=directory, sha256=DIGEST).close()
    flip_byte(copy_in(directory), 1000)  # each time, the copy is read
    with pytest.raises(ChecksumError, match=f"expected the SHA-256 {DIGEST}, found"):
        onnxarchive.open(url, cache=directory, sha256=DIGEST)


# Commands


def test_commands_take_a_digest(
    web: WebServer, url: str, directory: Path, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "d.onnxa"
    cached: list[str | Path] = ["--cache-dir", directory]
    found = f"expected the SHA-256 {WRONG}, found {DIGEST}; "
    assert found in error_of(capsys, "download", url, target, "--sha256", WRONG, status=3)
    assert found in error_of(capsys, "run", url, *cached, "--sha256", WRONG, status=3)
    assert files_below(tmp_path) == set()
    assert run("download", url, target, "--sha256", DIGEST) == 0
    assert target.read_bytes() == ARCHIVE
    assert run("run", url, *cached, "--sha256", DIGEST.upper()) == 0
    assert run("ls", url, *cached, "--sha256", DIGEST) == 0
    assert found in error_of(capsys, "ls", url, *cached, "--sha256", WRONG, status=3)


def test_commands_refuse_a_digest_that_would_not_be_compared(
    web: WebServer, url: str, tmp_path: Path, capsys: Captured
) -> None:
    target = tmp_path / "d.onnxa"
    wanted = "expected a SHA-256 of 64 hexadecimal digits, found 'abc'"
    assert wanted in error_of(capsys, "download", url, target, "--sha256", "abc", status=2)
    message = "m.onnxa: --sha256 needs --cache, since ranges cannot be compared"
    assert message in error_of(capsys, "ls", url, "--sha256", DIGEST, status=2)
    for command in ("convert", "diff"):
        assert "--sha256" not in output_of(capsys, command, "--help")
        error_of(capsys, command, url, target, "--sha256", DIGEST, status=2)
    assert web.requests == []
