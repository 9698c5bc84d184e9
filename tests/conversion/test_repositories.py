"""All models of a directory become one archive."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import output_of
from models import further_model, runnable_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.errors import ArchiveFormatError


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A directory as optimum writes it: three models that share weights, and their settings."""
    folder = tmp_path / "my repository"
    (folder / "onnx").mkdir(parents=True)
    onnx.save(runnable_model(), folder / "onnx" / "model.onnx")
    for name in ("decoder_model", "Decoder-With.past"):
        path = folder / "onnx" / f"{name}.onnx"
        onnx.save(further_model(), path, save_as_external_data=True, location=f"{name}.weights")
    onnx.save(runnable_model(), folder / "onnx" / "model_fp16.onnx")
    onnx.save(runnable_model(), folder / "onnx" / "decoder_model_q4.onnx")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("[]")
    (folder / "LICENSE").write_text("free")
    (folder / ".gitattributes").write_text("*.onnx filter=lfs")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    return folder


def ids(path: Path) -> list[str]:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        return list(archive.models)


def test_every_model_gets_an_id_from_its_file_name(repository: Path, path: Path) -> None:
    outcome = onnxarchive.convert(repository, path, models="all", other_files=True)
    assert ids(path) == ["", "decoder_model", "decoder_with_past"]
    with onnxarchive.open(path) as archive:
        assert sorted(archive.assets) == ["LICENSE", "config.json", "tokenizer.json"]
        assert archive.assets["LICENSE"] == b"free"
    assert sorted(outcome.added_files) == ["LICENSE", "config.json", "tokenizer.json"]
    assert sorted(outcome.left_out) == [
        ".gitattributes",
        "onnx/decoder_model_q4.onnx",
        "onnx/model_fp16.onnx",
        "pytorch_model.bin",
    ]


def test_shared_tensors_are_stored_once_and_outputs_are_those_of_the_files(
    repository: Path, path: Path
) -> None:
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    outcome = onnxarchive.convert(repository, path, models="all")
    # The weight of three models, and one of two.
    assert outcome.tensors == 2
    assert outcome.shared_nbytes == 2 * (1 << 16) + 2048
    x = {"x": np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)}
    for name, identifier in (
        ("model", ""),
        ("decoder_model", "decoder_model"),
        ("Decoder-With.past", "decoder_with_past"),
    ):
        (expected,) = ort.InferenceSession(repository / "onnx" / f"{name}.onnx").run(None, x)
        session = onnxarchive.session(path, model=identifier)
        np.testing.assert_array_equal(session.run(None, x)[0], expected)


def test_models_below_any_number_of_folders_are_found(repository: Path, path: Path) -> None:
    for number in range(1100):
        (repository / f"folder {number}").mkdir()
    (repository / "folder 0" / "inner").mkdir()
    onnx.save(runnable_model(), repository / "folder 0" / "inner" / "deep.onnx")
    onnxarchive.convert(repository, path, models="all")
    assert "deep" in ids(path)


@pytest.mark.parametrize("name", ["decoder_model", "decoder_model.onnx", "onnx/decoder_model.onnx"])
def test_the_default_model_can_be_named(repository: Path, path: Path, name: str) -> None:
    onnxarchive.convert(repository, path, models="all", default=name)
    assert ids(path) == ["", "decoder_with_past", "model"]


def test_a_pattern_chooses_the_files(repository: Path, path: Path) -> None:
    onnxarchive.convert(repository, path, models="all", include="*_q4.onnx")
    assert ids(path) == [""]
    onnxarchive.convert(repository, path, models="all", include="model*")
    assert ids(path) == ["", "model_fp16"]
    onnxarchive.convert(repository, path, models="all", include=["model.*", "*_q4.onnx"])
    assert ids(path) == ["", "decoder_model_q4"]


@pytest.mark.parametrize("other_files", [False, True])
def test_models_that_are_not_chosen_are_named(
    repository: Path, path: Path, other_files: bool
) -> None:
    onnx.save(runnable_model(), repository / "A.ONNX", format="protobuf")
    outcome = onnxarchive.convert(repository, path, models="all", other_files=other_files)
    further = {".gitattributes", "pytorch_model.bin"} if other_files else set()
    not_chosen = {"A.ONNX", "onnx/decoder_model_q4.onnx", "onnx/model_fp16.onnx"}
    assert outcome.left_out == tuple(sorted(not_chosen | further))
    options: dict[str, Any] = {"include": ["*.ONNX", "model.onnx"], "other_files": other_files}
    outcome = onnxarchive.convert(repository, path, models="all", **options)
    assert ids(path) == ["", "a"]
    not_chosen |= {"onnx/Decoder-With.past.onnx", "onnx/decoder_model.onnx"}
    not_chosen -= {"A.ONNX"}
    assert not_chosen <= {*outcome.left_out}
    assert "A.ONNX" not in outcome.left_out


@pytest.mark.parametrize(
    ("place", "asset"), [("unpacked", "unpacked/__MODEL_PROTO"), ("assets", "__MODEL_PROTO")]
)
def test_an_unpacked_archive_in_a_folder_is_named_unless_it_becomes_an_asset(
    repository: Path, path: Path, place: str, asset: str
) -> None:
    onnxarchive.save(runnable_model(), path)
    onnxarchive.extract(path, repository / place)
    unpacked = f"{place}/__MODEL_PROTO"
    assert unpacked in onnxarchive.convert(repository, path, models="all").left_out
    outcome = onnxarchive.convert(repository, path, models="all", other_files=True)
    assert asset in outcome.added_files
    assert unpacked not in outcome.left_out


