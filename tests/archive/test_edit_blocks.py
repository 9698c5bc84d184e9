"""Several changes of an archive as one: `with archive.edit()`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from edits import (
    added,
    changed,
    documented,
    new_model,
    referring,
    removed,
    require,
    weights,
    with_array,
)
from models import copying_clone, model_of, raw_tensor, runnable_model
from written import saved

import onnxarchive
from onnxarchive.archive import rewriting
from onnxarchive.archive.editable import EditableArchive
from onnxarchive.archive.editing import change_model, replace_model, replace_tensor
from onnxarchive.errors import ArchiveError, LockedError
from onnxarchive.storage import files, locking

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is made")


@pytest.fixture
def archive(path: Path) -> Iterator[EditableArchive]:
    """An archive of `weights(2)` and an asset that is open for edits."""
    onnxarchive.save(weights(2), path, assets={"labels": b"cat"})
    with onnxarchive.open(path, mode="r+") as archive:
        yield archive


def saved_with_asset(model: onnx.ModelProto) -> bytes:
    return saved(model, assets={"labels": b"cat"})


# Written changes


def test_all_changes_of_a_block_are_written_as_one_when_it_ends(
    path: Path, archive: EditableArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def clone(source: files.MappedFile, target: int) -> bool:
        written.append(target)
        return copying_clone(source, target)

    monkeypatch.setattr(rewriting, "clone", clone)
    before = path.read_bytes()
    with archive.edit() as model:
        archive.metadata["author"] = "Ada"
        archive.metadata.update(year="1843", place="London")
        del archive.metadata["place"]
        archive.doc_string = "new"
        archive.domain = "test"
        model.graph.node.add(op_type="Neg", input=["a"], output=["b"])
        assert model is archive.model
        assert dict(archive.metadata) == {"author": "Ada", "year": "1843"}
        assert (archive.doc_string, archive.domain) == ("new", "test")
        assert path.read_bytes() == before
        assert written == []
    assert len(written) == 1
    expected = changed(weights(2), documented("new"))
    onnx.helper.set_model_props(expected, {"author": "Ada", "year": "1843"})
    expected.domain = "test"
    expected.graph.node.add(op_type="Neg", input=["a"], output=["b"])
    require(path, saved_with_asset(expected))
    assert archive.model == referring(path)
    assert archive.model is not model


def test_a_block_is_written_in_every_way(path: Path, way: dict[str, Any]) -> None:
    onnxarchive.save(weights(2), path)
    with onnxarchive.open(path, mode="r+") as archive:
        for text in ("new", "newer"):
            with archive.edit(**way) as model:
                model.doc_string = text
            require(path, saved(changed(weights(2), documented(text))))
        with archive.edit(compact=True, **way) as model:
            del model.graph.initializer[0]
        require(path, saved(changed(weights(2), documented("newer"), removed(0))))
        assert list(archive.tensors) == ["w1"]


def test_a_model_that_is_assigned_in_a_block_is_changed_further(
    path: Path, archive: EditableArchive
) -> None:
    with archive.edit() as model:
        archive.model = changed(model, documented("assigned"), added("w2"))
        model.producer_name = "yielded"
        archive.producer_version = "set"
        with pytest.raises(TypeError):
            archive.model = None  # type: ignore[assignment]
    assert list(archive.tensors) == ["w0", "w1", "w2"]
    found = referring(path)
    words = (found.doc_string, found.producer_name, found.producer_version)
    assert words == ("assigned", "yielded", "set")


def test_a_model_whose_inputs_are_renamed_in_a_block_is_changed_further(path: Path) -> None:
    onnxarchive.save(runnable_model(), path)
    with onnxarchive.open(path, mode="r+") as archive:
        with archive.edit() as model:
            archive.rename(inputs={"x": "pixels"})
            model.doc_string = "new"
            archive.rename(outputs={"y": "scores"})
        found = archive.model
    assert (found.graph.input[0].name, found.graph.output[0].name) == ("pixels", "scores")
    assert found.doc_string == "new"
    assert referring(path) == found


@pytest.mark.usefixtures("no_clones")
def test_a_block_without_a_change_writes_nothing(path: Path, archive: EditableArchive) -> None:
    before, status = path.read_bytes(), path.stat()
    for options in ({}, {"copy": True}, {"compact": True}):
        with archive.edit(**options) as model:
            assert model == archive.model
            archive.doc_string = "new"
            archive.doc_string = ""
            archive.metadata.update({})
    require(path, before)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


def test_a_model_that_lacks_a_tensor_is_refused_at_the_end_of_the_block(
    path: Path, archive: EditableArchive
) -> None:
    before = path.read_bytes()

    def remove() -> None:
        with archive.edit() as model:
            del model.graph.initializer[0]
            archive.doc_string = "new"

    with pytest.raises(ValueError, match="compact=True"):
        remove()
    require(path, before)
    assert archive.doc_string == ""
    archive.doc_string = "newer"
    require(path, saved_with_asset(changed(weights(2), documented("newer"))))


# Discarded changes


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_an_exception_discards_every_change_of_the_block(
    path: Path, archive: EditableArchive, error: type[BaseException], way: dict[str, Any]
) -> None:
    before = path.read_bytes()

    def fail() -> None:
        with archive.edit(**way) as model:
            archive.metadata["author"] = "Ada"
            archive.model = new_model()
            model.graph.name = "yielded"
            raise error

    with pytest.raises(error):
        fail()
    require(path, before)
    assert archive.model == referring(path)
    assert dict(archive.metadata) == {}
    with archive.edit(timeout=0):  # nothing is locked any more
        archive.doc_string = "new"
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


def test_a_block_in_another_one_is_written_and_discarded_with_that(
    path: Path, archive: EditableArchive
) -> None:
    before = path.read_bytes()

    def fail() -> None:
        with archive.edit() as model:
            with archive.edit() as inner:
                assert inner is model
                inner.doc_string = "new"
            assert path.read_bytes() == before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    require(path, before)
    with archive.edit():
        archive.doc_string = "new"
        with pytest.raises(TypeError):
            archive.metadata["year"] = 1843  # type: ignore[assignment]
        with pytest.raises(ValueError, match="found 'x'"):
            archive.rename(inputs={"x": "y"})
        archive.metadata["year"] = "1843"
    expected = changed(weights(2), documented("new"))
    onnx.helper.set_model_props(expected, {"year": "1843"})
    require(path, saved_with_asset(expected))


@pytest.mark.parametrize("options", [{"compact": True}, {"copy": True}, {"timeout": 0}])
def test_how_it_is_written_is_for_the_outer_block_to_say(
    path: Path, archive: EditableArchive, options: dict[str, Any]
) -> None:
    with archive.edit():
        archive.doc_string = "new"
        for inner in (archive.edit, archive.rename):
            with pytest.raises(ValueError, match=r"to the outer block of edit\(\)$"):
                with_block(inner(**options))
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


def with_block(block: Any) -> None:
    with block:
        pass


def test_an_archive_cannot_be_closed_in_a_block(path: Path, archive: EditableArchive) -> None:
    with archive.edit() as model:
        model.doc_string = "new"
        with pytest.raises(LockedError, match="finish the edit first"):
            archive.close()
    require(path, saved_with_asset(changed(weights(2), documented("new"))))
    archive.close()
    with pytest.raises(ValueError, match="the file is closed"), archive.edit():
        pytest.fail("the block begins")
    replace_model(path, new_model(), timeout=0)


def test_a_block_does_not_begin_if_others_have_changed_the_archive(
    path: Path, archive: EditableArchive, way: dict[str, Any]
) -> None:
    replace_model(path, new_model(), **way)
    theirs = path.read_bytes()
    with pytest.raises(ArchiveError, match="changed since it was opened"), archive.edit(**way):
        pytest.fail("the block begins")
    require(path, theirs)


# Who has to wait


def test_whoever_else_opens_the_archive_waits_for_the_block_or_sees_nothing_of_it(
    path: Path, archive: EditableArchive
) -> None:
    before = referring(path)
    calls: list[Callable[[], object]] = [
        lambda: onnxarchive.open(path, mode="r+", timeout=0),
        lambda: replace_model(path, new_model(), timeout=0),
        lambda: onnxarchive.recover(path, timeout=0),
    ]
    with ThreadPoolExecutor(1) as executor:
        with archive.edit() as model:
            for call in calls:
                with pytest.raises(LockedError) as caught:
                    executor.submit(call).result()
                assert caught.value.path == str(path)
            with executor.submit(onnxarchive.open, path, timeout=0).result() as other:
                assert other.model == before
            waiting = executor.submit(referring, path)
            model.doc_string = "new"
        assert waiting.result().doc_string == "new"


def test_a_thread_does_not_wait_for_its_own_block(path: Path, archive: EditableArchive) -> None:
    ones = np.ones(300, np.float32)
    calls: list[Callable[[], object]] = [
        lambda: onnxarchive.open(path),
        lambda: onnxarchive.open(path, mode="r+"),
        lambda: onnxarchive.check(path),
        lambda: onnxarchive.recover(path),
        lambda: onnxarchive.save(new_model(), path),
        lambda: replace_model(path, new_model()),
        lambda: replace_model(path, new_model(), copy=True),
        lambda: replace_tensor(path, "w0", ones),
        lambda: change_model(path, lambda model: new_model()),
        lambda: onnxarchive.transform(path, path, lambda model: model, weights="loaded"),
        lambda: archive.replace_model(new_model()),
        lambda: archive.replace_tensor("w0", ones),
    ]
    before = path.read_bytes()
    with archive.edit() as model:
        for call in calls:
            with pytest.raises(LockedError, match="finish the edit first") as caught:
                call()
            assert caught.value.path == str(path)
            assert path.read_bytes() == before
        assert archive.tensors["w0"].shape == (300,)
        assert bytes(archive.assets["labels"]) == b"cat"
        archive.verify()
        assert bytes(archive.read("__MODEL_PROTO"))
        model.doc_string = "new"
    require(path, saved_with_asset(changed(weights(2), documented("new"))))
    archive.replace_tensor("w0", ones, timeout=0)
    onnxarchive.open(path, timeout=0).close()


def test_what_a_block_runs_as_tasks_belongs_to_it(path: Path, archive: EditableArchive) -> None:
    async def edit() -> None:
        archive.doc_string = "new"

    with archive.edit():
        asyncio.run(edit())
        assert archive.doc_string == "new"
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


def test_edits_go_on_while_asyncio_is_being_imported(
    path: Path, archive: EditableArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncio", ModuleType("asyncio"))
    with archive.edit() as model:
        model.doc_string = "new"
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


class InterruptedLock:
    """A lock that this thread gets, and an interrupt with it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self.is_interrupted = True

    def acquire(self, timeout: float = -1) -> bool:
        got = self._lock.acquire(timeout=timeout)
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        return got

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_an_interrupt_that_comes_with_the_lock_of_threads_leaves_it_to_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnxarchive.save(weights(2), path)
    monkeypatch.setattr(threading, "RLock", InterruptedLock)
    archive = onnxarchive.open(path, mode="r+")
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        archive.doc_string = "never"
    with ThreadPoolExecutor(1) as executor:
        executor.submit(archive.rename, timeout=1).result()
        executor.submit(setattr, archive, "doc_string", "new").result()
    archive.close()
    require(path, saved(changed(weights(2), documented("new"))))


