"""The command `assets`, and the options of `convert` that name assets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import error_of, output_of, result_of, run
from models import MEASURE_MEMORY, entry_of, flip_byte, run_python, runnable_model
from written import saved, write_model

import onnxarchive

Captured = pytest.CaptureFixture[str]
ASSETS = {"labels.txt": b"cat\ndog\n", "deep/er.json": b"{}"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path, assets=ASSETS)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of files; some are hidden."""
    folder = tmp_path / "llm"
    for name in ("config.json", "vocab/a.txt", "vocab/b.json", ".hidden", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def assets_of(path: Path) -> dict[str, bytes]:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as opened:
        return dict(opened.assets)


# assets


def test_assets_are_listed(archive: Path, capsys: Captured) -> None:
    assert output_of(capsys, "assets", "list", archive) == (
        "name          bytes\ndeep/er.json      2\nlabels.txt        8\n\n2 assets\n"
    )
    assert result_of(capsys, "assets", "list", archive)["assets"] == [
        {"name": "deep/er.json", "nbytes": 2},
        {"name": "labels.txt", "nbytes": 8},
    ]


def test_an_asset_is_written_to_standard_output(
    archive: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run("cat", archive, "labels.txt") == 0
    assert capfdbinary.readouterr().out == b"cat\ndog\n"


@pytest.mark.parametrize("command", ["cat ARCHIVE large", "assets extract ARCHIVE NEW large"])
def test_a_large_asset_is_written_without_a_copy(archive: Path, command: str) -> None:
    nbytes = 1 << 28
    large = archive.with_name("large")
    with large.open("wb") as file:
        file.truncate(nbytes)
    assert run("assets", "add", archive, large) == 0
    code = f"""
import onnx, os
from onnxarchive.cli import main
{MEASURE_MEMORY}
sys.stdout = open(os.devnull, "w")
print(growth(lambda: main(sys.argv[1:])), file=sys.__stdout__)
"""
    paths = {"ARCHIVE": archive, "NEW": archive.with_name("new")}
    arguments = [paths.get(word, word) for word in command.split()]
    assert int(run_python(code, *arguments)) < nbytes / 8


def test_a_damaged_asset_fails_after_it_was_written(
    archive: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    flip_byte(archive, entry_of(archive, "assets/labels.txt").data_offset)
    assert run("cat", archive, "labels.txt") == 3
    error = capfdbinary.readouterr().err.decode()
    assert error.startswith(f"onnxarchive: {archive}: entry 'assets/labels.txt': expected 8 bytes")


def test_assets_are_added_replaced_and_removed(
    archive: Path, folder: Path, capsys: Captured
) -> None:
    labels = folder / "vocab" / "a.txt"
    assert run("assets", "add", archive, f"labels.txt={labels}", folder / "config.json") == 0
    expected = {**ASSETS, "labels.txt": b"vocab/a.txt", "config.json": b"config.json"}
    assert archive.read_bytes() == saved(runnable_model(), assets=expected)
    assert run("assets", "remove", archive, "labels.txt", "deep/er.json") == 0
    assert archive.read_bytes() == saved(runnable_model(), assets={"config.json": b"config.json"})
    nbytes = archive.stat().st_size
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{archive}: {nbytes:,} bytes ({nbytes / 1024:.1f} KiB); ")


def test_assets_are_extracted_to_a_new_directory(archive: Path, capsys: Captured) -> None:
    new = archive.with_name("new")
    result = result_of(capsys, "assets", "extract", archive, new, "labels.txt")
    assert result == {"files": [{"path": str(new / "labels.txt"), "nbytes": 8}]}
    assert (new / "labels.txt").read_bytes() == ASSETS["labels.txt"]
    assert "not empty" in error_of(capsys, "assets", "extract", archive, new)
    other = archive.with_name("other")
    assert output_of(capsys, "assets", "extract", archive, other).splitlines() == [
        f"{other / 'deep' / 'er.json'}: 2 bytes",
        f"{other / 'labels.txt'}: 8 bytes",
    ]


# Files, directories and patterns

NAMED: dict[str, tuple[list[str], set[str]]] = {
    "a file": (["llm/config.json"], {"config.json"}),
    "a file with a name": (["x/y=llm/config.json"], {"x/y"}),
    "several": (["llm/config.json", "llm/vocab/a.txt"], {"config.json", "a.txt"}),
    "a directory": (["llm"], {"llm/config.json", "llm/vocab/a.txt", "llm/vocab/b.json"}),
    "a directory with a slash": (["llm/vocab/"], {"vocab/a.txt", "vocab/b.json"}),
    "a directory with a name": (["x=llm/vocab"], {"x/a.txt", "x/b.json"}),
    "a pattern": (["llm/*.json"], {"config.json"}),
    "a pattern with a name": (["x=llm/*.json"], {"x/config.json"}),
    "a pattern of folders": (["llm/**/*.json"], {"config.json", "vocab/b.json"}),
    "all files below": (["llm/**"], {"config.json", "vocab/a.txt", "vocab/b.json"}),
    "a pattern below folders and files": (["*/**/b.*"], {"llm/vocab/b.json"}),
    "a file with an equals sign in its name": (["x/y=a=b"], {"x/y"}),
    "a file twice": (["llm/config.json", "llm/*.json"], {"config.json"}),
    "a file named like a pattern": (["[a].txt"], {"[a].txt"}),
}


@pytest.mark.parametrize(("given", "names"), NAMED.values(), ids=NAMED.keys())
def test_assets_are_given_as_files_directories_and_patterns(
    archive: Path,
    folder: Path,
    given: list[str],
    names: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("[a].txt").write_bytes(b"[a].txt")
    Path("a=b").write_bytes(b"a=b")
    Path("a.txt").write_bytes(b"not this one")
    write_model(Path("m.onnx"), runnable_model())
    assert run("convert", "m.onnx", "new.onnxa", "--asset", *given) == 0
    found = assets_of(Path("new.onnxa"))
    assert set(found) == names
    assert all(
        name.endswith(data.decode().split("/")[-1]) for name, data in found.items() if name != "x/y"
    )
    assert run("assets", "add", archive, *given) == 0
    assert assets_of(archive) == {**ASSETS, **found}


@pytest.mark.skipif(os.name == "nt", reason="links need a right on Windows")
@pytest.mark.timeout(20)
def test_a_pattern_of_folders_follows_no_links_to_folders(archive: Path, folder: Path) -> None:
    for name in ("one", "two"):  # 2**40 paths lead through them
        (folder / name).symlink_to(".")
    assert run("assets", "add", archive, f"x={folder}/**/*.json") == 0
    assert set(assets_of(archive)) == {*ASSETS, "x/config.json", "x/vocab/b.json"}


# convert --assets


def test_convert_adds_other_files_as_assets_and_lists_them(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    write_model(folder / "model.onnx", runnable_model())
    target = tmp_path / "new.onnxa"
    assert run("convert", folder, target, "--assets", "--asset", f"extra={folder / '.hidden'}") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[1:] == [
        "took      config.json",
        "took      vocab/a.txt",
        "took      vocab/b.json",
        "left out  .git/",
        "left out  .hidden",
    ]
    assert set(assets_of(target)) == {"config.json", "vocab/a.txt", "vocab/b.json", "extra"}
    result = result_of(capsys, "convert", folder, target, "--assets", "--force")
    assert result["added_files"] == ["config.json", "vocab/a.txt", "vocab/b.json"]
    assert result["left_out"] == [".git/", ".hidden"]


def test_convert_of_many_models_lists_the_assets_of_each(
    folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    source = write_model(folder / "model.onnx", runnable_model())
    assert output_of(
        capsys, "convert", source, "--output-dir", tmp_path / "out", "--assets"
    ).splitlines()[-6:] == [
        str(source),
        "took      config.json",
        "took      vocab/a.txt",
        "took      vocab/b.json",
        "left out  .git/",
        "left out  .hidden",
    ]
