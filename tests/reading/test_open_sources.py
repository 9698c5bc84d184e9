from __future__ import annotations

import gc
import io
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import entry_of, model_of, normalised, raw_tensor
from onnx import helper
from remote_archives import (
    ASSETS,
    LARGE,
    PATH,
    PLACES,
    a_model,
    an_archive,
    arrays_of,
    changes_after,
    many_tensors,
    placed,
    require_equal,
    sends,
    with_byte_flipped,
)
from web_server import Answer, WebServer
from written import saved
from zip_entries import add_bytes

import onnxarchive
from onnxarchive import (
    ArchiveFormatError,
    ChecksumError,
    ObjectChangedError,
    TensorNotFoundError,
    UnsupportedFeatureError,
)
from onnxarchive.remote import objects
from onnxarchive.zipformat.records import DirectoryRecord
from onnxarchive.zipformat.writer import ZipWriter

ARCHIVE = an_archive()
MODEL = a_model()


@pytest.fixture(params=PLACES)
def source(request: pytest.FixtureRequest, tmp_path: Path, web: WebServer) -> Iterator[Any]:
    """A source of each kind, and the further arguments of `open`."""
    with placed(request.param, ARCHIVE, tmp_path, web) as found:
        yield found


@pytest.fixture
def url(web: WebServer) -> str:
    web.files[PATH] = ARCHIVE
    return web.url(PATH)


def test_every_source_gives_the_same_archive_whose_arrays_outlive_it(source: Any) -> None:
    source, access = source
    with onnxarchive.open(source, **access) as archive:
        require_equal(dict(archive.tensors), arrays_of(MODEL))
        assert dict(archive.assets) == ASSETS
        assert list(archive.models) == ["", "further"]
        archive.verify()
        require_equal(archive.fetch(), arrays_of(MODEL))
        require_equal(archive.fetch(["c", "b", "c"]), {it: archive.tensors[it] for it in "cb"})
        for entry in archive.entries.values():
            data = ARCHIVE[entry.data_offset : entry.data_offset + entry.nbytes]
            assert archive.read(entry.name) == data
        assert not archive.tensors["a/w"].flags.writeable
        assert not archive.fetch(["a/w"])["a/w"].flags.writeable
    assert onnxarchive.check(source, full=True, **access) == []
    assert onnxarchive.check(source, **access) == []
    assert onnxarchive.load(source, **access) == normalised(MODEL)
    with onnxarchive.open(source, model="further", **access) as archive:
        assert archive.fetch(["own"])["own"].size == 5000
        outliving = archive.fetch(["large3"]) | {"own": archive.tensors["own"]}
    assert outliving["large3"].tobytes() == arrays_of(MODEL)["large3"].tobytes()
    assert outliving["own"].tobytes() == raw_tensor("own", dims=(5000,), seed=9).raw_data
    with pytest.raises(ValueError, match="closed"):
        archive.read("large0")


# Requests


def test_an_archive_is_opened_by_one_request_and_a_tensor_is_one_more(
    web: WebServer, url: str
) -> None:
    with onnxarchive.open(url) as archive:
        assert len(web.requests) == 1
        assert repr(archive) == f"<onnxarchive.Archive '{url}', {len(archive.entries)} entries>"
        for count, name in enumerate(LARGE, 2):
            assert archive.tensors[name].nbytes == LARGE[name]
            assert len(web.requests) == count
        entry = archive.entries["large2"]
        begin = entry.header_offset - entry.header_offset % 64  # so that the array is aligned
        assert web.ranges()[3] == f"bytes={begin}-{entry.data_offset + entry.nbytes - 1}"
    assert {it.headers.get("if-match") for it in web.requests[1:]} == {
        web.requests[1].headers["if-match"]
    }