def test_a_block_belongs_to_the_task_that_began_it(path: Path, archive: EditableArchive) -> None:
    async def edit(begun: asyncio.Event, refused: asyncio.Event) -> None:
        with archive.edit() as model:
            begun.set()
            await refused.wait()
            model.doc_string = "new"
            assert archive.doc_string == "new"

    async def interfere(begun: asyncio.Event, refused: asyncio.Event) -> None:
        await begun.wait()
        assert archive.doc_string == ""
        with pytest.raises(LockedError, match="finish the edit first"):
            archive.metadata["author"] = "Ada"
        refused.set()

    async def both() -> None:
        begun, refused = asyncio.Event(), asyncio.Event()
        await asyncio.gather(edit(begun, refused), interfere(begun, refused))

    asyncio.run(both())
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


@pytest.mark.parametrize("written", ["model", "tensor"])
def test_an_edit_is_left_alone_by_what_is_called_with_its_progress(
    path: Path, archive: EditableArchive, way: dict[str, Any], written: str
) -> None:
    ones = np.ones(300, np.float32)
    refused = []

    def progress(done: int, total: int) -> None:
        calls: list[Callable[[], object]] = [
            archive.close,
            lambda: archive.replace_model(new_model()),
            lambda: archive.replace_tensor("w1", 2 * ones),
            lambda: archive.metadata.update(author="Ada"),
            lambda: with_block(archive.edit()),
        ]
        for call in calls:
            with pytest.raises(LockedError, match="finish the edit first") as caught:
                call()
            refused.append(caught.value.path)

    expected = changed(weights(2), documented("new"))
    if written == "model":
        archive.replace_model(expected, progress=progress, **way)
    else:
        archive.doc_string = "new"
        archive.replace_tensor("w0", ones, progress=progress, **way)
        expected = with_array(expected, 0, ones)
    assert set(refused) == {str(path)}
    require(path, saved_with_asset(expected))
    assert archive.doc_string == "new"


