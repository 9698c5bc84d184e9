"""Transfers on slow lines: they end when bytes stop, keep what has arrived, and stop at once."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import model_of, raw_tensor
from object_servers import S3Server
from processes import started, wait_until
from slow_line import SlowLine, slow_line
from web_server import WebServer
from written import saved

import onnxarchive
from onnxarchive.remote import uploads
from onnxarchive.remote.objects import END_SIZE

pytestmark = pytest.mark.sweep  # these tests take as long as their lines
ARCHIVE = saved(model_of(*(raw_tensor(f"w{it}", dims=(80_000,), seed=it) for it in range(5))))
MBIT = 1_000_000
posix = pytest.mark.skipif(os.name == "nt", reason="sends signals")


@pytest.fixture
def line(web: WebServer) -> Iterator[SlowLine]:
    web.files["/m.onnxa"] = ARCHIVE
    with slow_line(web.port, 2 * MBIT) as line:
        yield line


def url_of(line: SlowLine) -> str:
    return f"http://127.0.0.1:{line.port}/m.onnxa"


@pytest.mark.parametrize("rate", [1, 2, 20])
def test_a_download_takes_as_long_as_its_bytes_and_shows_them_at_once(
    web: WebServer, tmp_path: Path, rate: int
) -> None:
    data = ARCHIVE if rate < 20 else saved(model_of(raw_tensor("w", dims=(5_000_000,))))
    web.files["/m.onnxa"] = data
    onnxarchive.open(web.url("/m.onnxa")).close()  # imports what requests need, and starts it
    seen: list[int] = []
    with slow_line(web.port, rate * MBIT) as line:
        begin = time.monotonic()
        onnxarchive.download(
            url_of(line), tmp_path / "m", progress=lambda *_: seen.append(line.received)
        )
        took = time.monotonic() - begin
    assert took < 1.3 * len(data) * 8 / (rate * MBIT) + 1
    assert seen[0] < 0.5 * rate * MBIT / 8 + 1.3 * END_SIZE  # opening reads the end first
    assert line.received < 1.01 * len(data) + 10_000


def test_requests_may_take_longer_than_the_timeout_of_the_client(
    line: SlowLine, tmp_path: Path
) -> None:
    options = {"timeout": "2s", "max_retries": 0}
    onnxarchive.download(url_of(line), tmp_path / "m", storage_options=options)
    assert (tmp_path / "m").read_bytes() == ARCHIVE
    with onnxarchive.open(url_of(line), storage_options=options) as archive:
        assert len(archive.fetch()) == 5


def test_a_transfer_ends_when_bytes_stop_and_can_be_continued_later(
    line: SlowLine, tmp_path: Path
) -> None:
    def stop(done: int, _: int) -> None:
        line.is_open = done < 700_000

    options = {"stall_timeout": 1}
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"(no byte|too long) .*stall_timeout.* keeps \d+ of") as it:
        onnxarchive.download(url_of(line), tmp_path / "m", progress=stop, storage_options=options)
    assert time.monotonic() - begin < 12
    kept = int(str(it.value).partition(" keeps ")[2].partition(" ")[0])
    assert kept >= 700_000
    line.is_open = True
    line.received = 0
    onnxarchive.download(url_of(line), tmp_path / "m", storage_options=options)
    assert (tmp_path / "m").read_bytes() == ARCHIVE
    assert line.received < len(ARCHIVE) - kept + END_SIZE + 100_000  # of the line's own buffers


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon", "9" * 20])
def test_a_wrong_stall_timeout_is_refused(line: SlowLine, tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match="stall_timeout must be a number of seconds"):
        onnxarchive.download(url_of(line), tmp_path / "m", storage_options={"stall_timeout": value})


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once(line: SlowLine, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "onnxarchive", "download", url_of(line), tmp_path / "m"]
    with started(command) as process:
        wait_until(lambda: line.received > 400_000, process)
        begin = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=20)
    assert time.monotonic() - begin < 2
    assert process.returncode in (130, 143, -number)
    assert [it.name for it in tmp_path.iterdir()] == [".m.download"]


def through(server: S3Server, line: SlowLine) -> dict[str, object]:
    return server.options | {"endpoint": f"http://127.0.0.1:{line.port}"}


@posix
@pytest.mark.tool
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_upload_at_once(s3: S3Server, tmp_path: Path, number: int) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(40_000_000,))), path)
    with slow_line(int(s3.endpoint.rpartition(":")[2]), 4 * MBIT) as line:
        options = [f"--storage-option={name}={it}" for name, it in through(s3, line).items()]
        command = [sys.executable, "-m", "onnxarchive", "convert", path, "s3://bucket/m", *options]
        with started(command) as process:
            wait_until(lambda: line.sent > 1_000_000, process)
            begin = time.monotonic()
            process.send_signal(number)
            process.communicate(timeout=20)
    assert time.monotonic() - begin < 2
    assert process.returncode in (130, 143, -number)
    assert not s3.uploads()


@pytest.mark.tool
def test_a_part_of_an_upload_that_is_only_slow_arrives(s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(2_200_000,))), path)
    with slow_line(int(s3.endpoint.rpartition(":")[2]), 2 * MBIT) as line:
        options = through(s3, line) | {"stall_timeout": 1}  # a part takes 34 seconds
        begin = time.monotonic()
        onnxarchive.convert(path, "s3://bucket/slow", storage_options=options)
        assert time.monotonic() - begin < 1.3 * path.stat().st_size * 8 / (2 * MBIT) + 2
    assert line.sent < 1.01 * path.stat().st_size + 10_000
    onnxarchive.download("s3://bucket/slow", tmp_path / "d", storage_options=s3.options)
    assert (tmp_path / "d").read_bytes() == path.read_bytes()


@pytest.mark.tool
@pytest.mark.parametrize("after", [0, 12_000_000])
def test_an_upload_whose_bytes_stop_ends(
    s3: S3Server, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_SLOWEST", 1_000_000)  # bytes a second; the line has 12 million
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(6_000_000,))), path)
    with slow_line(int(s3.endpoint.rpartition(":")[2]), 100 * MBIT) as line:
        line.closes_after = after
        options = through(s3, line) | {"stall_timeout": 1}
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"upload stalls: \d+ of \d+ .*; stall_timeout in") as it:
            onnxarchive.convert(path, "s3://bucket/stalled", storage_options=options)
        assert 1 < time.monotonic() - begin < 40
        assert it.value.filename == "s3://bucket/stalled"
        arrived, size = map(int, re.findall(r"(\d+) of (\d+) bytes", str(it.value))[0])
        assert min(after, 1) <= arrived <= after
        assert size == path.stat().st_size
    with pytest.raises(FileNotFoundError):
        onnxarchive.open("s3://bucket/stalled", storage_options=s3.options)