@pytest.mark.parametrize("nodes", [2_000, 20_000])
def test_a_large_directory_or_model_takes_two_requests_more_at_most(
    web: WebServer, nodes: int
) -> None:
    model = many_tensors(1500, 16)
    model.graph.node.extend(
        helper.make_node("Identity", ["w0"], [f"output{it}"]) for it in range(nodes)
    )
    web.files[PATH] = saved(model, size_threshold=16 if nodes == 2000 else 1024)
    with onnxarchive.open(web.url(PATH)) as archive:
        assert 2 <= len(web.requests) <= 3
        assert archive.tensors["w7"].size == 4


def test_a_full_check_asks_for_many_tensors_together(
    web: WebServer, access: dict[str, Any]
) -> None:
    web.files[PATH] = saved(many_tensors(40, 160_000))
    assert onnxarchive.check(web.url(PATH), full=True, **access) == []
    assert len(web.requests) <= 7


def test_bytes_between_the_models_of_a_hostile_archive_are_not_read(
    web: WebServer, access: dict[str, Any]
) -> None:
    file = io.BytesIO()
    writer = ZipWriter(file)
    model = model_of().SerializeToString()
    for name, data in (
        ("__MODEL_PROTO_a", model),
        ("unlisted", bytes(4_000_000)),
        ("__MODEL_PROTO", model),
    ):
        add_bytes(writer, name, data)
    writer.finish()
    changed = bytearray(file.getvalue())
    record = changed.rindex(b"unlisted") - DirectoryRecord.SIZE
    changed[record + 20 : record + 28] = struct.pack("<2L", 5_000_000, 5_000_000)  # it is left out
    web.files[PATH] = bytes(changed)
    findings = onnxarchive.check(web.url(PATH), **access)
    assert "ZIP-6" in {it.rule for it in findings}
    assert web.nbytes < 1_000_000


def test_a_name_in_place_of_a_list_of_names_is_refused() -> None:
    with (
        onnxarchive.open(saved(MODEL)) as archive,
        pytest.raises(TypeError, match=r"write \['c'\]"),
    ):
        archive.fetch("c")


def test_many_tensors_are_fetched_by_a_few_requests(web: WebServer, access: dict[str, Any]) -> None:
    model = many_tensors()
    web.files[PATH] = saved(model)
    with onnxarchive.open(web.url(PATH), **access) as archive:
        require_equal(archive.fetch(), arrays_of(model))
        assert len(web.requests) == 2
        names = [f"w{it}" for it in range(0, 300, 150)]
        archive.fetch(names)
        assert len(web.requests) == (2 if access else 4)
    web.requests.clear()
    assert onnxarchive.load(web.url(PATH), **access) == normalised(model)
    assert len(web.requests) == (1 if access else 2)
    web.requests.clear()
    assert onnxarchive.check(web.url(PATH), full=True, **access) == []
    assert len(web.requests) == (1 if access else 4)
    web.requests.clear()
    assert onnxarchive.check(web.url(PATH), **access) == []
    assert len(web.requests) <= 2
    web.requests.clear()
    with onnxarchive.open(web.url(PATH), **access) as archive:
        archive.verify()
    assert len(web.requests) == (1 if access else 4)


def test_no_byte_is_requested_twice_by_verify(web: WebServer, url: str) -> None:
    with onnxarchive.open(url) as archive:
        archive.verify()
    assert web.nbytes <= objects.END_SIZE + len(ARCHIVE)


def test_an_archive_larger_than_parts_is_read_in_parts(
    web: WebServer, url: str, access: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 50_003)
    with onnxarchive.open(url, **access) as archive:
        require_equal(dict(archive.tensors), arrays_of(MODEL))
        require_equal(archive.fetch(), arrays_of(MODEL))
        assert dict(archive.assets) == ASSETS
        archive.verify()
    assert onnxarchive.load(url, **access) == normalised(MODEL)
    assert onnxarchive.check(url, full=True, **access) == []
    assert len(web.requests) > (20 if access else 30)


