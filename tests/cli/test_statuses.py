"""Exit statuses: a crash, a lack of memory and an output that cannot be written are no findings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import error_of, output_of, run
from models import runnable_model

import onnxarchive
from onnxarchive.remote.cache import directory_of_cache

Captured = pytest.CaptureFixture[str]

ROOT = Path(__file__).parents[2]
# What is written to the standard streams is buffered, unlike in some test environments.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path)
    return path


def status_of(*arguments: object, full: str) -> tuple[int, bytes]:
    """Status of a command one of whose streams is a full device; what the other one shows."""
    other = "stderr" if full == "stdout" else "stdout"
    command = [sys.executable, "-m", "onnxarchive", *map(str, arguments)]
    with open("/dev/full", "wb") as device:
        streams = {full: device, other: subprocess.PIPE}
        done = subprocess.run(command, check=False, env=BUFFERED, **streams)  # type: ignore[call-overload]
    return done.returncode, getattr(done, other)


def test_an_unforeseen_error_ends_with_status_70_and_a_traceback(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(onnxarchive, "diff", Mock(side_effect=TypeError("unforeseen")))
    assert run("diff", archive, archive) == 70
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith(
        "\nTypeError: unforeseen\n"
        "onnxarchive: this is a fault of onnxarchive (TypeError); please report the lines above\n"
    )


@pytest.mark.parametrize(("text", "shown"), [("", ""), ("no room for 9 bytes", ": no room for 9")])
def test_a_lack_of_memory_is_reported_in_a_message(
    text: str, shown: str, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(onnxarchive, "diff", Mock(side_effect=MemoryError(text)))
    error = error_of(capsys, "diff", archive, archive, status=2)
    assert error.startswith(f"onnxarchive: out of memory{shown}")


def test_check_goes_on_after_an_archive_that_lacks_memory(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(onnxarchive, "check", Mock(side_effect=[MemoryError, []]))
    assert run("check", archive, archive) == 2
    output, error = capsys.readouterr()
    assert "valid" in output
    assert error == "onnxarchive: out of memory\n"


def test_onnxruntime_is_not_blamed_for_a_lack_of_memory(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    failing = Mock(side_effect=MemoryError("std::bad_alloc"))
    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", failing)
    for command in ("run", "prepack"):
        error = error_of(capsys, command, archive, status=2)
        assert error == "onnxarchive: out of memory: std::bad_alloc\n"


def test_a_conversion_that_lacks_memory_does_not_stop_other_conversions(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    converted = Mock(side_effect=MemoryError("no room"))
    monkeypatch.setattr("onnxarchive.conversion.convert_many.convert_locations", converted)
    assert run("convert", archive, "--output-dir", archive.with_name("out")) == 2
    assert f"failed: {archive}: out of memory: no room\n" in capsys.readouterr().out


@pytest.mark.parametrize("is_old", [False, True])
def test_without_a_home_directory_the_option_for_the_cache_is_named(
    is_old: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    directory = Mock(return_value="~/.cache/onnxarchive")  # of older versions of platformdirs
    directory.side_effect = None if is_old else RuntimeError("could not determine the home")
    monkeypatch.setattr("platformdirs.user_cache_dir", directory)
    for command in ("cache list", "cache clear", "ls --cache http://127.0.0.1:9/m.onnxa"):
        assert (
            "home directory for the user's cache; give the cache a directory: --cache-dir DIR\n"
            in error_of(capsys, *command.split(), status=2)
        )
    with pytest.raises(OSError, match=r"give the cache a directory: cache=DIR"):
        directory_of_cache()


def test_cache_list_and_cache_clear_take_cache_dir(tmp_path: Path, capsys: Captured) -> None:
    for command in ("list", "clear"):
        output = output_of(capsys, "cache", command, "--cache-dir", tmp_path / "none")
        assert str(tmp_path / "none") in output


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no such device")
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("diff {} missing", 2),
        ("ls {}x", 2),
        ("check {}", 0),
        ("check {0} {0}x", 2),
        ("convert {} {}.onnx", 0),  # warns that the target is an archive
        ("unknown", 2),
    ],
)
def test_a_standard_error_that_cannot_be_written_changes_no_status(
    command: str, status: int, archive: Path
) -> None:
    arguments = command.format(archive, archive).split()
    found, _ = status_of(*arguments, full="stderr")
    assert found == status


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no such device")
@pytest.mark.parametrize("command", ["--help", "--version", "ls {}", "check {}x {}"])
def test_a_standard_output_that_cannot_be_written_is_a_system_error(
    command: str, archive: Path
) -> None:
    found, error = status_of(*command.format(archive, archive).split(), full="stdout")
    assert found == 2
    assert error.endswith(b"onnxarchive: standard output: No space left on device\n")


def test_the_statuses_in_the_guide_are_those_of_the_help(capsys: Captured) -> None:
    text = output_of(capsys, "--help").partition("Exit status")[2]
    statuses = re.findall(r"^  (\d+) +(.*)$", text, re.MULTILINE)
    assert [int(number) for number, _ in statuses] == [0, 1, 2, 3, 70, 129, 130, 141, 143]
    guide = (ROOT / "tools" / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", guide, re.MULTILINE)
    assert [(number, text.replace("`", "'")) for number, text in rows] == statuses
