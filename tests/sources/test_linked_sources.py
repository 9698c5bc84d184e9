"""Sources whose files are links: a Hugging Face cache, and directories that the caller names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from models import external, model_of, open_below, raw_tensor
from written import converted, zipped

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.cli import main
from onnxarchive.conversion.convert import open_source
from onnxarchive.conversion.convert_many import find_models
from onnxarchive.files.data_files import DataFiles
from onnxarchive.files.local_file import MappedFile
from onnxarchive.remote.location import Location
from onnxarchive.sources.reader import SourceReader, cached_model
from onnxarchive.sources.source import Source

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links are POSIX's")

DATA = bytes(range(256)) * 16  # of two tensors
SECRET = b"secret! " * 512
REVISION = "0123456789abcdef"


@pytest.fixture(
    params=["onnx", *(pytest.param(it, marks=pytest.mark.sweep) for it in ("", "onnx/fp16"))]
)
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory of a snapshot, or below it, whose files are links to blobs."""
    root = tmp_path / "hub" / "models--org--name"
    snapshot: Path = root / "snapshots" / REVISION / request.param
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(REVISION)
    tensors = [raw_tensor(name) for name in ("a", "b")]
    for tensor in tensors:
        tensor.raw_data = DATA[: len(tensor.raw_data)]
    model = model_of(*(external(tensor, "model.onnx_data") for tensor in tensors))
    snapshot.mkdir(parents=True)
    for name, content in (("model.onnx", model.SerializeToString()), ("model.onnx_data", DATA)):
        blob = root / "blobs" / f"{len(content):064x}"
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    (tmp_path / "secret").write_bytes(SECRET)
    return snapshot


@pytest.fixture
def expected(snapshot: Path, tmp_path: Path) -> bytes:
    """The archive of the same files without links."""
    return converted(Path(shutil.copytree(snapshot, tmp_path / "copied")))


@pytest.fixture(params=["model.onnx", "."])
def source(request: pytest.FixtureRequest, snapshot: Path) -> Path:
    """The model, or its directory."""
    return snapshot.joinpath(request.param)


def _cache(snapshot: Path) -> Path:
    return next(it for it in snapshot.parents if it.name.startswith("models--"))


# Links that are followed


@pytest.mark.parametrize(
    "follow_links", [lambda _: True, _cache, lambda it: str(_cache(it) / "blobs"), lambda _: "/"]
)
def test_a_model_of_a_cache_gives_the_archive_of_its_files(
    source: Path, snapshot: Path, expected: bytes, follow_links: Callable[[Path], Any]
) -> None:
    before = open_below(_cache(snapshot))
    target = source.parent / "written.onnxa"
    onnxarchive.convert(source, target, follow_links=follow_links(snapshot))
    assert target.read_bytes() == expected
    assert open_below(_cache(snapshot)) == before


def test_a_cache_is_recognised_through_a_link_to_its_snapshot(
    snapshot: Path, tmp_path: Path, expected: bytes
) -> None:
    (tmp_path / "alias").symlink_to(snapshot, target_is_directory=True)
    target = tmp_path / "written.onnxa"
    onnxarchive.convert(tmp_path / "alias" / "model.onnx", target, follow_links=True)
    assert target.read_bytes() == expected


def test_a_further_model_is_read_in_the_same_way(snapshot: Path, tmp_path: Path) -> None:
    model, target = snapshot / "model.onnx", tmp_path / "written.onnxa"
    onnxarchive.convert(model, target, models={"again": model}, follow_links=True)
    with onnxarchive.open(target) as archive:
        assert list(archive.models) == ["", "again"]


def test_other_files_of_a_snapshot_are_taken_along(snapshot: Path, tmp_path: Path) -> None:
    blob = _cache(snapshot) / "blobs" / "0"
    blob.write_text("{}")
    (snapshot / "config.json").symlink_to(os.path.relpath(blob, snapshot))
    target = tmp_path / "written.onnxa"
    onnxarchive.convert(snapshot, target, other_files=True, follow_links=True)
    with onnxarchive.open(target) as archive:
        assert bytes(archive.assets["config.json"]) == b"{}"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/hub/models--org--name/snapshots/0", "/hub/models--org--name"),
        ("/hub/models--org--name/snapshots/0/onnx", "/hub/models--org--name"),
        ("/models--a/snapshots/0/models--b/snapshots/1", "/models--a/snapshots/0/models--b"),
        ("/hub/models--org--name/snapshots", None),
        ("/hub/models--org--name/blobs/0", None),
        ("/hub/name/snapshots/0", None),
        ("/snapshots/0", None),
        ("/", None),
    ],
)
def test_a_cache_is_recognised_by_its_layout(path: str, model: str | None) -> None:
    assert cached_model(path) == model


