"""Stops a change of an archive at each of its calls to the system, and looks at what is left.

`python tests/faults.py CHANGE DIRECTORY` makes the change once for each way in which each call can
fail: the process is killed before it, behind it, or with half of the bytes written; the call fails
as on a full disk or a broken one, once or from then on; it writes fewer bytes than it was given.
Then the power fails, with whatever was not synced kept, lost, or kept in part. It prints as JSON
how many faults were tried, and every archive that is neither the old nor the new one afterwards.

Calls are caught where Python makes them, in a fork of this process: it has no threads.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
import onnx
from models import model_of, raw_tensor

import onnxarchive
from onnxarchive import files, rewriting
from onnxarchive.edit import replace_model, replace_tensor
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.recovery import recover

NAME = "model.onnxa"
WEIGHTS = 3
KILLS = ("killed before", "killed behind", "killed amid")
ERRORS = (errno.ENOSPC, errno.EIO)
WAYS = (
    *KILLS,
    "short",
    *(f"{errno.errorcode[code]} {times}" for code in ERRORS for times in ("once", "on")),
)

Change = Callable[[Path], None]

# Which changes of a file that were not synced a power failure leaves.
KEPT: dict[str, Callable[[list[Any]], list[Any]]] = {
    "all kept": lambda pending: pending,
    "all lost": lambda pending: [],
    "first lost": lambda pending: pending[1:],
    "last lost": lambda pending: pending[:-1],
    "last alone kept": lambda pending: pending[-1:],
}


# The changes


def _model(generation: int, *, weights: int = WEIGHTS, padding: int = 0) -> onnx.ModelProto:
    model = model_of(*(raw_tensor(f"w{i}", dims=(1500,), seed=i) for i in range(weights)))
    model.doc_string = f"{generation:04}" + "x" * padding
    return model


def _old(path: Path) -> None:
    onnxarchive.save(_model(1, padding=10_000), path, assets={"labels": bytes(3000)})


def _without_assets(path: Path) -> None:
    onnxarchive.save(_model(1, padding=10_000), path)


def _nothing(path: Path) -> None:
    """There is no archive before."""


def _cut_off(path: Path) -> None:
    """A change of the archive was cut off amid the writing of its end."""
    _old(path)
    calls = Calls(9, "killed amid")
    assert fork(_larger, path, calls) == "killed"
    assert path.with_name(f"{NAME}-journal").exists()


def _array() -> Any:
    return np.arange(1500, dtype=np.float32)


def _cloned(change: Change) -> Change:
    """The change on a file system that shares blocks: one that copies them, and says nothing."""

    def changed(path: Path) -> None:
        def clone(source: files.MappedFile, target: BinaryIO) -> bool:
            target.write(source.read(0, source.size))
            target.flush()
            return True

        with patch.object(rewriting, "clone", clone):
            change(path)

    return changed


def _smaller(path: Path) -> None:
    replace_model(path, _model(2))


def _larger(path: Path) -> None:
    replace_model(path, _model(2, padding=40_000))


def _added(path: Path) -> None:
    replace_model(path, _model(2, weights=WEIGHTS + 1))


def _compacted(path: Path) -> None:
    replace_model(path, _model(2, weights=WEIGHTS - 1), compact=True)


def _copied(path: Path) -> None:
    replace_model(path, _model(2), copy=True)


def _tensor_in_place(path: Path) -> None:
    replace_tensor(path, "w1", _array(), in_place=True)


def _tensor(path: Path) -> None:
    replace_tensor(path, "w1", _array())


def _recovered(path: Path) -> None:
    recover(path)


def _saved(path: Path) -> None:
    onnxarchive.save(_model(2), path)


# What is there before, and what is done to it.
CHANGES: dict[str, tuple[Change, Change]] = {
    "save": (_nothing, _saved),
    "save over an archive": (_old, _saved),
    "replace_model by a smaller one": (_old, _smaller),
    "replace_model by a larger one": (_old, _larger),
    "replace_model with a new tensor": (_without_assets, _added),
    "replace_model on a clone": (_old, _cloned(_larger)),
    "replace_model with compact": (_old, _compacted),
    "replace_model with copy": (_old, _copied),
    "save over a change that was cut off": (_cut_off, _saved),
    "replace_model after a change that was cut off": (_cut_off, _smaller),
    "replace_tensor in place": (_old, _tensor_in_place),
    "replace_tensor": (_old, _tensor),
    "replace_tensor on a clone": (_old, _cloned(_tensor)),
}


# Calls that fail


class Calls:
    """The calls that change something, counted; one of them can fail.

    Attributes:
        number: How many there were.
        log: What each did, for a file system that is to be as it was at any moment.
    """

    def __init__(self, at: int = -1, way: str = "") -> None:
        self._at = at
        self._way = way
        self.number = 0
        self.log: list[tuple[Any, ...]] = []

    def __call__(self, act: Callable[[Any], Any], data: Any = None, *entry: Any) -> Any:
        """Makes one call: `act` with all of `data`, or as much as the fault lets through."""
        number, self.number = self.number, self.number + 1
        is_write = isinstance(data, memoryview)
        if self._is_fault(number):
            code = getattr(errno, self._way.split()[0], None)
            if code is not None:
                raise OSError(code, os.strerror(code))
            if self._way == "killed before":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_write and self._way in ("killed amid", "short"):
                data = data[: len(data) // 2] if len(data) > 1 else data
        result = act(data)
        if number == self._at and self._way in KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if entry:
            written = (bytes(data),) if is_write else ()
            self.log.append((*entry, *written))
        return result

    def _is_fault(self, number: int) -> bool:
        if self._at < 0:
            return False
        return number == self._at or (self._way.endswith(" on") and number > self._at)

    def catch(self) -> None:
        """Catches the calls of this process from now on."""
        write_at, truncate, sync = os.pwrite, os.ftruncate, os.fsync
        move, unlink, open_descriptor = os.replace, os.unlink, os.open
        calls = self

        def inode(descriptor: int) -> int:
            return os.fstat(descriptor).st_ino

        def pwrite(descriptor: int, data: Any, offset: int) -> Any:
            entry = ("write", inode(descriptor), offset)
            return calls(lambda it: write_at(descriptor, it, offset), memoryview(data), *entry)

        def ftruncate(descriptor: int, size: int) -> Any:
            return calls(
                lambda _: truncate(descriptor, size), None, "truncate", inode(descriptor), size
            )

        def fsync(descriptor: int) -> Any:
            return calls(lambda _: sync(descriptor), None, "sync", inode(descriptor))

        def replace(source: Any, target: Any) -> Any:
            entry = ("rename", os.path.basename(source), os.path.basename(target))
            return calls(lambda _: move(source, target), None, *entry)

        def remove(path: Any) -> Any:
            if not os.path.lexists(path):
                return unlink(path)  # which fails, and changes nothing
            return calls(lambda _: unlink(path), None, "unlink", os.path.basename(path))

        def open_(path: Any, flags: int, mode: int = 0o777) -> int:
            if not flags & os.O_CREAT:
                return open_descriptor(path, flags, mode)
            made: int = calls(lambda _: open_descriptor(path, flags, mode))
            calls.log.append(("create", os.path.basename(path), inode(made)))
            return made

        class Raw(io.FileIO):
            def write(self, data: Any, /) -> Any:
                entry = ("write", inode(self.fileno()), os.lseek(self.fileno(), 0, os.SEEK_CUR))
                return calls(super().write, memoryview(data).cast("B"), *entry)

        def open_new(path: str) -> BinaryIO:
            raw = calls(lambda _: Raw(path, "x"))
            calls.log.append(("create", os.path.basename(path), inode(raw.fileno())))
            return io.BufferedWriter(raw)

        os.pwrite, os.ftruncate, os.fsync = pwrite, ftruncate, fsync  # type: ignore[assignment]
        os.replace, os.unlink, os.open = replace, remove, open_  # type: ignore[assignment]
        files._open_new = open_new


def fork(change: Change, path: Path, calls: Calls, log: Path | None = None) -> str:
    """Makes a change in a process of its own: what became of it, an error's name or `killed`."""
    process = os.fork()
    if not process:
        outcome = "done"
        calls.catch()
        try:
            change(path)
        except (OSError, ArchiveError) as error:
            outcome = "ArchiveError" if isinstance(error, ArchiveError) else "OSError"
        except BaseException as error:
            outcome = repr(error)
        if log is not None:
            log.write_bytes(pickle.dumps(calls.log))
        path.with_suffix(".outcome").write_text(outcome)
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    outcome = path.with_suffix(".outcome").read_text()
    path.with_suffix(".outcome").unlink()
    return outcome


