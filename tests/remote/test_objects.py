from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings, strategies as st
from models import run_python
from processes import wait_until
from remote_files import CONTENT, open_object
from web_server import Answer, Request, WebServer

from onnxarchive import ArchiveError
from onnxarchive.remote import objects
from onnxarchive.remote.location import Location
from onnxarchive.remote.objects import END_SIZE, RemoteFile

SIZE = len(CONTENT)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 10_000)
    monkeypatch.setattr(objects, "GAP_SIZE", 100)


def test_opening_is_one_request_and_reads_near_the_end_need_no_further_one(
    server: WebServer,
) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        assert file.size == SIZE
        assert file.read(SIZE - END_SIZE, END_SIZE) == CONTENT[-END_SIZE:]
        assert file.read(SIZE - 10, 100) == CONTENT[-10:]
        assert file.read(SIZE + 5, 3) == b""
    assert server.ranges() == [f"bytes=-{END_SIZE}"]


def test_a_small_object_is_read_by_opening_it(server: WebServer) -> None:
    with open_object(server.url("/small")) as file:
        assert file.read(0, 5000) == CONTENT[:1000]
    assert len(server.requests) == 1
    with open_object(server.url("/empty")) as file:
        assert (file.size, file.read(0, 10)) == (0, b"")


def test_the_end_of_a_large_object_beside_another_does_not_stay_in_memory(
    server: WebServer,
) -> None:
    model = Location.of(server.url("/model.onnx"))
    with model.open_beside("m.onnxa") as large, model.open_beside("small") as small:
        for _ in range(2):
            assert large.read(SIZE - 10, 10) == CONTENT[-10:]
            assert small.read(990, 10) == CONTENT[990:1000]
    assert [it.path for it in server.requests] == ["/m.onnxa", "/small", "/m.onnxa", "/m.onnxa"]