def test_another_thread_sees_the_state_before_and_waits_to_edit(
    path: Path, archive: EditableArchive, way: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(1) as executor:
        with archive.edit(**way) as model:
            model.doc_string = "by this thread"
            archive.metadata["a"] = "1"

            def look() -> tuple[str, dict[str, str], bytes, bytes]:
                archive.verify()
                read = bytes(archive.read("__MODEL_PROTO"))
                found = archive.tensors["w1"].tobytes()
                return archive.doc_string, dict(archive.metadata), read, found

            before = referring_bytes(archive)
            unchanged: dict[str, str] = {}
            expected = ("", unchanged, before, weights(2).graph.initializer[1].raw_data)
            assert executor.submit(look).result() == expected

            def edit(timeout: float | None) -> None:
                with archive.edit(timeout=timeout, **way) as other:
                    other.metadata_props.add(key="b", value=other.doc_string)

            with pytest.raises(
                LockedError, match="another thread is editing the archive"
            ) as caught:
                executor.submit(edit, 0).result()
            assert caught.value.path == str(path)
            waiting = executor.submit(edit, None)
        waiting.result()
    assert dict(archive.metadata) == {"a": "1", "b": "by this thread"}
    assert archive.model == referring(path)


def test_a_timeout_is_one_for_both_locks_of_an_edit(
    archive: EditableArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    exclusive = locking.exclusive
    given: list[float] = []

    def watched(descriptor: int, timeout: float | None) -> contextlib.AbstractContextManager[None]:
        given.append(-1 if timeout is None else timeout)
        return exclusive(descriptor, timeout)

    with ThreadPoolExecutor(1) as executor:
        with archive.edit():
            monkeypatch.setattr(locking, "exclusive", watched)
            begun = threading.Event()

            def edit() -> None:
                begun.set()
                with archive.edit(timeout=60):
                    pass

            waiting = executor.submit(edit)
            begun.wait()
            time.sleep(0.5)
        waiting.result()
    assert len(given) == 1
    assert 0 < given[0] < 59.9


@pytest.mark.parametrize("timeout", [-1, -2.5, float("nan")])
def test_a_timeout_is_not_negative(archive: EditableArchive, timeout: float) -> None:
    calls: list[Callable[[], object]] = [
        archive.edit(timeout=timeout).__enter__,
        lambda: archive.rename(timeout=timeout),
        lambda: archive.replace_model(new_model(), timeout=timeout),
        lambda: archive.replace_tensor("w0", np.ones(300, np.float32), timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^expected a timeout of 0 seconds or more, found"):
            call()


def referring_bytes(archive: EditableArchive) -> bytes:
    return bytes(archive.read("__MODEL_PROTO"))


# Forks


def ends_well(call: Callable[[], object]) -> bool:
    """Whether a call returns in a fork of this process, and does so within a minute."""
    process = os.fork()
    if not process:
        signal.alarm(60)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1] == 0


@posix
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_fork_that_leaves_the_block_writes_nothing_and_keeps_the_lock(
    path: Path, archive: EditableArchive, error: type[BaseException] | None, way: dict[str, Any]
) -> None:
    before = path.read_bytes()

    def leave(block: Any) -> None:
        if error is None:
            with pytest.raises(ArchiveError, match="is a fork of"):
                block.__exit__(None, None, None)
        else:
            assert not block.__exit__(error, error(), None)
        assert path.read_bytes() == before

    block = archive.edit(**way)
    model = block.__enter__()
    model.doc_string = "new"
    assert ends_well(lambda: leave(block))
    assert path.read_bytes() == before
    with ThreadPoolExecutor(1) as executor, pytest.raises(LockedError):
        executor.submit(onnxarchive.recover, path, timeout=0).result()
    block.__exit__(None, None, None)
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


@posix
def test_a_fork_that_returns_from_the_function_of_change_model_writes_nothing(
    path: Path, way: dict[str, Any]
) -> None:
    onnxarchive.save(weights(2), path)
    before = path.read_bytes()
    parent = os.getpid()

    def change(model: onnx.ModelProto) -> onnx.ModelProto:
        process = os.fork()
        if process:
            assert os.waitpid(process, 0)[1] == 0
            assert path.read_bytes() == before
        return new_model()

    try:
        change_model(path, change, **way)
    except ArchiveError as error:
        os._exit(0 if os.getpid() != parent and "is a fork of" in str(error) else 1)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    require(path, saved(new_model()))


@posix
def test_a_fork_reads_and_closes_an_archive_that_another_thread_edits(
    path: Path, archive: EditableArchive
) -> None:
    begun, end = threading.Event(), threading.Event()

    def edit() -> None:
        with archive.edit() as model:
            model.doc_string = "new"
            begun.set()
            end.wait(60)

    def read_and_close() -> None:
        assert archive.tensors["w0"].shape == (300,)
        assert archive.read("__MODEL_PROTO")
        archive.verify()
        with pytest.raises(ArchiveError, match="is a fork of"):
            archive.doc_string = "by the fork"
        archive.close()

    with ThreadPoolExecutor(1) as executor:
        editing = executor.submit(edit)
        assert begun.wait(60)
        try:
            assert ends_well(read_and_close)
        finally:
            end.set()
        editing.result()
    require(path, saved_with_asset(changed(weights(2), documented("new"))))


def test_a_model_that_is_assigned_in_a_block_of_edit_is_not_changed_by_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path)
    model = model_of(raw_tensor("w", dims=(300,)))
    before = model.SerializeToString(deterministic=True)
    with onnxarchive.open(path, mode="r+") as archive, archive.edit():
        archive.model = model
        archive.doc_string = "new"
        archive.metadata["author"] = "Ada"
        archive.model.graph.name = "another"
    assert model.SerializeToString(deterministic=True) == before
    with onnxarchive.open(path) as changed:
        assert changed.model.doc_string == "new"
        assert dict(changed.metadata) == {"author": "Ada"}
        assert changed.model.graph.name == "another"
