"""Files that may be edited: names and links, permissions; other files are refused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from edits import (
    EDITS,
    IN_PLACE,
    NAME,
    Way,
    changed,
    document,
    documented,
    fails_at,
    new_model,
    posix,
    refused,
    replace_model,
    require,
    weights,
)
from interruptions import interrupt
from limits import user
from models import copying_clone, model_of
from written import saved

import onnxarchive
from onnxarchive.editing.recover import Recovery, recover
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files import clones_and_sync

CALLS: dict[str, Callable[..., object]] = {
    **EDITS,
    "with compact": partial(replace_model, model=model_of(), compact=True),
    "with copy": partial(document, copy=True),
    "recover": recover,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_file_that_is_no_archive_is_refused_and_left_as_it_is(
    tmp_path: Path, call: Callable[..., object]
) -> None:
    folder = tmp_path / "ein Verzeichnis"
    folder.mkdir()
    contents = {"empty": b"", "junk": b"junk" * 100, "m.onnx": weights(1).SerializeToString()}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArchiveFormatError, match="expected an ONNX archive, found a directory"):
        call(folder)
    for name, content in contents.items():
        with pytest.raises(ArchiveFormatError, match="expected ") as caught:
            call(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.rule == "ZIP-2"
        assert (tmp_path / name).read_bytes() == content
    with fails_at(tmp_path / "missing", FileNotFoundError):
        call(tmp_path / "missing")
    assert sorted(os.listdir(tmp_path)) == sorted([folder.name, *contents])


@posix
@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("is_link", [False, True], ids=["hard link", "symbolic link"])
def test_a_file_with_another_name_is_changed_only_as_a_copy(
    path: Path, tmp_path: Path, is_link: bool, change: Callable[..., None]
) -> None:
    other = tmp_path / "another name"
    onnxarchive.save(weights(2), other)
    before, inode = other.read_bytes(), other.stat().st_ino
    kind = "a file with 2 names (hard links), which share the content"
    if is_link:
        path.symlink_to(other)
        kind = f"a symbolic link to {other.resolve()}, a file that others may use"
    else:
        os.link(other, path)
    with refused(path, ValueError) as caught:
        change(path)
    assert str(caught.value) == (
        f"{path}: this is {kind}; copy=True (--copy) writes a new file at this path instead"
    )
    assert path.is_symlink() == is_link
    change(path, copy=True)
    assert not path.is_symlink()
    assert path.read_bytes() != before == other.read_bytes()
    assert other.stat().st_ino == inode != path.stat().st_ino
    assert onnxarchive.check(path, full=True) == []
    assert os.listdir(path.parent) == [path.name]
    assert sorted(os.listdir(tmp_path)) == sorted([path.parent.name, "another name"])
    change(path)  # it has one name now


@posix
def test_a_path_through_a_linked_directory_is_no_further_name_of_the_file(
    two: Path, tmp_path: Path
) -> None:
    (tmp_path / "way").symlink_to(two.parent)
    replace_model(tmp_path / "way" / two.name, new_model())
    require(two, saved(new_model()))


@posix
def test_a_link_that_leads_to_nothing_is_named(path: Path) -> None:
    path.symlink_to("nothing")
    with fails_at(path, FileNotFoundError):
        replace_model(path, new_model(), copy=True)
    assert path.is_symlink()


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o666])
def test_an_edit_keeps_permission_bits(two: Path, way: Way, mode: int) -> None:
    two.chmod(mode)
    for edit in (EDITS["models"], EDITS["tensors"], CALLS["with compact"]):
        edit(two, **way)
        assert stat.S_IMODE(two.stat().st_mode) == mode


@posix
@pytest.mark.usefixtures("no_clones")
def test_edits_in_place_keep_the_file_and_edits_of_a_copy_make_a_new_one(two: Path) -> None:
    others = [EDITS["tensors"], CALLS["with copy"], CALLS["with compact"]]
    calls: list[Callable[..., object]] = [
        *IN_PLACE.values(),
        partial(replace_model, model=weights(2)),
        *others,
    ]
    for call in calls:
        inode = two.stat().st_ino
        call(two)
        assert (two.stat().st_ino == inode) == (call not in others)


@pytest.mark.usefixtures("nobody", "no_clones")
def test_a_read_only_file_is_changed_only_as_a_copy(own_path: Path) -> None:
    path = own_path
    onnxarchive.save(weights(2), path)
    path.chmod(0o444)
    before = path.read_bytes()
    for edit in EDITS.values():
        with fails_at(path, PermissionError):
            edit(path)
    require(path, before)
    document(path, copy=True)
    with fails_at(path, PermissionError):  # the copy is read-only, too
        document(path, "newer")
    require(path, saved(new_model()))
    replace_model(path, weights(2), copy=True)
    require(path, before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


@posix
@pytest.mark.usefixtures("nobody", "no_clones")
def test_in_an_unwritable_directory_a_writable_file_is_edited_only_in_place(
    own_path: Path,
) -> None:
    path = own_path
    onnxarchive.save(weights(2), path)
    path.parent.chmod(0o555)
    before = path.read_bytes()
    whole: list[Callable[..., object]] = [
        *(partial(edit, copy=True) for edit in EDITS.values()),
        *(EDITS["tensors"], CALLS["with compact"]),
        lambda path: onnxarchive.save(weights(1), path),
    ]
    for write_whole_file in whole:
        with fails_at(path, PermissionError):
            write_whole_file(path)
        require(path, before)
    for edit in IN_PLACE.values():
        inode = path.stat().st_ino
        edit(path)
        require(path, saved(new_model()))
        assert path.stat().st_ino == inode
        replace_model(path, weights(2))
    require(path, before)


@posix
@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM, errno.EACCES])
def test_a_file_whose_name_no_clone_may_take_is_edited_in_its_place(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    monkeypatch.setattr(clones_and_sync, "clone", copying_clone)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(number, os.strerror(number))))
    for edit in IN_PLACE.values():
        inode = path.stat().st_ino
        edit(path)
        require(path, saved(new_model()))
        assert path.stat().st_ino == inode
        path.write_bytes(before)
        with pytest.raises(OSError, match=r"\.onnxa") as caught:
            edit(path, copy=True)
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
        require(path, before)
    with pytest.raises(OSError, match=r"\.onnxa"):
        EDITS["tensors"](path)
    require(path, before)


def test_a_file_that_the_user_may_not_write_is_not_changed(own_path: Path) -> None:
    if os.getuid():
        pytest.skip("all files are this user's own")
    onnxarchive.save(weights(2), own_path)
    own_path.chmod(0o400)
    changes: list[Callable[[Path], object]] = [*EDITS.values(), recover]
    with user(65534):
        for change in changes:
            with fails_at(own_path, PermissionError):
                change(own_path)
    assert os.listdir(own_path.parent) == [own_path.name]


@posix
@pytest.mark.usefixtures("nobody")
def test_in_a_directory_that_may_not_be_listed_an_interrupted_edit_is_rolled_back(
    own_path: Path,
) -> None:
    onnxarchive.save(weights(2), own_path)
    interrupted = interrupt(own_path, lambda path: replace_model(path, new_model()))
    own_path.write_bytes(interrupted.states["new end begun"])
    own_path.parent.chmod(0o300)
    try:
        assert recover(own_path) == Recovery(True, ())
    finally:
        own_path.parent.chmod(0o700)
    require(own_path, interrupted.old)


@pytest.mark.parametrize("name", [NAME, "-", "a'b\n.onnxa", "%s", "n" * 200])
@pytest.mark.parametrize("is_relative", [False, True])
def test_an_archive_at_any_path_is_edited(
    path: Path, name: str, is_relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path.with_name(name)
    onnxarchive.save(weights(2), path)
    monkeypatch.chdir(path.parent)
    for call in CALLS.values():
        call(name if is_relative else path)
        assert onnxarchive.check(path, full=True) == []
    assert onnxarchive.load(path) == changed(model_of(), documented("new"))
    assert os.listdir(path.parent) == [name]
