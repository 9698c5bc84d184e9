"""Changes on file systems that let files share blocks: a clone takes the archive's name.

XFS and Btrfs are made in sparse files and mounted, which root may do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from edits import refused, replace_model, replace_tensor
from models import external, model_of, raw_tensor
from mounts import SHARING, attempt, new_disk
from onnx import TensorProto
from processes import completed

import onnxarchive
from onnxarchive.editing.recover import recover
from onnxarchive.errors import ArchiveError
from onnxarchive.files import clones_and_sync, undo
from onnxarchive.files.clones_and_sync import clone
from onnxarchive.files.local_file import MappedFile

MIB = 1 << 20
WEIGHTS = 16  # of 4 MiB each
ELEMENTS = MIB

pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(sys.platform != "linux", reason="clones are Linux's"),
]


def model(doc_string: str = "old") -> onnx.ModelProto:
    """A model with its weights in the archive."""
    weights = (
        TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[ELEMENTS])
        for i in range(WEIGHTS)
    )
    made = model_of(*(external(weight, weight.name) for weight in weights))
    made.doc_string = doc_string
    return made


def write(path: Path) -> Path:
    """Writes an archive of 64 MiB."""
    random = np.random.default_rng(0)
    with onnxarchive.Writer(path) as writer:
        for index in range(WEIGHTS):
            writer.add(f"w{index}", random.random(ELEMENTS, np.float32))
        writer.finish(model())
    return path


@pytest.fixture(scope="module")
def original(disk: Path) -> Path:
    """The archive that tests take clones of."""
    return write(disk / "original")


def cloned(source: Path, path: Path) -> Path:
    with MappedFile(source) as file, open(path, "xb") as target:
        assert clone(file, target.fileno())
    return path


@pytest.fixture
def archive(original: Path) -> Iterator[Path]:
    directory = original.parent / "directory"
    directory.mkdir()
    yield cloned(original, directory / "model.onnxa")
    shutil.rmtree(directory)


def free(directory: Path) -> int:
    """Bytes that are free when all is written."""
    assert attempt(["sync", "-f", str(directory)]) is None
    found = os.statvfs(directory)
    return found.f_bfree * found.f_frsize


def shared_nbytes(path: Path) -> int:
    """How many bytes of a file lie in extents that others have, too."""
    done = completed(["filefrag", "-s", "-v", "-b1", str(path)], status=0)
    lines = [line for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()]
    assert lines
    return sum(int(line.split(":")[3]) for line in lines if "shared" in line)


ARRAY = np.random.default_rng(1).random(ELEMENTS, np.float32)


def added() -> onnx.ModelProto:
    made = model("new")
    made.graph.initializer.append(raw_tensor("wz", dims=(2000,), seed=9))
    return made


CHANGES: dict[str, Callable[..., None]] = {
    "a larger model": partial(replace_model, model=model("new" + "x" * 100_000)),
    "a smaller model": partial(replace_model, model=model("")),
    "a new tensor": partial(replace_model, model=added()),
    "another tensor": partial(replace_tensor, name="w5", array=ARRAY),
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())


@pytest.mark.parametrize("copy", [False, True])
@changes
def test_a_change_makes_a_new_file_that_shares_its_blocks_with_the_old_one(
    archive: Path, change: Callable[..., None], copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cloned(archive, archive.with_name("expected"))
    with patch.object(clones_and_sync, "clone", return_value=False):
        change(expected)
    archive.chmod(0o640)
    before = archive.stat()
    content = archive.read_bytes()
    free_before = free(archive.parent)
    monkeypatch.delattr(undo, "change_end")  # no undo log is needed
    with onnxarchive.open(archive) as opened:
        entry, view = opened.entries["w5"], opened.read("w5")
        change(archive, copy=copy)
        after = archive.stat()
        assert after.st_ino != before.st_ino
        assert stat.S_IMODE(after.st_mode) == 0o640
        old = content[entry.data_offset : entry.data_offset + entry.nbytes]
        assert bytes(view) == old
        view.release()
    assert free_before - free(archive.parent) < 6 * MIB
    assert archive.read_bytes() == expected.read_bytes()
    assert archive.read_bytes() != content
    assert shared_nbytes(archive) > 55 * MIB
    assert sorted(os.listdir(archive.parent)) == ["expected", "model.onnxa"]
    assert list(onnxarchive.check(archive, full=True)) == []


@changes
def test_an_edit_of_a_copy_leaves_other_names_of_the_file_unchanged(
    archive: Path, change: Callable[..., None]
) -> None:
    other = archive.with_name("other")
    os.link(archive, other)
    content = archive.read_bytes()
    inode = archive.stat().st_ino
    with refused(archive, ValueError, r"2 names \(hard links\)"):
        change(archive)
    change(archive, copy=True)
    assert other.read_bytes() == content
    assert (other.stat().st_ino, other.stat().st_nlink) == (inode, 1)
    assert archive.read_bytes() != content
    assert shared_nbytes(other) > 55 * MIB
    assert sorted(os.listdir(archive.parent)) == ["model.onnxa", "other"]


@pytest.mark.parametrize("kind", SHARING)
def test_a_disk_that_is_full_leaves_the_archive_and_nothing_else(kind: str, tmp_path: Path) -> None:
    # On a disk of its own: XFS frees the blocks of removed files later, such as while it is full.
    with new_disk(kind, tmp_path) as disk:
        archive = write(disk / "model.onnxa")
        with filled(disk / "filling"), refused(archive, (OSError, ArchiveError)):
            replace_tensor(archive, "w5", ARRAY)
        assert recover(archive).removed == ()
        replace_tensor(archive, "w5", ARRAY)
        assert list(onnxarchive.check(archive, full=True)) == []


@contextlib.contextmanager
def filled(path: Path) -> Iterator[None]:
    """A disk that is full: a file has all that was free, and nothing is written."""
    size, step = 0, 16 * MIB
    with open(path, "xb") as file:
        free(path.parent)
        while step >= 4096:
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 2
        yield
        file.truncate(0)  # frees the blocks at once, unlike a removal
    path.unlink()
    free(path.parent)
