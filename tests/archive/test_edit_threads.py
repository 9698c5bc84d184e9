"""Threads that use one archive while it is edited or closed: no error, no other file's bytes."""

from __future__ import annotations

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
from edits import MODEL, changed, documented, no_clone, referring, require, weights
from models import copying_clone, open_below
from written import saved

import onnxarchive
from onnxarchive.archive import rewriting
from onnxarchive.archive.editable import EditableArchive
from onnxarchive.archive.editing import change_model, replace_model
from onnxarchive.errors import ArchiveError, LockedError
from onnxarchive.storage import files

COUNT = 4  # weights
WAIT = 60  # seconds before a test gives up
EXPECTED = {tensor.name: tensor.raw_data for tensor in weights(COUNT).graph.initializer}
FOREIGN = b"\xaa" * 20_000  # content of other files


@pytest.fixture
def archive(path: Path) -> Iterator[EditableArchive]:
    """An archive that is open for edits and whose tensors have not been read."""
    onnxarchive.save(weights(COUNT), path, assets={"labels": b"cat"})
    with onnxarchive.open(path, mode="r+") as archive:
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


# All at once


def edit_in_turns(archive: EditableArchive, count: int) -> None:
    """Edits in every way, one after the other."""
    edits: list[Callable[[str], object]] = [
        lambda text: setattr(archive, "doc_string", text),
        lambda text: archive.metadata.update({text: "x" * 5000}),
        lambda text: archive.metadata.clear(),
        lambda text: archive.replace_tensor("w3", onnx_array("w3")),
        lambda text: archive.replace_model(changed(archive.model, documented(text)), copy=True),
    ]
    for number in range(count):
        edits[number % len(edits)](str(number))