def test_the_snapshots_of_a_cache_in_a_tree_are_converted_and_its_blobs_are_not(
    snapshot: Path, tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [path for path, _ in find_models(tmp_path / "hub")]
    assert found == [str(snapshot / "model.onnx")]
    monkeypatch.chdir(tmp_path)
    for follow_links in (True, "hub"):
        with ThreadPoolExecutor(1) as executor:
            (done,) = onnxarchive.convert_many(["hub"], "out", executor, follow_links=follow_links)
        assert done.error is None
        assert Path(done.target).read_bytes() == expected
    (refused,) = onnxarchive.convert_many(["hub"], "other")
    assert "follow_links=True (--follow-links)" in str(refused.error)


# Models that are found in a directory: each is refused if it is a link out of this directory


def _convert_all(directory: Path, target: Path, **options: Any) -> None:
    onnxarchive.convert(directory, target, models="all", **options)


def _convert_many(directory: Path, target: Path, **options: Any) -> None:
    (done,) = onnxarchive.convert_many([directory], target.parent / "out", **options)
    if done.error is not None:
        assert done.error_type == "ArchiveFormatError"
        raise ArchiveFormatError(done.error)
    os.replace(done.target, target)


def _convert_many_in_workers(directory: Path, target: Path, **options: Any) -> None:
    with ThreadPoolExecutor(1) as executor:
        _convert_many(directory, target, executor=executor, **options)


SEARCHES = {"all": _convert_all, "many": _convert_many, "workers": _convert_many_in_workers}
searches = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


@pytest.fixture
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory with a model that is a link to one elsewhere, or in a folder that is one."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    model = model_of(raw_tensor("w", dims=(300,)))
    if request.param == "sub":
        (outside / "__MODEL_PROTO").write_bytes(model.SerializeToString())
        (inside / "sub").mkdir()
        (inside / "sub" / "__MODEL_PROTO").symlink_to(outside / "__MODEL_PROTO")
        return inside
    path = outside / request.param
    if path.suffix == ".onnx":
        path.write_bytes(model.SerializeToString())
    elif path.suffix == ".zip":
        zipped(path, {"m.onnx": model.SerializeToString()})
    else:
        onnxarchive.save(model, path)
    (inside / path.name).symlink_to(path)
    return inside


@pytest.mark.parametrize(
    ("linked", "search"),
    [
        ("model.onnx", _convert_all),
        *(
            (kind, search)
            for kind in ("model.onnx", "m.onnxa", "m.zip", "sub")
            for search in (_convert_many, _convert_many_in_workers)
        ),
    ],
    indirect=["linked"],
)
def test_a_model_found_in_a_directory_is_refused_if_it_is_a_link_out_of_it(
    linked: Path, tmp_path: Path, search: Callable[..., None]
) -> None:
    target = tmp_path / "written.onnxa"
    for follow_links in (False, True, tmp_path / "inside"):
        with pytest.raises(ArchiveFormatError) as caught:
            search(linked, target, follow_links=follow_links)
        assert "(--follow-links DIRECTORY)" in str(caught.value)
        assert f"a link to {tmp_path / 'outside'}" in str(caught.value)
    assert not target.exists()
    search(linked, target, follow_links=tmp_path / "outside")
    assert onnxarchive.load(target) == model_of(raw_tensor("w", dims=(300,)))


def test_the_command_names_the_option_for_models_of_a_tree_as_for_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside.onnx").write_bytes(model_of(raw_tensor("w")).SerializeToString())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    directory, target = str(tmp_path / "m"), str(tmp_path / "written.onnxa")
    sentences = set()
    for arguments in (
        [target, "--force"],
        [target, "--force", "--all-models"],
        ["--output-dir", str(tmp_path / "out"), "--force"],
    ):
        assert main(["convert", directory, *arguments]) == 3
        printed = capsys.readouterr()
        sentences.add((printed.err + printed.out).partition("expected ")[2].splitlines()[0])
        assert main(["convert", directory, *arguments, "--follow-links", str(tmp_path)]) == 0
        assert main(["convert", directory, *arguments, "--follow-links"]) == 3
        capsys.readouterr()
    assert len(sentences) == 1
    assert "--follow-links" in sentences.pop()


@searches
@pytest.mark.parametrize("has_data", [False, True])
def test_models_of_a_snapshot_are_found_only_with_follow_links(
    snapshot: Path, tmp_path: Path, search: Callable[..., None], has_data: bool
) -> None:
    if not has_data:
        blob = Path(os.path.realpath(snapshot / "model.onnx"))
        blob.write_bytes(model_of(raw_tensor("w")).SerializeToString())
    target = tmp_path / "written.onnxa"
    with pytest.raises(ArchiveFormatError, match=r"follow_links=True \(--follow-links\)"):
        search(snapshot, target)
    search(snapshot, target, follow_links=True)
    assert onnxarchive.check(target, full=True) == []


@searches
def test_links_that_stay_in_the_directory_are_followed(
    tmp_path: Path, search: Callable[..., None]
) -> None:
    files = tmp_path / "m" / ".files"
    files.mkdir(parents=True)
    (files / "0").write_bytes(model_of(raw_tensor("w")).SerializeToString())
    (tmp_path / "m" / "model.onnx").symlink_to(".files/0")
    target = tmp_path / "written.onnxa"
    search(tmp_path / "m", target)
    assert onnxarchive.load(target) == model_of(raw_tensor("w"))
    target.unlink()
    (tmp_path / "alias").symlink_to("m")
    search(tmp_path / "alias", target)
    assert target.exists()


def test_a_link_that_the_caller_names_is_followed(tmp_path: Path) -> None:
    (tmp_path / "outside.onnx").write_bytes(model_of(raw_tensor("w")).SerializeToString())
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").symlink_to(tmp_path / "outside.onnx")
    (done,) = onnxarchive.convert_many([tmp_path / "m" / "model.onnx"], tmp_path / "out")
    assert done.error is None


def test_a_model_that_is_exchanged_for_a_link_after_the_search_is_refused(tmp_path: Path) -> None:
    for name in ("outside", "inside"):
        (tmp_path / name).mkdir()
        onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), tmp_path / name / "m.onnxa")

    class Exchanging(ThreadPoolExecutor):
        """Runs work after somebody has exchanged the model for a link."""

        def submit(self, *work: Any, **options: Any) -> Any:
            (tmp_path / "link").symlink_to(tmp_path / "outside" / "m.onnxa")
            os.replace(tmp_path / "link", tmp_path / "inside" / "m.onnxa")
            return super().submit(*work, **options)

    with Exchanging(1) as executor:
        (done,) = onnxarchive.convert_many([tmp_path / "inside"], tmp_path / "out", executor)
    assert "found 'm.onnxa', a link to" in str(done.error)