def test_the_command_names_models_that_are_not_chosen_and_the_option_that_chooses(
    repository: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output_of(capsys, "convert", repository, path, "--all-models").splitlines()[1:] == [
        "left out  onnx/decoder_model_q4.onnx",
        "left out  onnx/model_fp16.onnx",
        "2 models left out: --include PATTERN takes the models whose file names match, and no "
        "others; it can be given several times",
    ]
    options = ["--all-models", "--force", "--include", "*.onnx", "--json"]
    assert json.loads(output_of(capsys, "convert", repository, path, *options))["left_out"] == []
    (repository / "onnx" / "model_fp16.onnx").rename(repository / "B.ONNX")
    options = ["--all-models", "--force", "--assets"]
    assert output_of(capsys, "convert", repository, path, *options).splitlines()[-5:] == [
        "left out  .gitattributes",
        "left out  B.ONNX",
        "left out  onnx/decoder_model_q4.onnx",
        "left out  pytorch_model.bin",
        "2 models left out: --include PATTERN takes the models whose file names match, and no "
        "others; it can be given several times",
    ]


def test_include_is_named_if_no_model_has_a_usual_name(repository: Path, path: Path) -> None:
    for name in ("model", "decoder_model", "Decoder-With.past"):
        (repository / "onnx" / f"{name}.onnx").unlink()
    onnx.save(runnable_model(), repository / "A.ONNX", format="protobuf")
    message = r"'A\.ONNX', .*'onnx/model_fp16\.onnx' become models only if a pattern of --include"
    with pytest.raises(ArchiveFormatError, match=message):
        onnxarchive.convert(repository, path, models="all")


def test_a_clash_of_ids_names_both_files(repository: Path, path: Path) -> None:
    onnx.save(runnable_model(), repository / "onnx" / "decoder-model.onnx")
    with pytest.raises(
        ValueError, match=r"decoder-model\.onnx and .*decoder_model\.onnx would both"
    ):
        onnxarchive.convert(repository, path, models="all")
    assert not path.exists()


def test_a_faulty_choice_of_models_is_an_error_that_says_why(repository: Path, path: Path) -> None:
    with pytest.raises(ValueError, match=r"one default model 'none' among .*found 0.*--default"):
        onnxarchive.convert(repository, path, models="all", default="none")
    (repository / "empty").mkdir()
    (repository / "other").mkdir()
    onnx.save(runnable_model(), repository / "other" / "model.onnx")
    with pytest.raises(ValueError, match=r"default model 'model\.onnx' among .*found 2"):
        onnxarchive.convert(repository, path, models="all")
    onnx.save(runnable_model(), repository / "model.onnx")
    onnx.save(runnable_model(), repository / "onnx" / "2 parts.onnx")
    with pytest.raises(ValueError, match=r"2 parts\.onnx: expected a file name that gives"):
        onnxarchive.convert(repository, path, models="all", include="[2m]*.onnx")
    with pytest.raises(ArchiveFormatError, match="match no pattern of --include"):
        onnxarchive.convert(repository, path, models="all", include="*.none")
    with pytest.raises(ValueError, match=r'default and include.*go with models="all"'):
        onnxarchive.convert(repository / "model.onnx", path, default="model")
    with pytest.raises(ValueError, match=r"model\.onnx: .* takes a local directory"):
        onnxarchive.convert(repository / "model.onnx", path, models="all")
    with pytest.raises(ArchiveFormatError, match=r"there is no file named \*\.onnx"):
        onnxarchive.convert(repository / "empty", path, models="all")
    assert not path.exists()


@pytest.mark.parametrize("linked", ["decoder_model.weights", "config.json"])
def test_a_link_out_of_the_repository_is_named_with_one_remedy(
    repository: Path, path: Path, linked: str
) -> None:
    file = next(repository.rglob(linked))
    outside = path.with_name(linked)
    file.rename(outside)
    file.symlink_to(outside)
    holder = "decoder_model.onnx" if linked.endswith("weights") else repository.name
    message = rf"{holder}: .*found {linked!r}.*or convert with follow_links=DIRECTORY"
    with pytest.raises(ArchiveFormatError, match=message) as caught:
        onnxarchive.convert(repository, path, models="all", other_files=True)
    assert str(caught.value).count("or convert with") == 1


def test_a_folder_that_cannot_be_read_is_an_error_and_is_not_skipped(
    repository: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "closed").mkdir()
    open_file = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        if os.path.basename(name) == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return open_file(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="my repository/closed"):
        onnxarchive.convert(repository, path, models="all")
    assert not path.exists()


def test_the_command_packs_a_repository(
    repository: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(repository), str(path)]) == 2
    assert "NEW.onnxa --all-models --assets' converts " in capsys.readouterr().err
    (repository / "onnx" / "model.onnx").rename(repository / "onnx" / "encoder_model.onnx")
    assert main(["convert", str(repository / "onnx"), str(path)]) == 2
    assert "--all-models" in capsys.readouterr().err
    options = ["--all-models", "--default", "encoder_model", "--assets"]
    assert main(["convert", str(repository), str(path), *options]) == 0
    assert ids(path) == ["", "decoder_model", "decoder_with_past"]
    for option, *value in (["--all-models"], ["--default", "a"], ["--include", "*.onnx"]):
        assert main(["convert", str(repository), "--output-dir", str(path), option, *value]) == 2
        assert f"{option} goes with one SOURCE and TARGET" in capsys.readouterr().err
    options = ["--include", "*_fp16.onnx", "--include", "*_q4.onnx", "--default", "model_fp16"]
    assert main(["convert", str(repository), str(path), "--all-models", "--force", *options]) == 0
    assert ids(path) == ["", "decoder_model_q4"]