def test_names_are_looked_up_before_anything_is_fetched(web: WebServer, url: str) -> None:
    with onnxarchive.open(url) as archive:
        with pytest.raises(TensorNotFoundError, match="no such name"):
            archive.fetch(["large1", "no such name"])
        assert archive.fetch([]) == {}
    assert len(web.requests) == 1


# Integrity


def test_a_changed_byte_is_found_when_its_tensor_arrives(web: WebServer, url: str) -> None:
    entry = entry_of(ARCHIVE, "large1")
    sends(web, with_byte_flipped(ARCHIVE, entry.data_offset + 200_000))
    with onnxarchive.open(url) as archive:
        assert archive.tensors["large3"].nbytes == LARGE["large3"]
        for read in (
            lambda: archive.tensors["large1"],
            lambda: archive.fetch(["large0", "large1"]),
            lambda: archive.fetch(),
            lambda: archive.read("large1"),
            lambda: archive.tensor_by_key("large1"),
            archive.verify,
        ):
            with pytest.raises(ChecksumError, match=r"/m\.onnxa: entry 'large1'.*CRC-32"):
                read()
        assert archive.tensors["a/w"].size == 2000
    with pytest.raises(ChecksumError, match="entry 'large1'"):
        onnxarchive.load(url)
    (found,) = onnxarchive.check(url, full=True)
    assert (found.rule, found.entry) == ("ZIP-15", "large1")
    web.change = lambda _, answer: answer
    with onnxarchive.open(url) as archive:
        require_equal(archive.fetch(), arrays_of(MODEL))
        archive.verify()
    assert onnxarchive.check(url, full=True) == []


@pytest.mark.parametrize("part", ["model", "directory", "local header"])
def test_a_changed_byte_elsewhere_does_not_stay_in_the_cache(
    web: WebServer, url: str, access: dict[str, Any], part: str
) -> None:
    with onnxarchive.open(ARCHIVE) as archive:
        model, large = archive.entries["__MODEL_PROTO"], archive.entries["large1"]
    offset = {
        "model": model.data_offset + 10,
        "directory": model.data_offset + model.nbytes + 46,
        "local header": large.header_offset + 14,
    }[part]
    sends(web, with_byte_flipped(ARCHIVE, offset))
    with pytest.raises(ArchiveFormatError):
        onnxarchive.load(url, **access)
    web.change = lambda _, answer: answer
    assert onnxarchive.load(url, **access) == normalised(MODEL)


def test_an_object_that_changes_is_an_error_and_never_a_mixture(
    web: WebServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 300_000)
    archive = onnxarchive.open(url)
    assert archive.tensors["large0"].nbytes == LARGE["large0"]
    web.files[PATH] = with_byte_flipped(ARCHIVE, 0)
    for read in (lambda: archive.tensors["large2"], archive.fetch, archive.verify):
        with pytest.raises(ObjectChangedError, match=r"/m\.onnxa: .*open it again"):
            read()
    archive.close()


def in_full(source: str, **access: Any) -> None:
    onnxarchive.check(source, full=True, **access)


def verify(source: str, **access: Any) -> None:
    with onnxarchive.open(source, **access) as archive:
        archive.verify()


@pytest.mark.parametrize("read", [onnxarchive.load, in_full, verify])
def test_an_object_that_changes_while_it_is_read_is_an_error(
    web: WebServer,
    url: str,
    access: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[..., object],
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 20_000)
    changes_after(web, 2)
    with pytest.raises(ObjectChangedError):
        read(url, **access)


def test_an_object_without_an_etag_is_not_cached_and_its_time_is_compared(
    web: WebServer, url: str, tmp_path: Path
) -> None:
    time = "Wed, 15 Nov 2023 00:00:00 GMT"

    def change(_: object, answer: Answer) -> Answer:
        return Answer(
            answer.status, {**answer.headers, "ETag": None, "Last-Modified": time}, answer.body
        )

    web.change = change
    with onnxarchive.open(url, cache=tmp_path / "cache") as archive:
        require_equal(archive.fetch(), arrays_of(MODEL))
        assert not list(tmp_path.rglob("*.onnxa"))
        time = "Wed, 15 Nov 2023 00:00:01 GMT"
        with pytest.raises(ObjectChangedError):
            archive.tensors["large2"]


