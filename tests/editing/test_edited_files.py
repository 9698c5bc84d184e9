"""Files that may be edited: names and links, permissions; other files are refused."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edits import (
    EDITS,
    IN_PLACE,
    NAME,
    Way,
    add_asset,
    added,
    change_model,
    changed,
    document,
    fails_at,
    new_model,
    posix,
    referring,
    refused,
    removed,
    replace_model,
    replace_tensor,
    require,
    weights,
)
from interruptions import interrupt
from models import copying_clone, model_of
from written import saved

import onnxarchive
from onnxarchive.editing.recovery import Recovery, recover
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.files import filesystem

CALLS: dict[str, Callable[[Path], object]] = {
    "replace_model": lambda path: replace_model(path, weights(1)),
    "replace_model with compact": lambda path: replace_model(path, model_of(), compact=True),
    "replace_model with copy": lambda path: replace_model(path, weights(1), copy=True),
    "change_model": lambda path: change_model(path, lambda model: model),
    "replace_tensor": lambda path: replace_tensor(path, "w0", np.ones(300, np.float32)),
    "add_asset": lambda path: add_asset(path, "new", b""),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_no_archive_is_refused_and_left_as_it_is(
    tmp_path: Path, call: Callable[[Path], object]
) -> None:
    folder = tmp_path / "ein Verzeichnis"
    folder.mkdir()
    (tmp_path / "empty").write_bytes(b"")
    onnx.save(weights(1), tmp_path / "model.onnx")
    kept = (tmp_path / "model.onnx").read_bytes()
    with pytest.raises(ArchiveFormatError, match="expected an ONNX archive, found a directory"):
        call(folder)
    for name in ("empty", "model.onnx"):
        with pytest.raises(ArchiveFormatError) as caught:
            call(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.rule is not None
    with fails_at(tmp_path / "missing", FileNotFoundError):
        call(tmp_path / "missing")
    assert sorted(os.listdir(tmp_path)) == ["ein Verzeichnis", "empty", "model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == kept


@posix
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
        f"{path}: expected a file with one name, found {kind}; copy=True (--copy) writes a new "
        "file at this path instead"
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
def test_a_link_to_a_directory_on_the_way_is_no_further_name(two: Path, tmp_path: Path) -> None:
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
def test_permission_bits_stay(two: Path, way: Way, mode: int) -> None:
    two.chmod(mode)
    replace_model(two, new_model(), **way)
    assert stat.S_IMODE(two.stat().st_mode) == mode
    replace_model(two, model_of(), compact=True, **way)
    assert stat.S_IMODE(two.stat().st_mode) == mode
    onnxarchive.save(weights(2), two)
    replace_tensor(two, "w1", np.ones(300, np.float32), **way)
    assert stat.S_IMODE(two.stat().st_mode) == mode


@posix
@pytest.mark.usefixtures("no_clones")
def test_edits_in_place_keep_the_file_and_others_make_a_new_one(two: Path) -> None:
    inode = two.stat().st_ino
    for edit in IN_PLACE.values():
        edit(two)
        change_model(two, lambda model: weights(2))
    replace_model(two, changed(weights(2), added("w2")))
    assert two.stat().st_ino == inode
    others: list[Callable[[], None]] = [
        lambda: replace_tensor(two, "w1", np.ones(300, np.float32)),
        lambda: replace_model(two, referring(two), copy=True),
        lambda: replace_model(two, referring(two), compact=True, size_threshold=2000),
    ]
    for make_new_file in others:
        inode = two.stat().st_ino
        make_new_file()
        assert two.stat().st_ino != inode


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
def test_an_unwritable_directory_lets_a_writable_file_be_edited_in_its_place_alone(
    own_path: Path,
) -> None:
    path = own_path
    onnxarchive.save(weights(2), path)
    path.parent.chmod(0o555)
    before = path.read_bytes()
    whole: list[Callable[[], None]] = [
        *(lambda edit=edit: edit(path, copy=True) for edit in EDITS.values()),
        lambda: replace_tensor(path, "w0", np.ones(300, np.float32)),
        lambda: replace_model(path, model_of(), compact=True),
        lambda: onnxarchive.save(weights(1), path),
    ]
    for write_whole_file in whole:
        with fails_at(path, PermissionError):
            write_whole_file()
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
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    monkeypatch.setattr(filesystem, "clone", copying_clone)
    monkeypatch.setattr(os, "replace", refuse)
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


@pytest.mark.usefixtures("nobody")
def test_a_file_of_others_is_not_changed(own_path: Path) -> None:
    if os.getuid():
        pytest.skip("all files are this user's own")
    path = own_path
    os.seteuid(0)
    onnxarchive.save(weights(2), path)
    path.chmod(0o400)
    os.seteuid(65534)
    changes: list[Callable[[Path], object]] = [*EDITS.values(), recover]
    for change in changes:
        with fails_at(path, PermissionError):
            change(path)
    assert os.listdir(path.parent) == [path.name]


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
def test_any_path_will_do(
    path: Path, name: str, is_relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path.with_name(name)
    onnxarchive.save(weights(2), path)
    monkeypatch.chdir(path.parent)
    given = name if is_relative else path
    replace_model(given, new_model())
    require(path, saved(new_model()))
    document(given, "newer")
    replace_tensor(given, "w0", np.zeros(300, np.float32))
    replace_model(given, changed(referring(path), removed(1)), compact=True)
    assert onnxarchive.check(path, full=True) == []
    assert recover(given) == Recovery(False, ())
    assert os.listdir(path.parent) == [name]
