"""New directories: complete or absent; what others put in their place is untouched."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import limited, umask, user
from written import contents

from onnxarchive.errors import ArchiveError
from onnxarchive.files import new_directory as module
from onnxarchive.files.new_directory import (
    NewDirectory,
    new_directory,
    remove_leftover,
    temporary_directory,
)

if sys.platform != "win32":
    import resource

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX's links and permissions")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc leads to open directories")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root becomes other users"
)


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems with descriptors of directories, and without, as Windows."""
    if not request.param:
        monkeypatch.setattr(module, "HAS_DIR_FD", False)


both_ways = pytest.mark.usefixtures("_ways")


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def make_file(directory: NewDirectory, path: str = "file") -> None:
    with directory.make_file(path) as file:
        file.write(0, b"new")


@both_ways
def test_a_new_directory_is_there_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with new_directory(target) as made:
        make_file(made)
        assert not target.exists()
    assert contents(tmp_path) == {"target/file": b"new"}


@both_ways
def test_an_empty_directory_is_filled_and_stays_the_same_directory(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    before = target.stat().st_ino
    with new_directory(target) as made:
        make_file(made)
        make_file(made, "folder/deep/file")
        assert names(tmp_path) == ["target"]
        assert names(target) == [Path(made.path).name]
    assert names(tmp_path) == ["target"]
    assert contents(target) == {"file": b"new", "folder/deep/file": b"new"}
    assert target.stat().st_ino == before


@both_ways
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EPERM, "No"), KeyboardInterrupt()])
def test_an_empty_directory_is_empty_again_if_a_file_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException
) -> None:
    rename = os.rename
    moved: list[str] = []

    def fail(source: str, target: str, **directories: Any) -> None:
        moved.append(target)
        if len(moved) == count + 1:
            raise error
        rename(source, target, **directories)

    with pytest.raises(type(error)) as caught, new_directory(tmp_path) as made:  # noqa: PT012
        for name in "abc":
            make_file(made, name)
        monkeypatch.setattr(os, "rename", fail)
    assert len(moved) == 2 * count + 1  # and those that were moved were moved back
    assert names(tmp_path) == []
    if isinstance(caught.value, OSError):
        assert caught.value.filename == str(tmp_path)
        assert "cannot be renamed into place: No; it is unchanged" in str(caught.value)