def test_a_range_is_one_request_for_the_version_that_was_opened(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        assert file.read(100, 5000) == CONTENT[100:5100]
        assert file.read(100, 0) == b""
    assert server.ranges()[1:] == ["bytes=100-5099"]
    assert server.requests[1].headers["if-match"] == file.version.validator


def test_bytes_that_lead_to_the_end_stay_in_memory(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        begin = SIZE - END_SIZE - 50_000
        assert file.read(begin, 10_000) == CONTENT[begin : begin + 10_000]
        assert len(server.requests) == 2
        for offset in (begin - 1000, begin, SIZE - END_SIZE - 5, SIZE - 10):
            assert file.read(offset, 20_000) == CONTENT[offset : offset + 20_000]
        assert len(server.requests) == 2
        file.read(0, 10)
        file.read(0, 10)
        assert len(server.requests) == 4


@pytest.fixture
def short_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_FIRST_AHEAD", 20_000)
    monkeypatch.setattr(objects, "_MAX_SKIPPED", 1000)


@pytest.mark.usefixtures("short_ahead")
def test_successive_ranges_come_from_one_stream_that_reads_ahead(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa"), keeps_end=False) as file:
        for offset in range(0, SIZE - 2000, 2000):
            assert b"".join(file.pieces(offset, 1000)) == CONTENT[offset : offset + 1000]
            assert file.read(offset + 1100, 500) == CONTENT[offset + 1100 :][:500]
        assert len(server.requests) <= 8
        assert file.read(5, 10) == CONTENT[5:15]  # does not disturb the stream
        count = len(server.requests)
        assert b"".join(file.pieces(SIZE - 2000, 2000)) == CONTENT[-2000:]
        assert len(server.requests) == count


@pytest.mark.usefixtures("short_ahead")
def test_at_most_three_times_the_bytes_that_are_read_are_requested(server: WebServer) -> None:
    def asked() -> int:
        bounds = [it.removeprefix("bytes=").split("-") for it in server.ranges()[1:]]
        return sum(int(last) + 1 - int(first) for first, last in bounds)

    with open_object(server.url("/m.onnxa"), keeps_end=False) as file:
        offsets = range(SIZE - 60_000, 0, -60_000)  # each before the last
        for offset in offsets:
            assert len(b"".join(file.pieces(offset, 40_000))) == 40_000
        assert asked() == len(offsets) * 40_000
        for offset in range(0, 200_000, 20_000):
            assert len(b"".join(file.pieces(offset, 20_000))) == 20_000
        assert asked() - len(offsets) * 40_000 <= 3 * 200_000


@pytest.mark.usefixtures("short_ahead")
def test_two_ranges_of_a_file_may_be_read_in_turns(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        turns = itertools.zip_longest(
            file.pieces(1000, 80_000), file.pieces(50_000, 80_000), fillvalue=b""
        )
        found = [b"".join(pieces) for pieces in zip(*turns, strict=True)]
        assert found == [CONTENT[1000:81_000], CONTENT[50_000:130_000]]


@given(st.lists(st.tuples(st.integers(0, SIZE + 10), st.integers(0, 30_000)), max_size=8))
@settings(max_examples=15)
def test_pieces_and_reads_in_any_order_give_the_bytes_of_the_object(
    shared: WebServer, ranges: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "PART_SIZE", 10_000)
        patch.setattr(objects, "_FIRST_AHEAD", 20_000)
        with open_object(shared.url("/m.onnxa")) as file:
            for (offset, size), is_read in zip(ranges, itertools.cycle((False, True))):
                found = file.read(offset, size) if is_read else b"".join(file.pieces(offset, size))
                assert found == CONTENT[offset : offset + size]


@pytest.mark.usefixtures("short_ahead")
def test_two_of_several_files_that_are_read_in_turn_are_read_ahead(server: WebServer) -> None:
    files = [open_object(server.url("/m.onnxa"), keeps_end=False) for _ in range(4)]
    for offset in (0, 2000, 4000):
        for file in files:
            assert b"".join(file.pieces(offset, 1000)) == CONTENT[offset : offset + 1000]
            assert sum(it._stream is not None for it in files) <= 2
    for file in files:
        file.close()
        assert file._stream is None


def test_a_store_of_azure_is_first_asked_for_the_size(server: WebServer) -> None:
    server.files["/me/models/m.onnxa"] = CONTENT
    options = {"account_name": "me", "azure_storage_endpoint": server.url("/me")}
    with open_object(
        "az://models/m.onnxa",
        storage_options=options | {"SKIP_SIGNATURE": True, "allow_http": True},
    ) as file:
        assert file.read(0, 10) == CONTENT[:10]
    assert [it.method for it in server.requests] == ["HEAD", "GET", "GET"]
    assert {it.path for it in server.requests} == {"/me/models/m.onnxa"}


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, SIZE + 10), st.integers(0, 30_000)), min_size=0, max_size=8
    )
)
@settings(max_examples=15)
def test_ranges_are_read_in_any_order(shared: WebServer, ranges: list[tuple[int, int]]) -> None:
    file = open_object(shared.url("/m.onnxa"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "PART_SIZE", 10_000)
        patch.setattr(objects, "GAP_SIZE", 100)
        found = list(file.read_ranges(ranges))
        assert found == [CONTENT[offset : offset + size] for offset, size in ranges]
        seen = bytearray(SIZE)
        for offset, body in file.stream_ranges(ranges):
            assert bytes(body) == CONTENT[offset : offset + len(body)]
            assert len(body) <= 10_000
            seen[offset : offset + len(body)] = b"\1" * len(body)
        assert all(all(seen[offset : offset + size]) for offset, size in ranges)


@pytest.mark.usefixtures("small_parts")
def test_close_ranges_are_read_by_one_request(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        list(file.read_ranges([(0, 10), (50, 20), (500, 10)]))
        assert sorted(server.ranges()[1:]) == ["bytes=0-69", "bytes=500-509"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("method", ["pieces", "stream_ranges"])
def test_12_requests_run_at_once_and_no_more_than_are_taken(server: WebServer, method: str) -> None:
    reached = threading.Barrier(12)

    def change(request: Request, answer: Answer) -> Answer:
        if len(server.requests) <= 13:
            reached.wait(20)
        return answer

    with open_object(server.url("/m.onnxa")) as file:
        server.change = change
        parts: Any = file.pieces(5, SIZE) if method == "pieces" else file.stream_ranges([(5, SIZE)])
        next(parts)
        assert 12 <= len(server.requests) - 1 <= 13
        for taken, _ in enumerate(parts, 2):
            assert len(server.requests) - 1 <= taken + 12


@pytest.mark.usefixtures("small_parts")
def test_parts_before_one_that_fails_are_given(server: WebServer) -> None:
    has_failed = threading.Event()

    def change(request: Request, answer: Answer) -> Answer:
        if int(request.range.removeprefix("bytes=").partition("-")[0]) > 50_000:
            has_failed.set()
            return Answer(404)
        assert has_failed.wait(20)
        time.sleep(0.1)  # the client reads the error first
        return answer

    with open_object(server.url("/m.onnxa")) as file:
        server.change = change
        pieces: list[bytes | memoryview] = []
        with pytest.raises(FileNotFoundError):
            pieces.extend(file.pieces(0, SIZE))
        read = b"".join(pieces)
        assert len(read) > 50_000
        assert read == CONTENT[: len(read)]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("method", ["pieces", "stream_ranges"])
def test_closing_a_stream_cancels_its_requests(server: WebServer, method: str) -> None:
    asked, released = threading.Event(), threading.Event()

    def endless() -> Iterator[bytes]:
        asked.set()
        while not released.wait(0.02):
            yield b"x"

    def change(request: Request, answer: Answer) -> Answer:
        if request.range.startswith("bytes=0-"):
            return answer
        length = str(len(b"".join(answer.body)))
        return Answer(206, dict(answer.headers, **{"Content-Length": length}), endless())

    gc.collect()  # ends requests that the errors of other tests keep
    wait_until(lambda: not server.running)
    with open_object(server.url("/m.onnxa")) as file:
        server.change = change
        parts: Any = file.pieces(0, SIZE) if method == "pieces" else file.stream_ranges([(0, SIZE)])
        next(parts)
        assert asked.wait(20)
        gc.disable()  # which would end requests that a reference cycle keeps
        try:
            parts.close()
            wait_until(lambda: not server.running)
        finally:
            gc.enable()
            released.set()


@pytest.mark.parametrize("method", ["read", "pieces"])
def test_a_failed_request_leaves_no_reference_cycle(server: WebServer, method: str) -> None:
    file = open_object(server.url("/m.onnxa"))
    kept = weakref.ref(file)
    server.change = lambda request, answer: Answer(404)
    gc.disable()
    try:
        with pytest.raises(FileNotFoundError):
            b"".join(file.pieces(0, 10)) if method == "pieces" else file.read(0, 10)
        del file
        wait_until(lambda: kept() is None)
    finally:
        gc.enable()


@pytest.mark.skipif(os.name == "nt", reason="sends a signal to a thread")
def test_ctrl_c_ends_a_request_that_hangs(server: WebServer) -> None:
    released = threading.Event()
    main = threading.get_ident()

    def change(request: Request, answer: Answer) -> Answer:
        signal.pthread_kill(main, signal.SIGINT)
        released.wait(20)
        return answer

    with open_object(server.url("/m.onnxa")) as file:
        server.change = change
        with pytest.raises(KeyboardInterrupt):
            file.read(0, 10)
        server.change = lambda _, answer: answer
        released.set()
        assert file.read(0, 10) == CONTENT[:10]


def test_a_lack_of_memory_is_no_failure_of_the_server(
    server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        monkeypatch.setattr("obstore.get_async", Mock(side_effect=MemoryError("no room")))
        with pytest.raises(MemoryError, match="no room"):
            file.read(0, 10)


def test_a_user_and_a_password_are_sent_as_a_header(server: WebServer) -> None:
    url = server.url("/m.onnxa").replace("//", "//me:a%40b@")
    with open_object(url) as file:
        assert file.path == server.url("/m.onnxa")
    assert server.requests[0].headers["authorization"] == "Basic bWU6YUBi"


def test_a_query_is_sent_with_each_request_and_names_no_file(server: WebServer) -> None:
    signed = open_object(server.url("/m.onnxa?id=1&X-Amz-Signature=a%2Fb"))
    signed.read(0, 10)
    assert {it.path for it in server.requests} == {"/m.onnxa?id=1&X-Amz-Signature=a%2Fb"}
    again = open_object(server.url("/m.onnxa?X-Amz-Signature=c&id=1#x"))
    assert signed.cache_key() == again.cache_key()
    assert signed.identity == again.identity
    assert len(str(signed.cache_key())) == 64
    assert open_object(server.url("/m.onnxa?id=2")).cache_key() != signed.cache_key()


def test_other_bytes_have_another_cache_key_and_identity(server: WebServer) -> None:
    before = open_object(server.url("/m.onnxa"))
    server.files["/m.onnxa"] = CONTENT[::-1]
    after = open_object(server.url("/m.onnxa"))
    assert before.cache_key() != after.cache_key()
    assert before.identity != after.identity


def test_without_a_strong_etag_there_is_no_cache_key(server: WebServer) -> None:
    for etag in ('W/"1"', None):
        server.change = lambda _, it, etag=etag: Answer(  # type: ignore[misc]
            it.status, dict(it.headers, ETag=etag), it.body
        )
        with open_object(server.url("/m.onnxa")) as file:
            assert file.cache_key() is None
            assert file.read(0, 10) == CONTENT[:10]
        assert "if-match" not in server.requests[-1].headers


def test_with_the_same_strong_etag_an_object_may_have_another_time(server: WebServer) -> None:
    with open_object(server.url("/m.onnxa")) as file:
        server.change = lambda _, it: Answer(
            it.status, dict(it.headers, **{"Last-Modified": None}), it.body
        )
        assert file.read(0, 10) == CONTENT[:10]


def test_a_store_of_the_callers_own_is_read_by_key() -> None:
    from obstore.store import MemoryStore

    store = MemoryStore()
    store.put("models/m.onnxa", CONTENT)
    with open_object("models/m.onnxa", store=store) as file:
        assert (file.path, file.size) == ("models/m.onnxa", SIZE)
        assert file.read(5, 10) == CONTENT[5:15]


def test_other_schemes_are_read_by_fsspec() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/folder/m.onnxa", CONTENT)
    with open_object("memory://folder/m.onnxa") as file:
        assert file.size == SIZE
        assert file.read(5, 10) == CONTENT[5:15]
        assert b"".join(file.pieces(0, SIZE)) == CONTENT
        assert file.cache_key() is None
        system.pipe("/folder/m.onnxa", CONTENT)  # the same bytes at a later time
        with pytest.raises(ArchiveError, match="has changed since"):
            file.read(5, 10)
    with pytest.raises(FileNotFoundError):
        open_object("memory://folder/other.onnxa")
    with pytest.raises(IsADirectoryError):
        open_object("memory://folder")


SPAWN = "start processes with multiprocessing's method 'spawn'"


@pytest.mark.sweep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ("store", [str(SIZE)]),  # without threads
        ("obstore.get(store, 'm.onnxa').bytes()", [SPAWN]),
        ("asyncio.run(get())", [SPAWN]),
        ("file = Location.of(url).open(); calls.append(lambda: file.read(0, 1))", [SPAWN] * 2),
    ],
)
def test_a_fork_of_a_process_that_has_made_requests_is_refused(
    server: WebServer, use: str, printed: list[str]
) -> None:
    code = f"""
import asyncio, multiprocessing, sys, warnings
import obstore
from obstore.store import HTTPStore
from onnxarchive.remote.location import Location
warnings.simplefilter("ignore")
url = sys.argv[1] + "/m.onnxa"
store = HTTPStore(sys.argv[1], client_options={{"allow_http": True}})
async def get():
    await obstore.head_async(store, "m.onnxa")
calls = [lambda: Location.of(url).open().size]
{use}
def child():
    for call in calls:
        try:
            print(call(), flush=True)
        except OSError as error:
            print(error, flush=True)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
process.kill()
"""
    lines = run_python(code, server.url("")).splitlines()
    for text, line in zip(printed, lines, strict=True):
        assert text in line


def test_a_thread_that_cannot_be_started_fails_one_request_and_not_the_next(
    server: WebServer,
) -> None:
    code = """
import sys, threading
from onnxarchive.remote.location import Location
start = threading.Thread.start
def fail(thread):
    threading.Thread.start = start
    raise RuntimeError("can't start new thread")
threading.Thread.start = fail
try:
    Location.of(sys.argv[1]).open()
except OSError as error:
    print(error.filename, error.strerror)
print(Location.of(sys.argv[1]).open().size)
"""
    url = server.url("/m.onnxa")
    first, second = run_python(code, url).splitlines()
    assert first.startswith(f"{url} remote requests need a thread, which could not be started")
    assert second == str(SIZE)


def test_a_process_ends_well_right_after_its_last_request(server: WebServer) -> None:
    code = """
import sys
from onnxarchive.remote.location import Location
file = Location.of(sys.argv[1]).open()
waiting = file.stream_ranges([(0, file.size)])
next(waiting)
"""
    for _ in range(2):  # a wrong end was seen in two of three
        assert run_python(code, server.url("/m.onnxa")) == ""


def test_a_file_shows_nothing_of_its_store(server: WebServer) -> None:
    file = open_object(server.url("/m.onnxa?sig=SECRET"))
    assert isinstance(file, RemoteFile)
    assert "SECRET" not in f"{file!r} {file.path} {file.identity!r} {file._origin!r}"
