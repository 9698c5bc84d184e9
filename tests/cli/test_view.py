from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
import webbrowser
from pathlib import Path

import pytest
from models import flip_byte, runnable_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.runtime import netron

Captured = pytest.CaptureFixture[str]
needs_netron = pytest.mark.skipif(
    importlib.util.find_spec("netron") is None,
    reason="netron, which pip installs, is the page that is served",
)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "an archive.onnxa"
    onnxarchive.save(runnable_model(), path)
    return path


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the command end at once; what it answered meanwhile, and what a browser was given."""
    opened: list[str] = []

    def interrupt(server: netron.Server) -> None:
        with urllib.request.urlopen(server.url, timeout=30) as response:
            assert response.status == 200
        raise KeyboardInterrupt

    def open_browser(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(netron.Server, "wait", interrupt)
    monkeypatch.setattr(webbrowser, "open", open_browser)
    return opened


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


@needs_netron
def test_view_opens_a_browser_and_ends_well_with_an_interrupt(
    archive: Path, interrupted: list[str], capsys: Captured
) -> None:
    assert run("view", archive) == 0
    captured = capsys.readouterr()
    (url,) = interrupted
    assert url.startswith("http://127.0.0.1:")
    assert captured.out.endswith(f"shows {archive} at {url}\nCtrl-C ends it.\n")
    assert captured.err == ""
    assert list(archive.parent.iterdir()) == [archive]


@needs_netron
def test_view_starts_no_browser_where_it_shall_not(
    archive: Path, interrupted: list[str], capsys: Captured
) -> None:
    assert run("view", archive, "--no-browser", "--host", "localhost", "--json") == 0
    assert interrupted == []
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(archive)
    assert result["url"].startswith("http://localhost:")
    assert result["netron"][0].isdigit()


@needs_netron
def test_view_says_so_where_no_browser_can_be_started(
    archive: Path, interrupted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert run("view", archive) == 0
    assert "open the address in one" in capsys.readouterr().err


@needs_netron
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_view_serves_until_it_is_ended(archive: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "onnxarchive", "view", str(archive), "--no-browser", "--json"]
    environment = {key: it for key, it in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(5)]
    url = json.loads("".join(lines))["url"]
    with onnxarchive.open(archive) as opened:
        expected = bytes(opened.read("layer_0_weight"))
    with urllib.request.urlopen(url + "data/layer_0_weight", timeout=30) as response:
        assert response.read() == expected
    process.send_signal(number)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
    assert list(archive.parent.iterdir()) == [archive]


@needs_netron
def test_view_tells_of_a_weight_that_it_does_not_show(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with onnxarchive.open(archive) as opened:
        flip_byte(archive, opened.entries["layer_0_weight"].data_offset)

    def ask_and_interrupt(server: netron.Server) -> None:
        with urllib.request.urlopen(server.url + "data/layer_0_weight", timeout=30) as response:
            response.read(1 << 10)
            response.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(netron.Server, "wait", ask_and_interrupt)
    run("view", archive, "--no-browser")
    error = capsys.readouterr().err
    assert error.startswith(f"onnxarchive: not shown: {archive}: entry 'layer_0_weight': ")
    assert error.count("\n") == 1


@needs_netron
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["missing.onnxa"], 2, "missing.onnxa: No such file"),
        (["text"], 3, "text: expected an end record"),
        (["an archive.onnxa", "--port", "65536"], 2, "expected a port"),
        (["an archive.onnxa", "--port", "x"], 2, "invalid int"),
        (["an archive.onnxa", "--host", "192.0.2.1"], 2, "192.0.2.1:0: "),
        (["an archive.onnxa", "--host", "no such host"], 2, "no such host"),
    ],
)
def test_wrong_use_is_told_in_a_line(
    archive: Path,
    arguments: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(archive.parent)
    Path("text").write_text("This is not an archive.\n")
    assert run("view", *arguments, "--no-browser") == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_view_without_netron_says_what_to_install(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("view", archive) == 2
    assert "pip install 'onnxarchive[view]'" in capsys.readouterr().err
