"""Readers, savers and editors of one archive at once, also after a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import edits
import lock_calls
import onnx
import pytest
from models import model_of, raw_tensor, run_python

import onnxarchive
from onnxarchive.files import locking

pytest.importorskip("fcntl", reason="locks of POSIX")


def model(text: str, *, padding: int = 0, seed: int = 0) -> onnx.ModelProto:
    made = model_of(
        raw_tensor("v", dims=(3000,)), raw_tensor("w", dims=(3000,), seed=seed), raw_tensor("u")
    )
    made.doc_string = text + " " * padding
    return made


def text_of(path: Path) -> str:
    with onnxarchive.open(path) as archive:
        return archive.model.doc_string.strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model("first", padding=9000), path)
    return path


def kill(path: Path, *, copy: bool = False) -> None:
    """Kills an edit of the model amid the writing of its end."""
    code = """
import os, sys
import onnxarchive

with onnxarchive.edit(
    sys.argv[1], copy=sys.argv[2] == "True", progress=lambda *_: os._exit(0)
) as edit:
    edit.model.doc_string = "cut"
"""
    run_python(code, path, copy)


def cut_off(path: Path) -> None:
    """Leaves an edit of the model that was interrupted amid the writing of its end."""
    kill(path)
    with pytest.raises(onnxarchive.UnfinishedEditError):
        onnxarchive.open(path)


class Waiting:
    """A call in a thread, waiting for a lock of the test."""

    def __init__(self, path: Path, call: Callable[[], Any]) -> None:
        self._descriptor = os.open(path, os.O_RDWR)
        lock_calls.lock(self._descriptor, "exclusive")
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._thread.join(0.2)
        assert self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.result = error

    def end(self) -> Any:
        """Releases the lock; returns the result of the call, or its error."""
        os.close(self._descriptor)
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result


def test_a_reader_that_waited_while_the_archive_was_replaced_reads_the_new_one(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(model("second"), tmp_path / "other")
    waiting = Waiting(path, lambda: text_of(path))
    os.write(waiting._descriptor, b"half a change")
    os.replace(tmp_path / "other", path)
    assert waiting.end() == "second"


@pytest.mark.parametrize(
    "save",
    [
        lambda path: onnxarchive.save(model("second"), path),
        lambda path: onnxarchive.convert(path.with_name("other"), path),
    ],
    ids=["save", "convert"],
)
def test_saving_over_an_archive_waits_for_the_one_who_changes_it(
    path: Path, save: Callable[[Path], None]
) -> None:
    onnxarchive.save(model("second"), path.with_name("other"))
    content = path.read_bytes()
    waiting = Waiting(path, lambda: save(path))
    assert path.read_bytes() == content
    waiting.end()
    assert text_of(path) == "second"


def test_a_writer_that_waited_while_the_archive_was_replaced_changes_the_new_one(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(model("second", seed=5), tmp_path / "other")
    waiting = Waiting(path, lambda: edits.change_model(path, lambda it: model("third", seed=5)))
    os.replace(tmp_path / "other", path)
    assert waiting.end() is None
    assert text_of(path) == "third"
    assert onnxarchive.check(path, full=True) == []


def test_saving_over_an_edit_that_was_interrupted_replaces_it(path: Path) -> None:
    cut_off(path)
    onnxarchive.save(model("second"), path)
    assert os.listdir(path.parent) == [path.name]
    assert text_of(path) == "second"
    assert not onnxarchive.recover(path).is_rolled_back


def test_an_edit_that_was_interrupted_can_be_rolled_back_until_another_file_has_the_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    cut_off(path)

    def fail(*_: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        onnxarchive.save(model("second"), path)
    assert onnxarchive.recover(path).is_rolled_back
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_temporary_file_that_is_removed_before_it_is_locked_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.keep_exclusive
    removed: list[str] = []

    def late(descriptor: int) -> None:
        monkeypatch.setattr(locking, "keep_exclusive", lock)
        removed.extend(onnxarchive.recover(path).removed)
        lock(descriptor)

    monkeypatch.setattr(locking, "keep_exclusive", late)
    onnxarchive.save(model("second"), path)
    assert len(removed) == 1
    assert text_of(path) == "second"


@pytest.mark.parametrize("way", ["recover", "open", "edit"])
def test_another_archive_that_is_copied_over_an_interrupted_edit_stays(
    path: Path, tmp_path: Path, way: str
) -> None:
    # `cp` keeps the inode; what surrounds the end is the same, and a tensor in between is not.
    backup = tmp_path / "backup"
    other = model("first", padding=9000)
    other.graph.initializer[1].CopyFrom(raw_tensor("w", dims=(3000,), seed=9))
    other.graph.initializer.append(raw_tensor("z", dims=(3000,)))
    onnxarchive.save(other, backup)
    base = model("first", padding=9000)
    base.graph.initializer.append(raw_tensor("z", dims=(3000,)))
    onnxarchive.save(base, path)
    cut_off(path)
    inode = path.stat().st_ino
    path.write_bytes(backup.read_bytes())
    assert path.stat().st_ino == inode
    if way == "recover":
        assert onnxarchive.recover(path) == onnxarchive.Recovery(False, ())
    elif way == "open":
        onnxarchive.open(path).close()
    else:
        edits.change_model(path, lambda it: it)
    assert path.read_bytes() == backup.read_bytes()


def test_a_clone_or_a_new_file_has_the_owner_of_the_old_one(path: Path) -> None:
    if not hasattr(os, "getuid") or os.getuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(path, 1234, 1235)
    os.chmod(path, 0o640)
    changes: list[Callable[[], None]] = [
        lambda: onnxarchive.save(model("second"), path),
        lambda: edits.replace_model(path, model("third"), copy=True),
    ]
    for change in changes:
        change()
        status = path.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (1234, 1235, 0o640)


@pytest.mark.parametrize("padding", [0, 20_000])
def test_verifying_an_archive_that_was_changed_since_says_so(path: Path, padding: int) -> None:
    with onnxarchive.open(path) as archive:
        edits.replace_model(path, model("second", padding=padding))
        with pytest.raises(onnxarchive.ArchiveError, match="opened; open it again") as caught:
            archive.verify()
        assert not isinstance(caught.value, onnxarchive.ArchiveFormatError)
    with onnxarchive.open(path) as archive:
        archive.verify()


def test_two_writers_whose_models_are_the_archives_of_each_other_do_not_wait_for_ever(
    path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.onnxa"
    onnxarchive.save(model("other"), other)
    waiting = Waiting(other, lambda: text_of(other))  # whoever has it, has it for long
    edits.replace_model(path, other, timeout=0, compact=True)
    assert text_of(path) == "other"
    assert waiting.end() == "other"


def test_what_a_killed_copy_leaves_beside_a_symbolic_link_is_removed(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "m.onnxa"
    link.symlink_to(path)
    kill(link, copy=True)
    assert len(os.listdir(link.parent)) == 2
    assert len(onnxarchive.recover(link).removed) == 1
    assert os.listdir(link.parent) == ["m.onnxa"]


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_is_not_negative(path: Path, timeout: float) -> None:
    with pytest.raises(ValueError, match="expected a timeout of 0 seconds or more, found"):
        edits.change_model(path, lambda it: it, timeout=timeout)
    left = path.with_name(f".{path.name}.1-1.tmp")
    left.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="expected a timeout of 0 seconds or more, found"):
        onnxarchive.recover(path, timeout=timeout)
    assert left.exists()
    assert onnxarchive.recover(path).removed == (str(left),)
