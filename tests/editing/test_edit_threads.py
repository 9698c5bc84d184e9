"""Threads that use one archive while it is edited or closed: no error, no other file's bytes."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lock_calls
import numpy as np
import pytest
from edits import (
    MODEL,
    changed,
    document,
    documented,
    no_clone,
    replace_model,
    require,
    weights,
)
from models import copying_clone, open_below
from written import saved

import onnxarchive
from onnxarchive.errors import ArchiveError, LockedError
from onnxarchive.files import clones_and_sync
from onnxarchive.reading.contents import Contents

COUNT = 4  # weights
WAIT = 60  # seconds before a test gives up
EXPECTED = {tensor.name: tensor.raw_data for tensor in weights(COUNT).graph.initializer}
FOREIGN = b"\xaa" * 20_000  # content of other files


@pytest.fixture
def archive(path: Path) -> Iterator[onnxarchive.Archive]:
    """An open archive whose tensors have not been read."""
    onnxarchive.save(weights(COUNT), path, assets={"labels": b"cat"})
    with onnxarchive.open(path) as archive:
        yield archive


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    path = tmp_path / "foreign"
    path.write_bytes(FOREIGN)
    return path


@pytest.fixture
def busy_switching() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


# Many threads at once


def edit_in_turns(path: Path, count: int) -> None:
    """Edits in every way, one after the other."""
    for number in range(count):
        with onnxarchive.edit(path, copy=number % 5 == 4, compact=number % 5 == 3) as edit:
            edit.metadata[str(number)] = "x" * 5000
            if number % 5 == 1:
                edit.metadata.clear()
            elif number % 5 == 2:
                edit.tensors["w3"] = np.full(300, number, np.float32)
                edit.assets["labels"] = b"dog"


LOOKS: dict[str, Callable[[onnxarchive.Archive, str], bytes]] = {
    "tensors": lambda archive, name: archive.tensors[name].tobytes(),
    "tensor": lambda archive, key: archive.tensor_by_key(key).tobytes(),
    "read": lambda archive, key: bytes(archive.read(key)),
}


@pytest.mark.usefixtures("busy_switching")
def test_threads_read_an_archive_while_another_one_edits_it(
    path: Path, archive: onnxarchive.Archive, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further threads open and close files, which get the numbers of free descriptors."""
    clones = itertools.cycle([no_clone, copying_clone])
    monkeypatch.setattr(clones_and_sync, "clone", lambda *files: next(clones)(*files))
    is_over = threading.Event()

    def repeat(act: Callable[[], object]) -> int:
        count = 0
        while not is_over.is_set():
            act()
            count += 1
        return count

    def look() -> None:
        for name, expected in EXPECTED.items():
            for act in LOOKS.values():
                assert act(archive, name) == expected
        assert bytes(archive.assets["labels"]) == b"cat"
        assert len(archive.model.graph.initializer) == COUNT

    def open_anew() -> None:
        with onnxarchive.open(path) as latest, contextlib.suppress(ArchiveError):
            latest.verify()  # unless the model was edited meanwhile
            assert b"graph" in bytes(latest.read(MODEL))

    def churn() -> None:
        descriptors = [os.open(foreign, os.O_RDONLY) for _ in range(20)]
        for descriptor in descriptors:
            assert os.pread(descriptor, 4, 0) == FOREIGN[:4]
            os.close(descriptor)

    acts = [look, look, open_anew, churn, churn]
    with ThreadPoolExecutor(len(acts)) as executor:
        running = [executor.submit(repeat, act) for act in acts]
        try:
            edit_in_turns(path, 60)
        finally:
            is_over.set()
        assert all(each.result() > 0 for each in running)
    assert {name: array.tobytes() for name, array in archive.tensors.items()} == EXPECTED
    assert onnxarchive.check(path, full=True) == []


# Another thread acts at a chosen moment


class Late:
    """Lets another thread act before the first call of a function."""

    def __init__(self, function: Callable[..., Any], before: Callable[[], object]) -> None:
        self._function = function
        self._before = before
        self.is_called = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.is_called:
            self.is_called = True
            thread = threading.Thread(target=self._before)
            thread.start()
            thread.join(WAIT)
            assert not thread.is_alive()
        return self._function(*arguments, **options)


@pytest.mark.parametrize("module", [os, mmap])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_an_archive_that_is_closed_during_a_read_completes_it_and_refuses_later_reads(
    path: Path,
    foreign: Path,
    module: Any,
    look: Callable[[onnxarchive.Archive, str], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other files get the numbers of descriptors that are free then."""
    onnxarchive.save(weights(COUNT), path)
    opened: list[int] = []
    archive = onnxarchive.open(path)

    def close() -> None:
        archive.close()
        opened.extend(os.open(foreign, os.O_RDONLY) for _ in range(50))

    name = "pread" if module is os else "mmap"
    late = Late(getattr(module, name), close)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, late)
            try:
                assert look(archive, "w1") == EXPECTED["w1"]
            except ValueError as error:
                assert "the file is closed" in str(error)
        assert late.is_called
        with pytest.raises(ValueError, match="the file is closed"):
            look(archive, "w1")
        assert open_below(path.parent) == []
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_model_is_assigned_while_another_thread_opens_an_archive(
    path: Path, archive: onnxarchive.Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether an open archive has given the model is found out meanwhile."""
    content = path.read_bytes()
    opened: list[onnxarchive.Archive] = []
    late = Late(Contents.has_model, lambda: opened.append(onnxarchive.open(content)))
    monkeypatch.setattr(Contents, "has_model", lambda *arguments: late(*arguments))
    new = changed(weights(COUNT), documented("new"))
    replace_model(path, new)
    assert len(opened) == 1
    require(path, saved(new, assets={"labels": b"cat"}))


# Locks of files, between threads as between processes


pytest.importorskip("fcntl", reason="calls of POSIX are watched")


@pytest.mark.usefixtures("no_clones")
def test_the_end_of_an_edit_does_not_release_the_lock_of_the_next_edit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has the lock is distinguished from threads that wait for it."""
    onnxarchive.save(weights(COUNT), path)
    has_lock, is_over = threading.Event(), threading.Event()
    first: list[int] = []
    following: list[Any] = []

    def let_the_next_begin(descriptor: int, kind: str, call: Callable[[], object]) -> None:
        is_of_archive = os.path.samestat(os.fstat(descriptor), path.stat())
        call()
        is_first = threading.get_ident() in first and not following
        if kind == "unlock" and is_of_archive and is_first:
            following.append(executor.submit(edit_next))
            assert has_lock.wait(WAIT)

    def edit_first() -> None:
        first.append(threading.get_ident())
        document(path, "first")
        is_over.set()

    def edit_next() -> None:
        with onnxarchive.edit(path) as edit:
            has_lock.set()
            assert is_over.wait(WAIT)
            with pytest.raises(LockedError, match="finish the edit first"):
                onnxarchive.open(path, timeout=0)
            edit.model.domain = "next"

    lock_calls.watch(monkeypatch, let_the_next_begin)
    with ThreadPoolExecutor(2) as executor:
        executor.submit(edit_first).result()
        following[0].result()
    expected = changed(weights(COUNT), documented("first"))
    expected.domain = "next"
    require(path, saved(expected))