# File objects


class Counting(io.BytesIO):
    """A file that says how it was used."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.largest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert size >= 0
        self.largest = max(self.largest, size)
        return super().read(min(size, 70_000))  # fewer bytes than asked for


def test_a_file_object_is_read_by_position_and_closed_by_its_owner() -> None:
    file = Counting(ARCHIVE)
    with onnxarchive.open(file) as archive:
        assert file.largest <= len(ARCHIVE) // 4
        file.seek(5)
        assert archive.tensors["large1"].nbytes == LARGE["large1"]
        require_equal(archive.fetch(), arrays_of(MODEL))
        assert archive.path == "file object Counting"
    assert not file.closed
    with pytest.raises(ValueError, match="closed"):
        archive.tensors["large1"]
    file.seek(0)
    assert file.getvalue() == ARCHIVE
    with onnxarchive.open(file) as archive:
        file.close()
        with pytest.raises(ValueError, match="closed"):
            archive.tensors["large1"]


class Reusing(Counting):
    """Gives every range that is read in the same buffer."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._buffer = bytearray(len(data))

    def read(self, size: int | None = -1) -> Any:
        found = super().read(size)
        self._buffer[: len(found)] = found
        return memoryview(self._buffer)[: len(found)]


def test_bytes_that_a_file_object_gives_are_copied() -> None:
    with onnxarchive.open(Reusing(ARCHIVE)) as archive:
        arrays = archive.fetch()
        assert archive.model == onnxarchive.open(ARCHIVE).model
        require_equal(arrays, arrays_of(MODEL))


def test_an_archive_does_not_keep_a_file_object() -> None:
    file = Counting(ARCHIVE)
    kept = weakref.ref(file)
    array = onnxarchive.open(file).tensors["large1"]
    del file
    gc.collect()
    assert kept() is None
    assert array.nbytes == LARGE["large1"]


def test_a_file_object_that_is_truncated_meanwhile_gives_an_error() -> None:
    file = io.BytesIO(ARCHIVE)
    with onnxarchive.open(file) as archive:
        entry = archive.entries["large1"]
        for size in (entry.data_offset + 5, entry.header_offset + 3, 0):
            file.truncate(size)
            for read in (
                lambda: archive.tensors["large1"],
                archive.fetch,
                archive.verify,
                lambda: archive.read("__MODEL_PROTO"),
            ):
                with pytest.raises(onnxarchive.ArchiveError, match="file object BytesIO"):
                    read()


def test_a_text_file_a_pipe_and_a_writer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    path.write_bytes(ARCHIVE)
    reader, writer = os.pipe()
    os.close(writer)
    with (
        open(path, encoding="latin-1") as text,
        os.fdopen(reader, "rb") as pipe,
        open(path, "ab") as written,
    ):
        for file, message in (
            (text, "open for text; open it in binary mode"),
            (io.StringIO("PK"), "open for text; open it in binary mode"),
            (pipe, "seekable"),
            (written, "seekable|readable|read"),
        ):
            with pytest.raises((ValueError, OSError), match=message):
                onnxarchive.open(file)  # type: ignore[arg-type]
    closed = io.BytesIO(ARCHIVE)
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        onnxarchive.open(closed)


@pytest.mark.parametrize("source", [None, 5, [b"PK"], object()])
def test_objects_that_are_no_sources_are_refused(source: Any) -> None:
    for call in (onnxarchive.open, onnxarchive.load, onnxarchive.check):
        with pytest.raises(TypeError, match="expected a path, a URL, bytes or a binary file"):
            call(source)


