"""Makes each system call of an archive's edit fail, and checks the file afterwards.

`python tests/helpers/faults.py` reads lines of a directory and an edit in JSON, and tries each way
to fail at each call of the edit: the process is killed before the call, after the call, or with
half of the bytes written; the call fails with ENOSPC or EIO, once or from then on; a write writes
only half of its bytes. Recovery is stopped in the same ways. Then the power fails after each call,
and unsynced changes are kept, lost, or kept in part. Prints a line of JSON for each edit: the
number of faults by outcome, and a description of each problem found afterwards, such as an archive
with neither the old nor the new bytes.

Patched functions of `os` catch the calls. Each edit is tried in a fork of this process, so that
none finds what another left in memory; the killed process is a fork of that. None has threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import edits
import numpy as np
import onnx
from edits import remove_model, replace_model, replace_tensor
from interruptions import interrupt
from models import model_of, raw_tensor

import onnxarchive
from onnxarchive.editing.recover import recover
from onnxarchive.errors import ArchiveError, UnfinishedEditError
from onnxarchive.files import clones_and_sync

NAME = "model.onnxa"
WEIGHTS = 3
SECTOR_SIZE = 512
KILLS = ("killed before", "killed after", "killed amid")
ERRORS = (errno.ENOSPC, errno.EIO)
WAYS = (
    *KILLS,
    "short",
    *(f"{errno.errorcode[code]} {times}" for code in ERRORS for times in ("once", "on")),
)

Edit = Callable[[Path], object]


# The edits


def _generation(generation: int, *, weights: int = WEIGHTS, padding: int = 0) -> onnx.ModelProto:
    model = model_of(*(raw_tensor(f"w{i}", dims=(1500,), seed=i) for i in range(weights)))
    model.doc_string = f"{generation:04}" + "x" * padding
    return model


def _old(path: Path) -> None:
    onnxarchive.save(_generation(1, padding=10_000), path, assets={"labels": bytes(3000)})


def _without_assets(path: Path) -> None:
    onnxarchive.save(_generation(1, padding=10_000), path)


def _two(path: Path) -> None:
    """Makes an archive of two models that share weights."""
    decoder = _generation(1, weights=WEIGHTS - 1, padding=3000)
    onnxarchive.save(_generation(1, padding=10_000), path, models={"decoder": decoder})


def _cloned(edit: Edit) -> Edit:
    """The edit as on a file system with clones; a clone is a copy here."""
    edit = patch.object(clones_and_sync, "has_clones", lambda source: True)(edits.on_a_clone(edit))
    return patch.object(clones_and_sync, "devices_without_clones", set[int]())(edit)


def _replaced(*, compact: bool = False, copy: bool = False, name: str = "", **model: int) -> Edit:
    """An edit that replaces a model."""
    return lambda path: replace_model(
        path, _generation(2, **model), name=name, compact=compact, copy=copy
    )


_longer = _replaced(padding=40_000)


def _interrupted(phase: str, before: Edit = _old) -> Edit:
    """An edit that makes an archive and leaves it interrupted in a phase of `PHASES`."""

    def leave(path: Path) -> None:
        before(path)
        path.write_bytes(interrupt(path, _longer).states[phase])

    return leave


def _assigned(path: Path) -> None:
    with onnxarchive.edit(path) as edit:
        edit.model = _generation(2, weights=WEIGHTS + 1, padding=10_000)
        edit.metadata["author"] = "Ada"
        edit.models["decoder"] = _generation(3)
        edit.assets["new"] = bytes(2000)


def _tensor(path: Path) -> None:
    replace_tensor(path, "w1", np.arange(1500, dtype=np.float32))


def _saved(path: Path) -> None:
    onnxarchive.save(_generation(2), path, assets={})


def _assets(path: Path, removed: Collection[str] = ()) -> None:
    edits.change_assets(path, {"a": bytes(2000), "b": b"new"}, removed)


_replaced_assets = partial(_assets, removed=["labels"])
_removed = partial(remove_model, name="decoder")


_further = _replaced(weights=WEIGHTS + 1, padding=8000, name="decoder")

# By name: makes the archive, then edits it.
EDITS: dict[str, tuple[Edit, Edit]] = {
    "save": (lambda path: None, _saved),
    "save over an archive": (_old, _saved),
    "replace_model with a shorter end": (_old, _replaced()),
    "replace_model with an equal end": (_old, _replaced(padding=10_000)),
    "replace_model with a longer end": (_old, _longer),
    "replace_model with a new tensor": (_without_assets, _replaced(weights=WEIGHTS + 1)),
    "replace_model with a new tensor after assets": (_old, _replaced(weights=WEIGHTS + 1)),
    "several changes": (_old, _assigned),
    "several changes on a clone": (_old, _cloned(_assigned)),
    "replace_model on a clone": (_old, _cloned(_longer)),
    "replace_model with compact": (_old, _replaced(weights=WEIGHTS - 1, compact=True)),
    "replace_model with copy": (_old, _replaced(copy=True)),
    "save after a new end was begun": (_interrupted("new end begun"), _saved),
    "replace_model after a log was begun": (_interrupted("log begun"), _replaced()),
    "replace_model after a new end was begun": (_interrupted("new end begun"), _replaced()),
    "replace_model of one of two models": (_two, _longer),
    "replace_model of a further model": (_two, _further),
    "replace_model with a further model": (_old, _further),
    "remove_model": (_two, _removed),
    "remove_model after a log was begun": (_interrupted("log begun", _two), _removed),
    "remove_model after a new end was begun": (_interrupted("new end begun", _two), _removed),
    "replace_tensor of a shared tensor": (_two, _tensor),
    "replace_tensor": (_old, _tensor),
    "replace_tensor on a clone": (_old, _cloned(_tensor)),
    "new assets": (_old, _assets),
    "new assets on a clone": (_old, _cloned(_assets)),
    "change_assets": (_old, _replaced_assets),
    "change_assets on a clone": (_old, _cloned(_replaced_assets)),
}


# Calls that fail


class Call(NamedTuple):
    """A system call that changes a file or directory, or syncs it.

    Attributes:
        kind: "write", "truncate", "sync", "create", "rename", "link" or "unlink".
        file: Inode of the file, or name of the file or directory.
        detail: Offset of a write, new size, new name, or inode of the created file.
        data: Bytes of a write.
    """

    kind: str
    file: int | str
    detail: Any = None
    data: bytes = b""


class Calls:
    """Catches and logs the system calls of an edit; lets one of them fail.

    Attributes:
        way: How the call fails, from `WAYS`.
        log: The calls made so far, from which the disk at any moment can be computed.
    """

    def __init__(self, at: int = -1, way: str = "") -> None:
        self._at = at
        self.way = way
        self._number = 0
        self.log: list[Call] = []

    def _make(self, act: Callable[[Any], Any], call: Call, data: Any = None) -> Any:
        """Makes one call: `act` with all of `data`, or with half of it if the fault cuts it."""
        number, self._number = self._number, self._number + 1
        if self._is_fault(number):
            code = getattr(errno, self.way.split()[0], None)
            if code is not None:
                raise OSError(code, os.strerror(code))
            if self.way == "killed before":
                os.kill(os.getpid(), signal.SIGKILL)
            if call.kind == "write" and self.way in ("killed amid", "short"):
                data = data[: len(data) // 2] if len(data) > 1 else data
        result = act(data)
        if number == self._at and self.way in KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if call.kind == "create":
            call = call._replace(detail=_inode(result))
        self.log.append(call if data is None else call._replace(data=bytes(data)))
        return result

    def _is_fault(self, number: int) -> bool:
        return number == self._at or (self.way.endswith(" on") and number > self._at >= 0)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catches the calls of this process while the block runs; nothing waits for the disk."""
        write_at, truncate_at = os.pwrite, os.ftruncate
        move, remove, open_descriptor, make_link = os.replace, os.unlink, os.open, os.link

        def write(descriptor: int, data: Any, offset: int) -> Any:
            call = Call("write", _inode(descriptor), offset)
            return self._make(lambda it: write_at(descriptor, it, offset), call, memoryview(data))

        def truncate(descriptor: int, size: int) -> Any:
            call = Call("truncate", _inode(descriptor), size)
            return self._make(lambda _: truncate_at(descriptor, size), call)

        def sync(descriptor: int) -> Any:
            return self._make(lambda _: None, Call("sync", _inode(descriptor)))

        def replace(source: Any, target: Any) -> Any:
            call = Call("rename", os.path.basename(source), os.path.basename(target))
            return self._make(lambda _: move(source, target), call)

        def link(source: Any, target: Any) -> Any:
            call = Call("link", os.path.basename(source), os.path.basename(target))
            return self._make(lambda _: make_link(source, target), call)

        def unlink(path: Any) -> Any:
            if not os.path.lexists(path):
                return remove(path)  # fails and changes nothing
            return self._make(lambda _: remove(path), Call("unlink", os.path.basename(path)))

        def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
            if not flags & os.O_CREAT:
                return open_descriptor(path, flags, mode, dir_fd=dir_fd)
            call = Call("create", os.path.basename(path))
            return self._make(lambda _: open_descriptor(path, flags, mode, dir_fd=dir_fd), call)

        system: dict[str, Any] = {
            "pwrite": write,
            "ftruncate": truncate,
            "fsync": sync,
            "replace": replace,
            "link": link,
            "unlink": unlink,
            "open": open_,
        }
        with patch.multiple(os, **system):
            yield


