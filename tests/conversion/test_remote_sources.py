from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import edits
import onnx
import pytest
from models import external, model_of, normalised, raw_tensor, runnable_model
from remote_archives import (
    ASSETS,
    PATH,
    PLACES,
    a_model,
    an_archive,
    changes_after,
    many_tensors,
    sends,
    with_byte_flipped,
)
from web_server import Answer, WebServer
from written import contents, files_below, saved, write_model, zipped

import onnxarchive
from onnxarchive import (
    ArchiveFormatError,
    ChecksumError,
    ObjectChangedError,
    UnsupportedFeatureError,
)
from onnxarchive.reading.archive import contents_of
from onnxarchive.remote import objects

ARCHIVE = an_archive()
KINDS = ["file URL", "memory URL", "web", "web with a cache", "store"]
Call = Callable[..., object]


def convert(source: Any, target: Path, **options: Any) -> None:
    if "store" not in options:
        onnxarchive.convert(source, target, **options)
        return
    try:
        with open(target, "xb") as file:  # a path would be one in the store, too
            onnxarchive.convert(source, file, **options)
    except BaseException:
        target.unlink()
        raise


WAYS: dict[str, Call] = {
    "export": onnxarchive.export,
    "export, external": partial(onnxarchive.export, external_data="weights.data"),
    "export, further": partial(onnxarchive.export, model="further"),
    "extract": onnxarchive.extract,
    "convert": convert,
    "convert, all": partial(convert, size_threshold=0, convert_attribute=True),
    "convert, verified": partial(convert, verify_checksum=True),
}
every_way = pytest.mark.parametrize("way", WAYS)
four_ways = pytest.mark.parametrize("way", ["export", "export, external", "extract", "convert"])


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Path]:
    """A folder for what is written; the test leaves only complete files."""
    folder = tmp_path / "targets"
    folder.mkdir()
    yield folder
    assert [it for it in files_below(folder) if "/." in f"/{it}" or it.endswith(".tmp")] == []


def written(way: str, source: Any, folder: Path, **access: Any) -> dict[str, bytes]:
    """What a call writes, by paths in a new folder."""
    folder.mkdir()
    WAYS[way](source, folder / "target", **access)
    return contents(folder)


