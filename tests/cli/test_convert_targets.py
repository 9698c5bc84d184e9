"""`convert` of a source alone: where the archive appears; of a directory with several models."""

from __future__ import annotations

import shlex
from pathlib import Path

import fsspec
import pytest
from commands import error_of, output_of, result_of, run
from models import further_model, runnable_model
from written import saved, write_model

import onnxarchive

Captured = pytest.CaptureFixture[str]
WHOLE = saved(runnable_model())


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path / "work")


# Without a target


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("../models/m.v2.onnx", "../models/m.v2.onnxa"),
        ("../models/none", "../models/none.onnxa"),
        ("m.onnx", "m.onnxa"),
    ],
)
def test_the_archive_of_a_file_appears_beside_it(
    source: str, target: str, capsys: Captured
) -> None:
    write_model(Path(source), runnable_model())
    assert result_of(capsys, "convert", source)["path"] == target
    assert Path(target).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("source", "target"),
    [("../models", "../models.onnxa"), ("../models/", "../models.onnxa"), (".", "../work.onnxa")],
)
def test_the_archive_of_a_directory_appears_beside_it(
    source: str, target: str, capsys: Captured
) -> None:
    write_model(Path(source) / "m.onnx", runnable_model())
    output_of(capsys, "convert", source)
    assert Path(target).read_bytes() == WHOLE
    assert {path.name for path in Path(source).iterdir()} == {"m.onnx"}


def test_the_archive_of_a_url_appears_in_the_working_directory(capsys: Captured) -> None:
    with fsspec.open("memory://folder/m.onnx", "wb") as file:
        file.write(runnable_model().SerializeToString())
    output_of(capsys, "convert", "memory://folder/m.onnx")
    assert Path("m.onnxa").read_bytes() == WHOLE
    error = error_of(capsys, "convert", "memory://folder/..")
    assert "the URL does not end with a file name" in error


@pytest.mark.parametrize("options", [[], ["--force"], ["--dry-run"]])
def test_a_file_that_was_not_named_as_target_is_not_replaced(
    options: list[str], capsys: Captured
) -> None:
    write_model(Path("m.onnx"), runnable_model())
    Path("m.onnxa").write_bytes(b"mine")
    error = error_of(capsys, "convert", "m.onnx", *options)
    assert "m.onnxa: exists; to replace it, name it as TARGET and give --force" in error
    assert Path("m.onnxa").read_bytes() == b"mine"
    assert run("convert", "m.onnx", "m.onnxa", "--force") == 0
    assert Path("m.onnxa").read_bytes() == WHOLE
    Path("m.onnxa").unlink()
    Path("m.onnxa").symlink_to("elsewhere")
    error_of(capsys, "convert", "m.onnx", *options)
    assert not Path("elsewhere").exists()


def test_a_source_may_be_given_with_options_that_take_paths(capsys: Captured) -> None:
    write_model(Path("m.onnx"), runnable_model())
    Path("a.txt").write_bytes(b"a")
    output_of(capsys, "convert", "m.onnx", "--follow-links", "..", "--asset", "a.txt", "b=a.txt")
    with onnxarchive.open("m.onnxa") as archive:
        assert sorted(archive.assets) == ["a.txt", "b"]


# A directory with several models


def commands_of(error: str) -> tuple[list[str], list[str]]:
    """The commands of the two last lines of an error: for one model, and for all."""
    lines = error.splitlines()[-2:]
    one, several = [shlex.split(line.rpartition("' ")[0].removeprefix("'")) for line in lines]
    assert one[0] == several[0] == "onnxarchive"
    return one[1:], several[1:]


def write_models(*names: str) -> None:
    for name in names:
        path = Path("repository", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_model(path, further_model() if "decoder" in name else runnable_model())
    Path("repository/tokenizer.json").write_bytes(b"{}")


def test_several_models_are_listed_with_the_command_that_packs_all(capsys: Captured) -> None:
    write_models("encoder model.onnx", "decoder.onnx", "decoder_fp16.onnx", "._decoder.onnx")
    error = error_of(capsys, "convert", "repository", "new.onnxa")
    assert "repository: expected one model" in error
    size = Path("repository/decoder.onnx").stat().st_size
    assert f"{size:>17,}  decoder.onnx\n" in error
    assert "._decoder" not in error
    assert "converts 2 of them to one archive, without further precisions" in error
    one, several = commands_of(error)
    assert run(*one) == 0
    Path("NEW.onnxa").unlink()
    assert run(*several) == 0
    with onnxarchive.open("NEW.onnxa") as archive:
        assert list(archive.models) == ["", "encoder_model"]
        assert list(archive.assets) == ["tokenizer.json"]


def test_a_default_model_with_a_usual_name_need_not_be_given(capsys: Captured) -> None:
    write_models("onnx/model.onnx", "onnx/decoder.onnx")
    error = error_of(capsys, "convert", "repository")
    assert "'onnxarchive convert repository NEW.onnxa --all-models --assets' converts all" in error
    assert run(*commands_of(error)[1]) == 0
    with onnxarchive.open("NEW.onnxa") as archive:
        assert list(archive.models) == ["", "decoder"]


def test_models_in_further_precisions_alone_are_taken_by_a_pattern(capsys: Captured) -> None:
    write_models("model_q4.onnx", "model_int8.onnx")
    error = error_of(capsys, "convert", "repository")
    assert run(*commands_of(error)[1]) == 0
    with onnxarchive.open("NEW.onnxa") as archive:
        assert list(archive.models) == ["", "model_q4"]


def test_models_with_one_name_become_archives_of_their_own(capsys: Captured) -> None:
    write_models("text_encoder/model.onnx", "decoder/model.onnx", "unet/model.onnx")
    error = error_of(capsys, "convert", "repository")
    _, each = commands_of(error)
    assert each == ["convert", "repository", "--output-dir", "NEW"]
    assert run(*each) == 0
    assert Path("NEW/text_encoder/model.onnxa").read_bytes() == WHOLE


def test_a_default_model_that_is_missing_is_asked_for_as_an_option(capsys: Captured) -> None:
    write_models("encoder.onnx", "decoder.onnx")
    error = error_of(capsys, "convert", "repository", "new.onnxa", "--all-models")
    assert error.endswith("found 0; name it with --default NAME\n")
    error = error_of(capsys, "convert", "repository", "new.onnxa", "--all-models", "--default", "x")
    assert "default=" not in error