def _inode(descriptor: int) -> int | str:
    """The inode of a file, or "." for a directory."""
    status = os.fstat(descriptor)
    return "." if stat.S_ISDIR(status.st_mode) else status.st_ino


def attempt(edit: Edit, path: Path, calls: Calls) -> str:
    """Makes an edit; returns "done", "killed", or the class (or text) of its error."""
    if calls.way in KILLS:  # in another process
        process = os.fork()
        if not process:
            try:
                with calls.caught():
                    edit(path)
            finally:
                os._exit(0)
        _, status = os.waitpid(process, 0)
        return "killed" if os.WIFSIGNALED(status) else "done"
    with calls.caught():
        try:
            edit(path)
        except (OSError, ArchiveError) as error:
            return "ArchiveError" if isinstance(error, ArchiveError) else "OSError"
        except Exception as error:
            return repr(error)
    return "done"


# Checks


class Scene:
    """A directory with an archive, and the archive's bytes before and after an edit."""

    def __init__(self, directory: Path, before: Edit, edit: Edit) -> None:
        self.directory = directory
        self.path = directory / NAME
        self._edit = edit
        self._restore({})
        before(self.path)
        self._start = self._snapshot()
        if self.path.exists():
            recover(self.path)
        self.old = self._bytes()
        self.set_up()
        edit(self.path)
        self.new = self._bytes()
        assert self.old != self.new
        self.set_up()
        self.log = self._calls_of(edit)
        assert self._bytes() == self.new

    def set_up(self) -> None:
        """Restores the directory to its state before the edit."""
        self._restore(self._start)

    def _snapshot(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def _restore(self, snapshot: dict[str, bytes]) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        for name, content in snapshot.items():
            (self.directory / name).write_bytes(content)

    def _bytes(self) -> bytes | None:
        return self.path.read_bytes() if self.path.exists() else None

    def _calls_of(self, edit: Edit) -> list[Call]:
        """Makes an edit; returns its calls."""
        calls = Calls()
        outcome = attempt(edit, self.path, calls)
        assert outcome == "done", outcome
        return calls.log

    def try_fault(self, at: int, way: str) -> tuple[str, str | None]:
        """The outcome of the edit with one fault, and the problem found afterwards or None."""
        self.set_up()
        outcome = attempt(self._edit, self.path, Calls(at, way))
        if outcome not in ("done", "killed", "OSError", "ArchiveError"):
            return outcome, f"an error of another kind: {outcome}"
        is_finished = outcome == "done" or (outcome == "OSError" and not way.endswith(" on"))
        was_finished = self._start.get(NAME) == self.old
        if is_finished and was_finished and self._bytes() not in (self.old, self.new):
            return outcome, "the edit was left unfinished without a crash"
        problem = self._problem()
        if problem is not None:
            return outcome, problem
        found = "old" if self._bytes() == self.old else "new"
        if way == "short" and (outcome, found) != ("done", "new"):
            return outcome, f"a short write: {outcome}, {found}"
        if outcome == "done" and found == "old":
            return outcome, "the edit reported success, but the archive is the old one"
        if outcome == "OSError" and found == "new" and not self._is_last_sync(at):
            return outcome, "the edit reported an error, but the archive is the new one"
        return f"{outcome}, {found}", None

    def _is_last_sync(self, at: int) -> bool:
        """True if a call is the last sync, after the truncation that completes an edit."""
        kinds = [call.kind for call in self.log]
        return kinds[at:] == ["sync"] and kinds[at - 1] == "truncate"

    def _problem(self) -> str | None:
        """The problem that a reader or recovery has with the archive; None if there is none."""
        try:
            with onnxarchive.open(self.path):
                pass
            if self._bytes() not in (self.old, self.new):
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
        left = [name for name in sorted(os.listdir(self.directory)) if name != NAME]
        return f"left behind: {left}" if left else None

    def try_recovery(self) -> Iterator[tuple[str, str | None]]:
        """Kills the edit at each call, and makes each call of the recovery fail."""
        tried = []
        for at, way in faults(self.log, KILLS):
            self.set_up()
            assert attempt(self._edit, self.path, Calls(at, way)) == "killed"
            start = self._snapshot()
            # Recovery does not read temporary files.
            known = {name: start[name] if name == NAME else b"" for name in start}
            if not start or known in tried:
                continue
            tried.append(known)
            log = self._calls_of(recover)
            for number, how in faults(log, (*KILLS, "short", "ENOSPC once", "EIO on")):
                self._restore(start)
                outcome = attempt(recover, self.path, Calls(number, how))
                expected = "killed" if how in KILLS else "done" if how == "short" else ""
                is_expected = outcome in (expected or ("OSError", "ArchiveError", "done"))
                problem = None if is_expected else f"recovery, {how}: {outcome}"
                yield f"recovery, {outcome}", self._problem() or problem
            for problem in self._power_failures(start, log):
                yield "power failure of recovery", problem

    def power_failures(self) -> Iterator[tuple[str, str | None]]:
        """Lets the power fail after each call; yields outcome and problem."""
        for problem in self._power_failures(self._start, self.log):
            yield "power failure", problem
        for files in after_power_failures(self._start, self.log):
            self._restore(files)
            problem = self._problem()
            if problem is None and self._bytes() != self.new:
                problem = "the finished edit was lost"
            yield "power failure at the end", problem

    def _power_failures(self, start: dict[str, bytes], log: list[Call]) -> Iterator[str | None]:
        """Yields the problem, or None, after each distinct state of the disk."""
        tried = set()
        for count in range(len(log) + 1):
            for files in after_power_failures(start, log[:count]):
                if (state := frozenset(files.items())) not in tried:
                    tried.add(state)
                    self._restore(files)
                    yield self._problem()


def faults(log: list[Call], ways: Collection[str] = WAYS) -> Iterator[tuple[int, str]]:
    """Yields the number of each call with each way in which the call can fail."""
    for number, call in enumerate(log):
        for way in ways:
            if way == "killed before" and number:  # same as killed after the previous call
                continue
            if call.kind == "write" or way not in ("killed amid", "short"):
                yield number, way


# Power failures


@dataclass
class Changes:
    """The writes and truncations of a file.

    Attributes:
        before: Bytes before the calls.
        calls: The writes and truncations.
        synced: Number of leading calls that a sync put on the disk.
    """

    before: bytes = b""
    calls: list[Call] = field(default_factory=list)
    synced: int = 0

    def after_power_failures(self, *, is_new: bool) -> set[bytes]:
        """Contents that may be on the disk, with every size since the last sync.

        Of the unsynced writes, the disk has the first or last ones, one, or all but one; of
        these it has all sectors or every other sector. For a new file fewer states are enough.
        """
        sizes = range(self.synced, len(self.calls) + 1)
        writes = [at for at in sizes[:-1] if self.calls[at].kind == "write"]
        if is_new:
            sizes = sizes[:: len(sizes) - 1 or 1]
            kept = {frozenset(writes), frozenset(writes[1:]), frozenset[int]()}
        else:
            kept = {frozenset(writes[:at]) for at in range(len(writes) + 1)}
            kept |= {frozenset(writes[at:]) for at in range(len(writes))}
            kept |= {frozenset(writes) - {at} for at in writes}
            kept |= {frozenset({at}) for at in writes}
        return {
            self._content(numbers, sectors, size)
            for numbers in kept
            for sectors in ((0, 1), (0,), (1,))
            for size in sizes
        }

    def _content(self, kept: Collection[int], sectors: Collection[int], count: int) -> bytes:
        """The file with the synced writes and the writes `kept`, with its size after `count` calls.

        `sectors` selects the sectors of `kept`: even (0), odd (1), or both.
        """
        content = bytearray(self.before)
        size = len(content)
        for number, call in enumerate(self.calls):
            is_synced = number < self.synced
            if call.kind == "truncate":
                if number < count:
                    size = call.detail
                    del content[size:]
                continue
            if number < count:
                size = max(size, call.detail + len(call.data))
            if not (is_synced or number in kept):
                continue
            position, end = call.detail, call.detail + len(call.data)
            content.extend(bytes(max(end - len(content), 0)))
            while position < end:
                sector = position // SECTOR_SIZE
                stop = min((sector + 1) * SECTOR_SIZE, end)
                if is_synced or sector % 2 in sectors:
                    begin = position - call.detail
                    content[position:stop] = call.data[begin : begin + stop - position]
                position = stop
        return bytes(content[:size].ljust(size, b"\0"))


def after_power_failures(start: dict[str, bytes], log: list[Call]) -> Iterator[dict[str, bytes]]:
    """Yields the files that may be on the disk if the power fails after these calls.

    Of the unsynced changes of the directory, the disk has the first ones, or only the last one.
    """
    of_names: list[Call] = []
    synced_names = 0
    of_files: dict[int | str, Changes] = {}
    created = set()
    for call in log:
        if call.kind in ("create", "rename", "link", "unlink"):
            of_names.append(call)
            if call.kind == "create":
                of_files[call.detail] = Changes()
                created.add(call.detail)
        elif call.kind in ("write", "truncate"):  # of a new file, or of the archive in place
            of_files.setdefault(call.file, Changes(start.get(NAME, b""))).calls.append(call)
        elif call == Call("sync", "."):
            synced_names = len(of_names)
        elif call.kind == "sync" and call.file in of_files:
            of_files[call.file].synced = len(of_files[call.file].calls)
    orders = [of_names[:count] for count in range(synced_names, len(of_names) + 1)]
    if len(of_names) > synced_names + 1 and of_names[-1].kind != "rename":
        orders.append(
            [*of_names[:synced_names], of_names[-1]]
        )  # the other unsynced changes are lost
    files = list(of_files)
    contents = [of_files[file].after_power_failures(is_new=file in created) for file in files]
    for found, order in itertools.product(itertools.product(*contents), orders):
        content_of = dict(zip(files, found, strict=True))
        on_disk = dict(start)
        for file in content_of.keys() - created:
            on_disk[NAME] = content_of[file]
        for call in order:
            if call.kind == "create":
                on_disk[str(call.file)] = content_of[call.detail]
            elif call.kind == "rename":
                on_disk[call.detail] = on_disk.pop(str(call.file))
            elif call.kind == "link":
                on_disk[call.detail] = on_disk[str(call.file)]
            else:
                on_disk.pop(str(call.file), None)
        yield on_disk


def main() -> None:
    """Tries all faults of the edits that are asked for, and prints the outcomes."""
    patch.object(os, "fsync", lambda _: None).start()
    patch.object(clones_and_sync, "clone", edits.no_clone).start()
    patch.object(clones_and_sync, "has_clones", lambda source: False).start()
    for line in sys.stdin:
        directory, name = json.loads(line)
        process = os.fork()
        if not process:
            sys.stdout.write(json.dumps(try_all(name, Path(directory))) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert status == 0, name


def try_all(name: str, directory: Path) -> dict[str, Any]:
    """Tries all faults of one edit."""
    scene = Scene(directory / "scene", *EDITS[name])
    outcomes: Counter[str] = Counter()
    problems: list[str] = []

    def count(where: str, outcome: str, problem: str | None) -> None:
        outcomes[outcome] += 1
        if problem is not None:
            problems.append(f"{where}: {problem}")

    for at, way in faults(scene.log):
        count(f"call {at} {scene.log[at][:3]} {way}", *scene.try_fault(at, way))
    for result in itertools.chain(scene.try_recovery(), scene.power_failures()):
        count(result[0], *result)
    return {
        "calls": [call.kind for call in scene.log],
        "outcomes": outcomes,
        "problems": problems,
    }


if __name__ == "__main__":
    main()