def in_another_order(path: Path) -> bytes:
    """An archive whose last model names its tensors in another order than they lie."""
    model = a_model()
    onnxarchive.save(model, path, assets=ASSETS)
    model.graph.initializer.sort(key=lambda it: it.name, reverse=True)
    model.graph.initializer.append(raw_tensor("new", dims=(3000,), seed=8))
    edits.replace_model(path, model)
    assert onnxarchive.check(path, full=True) == []
    return path.read_bytes()


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_a_remote_archive_is_written_as_a_local_one(
    kind: str, way: str, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    (tmp_path / "l.onnxa").write_bytes(ARCHIVE)
    source, access = PLACES[kind](ARCHIVE, tmp_path, web)
    expected = written(way, tmp_path / "l.onnxa", targets / "local")
    assert written(way, source, targets / "remote", **access) == expected


@every_way
def test_equal_tensors_and_tensors_in_another_order_are_read_correctly(
    way: str, tmp_path: Path, targets: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 50_000)
    alike = [raw_tensor(f"w{it}", dims=(100_000,), seed=it % 3) for it in range(6)]
    equal = saved(model_of(*alike), models={"further": model_of(*alike[::-1])})
    for number, data in enumerate((equal, in_another_order(tmp_path / "o.onnxa"))):
        if number and way == "export, further":
            continue
        (tmp_path / "l.onnxa").write_bytes(data)
        web.files[PATH] = data
        expected = written(way, tmp_path / "l.onnxa", targets / f"local{number}")
        assert written(way, web.url(PATH), targets / f"remote{number}") == expected


@four_ways
def test_many_tensors_take_a_few_requests(
    way: str, targets: Path, web: WebServer, access: dict[str, Any]
) -> None:
    web.files[PATH] = saved(many_tensors(), assets={f"{it}.txt": b"%d" % it for it in range(30)})
    WAYS[way](web.url(PATH), targets / "target", **access)
    assert len(web.requests) <= 7
    if access:
        onnxarchive.open(web.url(PATH), **access).close()
    web.requests.clear()
    WAYS[way](web.url(PATH), targets / "again", **access)
    assert len(web.requests) <= (1 if access else 7)


def test_a_full_diff_takes_a_few_requests(web: WebServer, access: dict[str, Any]) -> None:
    model = many_tensors()
    web.files[PATH] = data = saved(model, assets=ASSETS)
    assert onnxarchive.diff(web.url(PATH), data, full=True, **access).is_same
    assert onnxarchive.diff(web.url(PATH), web.url(PATH), full=True, **access).is_same
    assert len(web.requests) <= 12
    web.requests.clear()
    model.graph.initializer[7].raw_data = bytes(4000)
    assert not onnxarchive.diff(web.url(PATH), saved(model, assets=ASSETS), **access).is_same
    assert len(web.requests) == 1


@pytest.mark.parametrize("part", ["tensor", "asset", "model"])
@four_ways
def test_changed_bytes_are_an_error_that_leaves_no_file(
    way: str, part: str, targets: Path, web: WebServer, access: dict[str, Any]
) -> None:
    if part == "asset" and way.startswith("export"):
        return  # they read none
    with onnxarchive.open(ARCHIVE) as archive:
        name = {"tensor": "large2", "asset": "assets/folder/big.bin", "model": "__MODEL_PROTO"}[
            part
        ]
        entry = archive.entries[name]
    web.files[PATH] = ARCHIVE
    sends(web, with_byte_flipped(ARCHIVE, entry.data_offset + entry.nbytes // 2))
    with pytest.raises(ChecksumError if part != "model" else ArchiveFormatError, match=name):
        WAYS[way](web.url(PATH), targets / "target", **access)
    assert files_below(targets) == set()
    web.change = lambda _, answer: answer
    WAYS[way](web.url(PATH), targets / "target", **access)


@four_ways
def test_an_object_that_changes_is_an_error_that_leaves_no_file(
    way: str,
    targets: Path,
    web: WebServer,
    access: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 20_000)
    web.files[PATH] = ARCHIVE
    changes_after(web, 2)
    with pytest.raises(ObjectChangedError, match=r"/m\.onnxa: .* has changed since"):
        WAYS[way](web.url(PATH), targets / "target", **access)
    assert files_below(targets) == set()


def test_a_full_diff_does_not_mix_versions(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 20_000)
    web.files[PATH] = ARCHIVE
    changes_after(web, 2)
    with pytest.raises(ObjectChangedError):
        onnxarchive.diff(web.url(PATH), ARCHIVE, full=True)


def test_a_further_model_comes_from_another_url(
    tmp_path: Path, targets: Path, web: WebServer
) -> None:
    local = {"one": runnable_model(), "other": a_model()}
    for name, model in local.items():
        onnxarchive.save(model, tmp_path / name)
        web.files[f"/{name}"] = (tmp_path / name).read_bytes()
    onnxarchive.convert(tmp_path / "one", targets / "local", models={"b": tmp_path / "other"})
    onnxarchive.convert(web.url("/one"), targets / "remote", models={"b": web.url("/other")})
    onnxarchive.convert(tmp_path / "one", targets / "both", models={"b": web.url("/other")})
    assert (targets / "remote").read_bytes() == (targets / "local").read_bytes()
    assert (targets / "both").read_bytes() == (targets / "local").read_bytes()


@pytest.mark.parametrize("way", ["export", "extract", "convert"])
def test_a_url_without_an_archive_is_an_error(way: str, targets: Path, web: WebServer) -> None:
    web.files["/page"] = b"<html>" * 1000
    web.files["/pointer"] = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for name, kind in (("page", "an HTML page"), ("pointer", "a Git LFS pointer")):
        with pytest.raises(ArchiveFormatError, match=f"/{name}: expected .*, found {kind}; "):
            WAYS[way](web.url(f"/{name}"), targets / "target")
    with pytest.raises(FileNotFoundError, match="No such object"):
        WAYS[way](web.url("/missing"), targets / "target")
    web.change = lambda *_: Answer(403)
    with pytest.raises(PermissionError, match="refuses access"):
        WAYS[way](web.url("/page"), targets / "target")
    assert files_below(targets) == set()


# Models of other tools


def put(folder: Path, kind: str, web: WebServer) -> tuple[str, dict[str, Any]]:
    """The files of a folder in a place of a kind; gives where `m.onnx` is."""
    files = contents(folder)
    if kind == "store":
        from obstore.store import MemoryStore

        store = MemoryStore()
        for name, data in files.items():
            store.put(f"a/{name}", data)
        return "a/m.onnx", {"store": store}
    if kind == "memory URL":
        import fsspec

        fsspec.filesystem("memory").pipe({f"{folder}/{name}": it for name, it in files.items()})
        return f"memory:/{folder}/m.onnx", {}
    from urllib.parse import quote

    web.files |= {quote(f"/a/{name}"): data for name, data in files.items()}
    return web.url("/a/m.onnx?sig=x"), {}


def with_data(folder: Path, *locations: str) -> onnx.ModelProto:
    """Writes a model with tensors of two parts of each of some files; gives it with its data."""
    given, complete = model_of(), model_of()
    for seed, location in enumerate(locations):
        tensors = [raw_tensor(f"{location}{it}", dims=(5000,), seed=2 * seed + it) for it in (0, 1)]
        file = folder / location
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"".join(it.raw_data for it in tensors[::-1]))
        for tensor, offset in zip(tensors, (20_000, 0), strict=True):
            given.graph.initializer.append(external(tensor, location, offset=offset, length=20_000))
        complete.graph.initializer.extend(tensors)
    write_model(folder / "m.onnx", given)
    return complete


@pytest.mark.parametrize("kind", ["web", "memory URL", "store"])
def test_the_data_of_a_remote_model_is_beside_it(
    kind: str, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    folder = tmp_path / "models"
    complete = with_data(folder, "w.data", "sub/my größe.bin", "100%25.data", "a+b#c.data")
    source, access = put(folder, kind, web)
    convert(source, targets / "remote", **access)
    onnxarchive.convert(folder / "m.onnx", targets / "local")
    assert (targets / "remote").read_bytes() == (targets / "local").read_bytes()
    assert onnxarchive.load(targets / "remote") == normalised(complete)


def test_the_query_of_a_url_is_also_sent_for_the_data_of_the_model(
    tmp_path: Path, targets: Path, web: WebServer
) -> None:
    with_data(tmp_path / "models", "w.data")
    source, _ = put(tmp_path / "models", "web", web)
    onnxarchive.convert(source, targets / "target")
    assert {it.path for it in web.requests} == {"/a/m.onnx?sig=x", "/a/w.data?sig=x"}


def test_many_tensors_of_a_data_file_take_a_few_requests(
    tmp_path: Path, targets: Path, web: WebServer, access: dict[str, Any]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    onnx.save(many_tensors(), folder / "m.onnx", save_as_external_data=True, location="w.data")
    source, _ = put(folder, "web", web)
    onnxarchive.convert(source, targets / "remote", **access)
    assert len(web.requests) <= 6
    onnxarchive.convert(folder / "m.onnx", targets / "local")
    assert (targets / "remote").read_bytes() == (targets / "local").read_bytes()


def test_large_tensors_of_a_data_file_are_requested_once(
    tmp_path: Path, targets: Path, web: WebServer, access: dict[str, Any]
) -> None:
    tensors = [raw_tensor(f"w{it}", dims=(400_000,), seed=it) for it in range(3)]
    data = b"".join(it.raw_data for it in tensors)
    found = [external(it, "w.data", offset=1_600_000 * i) for i, it in enumerate(tensors)]
    write_model(tmp_path / "m.onnx", model_of(*found[::-1]))  # in another order than they lie
    (tmp_path / "w.data").write_bytes(data)
    web.files |= {f"/{name}": (tmp_path / name).read_bytes() for name in ("m.onnx", "w.data")}
    onnxarchive.convert(web.url("/m.onnx"), targets / "target", **access)
    assert web.nbytes < len(data) + 500_000  # with the end of each file, or whole blocks
    assert onnxarchive.load(targets / "target") == normalised(model_of(*tensors[::-1]))


@pytest.mark.parametrize("kind", ["web", "memory URL", "store"])
def test_a_missing_data_file_is_named(
    kind: str, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    folder = tmp_path / "models"
    with_data(folder, "w.data", "other.data")
    (folder / "other.data").unlink()
    source, access = put(folder, kind, web)
    with pytest.raises(
        ArchiveFormatError, match=r"data file 'other\.data', of .* is missing"
    ) as caught:
        convert(source, targets / "target", **access)
    assert "m.onnx: " in str(caught.value)
    assert files_below(targets) == set()


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "/secret",
        "sub/../../secret",
        "..\\secret",
        "C:\\secret",
        "file:///secret",
        "http://127.0.0.1/secret",
    ],
)
@pytest.mark.parametrize("kind", ["web", "memory URL", "store"])
def test_data_outside_the_folder_of_a_remote_model_is_refused(
    kind: str, location: str, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    folder = tmp_path / "models"
    tensor = raw_tensor("w", dims=(5000,))
    write_model(folder / "m.onnx", model_of(external(tensor, location)))
    source, access = put(folder, kind, web)
    web.files["/secret"] = tensor.raw_data
    with pytest.raises(ArchiveFormatError, match="initializer"):
        onnxarchive.convert(source, targets / "target", **access)
    assert files_below(targets) == set()
    assert {it.path for it in web.requests} <= {"/a/m.onnx?sig=x", "/a/file%3A///secret?sig=x"}


@pytest.mark.parametrize(
    "location", ["%2e%2e/secret", "..%2fsecret", "%2fsecret", "w?x=/../secret"]
)
def test_an_encoded_location_is_the_name_of_a_file(
    location: str, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    folder = tmp_path / "models"
    tensor = raw_tensor("w", dims=(5000,))
    write_model(folder / "m.onnx", model_of(external(tensor, location)))
    source, access = put(folder, "web", web)
    web.files["/secret"] = web.files["/a/w"] = tensor.raw_data
    with pytest.raises(ArchiveFormatError, match="initializer"):
        onnxarchive.convert(source, targets / "target", **access)
    assert not any(it.path.partition("?")[0] in ("/secret", "/a/w") for it in web.requests)


def test_a_data_file_that_changes_or_is_too_short_is_an_error(
    tmp_path: Path, targets: Path, web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_SIZE", 3_000)
    monkeypatch.setattr(objects, "END_SIZE", 100)
    folder = tmp_path / "models"
    with_data(folder, "w.data")
    source, _ = put(folder, "web", web)
    data = web.files["/a/w.data"]
    web.files["/a/w.data"] = data[:-1]
    with pytest.raises(ArchiveFormatError, match="found a file of 39999 bytes"):
        onnxarchive.convert(source, targets / "target")
    web.files["/a/w.data"] = data
    changes_after(web, 2, "/a/w.data")
    with pytest.raises(ObjectChangedError, match=r"/a/w\.data: "):
        onnxarchive.convert(source, targets / "target")
    assert files_below(targets) == set()


@pytest.mark.parametrize("kind", ["web", "memory URL", "store"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_remote_zip_of_another_tool_is_converted(
    kind: str, compression: int, tmp_path: Path, targets: Path, web: WebServer
) -> None:
    folder = tmp_path / "models"
    complete = with_data(folder, "w.data", "sub/v.data")
    (tmp_path / "zipped").mkdir()
    zipped(tmp_path / "zipped" / "m.onnx", contents(folder), compression)
    source, access = put(tmp_path / "zipped", kind, web)
    convert(source, targets / "target", **access)
    assert onnxarchive.load(targets / "target") == normalised(complete)
    assert onnxarchive.check(targets / "target", full=True) == []


def test_a_single_file_takes_the_tensors_of_its_model_alone(
    tmp_path: Path, targets: Path, web: WebServer, access: dict[str, Any]
) -> None:
    small = model_of(*(raw_tensor(f"s{it}", dims=(2000,), seed=it) for it in range(5)))
    large = model_of(raw_tensor("w", dims=(1_000_000,)))
    web.files[PATH] = saved(large, models={"small": small})
    onnxarchive.export(web.url(PATH), targets / "target", model="small", **access)
    assert onnx.load(targets / "target") == small
    assert web.nbytes < 800_000
    assert len(web.requests) <= 4


def test_a_model_too_large_for_a_single_file_is_not_fetched(
    targets: Path, web: WebServer, access: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files[PATH] = saved(model_of(raw_tensor("w", dims=(1_000_000,))))
    monkeypatch.setattr("onnxarchive.model.model_proto.SIZE_LIMIT", 3_000_000)
    with pytest.raises(UnsupportedFeatureError, match="external_data="):
        onnxarchive.export(web.url(PATH), targets / "target", **access)
    assert web.nbytes < 500_000


def test_other_files_beside_a_remote_model_are_left_out_with_a_warning(
    targets: Path, web: WebServer
) -> None:
    web.files |= {"/m.onnx": runnable_model().SerializeToString(), "/tokenizer.json": b"{}"}
    with pytest.warns(UserWarning, match="not looked for beside a remote"):
        found = onnxarchive.convert(web.url("/m.onnx"), targets / "target", other_files=True)
    assert (found.added_files, len(found.warnings)) == ((), 1)


def test_a_dry_run_writes_nothing(targets: Path, web: WebServer) -> None:
    web.files[PATH] = ARCHIVE
    outcome = onnxarchive.convert(web.url(PATH), targets / "target", dry_run=True)
    onnxarchive.convert(web.url(PATH), targets / "target")
    assert outcome.nbytes == (targets / "target").stat().st_size
    assert outcome.source == web.url(PATH)


# Targets


@pytest.mark.parametrize("kind", ["store", "memory URL"])
def test_archives_are_written_to_stores(kind: str, tmp_path: Path, web: WebServer) -> None:
    target, access = PLACES[kind](b"old", tmp_path, web)
    local = tmp_path / "local"
    onnxarchive.save(a_model(), local, assets=ASSETS, size_threshold=0)
    onnxarchive.save(a_model(), target, assets=ASSETS, size_threshold=0, **access)
    with onnxarchive.open(target, **access) as archive:
        assert (
            contents_of(archive).file.read(0, contents_of(archive).file.size) == local.read_bytes()
        )
    converted = onnxarchive.convert(target, f"{target}2", **access)
    onnxarchive.convert(local, tmp_path / "local2")
    assert converted.nbytes == (tmp_path / "local2").stat().st_size
    assert converted.target == f"{target}2"
    assert onnxarchive.check(f"{target}2", full=True, **access) == []


@pytest.mark.parametrize("kind", ["store", "memory URL"])
def test_a_failed_conversion_leaves_the_old_object_in_the_store(
    kind: str, tmp_path: Path, web: WebServer
) -> None:
    target, access = PLACES[kind](ARCHIVE, tmp_path, web)
    damaged, _ = PLACES[kind](with_byte_flipped(ARCHIVE, 500_000), tmp_path / "damaged", web)
    if kind == "store":
        damaged = "damaged"
        access["store"].put(damaged, with_byte_flipped(ARCHIVE, 500_000))
    with pytest.raises(ChecksumError):
        onnxarchive.convert(damaged, target, **access)
    assert onnxarchive.check(target, full=True, **access) == []
