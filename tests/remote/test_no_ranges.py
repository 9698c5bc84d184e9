"""A server without ranges, as Python's own: `download` and caches take the file in one stream."""

from __future__ import annotations

import functools
import http.server
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import run
from models import model_of, raw_tensor
from remote_archives import an_archive, with_byte_flipped
from web_server import Answer, Request, WebServer

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, ObjectChangedError

ARCHIVE = an_archive()
NAME = "/m.onnxa"
NOT_RESUMED = "cannot be resumed if it is interrupted"


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory that the server serves."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / NAME[1:]).write_bytes(ARCHIVE)
    return folder


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """The address of Python's own server, which has neither ranges nor ETags."""
    handler = functools.partial(Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target" / "copy.onnxa"


def without_ranges(server: WebServer) -> None:
    """Makes a server send whole files, with ETags."""

    def change(request: Request, answer: Answer) -> Answer:
        if answer.status != 206:
            return answer
        headers = {**answer.headers, "Content-Range": None}
        return Answer(200, headers, [server.files[request.path]])

    server.change = change


def test_a_download_comes_in_one_stream_and_says_once_that_it_is_not_resumed(
    url: str, target: Path
) -> None:
    done: list[tuple[int, int]] = []
    with pytest.warns(UserWarning, match=NOT_RESUMED) as warned:
        onnxarchive.download(url + NAME, target, progress=lambda *it: done.append(it))
    assert len(warned) == 1
    assert target.read_bytes() == ARCHIVE
    assert os.listdir(target.parent) == [target.name]
    assert done[-1][1] == len(ARCHIVE)
    assert done == sorted(done)


def test_the_command_downloads_without_ranges_and_warns(
    url: str, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("download", url + NAME, target) == 0
    captured = capsys.readouterr()
    assert f"onnxarchive: warning: {url}{NAME}: the server does not answer" in captured.err
    assert captured.err.count("\n") == 1
    assert "verified" in captured.out
    assert target.read_bytes() == ARCHIVE


def test_opening_an_object_without_ranges_suggests_download(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match=r"'onnxarchive download' .* fetches"):
        onnxarchive.open(url + NAME)
    assert run("ls", url + NAME) == 2
    assert "'onnxarchive download'" in capsys.readouterr().err


def test_damaged_bytes_of_a_stream_are_an_error_and_nothing_is_left(
    url: str, folder: Path, target: Path
) -> None:
    (folder / NAME[1:]).write_bytes(with_byte_flipped(ARCHIVE, 5000))
    with pytest.raises(ChecksumError), pytest.warns(UserWarning, match=NOT_RESUMED):
        onnxarchive.download(url + NAME, target)
    (folder / NAME[1:]).write_bytes(ARCHIVE[:-100])
    with pytest.raises(ArchiveFormatError), pytest.warns(UserWarning, match=NOT_RESUMED):
        onnxarchive.download(url + NAME, target)
    assert os.listdir(target.parent) == []


def test_a_page_for_a_login_is_named_and_not_read_to_its_end(
    server: WebServer, target: Path
) -> None:
    # Much more than sockets and the client take before anything is read.
    page = b"<!DOCTYPE html><title>Log in</title>" + b" " * (64 << 20)
    server.files[NAME] = page
    without_ranges(server)
    with (
        pytest.raises(ArchiveFormatError, match=r"found an HTML page; .* or needs a login"),
        pytest.warns(UserWarning, match=NOT_RESUMED),
    ):
        onnxarchive.download(server.url(NAME), target)
    assert os.listdir(target.parent) == []
    assert server.nbytes < len(page)


def test_a_model_is_named_with_and_without_ranges(
    server: WebServer, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url("/m.onnx")
    message = f"{url}: expected an ONNX archive, found an ONNX model; 'onnxarchive convert' makes"
    for nbytes in (100, 100_000):  # less and more than the bytes that are looked at
        server.files["/m.onnx"] = model_of(raw_tensor("w", dims=(nbytes // 4,))).SerializeToString()
        assert run("info", url) == 3
        assert message in capsys.readouterr().err
    without_ranges(server)
    assert run("download", url, target) == 3
    assert message in capsys.readouterr().err


def test_a_broken_stream_is_an_error_and_the_next_download_starts_over(
    server: WebServer, target: Path
) -> None:
    server.files[NAME] = ARCHIVE
    without_ranges(server)
    inner = server.change

    def broken(request: Request, answer: Answer) -> Answer:
        answer = inner(request, answer)
        if request.method == "HEAD" or request.range:
            return answer
        headers = {**answer.headers, "Content-Length": str(len(ARCHIVE))}
        return Answer(200, headers, iter([ARCHIVE[: len(ARCHIVE) // 2]]))

    server.change = broken
    with pytest.raises(OSError, match=NAME), pytest.warns(UserWarning, match=NOT_RESUMED):
        onnxarchive.download(server.url(NAME), target)
    assert os.listdir(target.parent) == []
    server.change = inner
    with pytest.warns(UserWarning, match=NOT_RESUMED):
        onnxarchive.download(server.url(NAME), target)
    assert target.read_bytes() == ARCHIVE


def test_an_object_that_changes_before_the_stream_is_an_error(
    server: WebServer, target: Path
) -> None:
    server.files[NAME] = ARCHIVE
    without_ranges(server)
    inner = server.change

    def change(request: Request, answer: Answer) -> Answer:
        answer = inner(request, answer)
        if request.method == "GET" and not request.range:
            return Answer(200, {**answer.headers, "ETag": '"new"'}, answer.body)
        return answer

    server.change = change
    with pytest.raises(ObjectChangedError), pytest.warns(UserWarning, match=NOT_RESUMED):
        onnxarchive.download(server.url(NAME), target)
    assert os.listdir(target.parent) == []


def test_a_cache_downloads_an_object_without_ranges_again_only_if_its_etag_changes(
    server: WebServer, tmp_path: Path
) -> None:
    server.files[NAME] = ARCHIVE
    without_ranges(server)
    cache = tmp_path / "cache"
    with (
        pytest.warns(UserWarning, match=NOT_RESUMED) as warned,
        onnxarchive.open(server.url(NAME), cache=cache) as archive,
    ):
        archive.verify()
    assert len(warned) == 1
    server.requests.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onnxarchive.open(server.url(NAME), cache=cache).close()
    assert [it.headers.get("if-none-match") is None for it in server.requests] == [False]


def test_without_an_etag_a_cache_downloads_an_object_each_time_and_keeps_one_copy(
    url: str, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with onnxarchive.open(url + NAME, cache=cache) as archive:
                archive.verify()
        texts = [str(it.message) for it in warned]
        assert "states no ETag, so the file is downloaded each time" in texts[0]
        assert NOT_RESUMED in texts[1]
    assert len(list(cache.glob("*.onnxa"))) == 1