def test_bytes_are_not_copied_and_views_keep_them() -> None:
    data = bytearray(ARCHIVE)
    with onnxarchive.open(data) as archive:
        array = archive.tensors["large1"]
        entry = archive.entries["large1"]
    data[entry.data_offset] ^= 0xFF
    assert array.tobytes()[0] == data[entry.data_offset]
    with pytest.raises(BufferError):
        data.append(0)


def test_damaged_bytes_in_memory_are_refused() -> None:
    for data in (b"", b"PK", ARCHIVE[:-1], ARCHIVE[1:], ARCHIVE + b"x"):
        for source in (data, io.BytesIO(data)):
            with pytest.raises(ArchiveFormatError) as caught:
                onnxarchive.open(source)
            assert str(caught.value).startswith(("archive in memory: ", "file object BytesIO: "))


@pytest.mark.parametrize("kind", sorted({*PLACES} - {"path", "file URL", "web with a cache"}))
def test_only_files_are_edited_pickled_or_prefetched(
    kind: str, tmp_path: Path, web: WebServer
) -> None:
    import pickle

    with placed(kind, ARCHIVE, tmp_path, web) as (source, access):
        if "store" not in access:  # `edit` takes none, so the source would be a path
            with (
                pytest.raises(UnsupportedFeatureError, match="expected a local file"),
                onnxarchive.edit(source),
            ):
                pass
        with onnxarchive.open(source, prefetch="willneed", **access) as archive:
            with pytest.raises(TypeError, match="at a URL cannot be pickled"):
                pickle.dumps(archive)
            assert archive.tensors["large1"].nbytes == LARGE["large1"]


# Errors


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (404, FileNotFoundError, "No such object"),
        (403, PermissionError, "refuses access"),
        (500, OSError, "HTTP status 500"),
    ],
)
def test_errors_of_servers_name_the_url_without_secrets(
    web: WebServer, url: str, status: int, error: type[Exception], message: str
) -> None:
    web.change = lambda *_: Answer(status, {}, [b"SECRET"])
    secret = url.replace("//", "//me:SECRET@") + "?X-Amz-Signature=SECRET"
    for call in (onnxarchive.open, onnxarchive.load, onnxarchive.check):
        with pytest.raises(error, match=message) as caught:
            call(secret, storage_options={"max_retries": 0, "default_headers": {"X": "SECRET"}})
        assert url in str(caught.value)
        assert "SECRET" not in str(caught.value)


def test_an_object_that_is_no_archive_is_refused_under_its_url(web: WebServer) -> None:
    web.files.update(
        {"/page": b"<html>" * 100_000, "/empty": b"", "/m": model_of().SerializeToString()}
    )
    for path in web.files:
        with pytest.raises(ArchiveFormatError) as caught:
            onnxarchive.open(web.url(path))
        assert str(caught.value).startswith(web.url(path) + ": ")


def test_an_archive_of_a_later_version_is_reported_as_such(web: WebServer) -> None:
    web.files[PATH] = ARCHIVE.replace(b"assets/labels.txt", b"__labels/next.txt")
    for source in (web.files[PATH], web.url(PATH)):
        with pytest.raises(ArchiveFormatError, match="later version of the format") as caught:
            onnxarchive.open(source)
        assert caught.value.rule == "VERSION-1"


def test_a_url_of_an_unknown_scheme_is_refused() -> None:
    with pytest.raises((ValueError, ImportError), match="nonsense"):
        onnxarchive.open("nonsense://me:SECRET@host/m.onnxa?sig=SECRET")


def test_store_and_options_exclude_each_other(tmp_path: Path) -> None:
    source, access = PLACES["store"](ARCHIVE, tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give store or storage_options, not both"):
        onnxarchive.open(source, storage_options={"region": "x"}, **access)
    with pytest.raises(FileNotFoundError, match="other"):
        onnxarchive.open("models/other.onnxa", **access)