@both_ways
@pytest.mark.parametrize(
    ("is_there", "message"), [(False, "not empty"), (True, "the directory is no longer empty")]
)
def test_a_directory_that_another_process_fills_meanwhile_is_left_to_it(
    tmp_path: Path, is_there: bool, message: str
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with pytest.raises(OSError, match=message), new_directory(target) as made:  # noqa: PT012
        make_file(made)
        target.mkdir(exist_ok=True)
        (target / "file").write_bytes(b"of another")
    assert contents(tmp_path) == {"target/file": b"of another"}


@posix
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("free", range(8))
def test_without_descriptors_for_its_files_no_directory_is_left(
    tmp_path: Path, is_there: bool, free: int
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    with contextlib.ExitStack() as stack:
        stack.enter_context(limited(resource.RLIMIT_NOFILE, 256))
        spare = [stack.enter_context(open(os.devnull)) for _ in range(free)]
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        for file in spare:
            file.close()
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught:
            fill_without_end(target)
    assert str(caught.value.filename).startswith(str(target))
    assert names(tmp_path) == ["target"] * is_there
    assert not is_there or names(target) == []


def fill_without_end(target: Path) -> None:
    with contextlib.ExitStack() as stack, new_directory(target) as made:
        for number in range(300):
            stack.enter_context(made.make_file(f"folder/deep/{number}"))


@posix
def test_a_link_to_an_empty_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with new_directory(tmp_path / "link") as made:
        make_file(made)
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "there") == ["file"]


# Permissions


@posix
@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
@pytest.mark.parametrize("parent", [0o700, 0o777, 0o1777, 0o2775])
def test_only_its_user_may_fill_a_directory_which_then_gets_the_usual_permissions(
    tmp_path: Path, mask: int, parent: int
) -> None:
    tmp_path.chmod(parent)
    with umask(mask):
        (tmp_path / "any").mkdir()
        with new_directory(tmp_path / "target") as made:
            make_file(made, "folder/file")
            assert Path(made.path).stat().st_mode & 0o022 == 0
            (tmp_path / "any" / "folder").mkdir()
            (tmp_path / "any" / "folder" / "file").touch()
    for name in ("", "folder", "folder/file"):
        found = (tmp_path / "target" / name).stat().st_mode
        assert found == (tmp_path / "any" / name).stat().st_mode


@root
@pytest.mark.parametrize("mask", [0, 0o002])
def test_others_cannot_move_their_directories_to_folders_of_an_unfinished_one(
    tmp_path: Path, mask: int
) -> None:
    for above in (tmp_path, *tmp_path.parents):
        above.chmod(above.stat().st_mode | 0o055)
    tmp_path.chmod(0o2777)
    os.chown(tmp_path, -1, 12345)  # the group of the other user
    shared = tmp_path / "shared"
    with umask(0):
        shared.mkdir()
    (shared / "own").mkdir(0o755)
    (shared / "own" / "kept").touch()

    def fill() -> None:
        with umask(mask), new_directory(tmp_path / "target") as made:
            make_file(made, "folder/file")
            with user(12345), pytest.raises(PermissionError):
                shared.rename(Path(made.path, "folder", "shared"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert (shared / "own" / "kept").exists()
    assert names(tmp_path) == ["shared"]


@root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2777])
def test_another_user_fills_directories_in_a_shared_folder(tmp_path: Path, mode: int) -> None:
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o055 != 0o055 and above.owner() == "root":
            above.chmod(0o755)
    tmp_path.chmod(mode)
    with user(12345), new_directory(tmp_path / "target") as made:
        make_file(made, "folder/file")
    assert contents(tmp_path) == {"target/folder/file": b"new"}
    assert (tmp_path / "target").stat().st_uid == 12345


@posix
def test_a_server_may_give_the_directory_and_its_files_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with new_directory(tmp_path / "target") as made:
        make_file(made)
    assert contents(tmp_path) == {"target/file": b"new"}


# Names that another process exchanges


def exchange(path: str, other: Path | None) -> None:
    """Renames a directory to `moved`, and puts a link to another one in its place, or nothing."""
    os.rename(path, os.path.join(os.path.dirname(path), "moved"))
    if other is not None:
        os.symlink(other, path)


@pytest.fixture
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with files that nobody may touch."""
    directory = tmp_path_factory.mktemp("theirs")
    for name in ("file", "other", "folder/file"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(b"of another")
    return directory


@posix
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_target_of_a_link_in_place_of_the_directory_is_untouched(
    tmp_path: Path, theirs: Path, is_there: bool, fails: bool
) -> None:
    target = tmp_path / "target"
    if is_there:
        target.mkdir()
    before = contents(theirs)
    expected = KeyError if fails else ArchiveError
    with pytest.raises(expected) as caught, new_directory(target) as made:  # noqa: PT012
        make_file(made)
        exchange(made.path, theirs)
        make_file(made, "folder/file")
        if fails:
            raise KeyError
    assert contents(theirs) == before
    assert Path(made.path).is_symlink()
    assert contents(tmp_path) == {}  # what was written is gone, wherever it was moved
    if isinstance(caught.value, ArchiveError):
        assert caught.value.path == str(target)
        assert "another process has renamed or replaced the new directory" in str(caught.value)


@both_ways
@pytest.mark.parametrize("fails", [False, True])
def test_another_directory_that_took_the_name_stays(
    tmp_path: Path, theirs: Path, fails: bool
) -> None:
    with pytest.raises((ArchiveError, KeyError)), new_directory(tmp_path / "t") as made:  # noqa: PT012
        exchange(made.path, None)
        theirs.rename(made.path)
        if fails:
            raise KeyError
    names = {"file", "other", "folder/file"}
    left = dict.fromkeys((f"{os.path.basename(made.path)}/{name}" for name in names), b"of another")
    assert contents(tmp_path) == left


@posix
def test_a_directory_that_is_exchanged_while_it_is_renamed_is_an_error(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(theirs)
    with (  # noqa: PT012
        pytest.raises(ArchiveError, match="another process"),
        new_directory(tmp_path / "t") as made,
    ):
        make_file(made)
        monkeypatch.setattr(os, "rename", exchanging(os.rename, made.path, theirs))
    assert contents(theirs) == before
    assert names(tmp_path) == ["moved", "t"]
    assert (tmp_path / "t").is_symlink()


def exchanging(rename: Callable[..., None], path: str, other: Path) -> Callable[..., None]:
    def exchange_and_rename(source: str, target: str, **directories: Any) -> None:
        rename(path, os.path.join(os.path.dirname(path), "moved"))
        os.symlink(other, path)
        rename(source, target, **directories)

    return exchange_and_rename


@posix
@pytest.mark.parametrize("kind", ["link", "file", "full directory", "nothing"])
def test_a_directory_that_is_exchanged_before_it_is_opened_is_refused(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before, mkdir = contents(theirs), os.mkdir

    def make(name: str, mode: int, *, dir_fd: int | None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        path = tmp_path / name
        exchange(os.fspath(path), theirs if kind == "link" else None)
        if kind == "file":
            path.touch()
        elif kind == "full directory":
            theirs.rename(path)

    monkeypatch.setattr(os, "mkdir", make)
    with (
        pytest.raises(ArchiveError, match="renamed or replaced"),
        new_directory(tmp_path / "t") as made,
    ):
        make_file(made)
    found = contents(tmp_path) if kind == "full directory" else contents(theirs)
    assert sorted(found.values()) == sorted(before.values())


@root
def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = os.mkdir

    def make(name: str, mode: int, *, dir_fd: int | None) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        os.chown(tmp_path / name, 12345, 12345)

    monkeypatch.setattr(os, "mkdir", make)
    with (
        pytest.raises(ArchiveError, match="renamed or replaced"),
        new_directory(tmp_path / "t") as made,
    ):
        make_file(made)


@posix
def test_a_file_that_was_put_in_place_of_a_moved_one_is_not_moved_back(
    tmp_path: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail_at_the_second(source: str, target: str, **directories: Any) -> None:
        if list(tmp_path.glob("[ab]")):
            monkeypatch.setattr(os, "rename", rename)
            (moved,) = tmp_path.glob("[ab]")
            moved.rename(theirs / "moved")
            (theirs / "folder").rename(moved)
            raise OSError(errno.EPERM, "No")
        rename(source, target, **directories)

    with pytest.raises(OSError, match="No"), new_directory(tmp_path) as made:  # noqa: PT012
        make_file(made, "a")
        make_file(made, "b")
        monkeypatch.setattr(os, "rename", fail_at_the_second)
    assert list(contents(tmp_path).values()) == [b"of another"]


# Syncing


@linux
@pytest.mark.parametrize("is_there", [False, True])
def test_files_are_synced_then_folders_then_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    target, steps = tmp_path / "target", list[str]()
    if is_there:
        target.mkdir()
    rename = os.rename

    def note(descriptor: int) -> None:
        steps.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def note_and_rename(source: str, target: str, **directories: Any) -> None:
        steps.append(f"{source} becomes {target}")
        rename(source, target, **directories)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", note_and_rename)
    with new_directory(target) as made:
        for path in ("file", "folder/deep/file", "folder/file"):
            make_file(made, path)
        assert steps == []
    path, name = made.path, os.path.basename(made.path)
    files = [f"{path}/{name}" for name in ("file", "folder/deep/file", "folder/file")]
    assert sorted(steps[:3]) == files
    assert steps[3:6] == [f"{path}/folder/deep", f"{path}/folder", path]
    if is_there:
        assert sorted(steps[6:-1]) == ["file becomes file", "folder becomes folder"]
        assert steps[-1] == str(target)
    else:
        assert steps[6:] == [f"{name} becomes target", str(tmp_path)]


def test_a_file_that_cannot_be_synced_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="cannot be synced") as caught:
        fill(tmp_path / "target")
    assert caught.value.filename == str(tmp_path / "target" / "file")
    assert names(tmp_path) == []


def fill(target: Path) -> None:
    with new_directory(target) as made:
        make_file(made)


# Temporary directories of libraries that take paths


@linux
def test_a_temporary_directory_is_found_and_removed_when_its_name_leads_elsewhere(
    tmp_path: Path, theirs: Path
) -> None:
    before = contents(theirs)
    with temporary_directory(os.fspath(tmp_path / "beside")) as made:
        assert Path(made.path).parent == tmp_path
        assert Path(made.path).stat().st_mode & 0o777 == 0o700
        exchange(made.path, theirs)
        path = made.lasting_path()
        (Path(path) / "file").write_bytes(b"new")
        assert contents(tmp_path / "moved") == {"file": b"new"}
    assert contents(theirs) == before
    assert contents(tmp_path) == {}


def test_an_error_in_a_temporary_directory_names_where_it_was_made(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError) as caught,
        temporary_directory(os.fspath(tmp_path / "beside")) as made,
    ):
        Path(made.lasting_path(), "missing").read_bytes()
    assert caught.value.filename == os.path.join(made.path, "missing")
    assert names(tmp_path) == []


@posix
@pytest.mark.parametrize(
    ("mode", "temporary", "place"),
    [
        (0o755, 0o777, "beside"),
        (0o1777, 0o777, "beside"),
        (0o777, 0o700, "temporary"),
        (0o775, 0o1777, "temporary"),
        (0o777, 0o777, None),
    ],
)
def test_without_lasting_paths_a_temporary_directory_is_where_others_cannot_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, temporary: int, place: str | None
) -> None:
    monkeypatch.setattr(module, "path_in_process", lambda descriptor: None)
    for name, permissions in (("beside", mode), ("temporary", temporary)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(permissions)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with contextlib.ExitStack() as stack:
        path = str(tmp_path / "beside" / "m.onnxa")
        if place is None:
            with pytest.raises(PermissionError, match=r"other users may rename .*TMPDIR") as caught:
                stack.enter_context(temporary_directory(path))
            assert caught.value.filename == str(tmp_path / "beside")
        else:
            made = stack.enter_context(temporary_directory(path))
            assert os.path.dirname(made.path) == str(tmp_path / place)


# Leftovers


@posix
def test_the_directory_of_a_killed_process_is_removed_without_following_links(
    tmp_path: Path, theirs: Path
) -> None:
    left = tmp_path / "left"
    for name in ("a/b/c", "a/d", "e"):
        (left / name).mkdir(parents=True)
        (left / name / "file").touch()
    (left / "link").symlink_to(theirs)
    (left / "a" / "b" / "link").symlink_to(theirs)
    before = contents(theirs)
    assert remove_leftover(os.fspath(left))
    assert names(tmp_path) == []
    assert contents(theirs) == before


@posix
def test_a_leftover_that_was_being_removed_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "left"
    for number in range(9):
        (left / f".removed-{number}" / "folder").mkdir(parents=True)
        (left / f".removed-{number}" / "folder" / "file").touch()
    assert remove_leftover(str(left))
    assert names(tmp_path) == []


@posix
def test_a_deep_leftover_is_removed_with_few_descriptors(tmp_path: Path) -> None:
    left = tmp_path / "left"
    (left / Path(*"d" * 500)).mkdir(parents=True)
    with limited(resource.RLIMIT_NOFILE, 100):
        assert remove_leftover(os.fspath(left))
    assert names(tmp_path) == []


@posix
def test_links_files_and_directories_that_others_may_write_are_no_leftovers(
    tmp_path: Path, theirs: Path
) -> None:
    (tmp_path / "link").symlink_to(theirs)
    (tmp_path / "file").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    before = names(tmp_path), contents(theirs)
    for name in ("link", "file", "shared", "missing"):
        assert not remove_leftover(os.fspath(tmp_path / name))
    assert (names(tmp_path), contents(theirs)) == before


@root
def test_a_directory_of_another_user_is_no_leftover(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    os.chown(tmp_path / "left", 12345, 12345)
    assert not remove_leftover(os.fspath(tmp_path / "left"))
    assert names(tmp_path) == ["left"]


@posix
def test_a_directory_that_is_being_filled_is_no_leftover(tmp_path: Path) -> None:
    with new_directory(tmp_path / "target") as made:
        make_file(made)
        assert not remove_leftover(made.path)
    assert contents(tmp_path) == {"target/file": b"new"}
