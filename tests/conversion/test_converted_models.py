"""Several models from files, directories and zips become one archive; later versions do not."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import edits
import onnx
import pytest
from models import external, mixed_model, model_of, normalised
from several_models import A, B, C, floats, of, require_loads
from written import contents, saved, zipped
from zip_entries import add_bytes

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError
from onnxarchive.model import model_proto
from onnxarchive.zipformat.writer import ZipWriter


def test_an_unpacked_archive_and_one_zipped_again_give_the_same_bytes(tmp_path: Path) -> None:
    path, models = tmp_path / "m.onnxa", {"a": mixed_model(), "b": of(w=A, v=B), "c": model_of()}
    onnxarchive.save(of(w=B), path, models=models, assets={"dir/x": b"y"})
    onnxarchive.extract(path, tmp_path / "extracted")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unzipped")
    files = dict(reversed(contents(tmp_path / "unzipped").items()))
    sources = [path, tmp_path / "extracted", tmp_path / "unzipped"]
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        sources.append(zipped(tmp_path / f"{kind}.zip", files, kind))
    for source in sources:
        onnxarchive.convert(source, tmp_path / "converted")
        assert (tmp_path / "converted").read_bytes() == path.read_bytes()
    for name in ("__MODEL_PROTO", *(f"__MODEL_PROTO_{id}" for id in models)):
        loaded = onnx.load(tmp_path / "unzipped" / name)
        id = name.removeprefix("__MODEL_PROTO").removeprefix("_")
        assert normalised(loaded) == normalised(models[id] if id else of(w=B))


def test_a_fault_that_is_found_late_names_all_files_that_may_have_it(tmp_path: Path) -> None:
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    one.write_bytes(of(w=A).SerializeToString())
    two.write_bytes(
        model_of(onnx.TensorProto(name="odd", data_type=1, dims=[600])).SerializeToString()
    )
    for default, further in ((one, two), (two, one)):
        with pytest.raises(ArchiveFormatError, match=f"^{default}, {further}: tensor 'odd'"):
            onnxarchive.convert(default, tmp_path / "m.onnxa", models={"further": further})


def test_models_of_several_files_each_with_external_data_become_one_archive(tmp_path: Path) -> None:
    for name, tensor in (("one", floats("w", A)), ("two", floats("v", A))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.data").write_bytes(A)
        model = model_of(external(tensor, "w.data"), floats("own", B if name == "one" else C))
        (tmp_path / name / "model.onnx").write_bytes(model.SerializeToString())
    path = tmp_path / "m.onnxa"
    one, two = (tmp_path / name / "model.onnx" for name in ("one", "two"))
    conversion = onnxarchive.convert(one, path, models={"two": two})
    assert (conversion.tensors, conversion.shared_nbytes) == (3, 1200)
    assert path.read_bytes() == saved(of(w=A, own=B), models={"two": of(v=A, own=C)})
    # An archive as source brings its further models, and takes others of the same ids.
    onnxarchive.convert(path, tmp_path / "again", models={"third": two, "two": one})
    require_loads(
        tmp_path / "again", {"": of(w=A, own=B), "third": of(v=A, own=C), "two": of(w=A, own=B)}
    )
    for source_file in (two, tmp_path / "two" / "w.data"):
        with pytest.raises(ValueError, match="two"):
            onnxarchive.convert(one, source_file, models={"two": two})


def test_a_shared_data_file_that_changes_before_it_is_written_is_found(tmp_path: Path) -> None:
    one, two, data = (tmp_path / name for name in ("one.onnx", "two.onnx", "w.data"))
    data.write_bytes(A)
    one.write_bytes(
        model_of(
            floats("v", bytes(1 << 17)), external(floats("w", A), data.name)
        ).SerializeToString()
    )
    two.write_bytes(of(x=A).SerializeToString())

    def change(*_: int) -> None:
        data.write_bytes(C)  # once the entry of v is written

    with pytest.raises(ChecksumError, match="entry 'w': expected 1200 bytes with CRC-32"):
        onnxarchive.convert(one, tmp_path / "m", models={"two": two}, jobs=1, progress=change)
    assert not (tmp_path / "m").exists()


def test_messages_of_all_models_of_a_source_are_counted_before_one_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, directory = tmp_path / "m.onnxa", tmp_path / "unpacked"
    onnxarchive.save(of(w=A), path, models={"a": of(w=A), "b": of(w=A)})
    with zipfile.ZipFile(path) as archive:
        archive.extractall(directory)
    zipped(tmp_path / "m.zip", contents(directory), zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(model_proto, "MAX_MESSAGES", 10)
    parse = patch.object(onnx.ModelProto, "FromString", side_effect=AssertionError("parsed"))
    for source in (directory, tmp_path / "m.zip"):
        with (
            parse,
            pytest.raises(
                ArchiveFormatError, match="all models together have more than 10 messages"
            ),
        ):
            onnxarchive.convert(source, tmp_path / "converted")


@pytest.mark.parametrize("name", ["__MODEL_PROTO_a", "__MODEL_PROTO_B"])
def test_further_models_without_a_default_one_are_refused_and_not_left_out(
    tmp_path: Path, name: str
) -> None:
    directory = tmp_path / "unpacked"
    directory.mkdir()
    for file_name in (name, "model.onnx"):
        (directory / file_name).write_bytes(of(w=A).SerializeToString())
    for source in (directory, zipped(tmp_path / "m.zip", contents(directory))):
        with pytest.raises(ArchiveFormatError, match=f"expected __MODEL_PROTO beside '{name}'"):
            onnxarchive.convert(source, tmp_path / "converted")


def with_entry(path: Path, name: str) -> None:
    """Puts an entry of this name before all others of an archive."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: b"later", **{it: archive.read(it) for it in archive.namelist()}}
    with path.open("wb") as file:
        writer = ZipWriter(file)
        for key, data in contents.items():
            add_bytes(writer, key, data)
        writer.finish()


@pytest.mark.parametrize("name", ["__INDEX", "__MODEL_PROTOS", "__", "__w", "__x/y"])
def test_a_file_of_a_later_version_is_refused_with_the_advice_to_upgrade(
    path: Path, tmp_path: Path, name: str
) -> None:
    onnxarchive.save(of(a=A), path, models={"decoder": of(z=A)}, assets={"x": b"y"})
    with_entry(path, name)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unzipped")
    zipped(tmp_path / "deflated.zip", contents(tmp_path / "unzipped"), zipfile.ZIP_DEFLATED)
    target = tmp_path / "target"
    calls: list[Callable[[], object]] = [
        lambda: onnxarchive.open(path),
        lambda: edits.document(path),
        lambda: onnxarchive.load(path),
        lambda: edits.replace_model(path, of(w=A)),
        lambda: edits.replace_model(path, of(w=A), copy=True, compact=True),
    ]
    for source in (path, tmp_path / "deflated.zip", tmp_path / "unzipped"):
        calls.append(partial(onnxarchive.convert, source, target))
    before = path.read_bytes()
    for call in calls:
        with pytest.raises(ArchiveFormatError) as caught:
            call()
        message = str(caught.value)
        assert caught.value.rule == "VERSION-1"
        assert "was written for a later version of the format; upgrade onnxarchive" in message
        assert "convert" not in message
        assert f"'{name.partition('/')[0]}" in message
    findings = onnxarchive.check(path)
    assert "VERSION-1" in {finding.rule for finding in findings}
    assert not any("convert" in str(finding) for finding in findings)
    assert path.read_bytes() == before
    assert not target.exists()
