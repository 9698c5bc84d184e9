from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import output_of, run
from models import entry_of, flip_byte
from processes import started, wait_until

import onnxarchive

Captured = pytest.CaptureFixture[str]
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither such modes nor signals")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("netron") is None,
    reason="netron, which pip installs, is the page that is served",
)


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as response:
        content: bytes = response.read()
        return content


def address_in(page: bytes) -> str:
    """Where a page leads."""
    found = re.search('<meta http-equiv="refresh" content="0; url=(.*?)">', page.decode())
    assert found is not None
    return html.unescape(found[1])


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the command end once it waits; what a browser was given, which shows the page."""
    opened: list[str] = []

    def open_browser(url: str) -> bool:
        opened.append(url)
        assert read(address_in(read(url)))
        return True

    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setattr(webbrowser, "open", open_browser)
    return opened


def test_view_opens_a_browser_and_an_interrupt_ends_it_successfully(
    archive: Path, opened: list[str], capsys: Captured
) -> None:
    assert run("view", archive) == 0
    captured = capsys.readouterr()
    assert len(opened) == 1
    shows, ends = captured.out.splitlines()
    assert shows.startswith(f"Netron shows {archive} at http://127.0.0.1:")
    assert ends == "If no browser shows it, open this address. Ctrl-C ends the server."
    assert captured.err == ""
    assert list(archive.parent.iterdir()) == [archive]


def test_view_starts_no_browser_with_no_browser_or_json(
    archive: Path, opened: list[str], capsys: Captured
) -> None:
    assert run("view", archive, "--no-browser", "--json") == 0
    assert opened == []
    result = json.loads(capsys.readouterr().out)
    assert result["path"] == str(archive)
    assert result["url"].startswith("http://127.0.0.1:")


def test_view_prints_the_address_if_no_browser_can_be_started(
    archive: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert "If no browser shows it, open this address." in output_of(capsys, "view", archive)


# Notes its command line where nobody looks before it is complete.
BROWSER = """
import json, os, sys
place = os.environ["NOTED"]
with open(place + ".part", "w") as file:
    json.dump(sys.argv, file)
os.rename(place + ".part", place)
"""


class View:
    """`onnxarchive view` in a process of its own, and a browser that only notes what it is given.

    Attributes:
        process: The command.
        temporary: The directory for its temporary files.
        url: The address that it printed.
    """

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.temporary = folder / "temporary files"
        self._noted = folder / "command line"
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(4)]
        self.url: str = json.loads("".join(lines))["url"]

    def command_line(self) -> list[str]:
        """The command line that started the browser."""
        wait_until(self._noted.exists, self.process)
        command_line: list[str] = json.loads(self._noted.read_text())
        return command_line


@pytest.fixture
def view(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[View]:
    folder = tmp_path_factory.mktemp("view")
    (folder / "temporary files").mkdir()
    (folder / "browser.py").write_text(BROWSER)
    given = {
        "BROWSER": shlex.join([sys.executable, str(folder / "browser.py"), "%s"]),
        "NOTED": str(folder / "command line"),
        "TMPDIR": str(folder / "temporary files"),
    }
    environment = {key: it for key, it in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "onnxarchive", "view", archive, "--json"]
    with started(command, env=environment | given) as process:
        yield View(process, folder)


@posix
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_view_serves_until_it_is_ended_and_leaves_no_page(
    archive: Path, view: View, number: signal.Signals
) -> None:
    assert view.command_line()
    with onnxarchive.open(archive) as opened:
        assert read(view.url + "data/layer_0_weight") == bytes(opened.read("layer_0_weight"))
    assert len(list(view.temporary.rglob("*"))) == 2
    view.process.send_signal(number)
    assert view.process.communicate(timeout=280) == ("", "")
    assert view.process.returncode == 0
    assert list(archive.parent.iterdir()) == [archive]
    assert list(view.temporary.iterdir()) == []


@posix
def test_a_browser_gets_the_address_from_a_file_that_only_its_user_can_read(view: View) -> None:
    secret = view.url.split("/")[3]
    command_line = view.command_line()
    assert not any(secret in it for it in command_line)
    directory, file = sorted(view.temporary.rglob("*"))
    assert command_line[1:] == [file.as_uri()]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert address_in(read(file.as_uri())) == view.url
    assert read(view.url)


@pytest.mark.tool
@posix
def test_a_browser_shows_the_page_of_the_archive(archive: Path, view: View, browser: Any) -> None:
    (address,) = view.command_line()[1:]
    browser.get(address)
    wait_until(lambda: browser.title == archive.name, view.process)
    assert browser.current_url == view.url
    assert [it["message"] for it in browser.get_log("browser")] == []


def test_view_names_a_weight_that_it_does_not_show(archive: Path, view: View) -> None:
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset)
    with pytest.raises(urllib.error.HTTPError, match="500") as caught:
        read(view.url + "data/layer_0_weight")
    caught.value.close()
    view.process.send_signal(signal.SIGINT)
    _, error = view.process.communicate(timeout=280)
    start = f"a weight is not shown: {archive}: entry 'layer_0_weight': "
    assert json.loads(error)["warning"].startswith(start)
    assert error.count("\n") == 1
