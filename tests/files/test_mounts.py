"""Archives that are mount points, or lie on mounts that may not be written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import edits
import pytest
from edits import (
    EDITS,
    IN_PLACE,
    NAME,
    changed,
    documented,
    new_model,
    removed,
    replace_model,
    weights,
)
from interruptions import interrupt
from mounts import mounted
from public_calls import WRITES
from written import saved

import onnxarchive

pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(sys.platform != "linux", reason="bind mounts are Linux's"),
]

# What writes a whole file, which then has to get the archive's name.
WHOLE: dict[str, Callable[[Path], object]] = {
    **{
        name: lambda path, write=write: write(path.with_name("other"), path)  # type: ignore[misc]
        for name, write in WRITES.items()
        if name in ("save", "convert", "Writer", "transform", "infer_shapes")
    },
    "compact": lambda path: replace_model(path, weights(1), compact=True),
    "replace_tensor": EDITS["tensors"],
    **{f"{name} with copy": partial(edit, copy=True) for name, edit in EDITS.items()},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An archive in a directory that is mounted elsewhere."""
    folder = tmp_path / "source"
    folder.mkdir()
    onnxarchive.save(weights(2), folder / NAME)
    return folder / NAME


def mounted_file(source: Path, options: str) -> Iterator[Path]:
    path = source.parent.with_name("folder") / "mounted.onnxa"
    path.parent.mkdir()
    path.touch()
    (path.parent / "other").write_bytes(source.read_bytes())
    with mounted(source, path, options):
        yield path


@pytest.fixture
def mount_point(source: Path) -> Iterator[Path]:
    """The archive, as a file that is itself a mount point."""
    yield from mounted_file(source, "bind")


@pytest.fixture
def read_only_mount_point(source: Path) -> Iterator[Path]:
    yield from mounted_file(source, "bind,ro")


@pytest.fixture
def on_read_only_mount(source: Path) -> Iterator[Path]:
    """The archive in a directory that is mounted for reading only."""
    folder = source.parent.with_name("folder")
    folder.mkdir()
    (source.parent / "other").write_bytes(source.read_bytes())
    with mounted(source.parent, folder, "bind,ro"):
        yield folder / source.name


def require_both(path: Path, source: Path, expected: bytes) -> None:
    """That an archive and where it is mounted from have these bytes, and nothing is left."""
    assert path.read_bytes() == source.read_bytes() == expected
    assert onnxarchive.check(path, full=True) == []
    assert sorted(os.listdir(path.parent)) == sorted(["other", path.name])
    assert set(os.listdir(source.parent)) <= {"other", source.name}


@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("edit", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_a_file_that_is_a_mount_point_is_edited_in_place(
    mount_point: Path, source: Path, edit: Callable[..., None]
) -> None:
    inode = source.stat().st_ino
    edit(mount_point)
    require_both(mount_point, source, saved(new_model()))
    edits.document(mount_point, "newer")
    require_both(mount_point, source, saved(changed(weights(2), documented("newer"))))
    assert source.stat().st_ino == inode


@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("edit", WHOLE.values(), ids=WHOLE.keys())
def test_a_file_that_is_a_mount_point_is_not_replaced_and_nothing_is_lost(
    mount_point: Path, source: Path, edit: Callable[[Path], object]
) -> None:
    before = source.read_bytes()
    with pytest.raises(OSError, match="is a mount point and cannot be replaced") as caught:
        edit(mount_point)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(mount_point))
    require_both(mount_point, source, before)
    replace_model(mount_point, new_model(), timeout=0)  # nothing is locked


def test_an_interrupted_edit_of_a_mount_point_is_rolled_back_from_either_side(
    mount_point: Path, source: Path
) -> None:
    before = source.read_bytes()
    interrupted = interrupt(mount_point, edits.document).states["new end begun"]
    for path in (mount_point, source):
        mount_point.write_bytes(interrupted)
        for unfinished in (mount_point, source):
            with pytest.raises(onnxarchive.UnfinishedEditError):
                onnxarchive.open(unfinished)
        assert onnxarchive.recover(path).is_rolled_back
        require_both(mount_point, source, before)


