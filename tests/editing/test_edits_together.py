"""Readers, savers and editors of one archive at once, also after a crash."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import edits
import lock_calls
import onnx
import pytest
from edits import changed, documented
from models import model_of, raw_tensor, run_python
from written import saved

import onnxarchive
from onnxarchive.files import locking

pytest.importorskip("fcntl", reason="locks of POSIX")


def model(text: str, *, padding: int = 0, seed: int = 0) -> onnx.ModelProto:
    tensors = (raw_tensor(name, dims=(3000,), seed=it) for name, it in (("v", 0), ("w", seed)))
    return changed(model_of(*tensors, raw_tensor("u")), documented(text + " " * padding))


def text_of(path: Path) -> str:
    with onnxarchive.open(path) as archive:
        return archive.model.doc_string.strip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model("first", padding=9000), path)
    return path


def kill(path: Path, **options: bool) -> None:
    """Kills an edit of the model amid the writing of its end."""
    code = f"""
import os, sys
import onnxarchive

with onnxarchive.edit(sys.argv[1], progress=lambda *_: os._exit(0), **{options}) as edit:
    edit.model.doc_string = "cut"
"""
    run_python(code, path)


def cut_off(path: Path) -> None:
    """Leaves an edit of the model that was interrupted amid the writing of its end."""
    kill(path)
    with pytest.raises(onnxarchive.UnfinishedEditError):
        onnxarchive.open(path)


@contextlib.contextmanager
def waiting(path: Path, call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Makes a call in a thread that waits for a lock until the block ends; gives its result."""
    outcome: list[Any] = []
    with ThreadPoolExecutor(1) as executor:
        with lock_calls.locked(path, "exclusive"):
            running = executor.submit(call)
            assert not wait([running], 0.2).done
            yield outcome
        outcome.append(running.result(60))


def test_a_reader_that_waited_while_the_archive_was_replaced_reads_the_new_one(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(model("second"), tmp_path / "other")
    with waiting(path, lambda: text_of(path)) as found:
        path.write_bytes(b"half a change")
        os.replace(tmp_path / "other", path)
    assert found == ["second"]


@pytest.mark.parametrize("function", [onnxarchive.save, onnxarchive.convert])
def test_saving_over_an_archive_waits_for_its_editor(
    path: Path, tmp_path: Path, function: Callable[..., object]
) -> None:
    onnxarchive.save(model("second"), tmp_path / "other")
    content = path.read_bytes()
    given = model("second") if function is onnxarchive.save else tmp_path / "other"
    with waiting(path, lambda: function(given, path)):
        assert path.read_bytes() == content
    assert text_of(path) == "second"


def test_a_writer_that_waited_while_the_archive_was_replaced_changes_the_new_one(
    path: Path, tmp_path: Path
) -> None:
    onnxarchive.save(model("second", seed=5), tmp_path / "other")
    third = model("third", seed=5)
    with waiting(path, lambda: edits.change_model(path, lambda it: third)):
        os.replace(tmp_path / "other", path)
    assert text_of(path) == "third"
    assert onnxarchive.check(path, full=True) == []


def test_saving_over_an_edit_that_was_interrupted_replaces_it(path: Path) -> None:
    cut_off(path)
    onnxarchive.save(model("second"), path)
    assert os.listdir(path.parent) == [path.name]
    assert text_of(path) == "second"
    assert not onnxarchive.recover(path).is_rolled_back


def test_an_edit_that_was_interrupted_can_be_rolled_back_until_another_file_has_the_path(
    path: Path,
) -> None:
    before = path.read_bytes()
    cut_off(path)
    with patch.object(os, "replace", side_effect=OSError("no")), pytest.raises(OSError, match="no"):
        onnxarchive.save(model("second"), path)
    assert onnxarchive.recover(path).is_rolled_back
    edits.require(path, before)


def test_a_temporary_file_that_is_removed_before_it_is_locked_is_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.keep_exclusive
    removed: list[str] = []

    def late(descriptor: int, timeout: float) -> bool:
        monkeypatch.setattr(locking, "keep_exclusive", lock)
        removed.extend(onnxarchive.recover(path).removed)
        return lock(descriptor, timeout)

    monkeypatch.setattr(locking, "keep_exclusive", late)
    onnxarchive.save(model("second"), path)
    assert len(removed) == 1
    assert text_of(path) == "second"


@pytest.mark.parametrize(
    "act",
    [
        onnxarchive.recover,
        lambda path: onnxarchive.open(path).close(),
        lambda path: edits.change_model(path, lambda it: it),
    ],
)
def test_another_archive_that_is_copied_over_an_interrupted_edit_stays(
    path: Path, act: Callable[[Path], object]
) -> None:
    # `cp` keeps the inode; what surrounds the end is the same, and a tensor in between is not.
    base, other = (model("first", padding=9000, seed=seed) for seed in (0, 9))
    for it in (base, other):
        it.graph.initializer.append(raw_tensor("z", dims=(3000,)))
    onnxarchive.save(base, path)
    cut_off(path)
    content = saved(other)
    path.write_bytes(content)
    act(path)
    edits.require(path, content)


@pytest.mark.parametrize("padding", [0, 20_000])
def test_verifying_an_archive_that_was_changed_since_it_was_opened_says_so(
    path: Path, padding: int
) -> None:
    """It says so once an edit by others, of which it may have read a part, has ended."""
    with onnxarchive.open(path) as archive:
        edits.replace_model(path, model("second", padding=padding))
        with (
            pytest.raises(onnxarchive.ArchiveError, match="opened; open it again") as caught,
            waiting(path, archive.verify),
        ):
            pass
        assert not isinstance(caught.value, onnxarchive.ArchiveFormatError)
    with onnxarchive.open(path) as archive:
        archive.verify()


def test_two_edits_that_assign_the_archives_of_each_other_do_not_deadlock(
    path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.onnxa"
    onnxarchive.save(model("other"), other)
    with waiting(other, lambda: text_of(other)) as found:  # whoever has it, has it for long
        edits.replace_model(path, other, timeout=0, compact=True)
        assert text_of(path) == "other"
    assert found == ["other"]


def test_the_file_of_a_killed_copy_beside_a_symbolic_link_is_removed(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "m.onnxa"
    link.symlink_to(path)
    kill(link, copy=True)
    assert len(os.listdir(link.parent)) == 2
    assert len(onnxarchive.recover(link).removed) == 1
    assert os.listdir(link.parent) == ["m.onnxa"]
