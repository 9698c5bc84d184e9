"""Directories with one model and its data files, and the checksums that external data may have."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import onnx
import pytest
from models import attribute, external, model_of, node, raw_tensor, runnable_model
from onnx import TensorProto
from written import contents, converted, saved, zipped

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError


def _small_model() -> onnx.ModelProto:
    model = model_of(
        raw_tensor("a/w", dims=(2000,), seed=1),
        raw_tensor("b", TensorProto.INT4, (4001,), seed=2),
        raw_tensor("small", dims=(3,), seed=3),
    )
    model.graph.node.append(node(attribute("t", t=raw_tensor("t", dims=(300,)))))
    return model


def _save(
    directory: Path, model: onnx.ModelProto, *, locations: Mapping[str, str] | None = None
) -> Path:
    """Writes a directory: each initializer is external, in one file or in that of its name."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    files: dict[str, bytes] = {}
    for tensor in copy.graph.initializer:
        location = (locations or {}).get(tensor.name, "weights.bin")
        held = files.setdefault(location, b"")
        raw_data = tensor.raw_data
        tensor.CopyFrom(external(tensor, location, offset=len(held), length=len(raw_data)))
        files[location] = held + raw_data
    for location, content in files.items():
        (directory / location).parent.mkdir(parents=True, exist_ok=True)
        (directory / location).write_bytes(content)
    (directory / "m.onnx").write_bytes(copy.SerializeToString())
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return _save(tmp_path / "m", _small_model())


# Kinds of directories