def onnx_array(name: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(EXPECTED[name], np.float32)


def alternating_clones() -> Callable[[files.MappedFile, int], bool]:
    ways = itertools.cycle([no_clone, copying_clone])
    return lambda source, target: next(ways)(source, target)


LOOKS: dict[str, Callable[[EditableArchive, str], bytes]] = {
    "tensors": lambda archive, name: archive.tensors[name].tobytes(),
    "tensor": lambda archive, key: archive.tensor_by_key(key).tobytes(),
    "read": lambda archive, key: bytes(archive.read(key)),
}


@pytest.mark.usefixtures("busy_switching")
def test_threads_read_an_archive_while_another_one_edits_it(
    path: Path, archive: EditableArchive, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others open and close files, which get the numbers of descriptors that are free."""
    monkeypatch.setattr(rewriting, "clone", alternating_clones())
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
        assert isinstance(archive.doc_string, str)

    def verify() -> None:
        archive.verify()
        assert b"graph" in bytes(archive.read(MODEL))

    def churn() -> None:
        descriptors = [os.open(foreign, os.O_RDONLY) for _ in range(20)]
        for descriptor in descriptors:
            assert os.pread(descriptor, 4, 0) == FOREIGN[:4]
            os.close(descriptor)

    acts = [look, look, verify, churn, churn]
    with ThreadPoolExecutor(len(acts)) as executor:
        running = [executor.submit(repeat, act) for act in acts]
        try:
            edit_in_turns(archive, 60)
        finally:
            is_over.set()
        assert all(each.result() > 0 for each in running)
    assert {name: array.tobytes() for name, array in archive.tensors.items()} == EXPECTED
    assert archive.model == referring(path)
    assert onnxarchive.check(path, full=True) == []


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_threads_read_an_archive_while_another_one_closes_it(
    path: Path, foreign: Path, mode: Any
) -> None:
    onnxarchive.save(weights(COUNT), path)

    def look(archive: EditableArchive, begin: threading.Barrier) -> None:
        for count in itertools.count():
            for name, expected in EXPECTED.items():
                for act in LOOKS.values():
                    try:
                        assert act(archive, name) == expected
                    except ValueError as error:
                        assert "the file is closed" in str(error)
                        assert count
                        return
            if not count:
                begin.wait(WAIT)

    def close(archive: EditableArchive, begin: threading.Barrier) -> None:
        begin.wait(WAIT)
        archive.close()
        descriptors = [os.open(foreign, os.O_RDONLY) for _ in range(20)]
        for descriptor in descriptors:
            os.close(descriptor)

    with ThreadPoolExecutor(3) as executor:
        for _ in range(50):
            archive, begin = onnxarchive.open(path, mode=mode), threading.Barrier(3)
            acts = [look, look, close]
            for each in [executor.submit(act, archive, begin) for act in acts]:
                each.result()


# One moment after the other


class Late:
    """A function that is called late, once: another thread has done something before."""

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


def after(edit: Callable[[], object], foreign: Path, opened: list[int]) -> Callable[[], None]:
    """Makes an edit, and then opens files, which get the numbers of descriptors that are free."""

    def act() -> None:
        edit()
        opened.extend(os.open(foreign, os.O_RDONLY) for _ in range(50))

    return act


@pytest.mark.parametrize("module", [os, mmap])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_a_descriptor_is_no_other_files_by_the_time_at_which_a_thread_reads_from_it(
    archive: EditableArchive,
    foreign: Path,
    module: Any,
    look: Callable[[EditableArchive, str], bytes],
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    name = "pread" if module is os else "mmap"
    edit = lambda: archive.replace_model(changed(weights(COUNT), documented("new")), **way)  # noqa: E731
    late = Late(getattr(module, name), after(edit, foreign, opened))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, late)
            assert look(archive, "w1") == EXPECTED["w1"]
        assert late.is_called
        assert look(archive, "w2") == EXPECTED["w2"]
        assert archive.doc_string == "new"
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.mark.parametrize("module", [os, mmap])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_an_archive_that_is_closed_while_a_thread_reads_gives_a_view_and_then_no_more(
    path: Path,
    foreign: Path,
    module: Any,
    look: Callable[[onnxarchive.Archive, str], bytes],
    mode: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnxarchive.save(weights(COUNT), path)
    opened: list[int] = []
    archive = onnxarchive.open(path, mode=mode)
    name = "pread" if module is os else "mmap"
    late = Late(getattr(module, name), after(archive.close, foreign, opened))
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


class WatchedLock:
    """A lock of one thread that says when another thread is about to wait for it."""

    awaited = threading.Event()

    def __init__(self) -> None:
        self._lock = _RLOCK()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.awaited.set()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_RLOCK = threading.RLock


@pytest.fixture
def watched(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EditableArchive]:
    """An archive that is open for edits, with locks that say when they are waited for."""
    onnxarchive.save(weights(COUNT), path)
    WatchedLock.awaited = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "RLock", WatchedLock)
        archive = onnxarchive.open(path, mode="r+")
    with archive:
        yield archive


def test_an_edit_that_waited_for_one_of_another_thread_is_made_on_top_of_that(
    path: Path, watched: EditableArchive, way: dict[str, Any]
) -> None:
    def edit() -> None:
        with watched.edit(**way) as model:
            model.metadata_props.add(key="second", value=model.doc_string)

    with ThreadPoolExecutor(1) as executor:
        with watched.edit(**way) as model:
            waiting = executor.submit(edit)
            assert WatchedLock.awaited.wait(WAIT)
            model.doc_string = "first"
        waiting.result()
    assert (watched.doc_string, dict(watched.metadata)) == ("first", {"second": "first"})
    assert watched.model == referring(path)


@pytest.mark.parametrize(
    "look",
    [lambda archive: archive.verify(), lambda archive: archive.read(MODEL)],
    ids=["verify", "read"],
)
def test_the_model_is_read_before_or_after_an_edit_and_not_amid_it(
    watched: EditableArchive, look: Callable[[EditableArchive], Any], way: dict[str, Any]
) -> None:
    looking: list[Any] = []
    is_over = threading.Event()

    def look_at_once() -> Any:
        try:
            return look(watched)
        finally:
            is_over.set()

    def progress(done: int, total: int) -> None:
        if not looking:
            looking.append(executor.submit(look_at_once))
            while not (WatchedLock.awaited.wait(0.001) or is_over.is_set()):
                pass

    new = changed(weights(COUNT), documented("x" * 100_000))
    with ThreadPoolExecutor(1) as executor:
        watched.replace_model(new, progress=progress, **way)
        (found,) = (each.result() for each in looking)
    assert found is None or bytes(found) == bytes(watched.read(MODEL))


def test_a_state_whose_model_was_edited_since_is_verified_without_it(
    watched: EditableArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The edit comes when the other entries have been read."""
    monkeypatch.setattr(rewriting, "clone", no_clone)
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == COUNT:
            watched.doc_string = "new"

    watched.verify(progress)
    assert calls[-1][0] == calls[-1][1]
    assert len(calls) == COUNT + 1
    watched.verify()


# Locks of files, between threads as between processes


pytest.importorskip("fcntl", reason="calls of POSIX are watched")


class WatchedLocks:
    """Says when a thread is about to wait for the lock of a file, or has let go of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[int, Callable[[str], object]] = {}  # by thread
        self.after: dict[int, Callable[[str], object]] = {}
        lock_calls.watch(monkeypatch, self._call)

    def _call(self, _: int, kind: str, call: Callable[[], object]) -> None:
        thread = threading.get_ident()
        if thread in self.before:
            self.before[thread](kind)
        call()
        if thread in self.after:
            self.after[thread](kind)


def test_verifying_waits_for_an_edit_by_others_before_it_says_what_it_has_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriting, "clone", no_clone)
    onnxarchive.save(weights(COUNT), path)
    locks = WatchedLocks(monkeypatch)
    is_due = threading.Event()
    verifying: list[Any] = []

    def verify() -> None:
        locks.before[threading.get_ident()] = lambda kind: is_due.set()
        try:
            archive.verify()
        finally:
            is_due.set()

    def progress(done: int, total: int) -> None:
        if not verifying:
            verifying.append(executor.submit(verify))
            assert is_due.wait(WAIT)

    with onnxarchive.open(path) as archive, ThreadPoolExecutor(1) as executor:
        replace_model(path, changed(weights(COUNT), documented("x" * 5000)), progress=progress)
        with pytest.raises(ArchiveError, match="opened; open it again") as caught:
            verifying[0].result()
        assert not isinstance(caught.value, onnxarchive.ArchiveFormatError)


def test_the_end_of_an_edit_leaves_the_lock_of_the_next_one_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has the lock is told from threads that wait for it."""
    monkeypatch.setattr(rewriting, "clone", no_clone)
    onnxarchive.save(weights(COUNT), path)
    locks = WatchedLocks(monkeypatch)
    has_lock, is_over = threading.Event(), threading.Event()
    following: list[Any] = []

    def let_the_next_begin(kind: str) -> None:
        if kind == "unlock" and not following:
            following.append(executor.submit(edit_next))
            assert has_lock.wait(WAIT)

    def edit_first() -> None:
        locks.after[threading.get_ident()] = let_the_next_begin
        replace_model(path, changed(weights(COUNT), documented("first")))
        is_over.set()

    def edit_next() -> None:
        def change(model: Any) -> Any:
            has_lock.set()
            assert is_over.wait(WAIT)
            with pytest.raises(LockedError, match="finish the edit first"):
                onnxarchive.open(path, timeout=0)
            model.domain = "next"
            return model

        change_model(path, change)

    with ThreadPoolExecutor(2) as executor:
        executor.submit(edit_first).result()
        following[0].result()
    expected = changed(weights(COUNT), documented("first"))
    expected.domain = "next"
    require(path, saved(expected))