# Errors without follow_links


def test_without_follow_links_the_error_names_the_option_once(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(source, tmp_path / "written.onnxa")
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.count("model.onnx") >= 1
    assert message.count("follow_links=True (--follow-links)") == 1
    assert message.startswith(f"{source}: ")
    assert not (tmp_path / "written.onnxa").exists()


@pytest.mark.parametrize("follow_links", [False, True])
def test_outside_a_cache_the_error_names_follow_links_with_a_directory(
    tmp_path: Path, follow_links: bool
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").symlink_to("../secret")
    (tmp_path / "secret").write_bytes(SECRET)
    with pytest.raises(ArchiveFormatError, match="follow_links=DIRECTORY"):
        onnxarchive.convert(tmp_path / "m", tmp_path / "written.onnxa", follow_links=follow_links)


def test_the_command_takes_follow_links_after_the_paths(
    source: Path, tmp_path: Path, expected: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "written.onnxa"
    for options in (["--follow-links"], ["--follow-links", str(tmp_path / "hub")]):
        assert main(["convert", str(source), str(target), "--force", *options]) == 0
        assert target.read_bytes() == expected
    assert main(["convert", str(source), str(target), "--force"]) == 3
    capsys.readouterr()
    assert main(["convert", "--follow-links", str(source), str(target)]) == 2
    assert "put --follow-links after the paths" in capsys.readouterr().err


# Links that are never followed


@pytest.mark.parametrize("follow_links", [True, _cache])
@pytest.mark.parametrize(
    "target",
    [
        "{top}/secret",  # absolute
        "{up}../../../secret",  # relative
        "link",  # in a loop
        "{up}../../blobs/out",  # a blob that is a link out
        "{up}../../blobs/loop",
        "{up}../../folder/secret",  # a folder that is a link out
    ],
)
def test_no_link_brings_in_bytes_from_outside(
    snapshot: Path, tmp_path: Path, target: str, follow_links: Any
) -> None:
    cache = _cache(snapshot)
    (cache / "blobs" / "out").symlink_to(tmp_path / "secret")
    (cache / "blobs" / "loop").symlink_to("../blobs/loop")
    (cache / "folder").symlink_to(tmp_path, target_is_directory=True)
    up = os.path.relpath(cache / "snapshots" / REVISION, snapshot) + "/"
    for name in ("model.onnx_data", "link"):
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(target.format(top=tmp_path, up=up))
    root = follow_links if follow_links is True else follow_links(snapshot)
    with pytest.raises(ArchiveFormatError, match=r"found 'model.onnx_data', a link|symbolic links"):
        onnxarchive.convert(snapshot, tmp_path / "written.onnxa", follow_links=root)
    assert not (tmp_path / "written.onnxa").exists()


@pytest.mark.parametrize("follow_links", [True, _cache])
def test_a_blob_that_is_a_link_to_another_blob_is_followed(
    snapshot: Path, tmp_path: Path, expected: bytes, follow_links: Any
) -> None:
    blob = Path(os.path.realpath(snapshot / "model.onnx_data"))
    blob.rename(blob.with_name("moved"))
    blob.symlink_to(blob.with_name("moved"))  # absolute
    root = follow_links if follow_links is True else follow_links(snapshot)
    target = tmp_path / "written.onnxa"
    onnxarchive.convert(snapshot, target, follow_links=root)
    assert target.read_bytes() == expected


@pytest.mark.parametrize("target", ["{top}/secret", "{blobs}/other"])
def test_a_link_that_is_exchanged_while_the_source_is_open_changes_nothing(
    snapshot: Path, tmp_path: Path, target: str
) -> None:
    blobs = _cache(snapshot) / "blobs"
    (blobs / "other").write_bytes(SECRET)
    expected = b"".join(_read(snapshot))
    with ExitStack() as resources:
        options = SourceReader(follow_links=True)
        source = open_source(Location.of(snapshot), resources, options)
        (snapshot / "new").symlink_to(target.format(top=tmp_path, blobs=blobs))
        os.replace(snapshot / "new", snapshot / "model.onnx_data")
        read = b"".join(piece for data in source.data for piece in data.pieces())
    assert read == expected


def _read(snapshot: Path) -> list[bytes]:
    with ExitStack() as resources:
        source = open_source(Location.of(snapshot), resources, SourceReader(follow_links=True))
        return [b"".join(data.pieces()) for data in source.data]


def test_follow_links_with_a_path_that_is_no_directory_names_the_path(
    snapshot: Path, tmp_path: Path
) -> None:
    with pytest.raises(NotADirectoryError) as caught:
        onnxarchive.convert(snapshot, tmp_path / "written.onnxa", follow_links=tmp_path / "secret")
    assert caught.value.filename == str(tmp_path / "secret")


def test_a_model_whose_directory_is_replaced_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("source", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.onnx").write_bytes(model_of(raw_tensor("w")).SerializeToString())
    read = SourceReader.read_onnx

    def read_after_a_change(
        reader: SourceReader, file: MappedFile, data_files: DataFiles
    ) -> Source:
        (tmp_path / "source").rename(tmp_path / "old")
        (tmp_path / "other").rename(tmp_path / "source")
        return read(reader, file, data_files)

    monkeypatch.setattr(SourceReader, "read_onnx", read_after_a_change)
    with pytest.raises(ArchiveFormatError, match="the directory of the model was replaced"):
        onnxarchive.convert(tmp_path / "source" / "m.onnx", tmp_path / "m.onnxa")