# What is left


class Scene:
    """A directory with an archive, and what the archive may be after a change."""

    def __init__(self, directory: Path, before: Change, change: Change) -> None:
        self.directory = directory
        self.path = directory / NAME
        self._before = before
        self._change = change
        self.set_up()
        self._start = self._snapshot()
        if self.path.exists():
            recover(self.path)
        self.old = self._bytes()
        self.set_up()
        change(self.path)
        self.new = self._bytes()
        assert self.old != self.new
        self.log = self._record()

    def set_up(self) -> None:
        """Makes everything as it is before the change."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        self._before(self.path)

    def _snapshot(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def _restore(self, snapshot: dict[str, bytes]) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        for name, content in snapshot.items():
            (self.directory / name).write_bytes(content)

    def _bytes(self) -> bytes | None:
        return self.path.read_bytes() if self.path.exists() else None

    def _record(self) -> list[tuple[Any, ...]]:
        """What the change does, call by call."""
        self.set_up()
        log = self.directory.with_suffix(".log")
        assert fork(self._change, self.path, Calls(), log) == "done"
        assert self._bytes() == self.new
        found: list[tuple[Any, ...]] = pickle.loads(log.read_bytes())
        log.unlink()
        return found

    def faults(self) -> Iterator[tuple[int, str]]:
        """Each call of the change, in each way in which it can fail."""
        counting = Calls()
        for entry in self.log:
            kind = entry[0]
            for way in WAYS:
                if way in ("killed amid", "short") and kind != "write":
                    continue
                yield counting.number, way
            counting.number += 1

    def try_fault(self, at: int, way: str) -> tuple[str, str | None]:
        """What became of the change, and what is wrong afterwards, if anything is."""
        self.set_up()
        outcome = fork(self._change, self.path, Calls(at, way))
        is_journal_left = self.path.with_name(f"{NAME}-journal").exists()
        had_journal = f"{NAME}-journal" in self._start
        is_error = outcome == "OSError" and not way.endswith(" on")
        if is_journal_left and not had_journal and (outcome == "done" or is_error):
            return outcome, "a journal is left without a crash"
        problem = self._problem()
        if problem is not None:
            return outcome, problem
        found = "old" if self._bytes() == self.old else "new"
        if way == "short" and (outcome, found) != ("done", "new"):
            return outcome, f"a short write: {outcome}, {found}"
        if outcome == "done" and found == "old":
            return outcome, "it was said to be done, and is not"
        if outcome == "OSError" and found == "new":
            return outcome, "it was said to have failed, and is done"
        if outcome not in ("done", "killed", "OSError", "ArchiveError"):
            return outcome, f"an error of another kind: {outcome}"
        return f"{outcome}, {found}", None

    def _problem(self) -> str | None:
        """What is wrong with what is left, for a reader, and after recovery."""
        try:
            with onnxarchive.open(self.path):
                pass
            readable = self._bytes()
            if readable not in (self.old, self.new):
                return "a reader opened neither the old nor the new archive"
        except UnfinishedEditError:
            pass
        except FileNotFoundError:
            if self.old is not None:
                return "the archive is gone"
        except Exception as error:
            return f"a reader found {error!r}"
        try:
            recover(self.path)
        except FileNotFoundError:
            if self.old is not None:
                return "the archive is gone"
        except Exception as error:
            return f"recovery found {error!r}"
        if self._bytes() not in (self.old, self.new):
            return "neither the old nor the new archive"
        left = sorted(set(os.listdir(self.directory)) - {NAME})
        return f"left behind: {left}" if left else None

    def try_recovery(self, at: int) -> Iterator[tuple[str, str | None]]:
        """Kills recovery, too, at each of its calls, after a change that was killed at one."""
        for number in itertools.count():
            self.set_up()
            fork(self._change, self.path, Calls(at, "killed behind"))
            outcome = fork(_recovered, self.path, Calls(number, "killed behind"))
            if outcome != "killed":
                return
            yield "killed again", self._problem()

    # Power failures

    def power_failures(self) -> Iterator[tuple[str, str | None]]:
        """The power fails behind each call."""
        for count in range(len(self.log) + 1):
            for name, disk in disks(self.log[:count]):
                self._restore(self._start)
                disk.materialize(self.path)
                problem = self._problem()
                if count == len(self.log) and problem is None and self._bytes() != self.new:
                    problem = "it was done, and is not any more"
                yield f"power failure, {name}", problem

    def power_failures_of_recovery(self, at: int) -> Iterator[tuple[str, str | None]]:
        """The power fails behind each call of the recovery of a change that was killed."""
        self.set_up()
        fork(self._change, self.path, Calls(at, "killed behind"))
        start = self._snapshot()
        if f"{NAME}-journal" not in start:
            return
        log = self.directory.with_suffix(".log")
        fork(_recovered, self.path, Calls(), log)
        calls = pickle.loads(log.read_bytes())
        log.unlink()
        for count in range(len(calls) + 1):
            for name, disk in disks(calls[:count]):
                self._restore(start)
                disk.materialize(self.path)
                yield f"power failure of recovery, {name}", self._problem()


class Disk:
    """What is on the disk after a power failure.

    Attributes:
        names: The inode that a name has got by then, or None for one that was removed.
        changes: The writes and truncations of each inode that have reached the disk.
        created: The inodes that were not there before.
    """

    def __init__(
        self, names: dict[str, int | None], changes: dict[int, list[Any]], created: set[int]
    ) -> None:
        self.names = names
        self.changes = changes
        self.created = created

    def materialize(self, archive: Path) -> None:
        """Makes the files of the archive's directory those of the disk."""
        for inode in self.changes.keys() - self.created:  # the archive, changed in its place
            content = self._content(inode, archive.read_bytes())
            with open(archive, "r+b") as file:
                file.truncate(len(content))
                file.write(content)
        for name, named in self.names.items():
            path = archive.with_name(name)
            path.unlink(missing_ok=True)
            if named is not None:
                path.write_bytes(self._content(named, b""))
        left = archive.with_name(f"{NAME}-journal")
        if left.exists() and archive.exists() and self.names.get(NAME) is None:
            left.write_bytes(of_inode(left.read_bytes(), archive.stat().st_ino))

    def _content(self, inode: int, before: bytes) -> bytes:
        content = bytearray(before)
        for kind, _, position, *data in self.changes.get(inode, []):
            if kind == "truncate":
                content = content[:position].ljust(position, b"\0")
            else:
                end = position + len(data[0])
                content = content.ljust(end, b"\0")
                content[position:end] = data[0]
        return bytes(content)