@pytest.mark.parametrize("name", ["decoder.onnx", "__MODEL_PROTO", "deep/other.ONNX"])
def test_an_asset_may_be_a_model_itself(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "m.onnxa"
    asset = runnable_model().SerializeToString()
    onnxarchive.save(_small_model(), archive, assets={name: asset})
    onnxarchive.extract(archive, tmp_path / "m")
    shutil.make_archive(os.fspath(tmp_path / "m"), "zip", tmp_path / "m")
    for source in (tmp_path / "m", tmp_path / "m.zip"):
        assert converted(source) == archive.read_bytes()
    # A file is a model without what lies around it.
    assert converted(tmp_path / "m" / "__MODEL_PROTO") == saved(_small_model())


def test_data_files_may_lie_in_folders(tmp_path: Path) -> None:
    locations = {"a/w": "weights/a.bin", "b": "weights/of the/b.bin", "small": "assets/small"}
    directory = _save(tmp_path / "m", _small_model(), locations=locations)
    assert converted(directory) == saved(_small_model())


def test_a_model_alone_in_a_directory_is_enough(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "any name.ONNX").write_bytes(_small_model().SerializeToString())
    assert converted(tmp_path / "m") == saved(_small_model())


# Choosing the model


def test_models_in_folders_are_listed(tmp_path: Path) -> None:
    for name in ("onnx/model.onnx", "onnx/deep/model_q4.onnx", ".git/model.onnx", "top.txt"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_bytes(b"model")
    (tmp_path / "m" / "onnx" / "model.onnx_data").write_bytes(bytes(12_345))
    with pytest.raises(ValueError, match="expected one model") as caught:
        onnxarchive.convert(tmp_path / "m", tmp_path / "m.onnxa")
    assert not isinstance(caught.value, ArchiveError)
    first, *listed, one, several = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path / 'm'}: expected one model ")
    assert [line.split() for line in listed] == [
        ["5", "onnx/deep/model_q4.onnx"],
        ["12,350", "onnx/model.onnx"],
    ]
    assert "/m/onnx/deep/model_q4.onnx NEW.onnxa' converts one of them" in one
    assert "NEW.onnxa --all-models --assets' converts 1 of them to one archive, without" in several


def test_a_folder_named_like_a_model_is_no_model(directory: Path) -> None:
    (directory / "folder.onnx").mkdir()
    assert converted(directory) == saved(_small_model())


# Other files


def test_other_files_are_left_out_with_a_warning_that_names_them(
    tmp_path: Path, directory: Path
) -> None:
    (directory / "README.md").write_bytes(b"words")
    (directory / "optimizer.bin").write_bytes(b"state")
    with pytest.warns(UserWarning, match="left out") as told:
        onnxarchive.convert(directory, tmp_path / "m.onnxa")
    (warning,) = told
    message = str(warning.message)
    assert message.startswith(f"{directory}: left out")
    assert message.endswith(": README.md, optimizer.bin")
    assert warning.filename == __file__
    assert (tmp_path / "m.onnxa").read_bytes() == saved(_small_model())


def test_a_hundred_files_left_out_are_counted(tmp_path: Path, directory: Path) -> None:
    for index in range(100):
        (directory / f"other{index:02}").touch()
    with pytest.warns(UserWarning, match="and 80 more"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa")


@pytest.mark.parametrize("place", ["weights.bin", "m.onnx", "assets/a.txt"])
def test_a_link_that_leaves_the_directory_is_refused(
    tmp_path: Path, directory: Path, place: str
) -> None:
    (directory / "assets").mkdir()
    (directory / "assets" / "a.txt").write_bytes(b"a")
    (directory / place).rename(tmp_path / "outside")
    (directory / place).symlink_to(tmp_path / "outside")
    with pytest.raises(ArchiveFormatError, match="a copy of its target") as caught:
        onnxarchive.convert(directory, tmp_path / "m.onnxa")
    assert repr(place) in str(caught.value)
    assert str(tmp_path / "outside") in str(caught.value)
    assert not (tmp_path / "m.onnxa").exists()


def test_links_that_lead_to_no_file_are_left_out_if_nothing_names_them(directory: Path) -> None:
    (directory / "loop").symlink_to("loop")
    (directory / "gone").symlink_to("nowhere")
    (directory / "too long").symlink_to("n" * 300)
    assert converted(directory) == saved(_small_model())


def test_a_tensor_whose_location_is_a_link_to_itself_is_named(tmp_path: Path) -> None:
    directory = _save(tmp_path / "m", _small_model(), locations={"a/w": "loop"})
    (directory / "loop").unlink()
    (directory / "loop").symlink_to("loop")
    with pytest.raises(ArchiveFormatError, match=r"'loop'.*symbolic links"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa")


@pytest.mark.parametrize("target", ["nowhere", "gone.txt", "n" * 300, None])
def test_an_asset_that_is_no_file_is_named_and_not_waited_for(
    tmp_path: Path, directory: Path, target: str | None
) -> None:
    asset = directory / "assets" / "gone.txt"
    asset.parent.mkdir()
    if target is None:
        os.mkfifo(asset)
    else:
        asset.symlink_to(target)
    with pytest.raises((ArchiveFormatError, OSError), match=r"gone\.txt"):
        onnxarchive.convert(directory, tmp_path / "m.onnxa")


@pytest.mark.parametrize("name", ["m.onnx", "weights.bin", "assets/a.txt"])
def test_a_file_of_a_source_directory_is_not_overwritten(directory: Path, name: str) -> None:
    (directory / "assets").mkdir()
    (directory / "assets" / "a.txt").write_bytes(b"a")
    before = (directory / name).read_bytes()
    with pytest.raises(ValueError, match="input"):
        onnxarchive.convert(directory, directory / name)
    assert (directory / name).read_bytes() == before


# Checksums


def _with_checksum(directory: Path, checksum: str, *, tensors: int = 2) -> Path:
    model = onnx.load(directory / "m.onnx", load_external_data=False)
    for tensor in model.graph.initializer[:tensors]:
        tensor.external_data.add(key="checksum", value=checksum)
    (directory / "m.onnx").write_bytes(model.SerializeToString())
    return directory


@pytest.mark.parametrize("in_capitals", [False, True])
def test_the_sha_1_of_the_whole_file_is_a_valid_checksum(
    tmp_path: Path, directory: Path, in_capitals: bool
) -> None:
    checksum = hashlib.sha1((directory / "weights.bin").read_bytes()).hexdigest()
    _with_checksum(directory, checksum.upper() if in_capitals else checksum)
    onnxarchive.convert(directory / "m.onnx", tmp_path / "m.onnxa", verify_checksum=True)
    assert (tmp_path / "m.onnxa").read_bytes() == saved(_small_model())


@pytest.mark.parametrize("form", ["file", "directory"])
def test_a_wrong_checksum_is_reported_only_if_asked_for(
    tmp_path: Path, directory: Path, form: str
) -> None:
    first = _small_model().graph.initializer[0].raw_data
    wrong = hashlib.sha1(first).hexdigest()  # of the tensor, and not of the file
    found = hashlib.sha1((directory / "weights.bin").read_bytes()).hexdigest()
    _with_checksum(directory, wrong, tensors=1)
    source = directory if form == "directory" else directory / "m.onnx"
    onnxarchive.convert(source, tmp_path / "m.onnxa")
    assert (tmp_path / "m.onnxa").read_bytes() == saved(_small_model())
    (tmp_path / "m.onnxa").unlink()
    with pytest.raises(ArchiveFormatError) as caught:
        onnxarchive.convert(source, tmp_path / "m.onnxa", verify_checksum=True)
    for part in ("tensor 'a/w'", wrong, found, "'weights.bin'"):
        assert part in str(caught.value)
    assert not (tmp_path / "m.onnxa").exists()


def test_a_file_without_checksum_needs_none(tmp_path: Path, directory: Path) -> None:
    onnxarchive.convert(directory, tmp_path / "m.onnxa", verify_checksum=True)
    assert (tmp_path / "m.onnxa").read_bytes() == saved(_small_model())


def test_a_file_is_hashed_once_for_all_its_tensors(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checksum = hashlib.sha1((directory / "weights.bin").read_bytes()).hexdigest()
    _with_checksum(directory, checksum, tensors=3)
    model = onnx.load(directory / "m.onnx", load_external_data=False)
    for number, tensor in enumerate(model.graph.initializer):
        tensor.external_data[0].value = "./" * number + "weights.bin"
    (directory / "m.onnx").write_bytes(model.SerializeToString())
    calls = []
    sha1 = hashlib.sha1

    def counted(*arguments: bytes, usedforsecurity: bool = True) -> object:
        calls.append(arguments)
        return sha1(*arguments, usedforsecurity=usedforsecurity)

    monkeypatch.setattr(hashlib, "sha1", counted)
    onnxarchive.convert(directory, tmp_path / "m.onnxa", verify_checksum=True)
    assert len(calls) == 1


def test_all_problems_of_a_model_are_listed_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "short.bin").write_bytes(bytes(100))
    (directory / "good.bin").write_bytes(bytes(2400))
    (tmp_path / "secret.bin").write_bytes(bytes(2400))
    tensor = raw_tensor("", dims=(600,))

    def named(name: str) -> TensorProto:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = name
        return copy

    model = model_of(
        external(named("fine"), "good.bin"),
        external(named("gone"), "missing.bin"),
        external(named("cut"), "short.bin", offset=40),
        external(named("thief"), "../secret.bin"),
        external(named("forged"), "good.bin", checksum="0" * 40),
        external(named("odd"), "good.bin", length=7),
    )
    body = onnx.GraphProto(name="g", initializer=[external(named("below"), "missing.bin")])
    model.graph.node.append(node(attribute("g", g=body)))
    (directory / "m.onnx").write_bytes(model.SerializeToString())
    files = {f"in/{name}": data for name, data in contents(directory).items()}
    packed = zipped(tmp_path / "m.zip", {**files, "secret.bin": bytes(2400)})
    (tmp_path / "missing.bin").write_bytes(bytes(2400))  # beside the zip is not in it
    for source in (directory, directory / "m.onnx", packed):
        with pytest.raises(ArchiveFormatError) as caught:
            onnxarchive.convert(source, tmp_path / "m.onnxa", verify_checksum=True)
        first, *lines = str(caught.value).splitlines()
        assert first == f"{source}: 6 tensors have faulty data:"
        expected = [
            ("2 tensors ('gone', 'below')", "2400 bytes", "'missing.bin'"),
            ("tensor 'cut'", "2400 bytes", "'short.bin'", "offset 40", "100 bytes"),
            ("tensor 'thief'", "'../secret.bin'"),
            ("tensor 'forged'", "0" * 40, "'good.bin'"),
            ("tensor 'odd'", "2400", "found 7"),
        ]
        assert "'fine'" not in str(caught.value)
        for line, parts in zip(lines, expected, strict=True):
            for part in parts:
                assert part in line
