"""Temporary files of killed processes: which of them a writer removes, and which it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from limits import user

from onnxarchive.editing.recover import recover
from onnxarchive.files import clones_and_sync
from onnxarchive.files.clones_and_sync import is_local
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.replacement import Replacement

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's table of mounts")

KILLED_WRITERS = """
import os, signal, sys
from onnxarchive.files.replacement import Replacement

for _ in range(50):
    if os.fork() == 0:
        replacement = Replacement(sys.argv[1])
        replacement.writer.write(b"begun")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.wait()[1])
"""
LEFT = ".target.onnxarchive-0.tmp"


@linux
def test_fifty_killed_writers_leave_one_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "target"
    subprocess.run([sys.executable, "-c", KILLED_WRITERS, target], check=True)
    assert os.listdir(tmp_path) == [LEFT]
    write(target)
    assert os.listdir(tmp_path) == ["target"]


def write(target: Path) -> None:
    with Replacement(target) as replacement:
        replacement.writer.write(b"new")
        replacement.commit()


def on_another_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the directory one that other machines may share."""
    monkeypatch.setattr(clones_and_sync, "_LOCAL_TYPES", frozenset({"xfs of another machine"}))


def without_a_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the system one that does not tell where a file lies."""

    def missing(_: Path) -> bytes:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", missing)


def of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the temporary file another user's."""
    other = os.stat(folder).st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def through_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the temporary file a link to a file of the user."""
    (folder / LEFT).rename(folder / "kept")
    (folder / LEFT).symlink_to("kept")


def a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the temporary file a directory."""
    (folder / LEFT).unlink()
    (folder / LEFT).mkdir()


@linux
@pytest.mark.parametrize(
    "change", [on_another_machine, without_a_table, of_another_user, through_a_link, a_directory]
)
def test_a_writer_does_not_remove_hidden_files_that_may_belong_to_others(
    tmp_path: Path,
    change: Callable[[Path, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / LEFT).write_bytes(b"of another process")
    change(tmp_path, monkeypatch)
    before = os.listdir(tmp_path)
    write(tmp_path / "target")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "target"])
    assert (tmp_path / "target").read_bytes() == b"new"


@linux
def test_a_writer_does_not_remove_the_temporary_file_of_another_writer(tmp_path: Path) -> None:
    with Replacement(tmp_path / "target") as first, Replacement(tmp_path / "target") as second:
        assert sorted(os.listdir(tmp_path)) == [LEFT, ".target.onnxarchive-1.tmp"]
        second.writer.write(b"second")
        second.commit()
        first.writer.write(b"first")
        first.commit()
    assert os.listdir(tmp_path) == ["target"]
    assert (tmp_path / "target").read_bytes() == b"first"


@linux
def test_a_closed_writer_does_not_remove_a_file_that_took_its_temporary_name(
    tmp_path: Path,
) -> None:
    first = Replacement(tmp_path / "target")
    (tmp_path / LEFT).unlink()
    with Replacement(tmp_path / "target") as second:
        first.close()
        second.writer.write(b"second")
        second.commit()
    assert os.listdir(tmp_path) == ["target"]


@linux
def test_the_types_of_file_systems_are_read_from_the_table_of_mounts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, expected in ((tmp_path / "file", None), (Path("/proc/self/status"), False)):
        with MappedFile(path) as file:
            done = subprocess.run(
                ["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True
            )
            known = done.stdout.strip() in ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs")
            assert is_local(file) is (known if expected is None else expected)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs two users")
def test_root_recovers_what_another_user_left(own_path: Path) -> None:
    left = own_path.with_name(f".{own_path.name}.onnxarchive-0.tmp")
    with user(65534):
        left.write_bytes(b"begun")
    write(own_path.with_name("other"))
    assert recover(own_path).removed == (str(left.resolve()),)