@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("mount", ["read_only_mount_point", "on_read_only_mount"])
def test_a_read_only_mount_is_read_and_every_edit_is_refused_by_name(
    mount: str, source: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(mount)
    before = source.read_bytes()
    with onnxarchive.open(path) as archive:
        assert len(archive.tensors) == 2
    for edit in [*EDITS.values(), *WHOLE.values()]:
        with pytest.raises(OSError, match=r"\.onnxa") as caught:
            edit(path)
        assert caught.value.errno in (errno.EROFS, errno.EBUSY)
        assert caught.value.filename == str(path)
        require_both(path, source, before)
    replace_model(source, changed(weights(2), removed(0)), compact=True)  # where it may be


def test_an_interrupted_edit_on_a_read_only_mount_is_left_and_named(source: Path) -> None:
    unfinished = interrupt(source, edits.document).states["new end begun"]
    source.write_bytes(unfinished)
    folder = source.parent.with_name("folder")
    folder.mkdir()
    path = folder / source.name
    with mounted(source.parent, folder, "bind,ro"):
        calls: list[Callable[[], object]] = [
            lambda: onnxarchive.recover(path),
            lambda: edits.document(path),
            lambda: replace_model(path, new_model()),
        ]
        for call in calls:
            with pytest.raises(OSError, match=r"\.onnxa") as caught:
                call()
            assert (caught.value.errno, caught.value.filename) == (errno.EROFS, str(path))
            assert source.read_bytes() == unfinished
    assert onnxarchive.recover(source).is_rolled_back


def test_an_archive_is_extracted_into_an_empty_mount_point(tmp_path: Path) -> None:
    archive, empty = tmp_path / "a.onnxa", tmp_path / "empty"
    onnxarchive.save(weights(3), archive)
    empty.mkdir()
    with mounted("tmpfs", empty, "size=1m", "-t", "tmpfs"):
        onnxarchive.extract(archive, empty)
        with onnxarchive.open(archive) as opened:
            assert sorted(os.listdir(empty)) == sorted(opened.entries)


def test_a_file_system_without_space_is_reported_with_the_file_that_was_written(
    tmp_path: Path,
) -> None:
    archive, full = tmp_path / "a.onnxa", tmp_path / "full"
    onnxarchive.save(weights(100), archive)
    full.mkdir()
    with mounted("tmpfs", full, "size=64k", "-t", "tmpfs"):
        writing: dict[str, Callable[[Path], object]] = {
            "a.onnxa": lambda path: onnxarchive.convert(archive, path),
            "b.onnxa": lambda path: onnxarchive.save(weights(100), path),
            "c.onnx": lambda path: onnxarchive.export(archive, path),
            "d.data": lambda path: onnxarchive.export(
                archive, path.with_name("d.onnx"), external_data=path.name
            ),
        }
        for name, write in writing.items():
            with pytest.raises(OSError, match="No space left on device") as caught:
                write(full / name)
            assert caught.value.filename == str(full / name)
        with pytest.raises(OSError, match="No space left on device") as caught:
            onnxarchive.extract(archive, full / "e")
        assert caught.value.filename == str(full / "e")  # its size is known before the first file
        assert list(full.iterdir()) == []


@pytest.mark.parametrize("is_model", [False, True], ids=["data", "model"])
def test_an_export_to_a_model_or_data_that_is_a_mount_point_changes_neither(
    source: Path, tmp_path: Path, is_model: bool
) -> None:
    folder = tmp_path / "exported"
    folder.mkdir()
    target = folder / "m.onnx"
    onnxarchive.export(source, target, external_data="m.data")
    onnxarchive.save(weights(3), source)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    point = target if is_model else target.with_name("m.data")
    copy = tmp_path / "copy"
    copy.write_bytes(point.read_bytes())
    with mounted(copy, point, "bind"):
        with pytest.raises(OSError, match="is a mount point and cannot be replaced") as caught:
            onnxarchive.export(source, target, external_data="m.data")
        assert caught.value.filename == str(point)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
