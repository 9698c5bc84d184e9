"""Commands that make directories, while another user exchanges the directories' names for links."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import pytest
from models import entry_of, flip_byte, runnable_model
from processes import started
from written import contents

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.errors import ArchiveError
from onnxarchive.interop import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc leads to open directories")

ASSETS = {f"folder {number % 3}/{number}": bytes([number]) * 99 for number in range(30)}
# Files of the victim with the names of those that are made.
THEIRS = (
    *("__MODEL_PROTO", "layer_0_weight", "y.npy", "0.onnx", "0.data", "model.onnx"),
    *("archive.onnxa", "assets/folder 0/0", "other"),
)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A directory of the victim, in which nothing may change."""
    directory = tmp_path / "theirs"
    for name in THEIRS:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"of the victim")
    return directory


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive in a shared folder, in which directories are made, too."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    onnxarchive.save(runnable_model(), shared / "m.onnxa", size_threshold=0, assets=ASSETS)
    return shared / "m.onnxa"


@pytest.fixture
def faulty(archive: Path) -> Path:
    """An archive whose last asset is damaged, so that it cannot be extracted."""
    with onnxarchive.open(archive) as opened:
        name = [name for name in opened.entries if name.startswith("assets/")][-1]
    flip_byte(archive, entry_of(archive, name).data_offset)
    return archive


def exchange(directory: Path, other: Path) -> int:
    """Puts a link in place of each hidden directory; returns their number."""
    found = [path for path in directory.glob(".*.tmp") if path.is_dir() and not path.is_symlink()]
    for number, path in enumerate(found):
        path.rename(path.with_name(f"moved-{number}"))
        path.symlink_to(other)
    return len(found)


@contextlib.contextmanager
def before_the_call(owner: Any, name: str, act: Callable[[], object]) -> Iterator[None]:
    """Acts before each call of a function."""
    function = getattr(owner, name)

    def acting(*arguments: Any, **options: Any) -> Any:
        act()
        return function(*arguments, **options)

    with patch.object(owner, name, acting):
        yield


@pytest.mark.parametrize("fails", [False, True])
def test_extract_touches_nothing_where_a_link_leads(
    archive: Path, theirs: Path, request: pytest.FixtureRequest, fails: bool
) -> None:
    if fails:
        request.getfixturevalue("faulty")
    before, exchanged = contents(theirs), []
    with pytest.raises(ArchiveError):
        onnxarchive.extract(
            archive,
            archive.parent / "out",
            progress=lambda *_: exchanged.append(exchange(archive.parent, theirs)),
        )
    assert sum(exchanged) == 1
    assert contents(theirs) == before
    assert not (archive.parent / "out").exists()


def test_run_touches_nothing_where_a_link_leads(
    archive: Path, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    before, exchanged = contents(theirs), []
    out = archive.parent / "out"
    with before_the_call(run, "run", lambda: exchanged.append(exchange(archive.parent, theirs))):
        assert main(["run", str(archive), "--output-dir", str(out)]) != 0
    assert exchanged == [1]
    assert "another process has renamed or replaced the new directory" in capsys.readouterr().err
    assert contents(theirs) == before
    assert not out.exists()


def test_prepack_touches_nothing_where_a_link_leads(archive: Path, theirs: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    before, exchanged = contents(theirs), []
    with before_the_call(
        ort, "InferenceSession", lambda: exchanged.append(exchange(archive.parent, theirs))
    ):
        onnxarchive.prepack(archive)
    assert exchanged == [1]
    assert contents(theirs) == before
    with onnxarchive.open(archive) as opened:
        assert any("prepacked" in name for name in opened.entries)


def test_check_model_touches_nothing_where_a_link_leads(
    archive: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(archive.parent))
    before, exchanged = contents(theirs), []
    with before_the_call(
        onnx.checker, "check_model", lambda: exchanged.append(exchange(archive.parent, theirs))
    ):
        assert onnxarchive.check_model(archive) == []
    assert exchanged == [1]
    assert contents(theirs) == before


# An adversary: exchanges names as fast as it can, and puts them back, until its input ends.

ADVERSARY = """
    import os, select, sys

    shared, other, counter = sys.argv[1:]
    count = 0
    moved = os.path.join(shared, "moved")
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for name in os.listdir(shared):
            if not (name.startswith(".") and name.endswith(".tmp")):
                continue
            path = os.path.join(shared, name)
            try:
                if os.path.isdir(path) and not os.path.islink(path):
                    os.rename(path, moved)
                    os.symlink(other, path)
                    count += 1
                    with open(counter, "ab") as file:
                        file.write(b".")
                    if count % 7:
                        os.unlink(path)
                        os.rename(moved, path)
            except OSError:
                pass
"""


def extract(archive: Path) -> None:
    onnxarchive.extract(archive, archive.parent / "out")


def run_with_output(archive: Path) -> None:
    main(["run", str(archive), "--output-dir", str(archive.parent / "out")])


WAYS: dict[str, Callable[[Path], object]] = {
    "extract": extract,
    "run": run_with_output,
    "prepack": onnxarchive.prepack,
}


@pytest.mark.sweep
@pytest.mark.parametrize("way", [*WAYS, "failing extract"])
def test_an_adversary_gains_nothing_from_a_thousand_exchanges(
    archive: Path, theirs: Path, request: pytest.FixtureRequest, way: str
) -> None:
    if way in ("run", "prepack"):
        pytest.importorskip("onnxruntime")
    if way == "failing extract":
        request.getfixturevalue("faulty")
    act, shared, before = WAYS.get(way, extract), archive.parent, contents(theirs)
    out, counter = shared / "out", shared.with_name("counter")
    counter.touch()
    expected: set[str] = set()
    if way in ("extract", "run"):
        act(archive)
        expected = set(contents(out))
    command = [sys.executable, "-c", textwrap.dedent(ADVERSARY), shared, theirs, counter]
    with started(command, stdin=-1) as adversary:
        assert adversary.stdout is not None
        assert adversary.stdout.readline() == "ready\n"
        while counter.stat().st_size < 1000:
            assert adversary.poll() is None
            remove_all_but(archive)
            with contextlib.suppress(ArchiveError, OSError):
                act(archive)
            assert contents(theirs) == before
            if out.exists() and not out.is_symlink():
                assert set(contents(out)) == expected
        _, error = adversary.communicate("")
    assert error == ""


def remove_all_but(archive: Path) -> None:
    """Empties the shared folder, while the adversary may still rename what is in it."""
    for path in archive.parent.iterdir():
        if path != archive:
            with contextlib.suppress(OSError):
                remove_tree(path)


def remove_tree(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            remove_tree(inner)
        path.rmdir()
    else:
        path.unlink()
