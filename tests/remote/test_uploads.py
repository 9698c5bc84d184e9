from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from obstore.store import HTTPStore, LocalStore, MemoryStore
from remote_files import create_object, list_objects, open_object

from onnxarchive import ArchiveError, UnsupportedFeatureError
from onnxarchive.remote import uploads

CONTENT = bytes(range(251)) * 100_000  # three parts of 8 MiB and a bit


def write_in_pieces(writer: Any, content: bytes) -> None:
    buffer = bytearray(100_001)
    for start in range(0, len(content), len(buffer)):
        piece = content[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        assert writer.write(memoryview(buffer)[: len(piece)]) == len(piece)
        buffer[:] = bytes(len(buffer))  # the caller's buffer is free again


@pytest.fixture(params=["memory store", "folder as store", "memory", "folder"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    targets: dict[str, tuple[str, dict[str, Any]]] = {
        "memory store": ("folder/m.onnxa", {"store": MemoryStore()}),
        "folder as store": ("folder/m.onnxa", {"store": LocalStore(tmp_path, mkdir=True)}),
        "memory": (f"memory:/{tmp_path}/m.onnxa", {}),
        "folder": (f"local://{tmp_path}/m.onnxa", {}),
    }
    return targets[request.param]


def test_an_object_appears_when_it_is_complete(target: tuple[str, dict[str, Any]]) -> None:
    path, place = target
    with create_object(path, size=len(CONTENT), **place) as writer:
        write_in_pieces(writer, CONTENT)
        with pytest.raises(FileNotFoundError):
            open_object(path, **place)
        writer.commit()
    with open_object(path, **place) as file:
        assert file.read(0, file.size) == CONTENT
    with create_object(path, len(CONTENT), **place) as writer:  # replaces it
        writer.write(b"new")
        with open_object(path, **place) as file:
            assert file.size == len(CONTENT)
        writer.commit()
    with open_object(path, **place) as file:
        assert file.read(0, 10) == b"new"


@pytest.mark.parametrize("key", ["a?b/m#n.onnxa", "#a", "?a", "a%20b", "a%2Fb", "a b", "é+&@:"])
def test_a_key_is_read_and_written_unchanged_and_shown_in_full(key: str) -> None:
    store = MemoryStore()
    store.put(key, b"12345")
    with open_object(key, store=store) as file:
        assert (file.size, file.path) == (5, key)
    with create_object(f"new/{key}", 0, store=store) as writer:
        assert writer.path == f"new/{key}"
        writer.commit()
    assert [it["path"] for it in store.list("new").collect()] == [f"new/{key}"]
    assert list_objects("new", store=store) == [(key, f"new/{key}")]


@pytest.mark.parametrize(
    "key",
    ["", "/", "a/", "/a", "//a", "a//b", "a//", "a/./b", "../a", "a/..", "a\nb", "a\0", "\x7f"],
)
def test_a_key_that_would_be_another_object_is_refused_by_name(key: str) -> None:
    store = MemoryStore()
    for name in ("a", "a/b", "b"):
        store.put(name, b"12345")
    for call in (partial(create_object, size=5), open_object):
        for url, given in ((key, store), (f"s3://bucket/{key}", None)):
            with pytest.raises(UnsupportedFeatureError, match="expected a key") as caught:
                call(url, store=given)
            assert repr(url) in str(caught.value)
    if key.strip("/"):
        with pytest.raises(UnsupportedFeatureError, match="expected a key"):
            list_objects(f"{key}/", store=store)


def test_slashes_that_a_library_drops_are_refused() -> None:
    for url in ("https://host//m.onnxa", "memory://folder/m.onnxa/", "zip://m/::memory://m.zip"):
        with pytest.raises(UnsupportedFeatureError, match=f"found '{url}'"):
            open_object(url)
    fsspec.filesystem("memory").pipe("/a//b", b"12345")
    assert open_object("memory://a//b").size == 5


@pytest.mark.parametrize("interrupt", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_of_an_object_that_is_given_up(
    target: tuple[str, dict[str, Any]], interrupt: type[BaseException], tmp_path: Path
) -> None:
    path, place = target

    def fail() -> None:
        with create_object(path, len(CONTENT), **place) as writer:
            write_in_pieces(writer, CONTENT)
            raise interrupt

    with pytest.raises(interrupt):
        fail()
    with pytest.raises(FileNotFoundError):
        open_object(path, **place)
    assert not [it for it in tmp_path.rglob("*") if it.is_file()]


@pytest.mark.parametrize("count", [3, 30])
def test_a_panic_of_obstore_is_an_error(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As pyo3's, with a secret."""

    def put(*_: object, **__: object) -> None:
        raise PanicError("SECRET")

    monkeypatch.setattr("obstore.put", put)
    with create_object("m", len(CONTENT), store=MemoryStore()) as writer:

        def write() -> None:
            for _ in range(count):
                writer.write(bytes(1 << 20))
            writer.commit()

        with pytest.raises(OSError, match="the request failed") as caught:
            write()
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_an_upload_that_stalls_ends_and_says_how_far_it_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_aborted = []

    def put(_store: object, _key: str, parts: Iterator[object], **_: object) -> None:
        next(parts)  # arrives at once
        try:
            list(parts)  # keeps the others
        except BaseException:
            is_aborted.append(True)
            raise

    monkeypatch.setattr("obstore.put", put)
    monkeypatch.setattr(uploads, "_SLOWEST", 100 << 20)
    part = 8 << 20
    place = {"store": LocalStore(tmp_path), "storage_options": {"stall_timeout": 1}}

    def write() -> None:
        with create_object("m", 3 * part, **place) as writer:
            writer.write(bytes(3 * part))
            writer.commit()

    arrived = f"stalls: {part} of {3 * part} bytes have arrived, and of {2 * part} under way none"
    with pytest.raises(OSError, match=f"{arrived} .*; stall_timeout in storage_options") as caught:
        write()
    assert (caught.value.errno, caught.value.filename) == (errno.ETIMEDOUT, "m")
    assert is_aborted == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_cannot_continue_an_object() -> None:
    with create_object("m", len(CONTENT), store=MemoryStore()) as writer:
        writer.write(b"begun")
        child = os.fork()
        if not child:
            status = 1
            for call in (lambda: writer.write(b"more"), writer.commit):
                with contextlib.suppress(ArchiveError):
                    call()
                    break
            else:
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("https://me:SECRET@host/m.onnxa?sig=SECRET", {}),
        ("m.onnxa", {"store": HTTPStore("https://host/?sig=SECRET")}),
    ],
)
def test_web_servers_are_not_written_to_or_listed(path: str, place: dict[str, Any]) -> None:
    for refused in (partial(create_object, size=5), list_objects):
        with pytest.raises(UnsupportedFeatureError, match="expected the URL of a store") as caught:
            refused(path, **place)
        assert "SECRET" not in str(caught.value)


def test_a_file_system_that_cannot_write_in_one_step_is_refused() -> None:
    class Plain(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "plain"
        opened: list[Any] = []  # noqa: RUF012

        def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            file = fsspec.spec.AbstractBufferedFile(self, path, mode)
            self.opened.append(file)
            return file

    fsspec.register_implementation("plain", Plain, clobber=True)
    with pytest.raises(
        UnsupportedFeatureError, match="in a Plain, files may appear before they are complete"
    ):
        create_object("plain://m.onnxa", 0)
    assert Plain.opened[0].closed


@pytest.mark.parametrize("step", ["start_transaction", "open"])
def test_a_file_system_that_cannot_write_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Reading(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "hf"

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    setattr(Reading, step, refuse)
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Reading)
    message = r"hf://.*in a Reading, files may appear .*; write a local .*\('hf upload'\)"
    with pytest.raises(UnsupportedFeatureError, match=message):
        create_object("hf://me/model/m.onnxa", 0)


def test_a_folder_is_listed_with_urls_that_open() -> None:
    store = MemoryStore()
    names = ["a/m.onnxa", "a/sub/n.onnxa", "ab.onnxa"]
    system = fsspec.filesystem("memory")
    for name in names:
        store.put(name, b"12345")
        system.pipe(f"/listed/{name}", b"12345")
    assert list_objects("a/", store=store) == [
        ("m.onnxa", "a/m.onnxa"),
        ("sub/n.onnxa", "a/sub/n.onnxa"),
    ]
    assert list_objects("", store=store) == [(name, name) for name in names]
    listed = list_objects("memory://listed")
    assert [path for path, _ in listed] == names
    with open_object(listed[1][1]) as file:
        assert file.read(0, 5) == b"12345"
