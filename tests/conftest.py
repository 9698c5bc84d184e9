"""Fixtures of several test files, and counts printed at the end of a run.

No test asserts a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import object_servers
import pytest
from chromium import chromium
from edits import NAME, no_clone, weights
from hypothesis import settings
from limits import user
from models import NEW_TYPES, NUMBERS, copying_clone, runnable_model
from mounts import SHARING, new_disk
from object_servers import S3Server
from sparse_files import require_room
from web_server import WebServer, serving

import onnxarchive
from onnxarchive.files import clones_and_sync, locking
from tools.zip_readers.readers import READERS, Reader

settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# Recorded by tests with `record_property`; printed in this order.
COUNTS = (
    "vectors",
    "rules",
    "vectors given to independent readers",
    "mutated files",
    "readers compared",
    "archives read by other tools",
    "models compared with their archives' sessions",
    "models of which only a session is made",
    "calls of changes made to fail",
    "faults tried",
    "interrupted edits recovered",
    "schedules of two editors",
    "accepted that should be refused",
)
# Counted in failed tests, too.
ALSO_OF_FAILED = COUNTS[-1:]


def pytest_configure() -> None:
    """Restores signals that a parent process may ignore: tests need exit statuses and Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempts the objects of the collection from garbage collection, to save time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests whose names say what is not installed: deflate64, or a new data type."""
    if find_spec("zipfile_deflate64") is None:
        _skip(items, "deflate64", "zipfile-deflate64 is not installed")
    for name in NEW_TYPES:
        if name not in NUMBERS:
            _skip(items, name.lower(), f"the installed onnx lacks {name}")


def _skip(items: list[pytest.Item], part: str, reason: str) -> None:
    """Skips tests that have this word in their names."""
    word = re.compile(rf"(?<![a-z]){part}(?![0-9])")
    for item in items:
        if word.search(item.name.lower()):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts of passed tests, and those in `ALSO_OF_FAILED` of failed tests."""
    counts: Counter[str] = Counter()
    for outcome, names in (("passed", COUNTS), ("failed", ALSO_OF_FAILED)):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name in names and isinstance(value, int):
                    counts[name] += value
    if counts:
        terminalreporter.section("counts")
        for name in COUNTS:
            if name in counts:
                terminalreporter.line(f"{name}: {counts[name]:,}")


@pytest.fixture(autouse=True)
def _syncs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces fsync except in tests of files: syncs took half of the time of most tests."""
    if "files" not in request.path.parts:
        monkeypatch.setattr(os, "fsync", os.fstat)  # fails for a bad descriptor, like fsync


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with spaces and non-ASCII letters in its name."""
    folder = tmp_path / "ein Verzeichnis für Größen"
    folder.mkdir()
    return folder


@pytest.fixture
def path(folder: Path) -> Path:
    """The path of an archive to write in `folder`."""
    return folder / NAME


@pytest.fixture
def archive(path: Path) -> Path:
    """An archive of `runnable_model`, whatever the fixture `path` of a module has written."""
    onnxarchive.save(runnable_model(), path, models={}, assets={})
    return path


@pytest.fixture
def two(path: Path) -> Path:
    """An archive of `weights(2)`."""
    onnxarchive.save(weights(2), path)
    return path


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on a disk with room for files of GiB, removed in the end."""
    folder = tmp_path_factory.mktemp("large")
    require_room(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=READERS.values(), ids=lambda reader: reader.name)
def zip_reader(request: pytest.FixtureRequest) -> Reader:
    """Each of the other zip readers that are installed."""
    reader: Reader = request.param
    missing = reader.missing()
    if missing is not None:
        pytest.skip(missing)
    return reader


@pytest.fixture
def link(archive: Path) -> Path:
    """A link (an .onnx file) to `archive`, in the same directory."""
    path = archive.with_name("ein Verweis.onnx")
    onnxarchive.link(archive, path)
    return path


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A web server without files."""
    with serving({}) as server:
        yield server


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A server of S3."""
    with object_servers.s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server) -> S3Server:
    """A server of S3 with an empty bucket."""
    s3_server.empty()
    return s3_server


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """Headless Chromium that reaches this machine only."""
    yield from chromium(tmp_path / "profile")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of its own for those who wait for a lock: they are done at once."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    waiting = SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(locking, "time", waiting)
    return clock


@pytest.fixture(autouse=True)
def _unknown_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each test find out whether a device has clones, by making one."""
    monkeypatch.setattr(clones_and_sync, "devices_without_clones", set())
    monkeypatch.setattr(clones_and_sync, "has_clones", lambda source: True)


@pytest.fixture(params=["in its place", "on a clone", "with copy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One of three ways to write an edited archive: in place, on a clone, or as a copy.

    Gives the arguments of an edit for this way."""
    clone = copying_clone if request.param == "on a clone" else no_clone
    monkeypatch.setattr(clones_and_sync, "clone", clone)
    return {"copy": request.param == "with copy"}


@pytest.fixture(params=[no_clone, copying_clone])
def clones_or_none(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits without clones, and with a clone of each file."""
    monkeypatch.setattr(clones_and_sync, "clone", request.param)


@pytest.fixture
def no_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits files in place, as on a file system without clones."""
    monkeypatch.setattr(clones_and_sync, "clone", no_clone)


@pytest.fixture
def own_path() -> Iterator[Path]:
    """A path in a directory that belongs to `nobody` (to the user, if not root)."""
    if not hasattr(os, "geteuid"):
        pytest.skip("permissions are POSIX's")
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as folder:  # pytest's own directory is closed to `nobody`
        if not os.geteuid():
            os.chown(folder, 65534, 65534)
        yield Path(folder, NAME)


@pytest.fixture
def nobody(own_path: Path) -> Iterator[None]:
    """Runs the test as `nobody` if the user is root, who has all permissions."""
    with contextlib.nullcontext() if os.geteuid() else user(65534):
        yield


@pytest.fixture(scope="module", params=SHARING)
def disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A directory on each file system that lets files share blocks."""
    with new_disk(request.param, tmp_path_factory.mktemp(request.param)) as directory:
        yield directory


@pytest.fixture(params=["no cache", "cache"])
def access(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options for a remote archive, without a cache and with one."""
    return {} if request.param == "no cache" else {"cache": tmp_path / "cache"}
