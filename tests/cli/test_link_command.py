from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import error_of, output_of, result_of, run
from models import break_local_header, entry_of, further_model, runnable_model
from opened_files import count_opens

import onnxarchive

Captured = pytest.CaptureFixture[str]


def test_link_writes_what_the_library_writes(archive: Path, link: Path, capsys: Captured) -> None:
    other = archive.with_name("other.onnx")
    assert run("link", archive, other) == 0
    assert other.read_bytes() == link.read_bytes()
    nbytes = other.stat().st_size
    assert capsys.readouterr().out == f"{other}: {nbytes} bytes, large tensors in {archive}\n"
    other.write_bytes(b"there")
    assert run("link", archive, other, "--json", "--force") == 0
    assert other.read_bytes() == link.read_bytes()
    result = {"path": str(other), "archive": str(archive), "nbytes": nbytes}
    assert json.loads(capsys.readouterr().out) == result


def test_link_to_a_directory_lists_a_link_for_each_model(tmp_path: Path, capsys: Captured) -> None:
    archive = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), archive, models={"further": further_model()})
    assert run("link", archive, tmp_path, "--json") == 0
    links = [tmp_path / "m.onnx", tmp_path / "further.onnx"]
    assert json.loads(capsys.readouterr().out) == [
        {"path": str(link), "archive": str(archive), "nbytes": link.stat().st_size}
        for link in links
    ]
    links[1].write_bytes(b"there")
    links[0].unlink()
    assert f"{links[1]}: exists; --force replaces it" in error_of(capsys, "link", archive, tmp_path)
    assert not links[0].exists()
    assert [
        line.partition(":")[0]
        for line in output_of(capsys, "link", archive, tmp_path, "--force").splitlines()
    ] == [*map(str, links)]


def test_link_to_a_directory_opens_the_archive_once(tmp_path: Path) -> None:
    archive = tmp_path / "m.onnxa"
    models = {f"m{number}": runnable_model() for number in range(3)}
    onnxarchive.save(runnable_model(), archive, models=models)
    assert count_opens(archive, lambda: run("link", archive, tmp_path)) == 1
    assert len([*tmp_path.glob("*.onnx")]) == 4


def test_link_refuses_a_broken_archive(archive: Path, capsys: Captured) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    assert "layer_0_weight" in error_of(
        capsys, "link", archive, archive.with_name("link.onnx"), status=3
    )
    assert not archive.with_name("link.onnx").exists()


def test_check_says_that_a_link_fits(archive: Path, link: Path, capsys: Captured) -> None:
    ways: list[list[str | Path]] = [["--link", link], ["--link", link, archive]]
    ways.append([archive, "--link", link])
    for arguments in ways:
        first, second = output_of(capsys, "check", *arguments).splitlines()
        assert first.startswith(f"{archive}: valid ")
        assert second == f"{link}: fits the archive"
        assert result_of(capsys, "check", "--full", *arguments) == []


def test_check_says_that_a_link_does_not_fit(archive: Path, link: Path, capsys: Captured) -> None:
    onnxarchive.save(runnable_model(), archive, alignment=4096)
    sound, changed = output_of(capsys, "check", "--link", link, status=1).splitlines()
    assert f"{archive}: valid " in sound
    assert changed.startswith(f"{link}: the archive has changed since it was linked")
    assert run("check", "--link", link, "--json") == 1
    (finding,) = onnxarchive.check_link(link)
    assert json.loads(capsys.readouterr().out) == [
        {"link": str(link), "rule": None, "entry": None, "message": finding.message}
    ]
    assert run("check", archive) == 0


def test_check_says_that_the_archive_of_a_link_is_missing(
    archive: Path, link: Path, capsys: Captured
) -> None:
    os.rename(archive, archive.with_name("renamed"))
    assert output_of(capsys, "check", "--link", link, status=1) == (
        f"{link}: the archive {archive} does not exist\n"
    )
    assert run("check", "--link", link, archive) == 2
    assert run("check", "--link", link, archive.with_name("renamed")) == 1


def test_check_of_a_link_first_reports_what_is_wrong_with_the_archive(
    archive: Path, link: Path, capsys: Captured
) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    assert "layer_0_weight" in output_of(capsys, "check", "--link", link, status=1)
