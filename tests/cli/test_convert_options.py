"""Options of `onnxarchive convert` for one model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from commands import error_of, output_of, result_of
from models import external, model_of, raw_tensor
from onnx import TensorProto
from processes import completed
from written import write_model

import onnxarchive
from onnxarchive.cli import main

Captured = pytest.CaptureFixture[str]


def run(*arguments: str | Path) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of four tensors of 8,000 bytes, and one that is small."""
    large = (raw_tensor(name, dims=(2000,)) for name in "abcd")
    return write_model(tmp_path / "m.onnx", model_of(*large, raw_tensor("small", dims=(3,))))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "m.onnxa"


# --dry-run


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--alignment", "4096"],
        ["--size-threshold", "0"],
        ["--convert-attribute"],
        ["--asset", "{file}", "--asset", "deep/other.txt={file}"],
    ],
    ids=" ".join,
)
def test_a_dry_run_prints_what_would_be_written_and_writes_nothing(
    source: Path, target: Path, tmp_path: Path, capsys: Captured, options: list[str]
) -> None:
    (tmp_path / "file.txt").write_bytes(b"words" * 100)
    options = [option.format(file=tmp_path / "file.txt") for option in options]
    before = sorted(os.listdir(tmp_path))
    planned = result_of(capsys, "convert", source, target, "--dry-run", *options)
    assert sorted(os.listdir(tmp_path)) == before
    written = result_of(capsys, "convert", source, target, *options)
    assert planned == written
    assert planned["nbytes"] == target.stat().st_size
    with onnxarchive.open(target) as archive:
        assert planned["assets"] == len(archive.assets)
        assert planned["tensors"] == len(archive.entries) - len(archive.assets) - 1


def test_a_dry_run_says_that_it_is_one(source: Path, target: Path, capsys: Captured) -> None:
    printed = output_of(capsys, "convert", source, target, "--dry-run")
    assert "would have 4 tensors, 0 assets, " in printed
    assert output_of(capsys, "convert", source, target) == printed.replace("would have ", "")


def test_a_dry_run_to_standard_output_or_with_force_writes_nothing(
    source: Path, target: Path, capsys: Captured
) -> None:
    target.write_bytes(b"old")
    assert run(source, target, "--dry-run", "--force") == 0
    assert target.read_bytes() == b"old"
    planned = result_of(capsys, "convert", source, "-", "--dry-run")
    assert run(source, target, "--force") == 0
    assert planned["nbytes"] == target.stat().st_size


# --verify-checksum


@pytest.mark.parametrize("is_right", [True, False])
def test_checksums_are_compared_if_asked_for(
    tmp_path: Path, target: Path, capsys: Captured, is_right: bool
) -> None:
    tensor = raw_tensor("layer/w", dims=(600,))
    content = b"unused" + tensor.raw_data
    (tmp_path / "w.bin").write_bytes(content)
    checksum = hashlib.sha1(content if is_right else tensor.raw_data).hexdigest()
    model = model_of(external(tensor, "w.bin", offset=6, checksum=checksum))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert run(tmp_path / "m.onnx", target) == 0
    target.unlink()
    capsys.readouterr()
    status = run(tmp_path / "m.onnx", target, "--verify-checksum")
    error = capsys.readouterr().err
    if is_right:
        assert (status, error) == (0, "")
        assert onnxarchive.load(target) == model_of(tensor)
    else:
        assert status == 3
        assert "'layer/w'" in error
        assert checksum in error
        assert not target.exists()


# Messages about sources


def test_what_is_left_out_is_reported_on_standard_error(
    source: Path, target: Path, tmp_path: Path, capsys: Captured
) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as file:
        file.write(source, "m.onnx")
        file.writestr("READ\u202eME", b"words")
    assert run(tmp_path / "m.zip", target) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"onnxarchive: warning: {tmp_path / 'm.zip'}: left out")
    assert "READ" in captured.err
    assert "\u202e" not in captured.err
    assert len(captured.err.splitlines()) == 1
    assert run(tmp_path / "m.zip", target, "--force", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["nbytes"] == target.stat().st_size
    assert json.loads(captured.err)["warning"].startswith(f"{tmp_path / 'm.zip'}: left out")
    assert "\u202e" not in captured.err
    assert len(captured.err.splitlines()) == 1


def test_every_problem_is_reported_in_a_line_of_its_own(
    tmp_path: Path, target: Path, capsys: Captured
) -> None:
    model = model_of(
        external(raw_tensor("a", TensorProto.INT8, (2000,)), "missing.bin"),
        external(raw_tensor("evil\x1b[2J", dims=(600,)), "missing too.bin"),
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    error = error_of(capsys, "convert", tmp_path / "m.onnx", target, status=3)
    lines = error.splitlines()
    assert lines[0].endswith("2 tensors have faulty data:")
    assert len(lines) == 3
    assert "\x1b" not in error


def test_a_zip_that_needs_a_temporary_file_leaves_none_when_its_disk_is_full(
    tmp_path: Path, source: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "m.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write(source, "m.onnx")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); "
        "from onnxarchive.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = completed(
        [sys.executable, "-c", code, "convert", tmp_path / "m.zip", tmp_path / "new.onnxa"],
        status=2,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(scratch.iterdir()) == []
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.zip", "scratch"]
