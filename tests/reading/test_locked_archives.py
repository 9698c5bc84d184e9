"""Archives that another program keeps locked: who waits, for how long, and what a reader sees."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import lock_calls
import numpy as np
import onnx
import pytest
from edits import add_asset, document, replace_model
from interruptions import PHASES, Interrupted, interrupt
from models import documented_model, runnable_model
from versions import object_store

import onnxarchive
from onnxarchive import LockedError, UnfinishedEditError
from onnxarchive.files import locking
from onnxarchive.files.replacement import Replacement
from onnxarchive.interop.onnxruntime import session

fcntl = pytest.importorskip("fcntl", reason="locks of POSIX")

_Result = TypeVar("_Result")

linux = pytest.mark.skipif(
    not lock_calls.has_open_file_locks(), reason="every reader can lock files"
)


def other_names(path: Path) -> set[str]:
    return set(os.listdir(path.parent)) - {path.name}


def in_a_thread(act: Callable[[], _Result]) -> _Result:
    """Calls a function in another thread, which has locks of its own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(act).result()


@pytest.fixture(params=["open files", "flock"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The locks of the system."""
    if request.param == "flock":
        monkeypatch.delattr(fcntl, "F_OFD_SETLK", raising=False)
    elif not lock_calls.has_open_file_locks():
        pytest.skip("this system has no locks of open files")
    return str(request.param)


def model_of(path: Path, **options: Any) -> onnx.ModelProto:
    with onnxarchive.open(path, **options) as archive:
        model: onnx.ModelProto = archive.model
        return model


def convert_to_another(path: Path) -> None:
    onnxarchive.convert(path, path.parent.parent / "other.onnxa")


READING: dict[str, Callable[[Path], object]] = {
    "open": model_of,
    "load": onnxarchive.load,
    "check": lambda path: onnxarchive.check(path, full=True),
    "verify": lambda path: onnxarchive.open(path).verify(),
    "session": session,
    "link": lambda path: onnxarchive.link(path, path.parent.parent / "link.onnx"),
    "diff": lambda path: onnxarchive.diff(path, path),
    "convert": convert_to_another,
    "export": lambda path: onnxarchive.export(path, path.parent.parent / "other.onnx"),
    "extract": lambda path: onnxarchive.extract(path, path.parent.parent / "directory"),
}


def replace_shapes(path: Path) -> None:
    onnxarchive.infer_shapes(path.with_name("other.onnxa"), path)


def write(path: Path) -> None:
    with onnxarchive.Writer(path) as writer:
        writer.add("w", np.zeros(300, np.float32))
        writer.finish(runnable_model())


# What replaces or edits `path`; `other.onnxa` is beside it.
CHANGING: dict[str, Callable[[Path], object]] = {
    "save": lambda path: onnxarchive.save(runnable_model(), path),
    "convert": lambda path: onnxarchive.convert(path.with_name("other.onnxa"), path),
    "export": lambda path: onnxarchive.export(path.with_name("other.onnxa"), path),
    "export external data": lambda path: onnxarchive.export(
        path.with_name("other.onnxa"),
        path.with_name("new.onnx"),
        external_data=path.name,
    ),
    "Writer": write,
    "link": lambda path: onnxarchive.link(path.with_name("other.onnxa"), path),
    "transform": lambda path: onnxarchive.transform(
        path.with_name("other.onnxa"), path, lambda model: model, weights="loaded"
    ),
    "infer_shapes": replace_shapes,
    "download": lambda path: onnxarchive.download(
        "other.onnxa", path, store=object_store("LocalStore", path.parent)
    ),
    "recover": onnxarchive.recover,
    "edit": document,
    "edit with copy": partial(document, copy=True),
    "edit of assets": lambda path: add_asset(path, "labels", b"cat"),
}


# Users who may only read a file


@linux
@pytest.mark.parametrize("act", (READING | CHANGING).values(), ids=READING | CHANGING)
def test_a_user_who_may_only_read_an_archive_keeps_nobody_waiting(
    archive: Path, act: Callable[[Path], object], clock: SimpleNamespace
) -> None:
    onnxarchive.save(runnable_model(), archive.with_name("other.onnxa"))
    with open(archive, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        act(archive)
    assert clock.now == 0


@linux
def test_a_user_who_may_only_read_a_file_can_replace_it_and_excludes_editors_meanwhile(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with onnxarchive.edit(archive, copy=True) as edit:
        with pytest.raises(LockedError):
            in_a_thread(lambda: document(archive, copy=True, timeout=0))
        with monkeypatch.context() as patches:
            patches.setattr(os, "open", open_file)
            with pytest.raises(LockedError):
                in_a_thread(lambda: document(archive, timeout=0))
        in_a_thread(lambda: model_of(archive, timeout=0))
        edit.model.doc_string = "new"
    assert model_of(archive).doc_string == "new"
    monkeypatch.undo()
    document(archive, timeout=0)


def test_a_lock_of_another_user_on_a_new_file_does_not_stop_its_writer(
    archive: Path, system: str, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = locking.keep_exclusive
    descriptors: list[int] = []

    def late(descriptor: int, timeout: float) -> bool:
        (name,) = other_names(archive)
        descriptors.append(os.open(archive.with_name(name), os.O_RDONLY))
        lock_calls.lock(descriptors[-1], "shared")
        return lock(descriptor, timeout)

    monkeypatch.setattr(locking, "keep_exclusive", late)
    onnxarchive.save(documented_model("new"), archive)
    os.close(descriptors[0])
    assert model_of(archive).doc_string == "new"


# Readers


@pytest.mark.parametrize("act", READING.values(), ids=READING)
def test_readers_of_a_file_that_stays_locked_go_on_after_a_while(
    archive: Path, act: Callable[[Path], object], system: str, clock: SimpleNamespace
) -> None:
    with lock_calls.locked(archive, "exclusive"):
        act(archive)
    assert clock.now >= locking.TIMEOUT


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    path = tmp_path_factory.mktemp("edit") / "model.onnxa"
    onnxarchive.save(documented_model("old"), path)
    return interrupt(path, lambda path: replace_model(path, documented_model("new" * 99)))


@pytest.mark.parametrize("phase", PHASES)
def test_a_reader_without_the_lock_sees_no_half_of_an_edit(
    archive: Path, phase: str, edit: Interrupted, system: str
) -> None:
    archive.write_bytes(edit.states[phase])
    acts = (model_of, onnxarchive.load, onnxarchive.check, convert_to_another)
    with lock_calls.locked(archive, "exclusive"):
        with pytest.raises(LockedError, match="the file is locked by a process") as caught:
            onnxarchive.open(archive, timeout=0)
        assert caught.value.path == str(archive)
    assert archive.read_bytes() == edit.states[phase]
    for act in acts:  # nobody edits it any more
        with pytest.raises(UnfinishedEditError):
            act(archive)


@pytest.mark.parametrize("failure", ["locked", "no locks"])
@pytest.mark.parametrize("length", [50, 40, 90])
@pytest.mark.parametrize("name", ["pread", "fstat"])
def test_an_edit_while_a_reader_without_the_lock_reads_is_noticed(
    archive: Path, name: str, length: int, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a reader may be followed by a whole edit of two models."""
    documents = {"old": "a" * 50, "new": "b" * length}
    states = {}
    for state, text in documents.items():
        model, other = documented_model(text), documented_model(text, seed=1)
        onnxarchive.save(model, archive, models={"decoder": other})
        states[state] = archive.read_bytes()
    old, new = states["old"], states["new"]
    function = getattr(os, name)
    outcomes: set[str] = set()

    def open_while_edited_after(count: int) -> bool:
        """Returns False if there are fewer calls."""
        calls = 0

        def edited(*arguments: int) -> Any:
            nonlocal calls
            result = function(*arguments)
            calls += 1
            if calls == count:
                with open(archive, "r+b") as file:
                    file.write(new)
                    file.truncate()
            return result

        archive.write_bytes(old)
        with monkeypatch.context() as patches:
            patches.setattr(os, name, edited)
            if failure == "no locks":
                lock_calls.refuse(patches, errno.ENOLCK)
            try:
                with onnxarchive.open(archive, timeout=0) as opened:
                    texts = {model.doc_string for model in opened.models.values()}
                outcomes.add(*texts)
            except LockedError as error:
                assert error.path == str(archive)
                outcomes.add("refused")
        return calls >= count

    with lock_calls.locked(archive, "exclusive" if failure == "locked" else "unlock"):
        count = 1
        while open_while_edited_after(count):
            count += 1
    assert {documents["old"], "refused"} <= outcomes <= {*documents.values(), "refused"}


@pytest.mark.parametrize(
    "code", [524, errno.EREMOTEIO, errno.EIO, errno.ENOMEM, errno.EPERM, errno.ENOLCK]
)
@pytest.mark.parametrize("act", READING.values(), ids=READING)
def test_readers_go_on_whatever_the_error_of_a_lock(
    archive: Path, act: Callable[[Path], object], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int, kind: lock_calls.Kind, call: Callable[[], object]) -> None:
        if kind == "shared":
            raise OSError(code, os.strerror(code))
        call()

    lock_calls.watch(monkeypatch, refuse)
    act(archive)


# Editors and writers


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
@pytest.mark.parametrize("act", CHANGING.values(), ids=CHANGING)
def test_replacing_a_file_that_stays_locked_is_an_error_that_names_it(
    archive: Path,
    act: Callable[[Path], object],
    kind: lock_calls.Kind,
    system: str,
    clock: SimpleNamespace,
) -> None:
    onnxarchive.save(documented_model("other"), archive.with_name("other.onnxa"))
    names, content = set(os.listdir(archive.parent)), archive.read_bytes()
    with (
        lock_calls.locked(archive, kind),
        pytest.raises(LockedError, match="the file is locked by a process") as caught,
    ):
        act(archive)
    assert caught.value.path == str(archive)
    assert clock.now >= locking.TIMEOUT
    assert archive.read_bytes() == content
    unfinished = f".{archive.name}.download"  # the next download continues it
    assert set(os.listdir(archive.parent)) - {unfinished} == names


@pytest.mark.parametrize("timeout", [0, 0.02, 90])
@pytest.mark.parametrize(
    "act",
    [
        lambda path, **options: onnxarchive.save(runnable_model(), path, **options),
        lambda path, **options: onnxarchive.convert(path.with_name("other.onnxa"), path, **options),
        lambda path, **options: onnxarchive.export(path.with_name("other.onnxa"), path, **options),
        document,
        onnxarchive.recover,
    ],
    ids=["save", "convert", "export", "edit", "recover"],
)
def test_a_locked_file_is_waited_for_as_long_as_asked(
    archive: Path, act: Callable[..., object], timeout: float, clock: SimpleNamespace
) -> None:
    onnxarchive.save(documented_model("other"), archive.with_name("other.onnxa"))
    with lock_calls.locked(archive, "shared"), pytest.raises(LockedError):
        act(archive, timeout=timeout)
    assert timeout <= clock.now < timeout + 1
    act(archive, timeout=None)


@pytest.mark.parametrize("name", ["m.onnx", "m.data"])
def test_an_export_to_locked_files_changes_neither(
    archive: Path, name: str, clock: SimpleNamespace
) -> None:
    target = archive.parent.parent / "m.onnx"
    onnxarchive.export(archive, target, external_data="m.data")
    other = archive.with_name("other.onnxa")
    onnxarchive.save(documented_model("other", seed=1), other)
    before = {path: path.read_bytes() for path in (target, target.with_name("m.data"))}
    with (
        lock_calls.locked(target.with_name(name), "shared"),
        pytest.raises(LockedError) as caught,
    ):
        onnxarchive.export(other, target, external_data="m.data")
    assert caught.value.path == str(target.with_name(name))
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(os.listdir(target.parent)) == sorted([archive.parent.name, "m.data", "m.onnx"])


@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE]
)
@pytest.mark.parametrize("call", ["open", "lock"])
def test_a_file_that_cannot_be_locked_is_not_replaced(
    archive: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, open_file = archive.read_bytes(), os.open
    replacement = Replacement(archive)
    replacement.writer.write(b"new")

    def refuse_lock(_: int, kind: lock_calls.Kind, lock: Callable[[], object]) -> None:
        if kind != "unlock":
            raise OSError(code, os.strerror(code))
        lock()

    def refuse_open(path: Any, *arguments: Any) -> int:
        if path == str(archive):
            raise OSError(code, os.strerror(code), path)
        return open_file(path, *arguments)

    with monkeypatch.context() as patches:
        if call == "open":
            patches.setattr(os, "open", refuse_open)
        else:
            lock_calls.watch(patches, refuse_lock)
        with pytest.raises(OSError, match=os.strerror(code)) as caught, replacement:
            replacement.commit()
    assert (caught.value.errno, caught.value.filename) == (code, str(archive))
    assert archive.read_bytes() == content
    assert os.listdir(archive.parent) == [archive.name]


def test_a_file_that_may_not_be_opened_is_replaced(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if path == str(archive):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_file(path, *arguments)

    with monkeypatch.context() as patches:
        patches.setattr(os, "open", refuse)
        onnxarchive.save(documented_model("new"), archive)
    assert model_of(archive).doc_string == "new"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, 524])
def test_a_file_is_replaced_where_the_file_system_has_no_locks(
    archive: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        lock_calls.refuse(patches, code)
        onnxarchive.save(documented_model("new"), archive)
    assert model_of(archive).doc_string == "new"
    assert os.listdir(archive.parent) == [archive.name]