def of_inode(content: bytes, inode: int) -> bytes:
    """A journal of the same file, which has another inode here, if it is a complete one."""
    covered, checksum = content[:-32], content[-32:]
    if hashlib.sha256(covered).digest() != checksum:
        return content
    covered = covered[:20] + inode.to_bytes(8, "little") + covered[28:]
    return covered + hashlib.sha256(covered).digest()


def disks(log: list[tuple[Any, ...]]) -> Iterator[tuple[str, Disk]]:
    """What may be on the disk when the power fails after these calls.

    Of changes of a file that were not synced any may be lost; of changes of the directory those
    behind some moment, or all but the last.
    """
    of_names: list[tuple[Any, ...]] = []
    of_files: dict[int, list[Any]] = {}
    synced: Counter[int] = Counter()
    synced_names = 0
    for entry in log:
        kind, first = entry[0], entry[1]
        if kind in ("create", "rename", "unlink"):
            of_names.append(entry)
            if kind == "create":
                of_files[entry[2]] = []
        elif kind in ("write", "truncate"):
            of_files.setdefault(first, []).append(entry)
        elif first in of_files:
            synced[first] = len(of_files[first])
        else:  # the directory
            synced_names = len(of_names)
    created = {entry[2] for entry in of_names if entry[0] == "create"}
    orders = [of_names[:count] for count in range(synced_names, len(of_names) + 1)]
    if len(of_names) > synced_names + 1 and of_names[-1][0] != "rename":
        orders.append([*of_names[:synced_names], of_names[-1]])  # the last one before the others
    for order in orders:
        names: dict[str, int | None] = {}
        for kind, first, *rest in order:
            if kind == "rename":
                names[rest[0]] = names[first]
            names[first] = rest[0] if kind == "create" else None
        for policy, keep in KEPT.items():
            changes = {
                inode: found[: synced[inode]] + keep(found[synced[inode] :])
                for inode, found in of_files.items()
            }
            yield policy, Disk(names, changes, created)


def main() -> None:
    """Tries one change in every way, and prints what came of it."""
    _, name, directory = sys.argv
    before, change = CHANGES[name]
    scene = Scene(Path(directory) / "scene", before, change)
    outcomes: Counter[str] = Counter()
    problems: list[str] = []

    def count(where: str, outcome: str, problem: str | None) -> None:
        outcomes[outcome] += 1
        if problem is not None:
            problems.append(f"{where}: {problem}")

    for at, way in scene.faults():
        count(f"call {at} {scene.log[at][:2]} {way}", *scene.try_fault(at, way))
    for at in range(len(scene.log)):
        for result in scene.try_recovery(at):
            count(f"recovery after call {at}", *result)
    for result in scene.power_failures():
        count(result[0], *result)
    for at in range(0, len(scene.log), 3):
        for result in scene.power_failures_of_recovery(at):
            count(f"after call {at}, {result[0]}", *result)
    json.dump({"calls": len(scene.log), "outcomes": outcomes, "problems": problems}, sys.stdout)


if __name__ == "__main__":
    main()
