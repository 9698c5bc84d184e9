"""Directories that killed processes leave, and their recovery."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

if not hasattr(os, "fork"):
    pytest.skip("a fork is killed", allow_module_level=True)

import onnxarchive
from onnxarchive.errors import ArchiveError
from onnxarchive.files import locking
from onnxarchive.files.new_directory import new_directory, temporary_directory


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(act: Callable[[], object]) -> None:
    """Runs a function in a process that it kills."""
    process = os.fork()
    if not process:
        try:
            act()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(process, 0)[1])


def begin(target: Path) -> None:
    with new_directory(target) as made:
        with made.make_file("folder/file") as file:
            file.write(0, b"begun")
        die()


def left_below(folder: Path) -> list[str]:
    return sorted(it.name for it in folder.rglob("*.tmp"))


@pytest.mark.parametrize("is_there", [False, True])
def test_the_directory_of_a_killed_extraction_is_removed(
    archive: Path, tmp_path: Path, is_there: bool
) -> None:
    folder = tmp_path / "folder"
    target = folder / "out"
    folder.mkdir()
    if is_there:
        target.mkdir()
    killed(lambda: onnxarchive.extract(archive, target, progress=die))
    (left,) = left_below(folder)
    if is_there:
        with pytest.raises(FileExistsError, match=f"left {re.escape(left)}.*onnxarchive recover"):
            onnxarchive.extract(archive, target)
    recovery = onnxarchive.recover(target)
    assert [os.path.basename(path) for path in recovery.removed] == [left]
    assert left_below(folder) == []
    assert target.exists() == is_there
    onnxarchive.extract(archive, target)
    assert os.listdir(folder) == ["out"]


def test_the_directory_of_a_killed_packing_of_weights_is_removed(archive: Path) -> None:
    before = archive.read_bytes()

    def pack() -> None:
        with temporary_directory(str(archive)) as made:
            with made.make_file("0.data") as file:
                file.write(0, b"packed")
            die()

    killed(pack)
    assert len(onnxarchive.recover(archive).removed) == 1
    assert os.listdir(archive.parent) == [archive.name]
    assert archive.read_bytes() == before


def test_the_target_of_a_link_in_a_leftover_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    killed(lambda: begin(tmp_path / "out"))
    (left,) = tmp_path.glob(".*.tmp")
    (left / "folder" / "link").symlink_to(tmp_path / "kept")
    (left / "file").symlink_to(tmp_path / "kept" / "file")
    assert onnxarchive.recover(tmp_path / "out").removed == (str(left.resolve()),)
    assert (tmp_path / "kept" / "file").read_bytes() == b"kept"
    assert os.listdir(tmp_path) == ["kept"]


def test_a_link_with_the_name_of_a_leftover_directory_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / ".out.onnxarchive-1-1.tmp").symlink_to("kept")
    with pytest.raises(FileNotFoundError):
        onnxarchive.recover(tmp_path / "out")
    assert len(os.listdir(tmp_path)) == 2


def test_a_temporary_directory_in_use_stays(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out"):
        (left,) = os.listdir(tmp_path)
        with pytest.raises(FileNotFoundError):
            onnxarchive.recover(tmp_path / "out")
        assert os.listdir(tmp_path) == [left]


def test_without_locks_a_temporary_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(lambda: begin(tmp_path / "out"))
    monkeypatch.setattr(locking, "keep_exclusive", lambda *_, **options: False)
    with pytest.raises(FileNotFoundError):
        onnxarchive.recover(tmp_path / "out")
    assert len(left_below(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs two users")
def test_a_temporary_directory_of_another_user_stays(tmp_path: Path) -> None:
    killed(lambda: begin(tmp_path / "out"))
    (left,) = tmp_path.glob(".*.tmp")
    os.chown(left, 65534, -1)
    with pytest.raises(FileNotFoundError):
        onnxarchive.recover(tmp_path / "out")
    assert (left / "folder" / "file").exists()


def test_recover_refuses_a_directory_without_leftovers(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="expected an ONNX archive, found a directory"):
        onnxarchive.recover(tmp_path)


def test_a_partial_download_is_named_and_removed_only_if_asked(archive: Path) -> None:
    partial = archive.with_name(f".{archive.name}.download")
    partial.write_bytes(b"begun")
    found = onnxarchive.recover(archive)
    assert (found.removed, found.downloads) == ((), (str(partial.resolve()),))
    assert partial.exists()
    found = onnxarchive.recover(archive, downloads=True)
    assert (found.removed, found.downloads) == ((str(partial.resolve()),), ())
    assert os.listdir(archive.parent) == [archive.name]


def test_a_download_in_progress_stays(tmp_path: Path) -> None:
    from onnxarchive.files.replacement import Replacement

    with Replacement(tmp_path / "m.onnxa", resumes=True) as replacement:
        replacement.writer.write(b"arrived")
        found = onnxarchive.recover(tmp_path / "m.onnxa", downloads=True)
        assert (found.removed, len(found.downloads)) == ((), 1)


def test_the_files_of_a_killed_export_are_removed(archive: Path, tmp_path: Path) -> None:
    target = tmp_path / "folder" / "m.onnx"
    target.parent.mkdir()
    onnxarchive.export(archive, target)
    content = target.read_bytes()
    left = target.with_name(".m.onnx.onnxarchive-0.tmp")
    left.write_bytes(content[:1000])
    assert onnxarchive.recover(target).removed == (str(left.resolve()),)
    assert os.listdir(target.parent) == [target.name]
    assert target.read_bytes() == content
