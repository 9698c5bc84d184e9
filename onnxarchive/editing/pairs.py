"""Replaces a model and its file of external data together.

Two names cannot change at once. So a record beside the model names both, and `PairReplacement`

1. gives the old data a hidden name, and the old model a second one, which is hidden;
2. gives the new model its name, and then the new data;
3. removes the hidden names and the record.

An error restores the old files. A killed process leaves the old files, the new ones, or a model
without its data, but never a model with the data of the other. `recover_pairs` continues from
there: if the model is the new one, by its SHA-256, the new data gets its name; otherwise the old
data gets its name back.

The hidden names are `.MODEL.onnxarchive-N.pair` (the record), `.MODEL.onnxarchive-N.old`,
`.DATA.onnxarchive-N.new` and `.DATA.onnxarchive-N.old`. A record is locked while its process runs.
A record may come from whoever made the folder, such as the author of a download. So it counts only
for the model after which it is named, and only regular files get names back.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    path_in_errors,
    recover_command,
)
from onnxarchive.files import locking
from onnxarchive.files.clones_and_sync import close_unwritten, sync, sync_directory
from onnxarchive.files.data import Closing, File, closing_on_error
from onnxarchive.files.hidden_files import (
    TEMPORARY,
    TemporaryFile,
    hidden_names,
    is_left_here,
    numbered_path,
    remove_abandoned,
    targets_of,
)
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.locking import OfOneProcess
from onnxarchive.files.paths import open_own
from onnxarchive.files.replacement import Replacement

NEW, OLD, RECORD = "new", "old", "pair"  # ends of hidden names
_RECORD_NAME = re.compile(rf"\..*\.onnxarchive-([0-9]+)\.{RECORD}", re.DOTALL)
_NEW_NAME = re.compile(rf"\..*\.onnxarchive-([0-9]+)\.{NEW}", re.DOTALL)
_MAX_RECORD_NBYTES = 1 << 14  # two names of 255 bytes, escaped, take a quarter of it


@dataclass(frozen=True)
class _Pair:
    """The files of a pair that is being replaced.

    Attributes:
        record: Path of the record.
        model: Path of the model, without links.
        data: Path of its data, without links.
        digest: SHA-256 of the new model, in hexadecimal digits; empty before it is complete.
        number: Number in the hidden names of the data; -1 before it is complete.
        had_model: Whether there was a model before, perhaps one with the same bytes.
    """

    record: str
    model: str
    data: str
    digest: str = ""
    number: int = -1
    had_model: bool = True

    @property
    def old_model(self) -> str:
        """Hidden path of the old model."""
        return self.record.removesuffix(RECORD) + OLD

    @property
    def old_data(self) -> str:
        """Hidden path of the old data."""
        return numbered_path(self.data, self.number, OLD)

    @property
    def new_data(self) -> str:
        """Hidden path of the new data."""
        return numbered_path(self.data, self.number, NEW)

    def names(self) -> bytes:
        """The first line of the record."""
        folder, model = os.path.split(self.model)
        is_beside = os.path.dirname(self.data) == folder  # then the folder may be moved
        data = os.path.basename(self.data) if is_beside else self.data
        return json.dumps({"model": model, "data": data}).encode() + b"\n"

    def completion(self) -> bytes:
        """The second line of the record, on the disk before a name is changed."""
        record = {"sha256": self.digest, "number": self.number, "had_model": self.had_model}
        return json.dumps(record).encode() + b"\n"

    @classmethod
    def of_record(cls, path: str, content: bytes) -> _Pair | None:
        """The pair of a record; None if the first line is incomplete, so that nothing was done."""
        folder = os.path.dirname(path)
        first, _, second = content.partition(b"\n")
        pair = None
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            names = json.loads(first)
            model, data = os.path.join(folder, names["model"]), os.path.join(folder, names["data"])
            pair = cls(path, model, data)
            completion = json.loads(second)
            pair = replace(
                pair,
                digest=completion["sha256"],
                number=operator.index(completion["number"]),
                had_model=completion["had_model"],
            )
        return pair

    def is_named_by_record(self) -> bool:
        """False if the record has another model's name, or its path of the data has links."""
        number = _RECORD_NAME.fullmatch(os.path.basename(self.record))
        folder = os.path.dirname(self.data)
        return (
            number is not None
            and self.record == numbered_path(self.model, number[1], RECORD)
            and os.path.realpath(folder) == folder
        )

    def complete(self) -> bool:
        """Gives the new data its name, if only that is missing; returns True if it did."""
        is_missing = not os.path.lexists(self.data) and _is_regular(self.new_data)
        if not (is_missing and self._has_new_model()):
            return False
        os.replace(self.new_data, self.data)
        self.sync()
        return True

    def undo(self) -> bool:
        """Gives the old files their names back, unless all is done; returns True if it did.

        The model comes first: the new model must not get the old data.
        """
        if os.path.lexists(self.data):
            return False
        is_undone = False
        if not os.path.lexists(self.model) or self._has_new_model():
            if _is_regular(self.old_model):
                os.replace(self.old_model, self.model)
                is_undone = True
            elif os.path.lexists(self.model) and not self.had_model:
                os.unlink(self.model)
                is_undone = True
            self.sync()
        if _is_regular(self.old_data):
            os.replace(self.old_data, self.data)
            self.sync()
            is_undone = True
        return is_undone

    def remove_old(self) -> list[str]:
        """Removes the old files under their hidden names; returns the paths of both."""
        removed = []
        for path in (self.old_data, self.old_model):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
                removed.append(path)
        self.sync()
        return removed

    def sync(self) -> None:
        """Syncs the names of the files."""
        for folder in {os.path.dirname(self.model), os.path.dirname(self.data)}:
            sync_directory(folder)

    def _has_new_model(self) -> bool:
        with contextlib.suppress(FileNotFoundError), MappedFile(self.model) as file:
            return _digest(file, file.size) == self.digest
        return False


def _is_regular(path: str) -> bool:
    """True for a regular file, False for a link to one: links do not take the names of a pair."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _digest(file: File, size: int) -> str:
    digest = sha256()
    for piece in file.pieces(0, size):
        digest.update(piece)
    return digest.hexdigest()


class PairReplacement(Closing, OfOneProcess):
    """A new model and its new data, which replace the old ones together; see the module.

    Closing it before `commit` discards the new files. What killed processes of this user have left
    of the two files on this machine is recovered first.

    Attributes:
        model: The new model.
        data: The new data.
    """

    def __init__(self, model: str | os.PathLike[str], data: str, *, timeout: float | None) -> None:
        """Creates the record, and both new files; for arguments and errors see `Replacement`."""
        super().__init__()
        for path in (data, model):
            recover_pairs(path, is_left_here)
        self._path = os.fspath(model)
        self._timeout = timeout
        self._resources = contextlib.ExitStack()
        with closing_on_error(self):
            with path_in_errors(data):
                target = os.path.realpath(model)
                self._record = TemporaryFile(target, kind=RECORD)
                self._resources.callback(self._close_record)
                self._pair = _Pair(self._record.path, target, os.path.realpath(data))
                self._write(0, self._pair.names())
            self.data = self._resources.enter_context(Replacement(data, timeout=timeout, kind=NEW))
            self.model = self._resources.enter_context(Replacement(model, timeout=timeout))

    def _close_record(self) -> None:
        self._record.remove()
        self._record.file.close()

    def _write(self, offset: int, line: bytes) -> None:
        self._record.file.write(offset, line)
        sync(self._record.file)
        self._pair.sync()

    def commit(self) -> None:
        """Replaces the old files.

        Raises:
            LockedError: One of the old files, or the folder, remained locked.
            ArchiveError: Another process changed a new file, or going back to the old files failed.
            OSError: A file cannot be synced or renamed. The old files are unchanged.
        """
        number = _NEW_NAME.fullmatch(os.path.basename(self.data.new_path))
        assert number is not None
        digest = _digest(self.model.file, self.model.writer.offset)
        self._pair = replace(self._pair, digest=digest, number=int(number[1]))
        try:
            self.data.commit(before_rename=self._rename_model)
        except BaseException as error:
            if not self.is_own:  # a fork leaves the files to its parent
                raise
            try:
                self._pair.undo()
            except OSError as second:
                raise ArchiveError(
                    f"replacing it and its data failed: {error}; going back failed, too: {second}; "
                    f"remove the cause, then run {recover_command(self._path)}",
                    path=self._path,
                ) from error
            self._remove_old()
            raise
        self._remove_old()

    def _rename_model(self) -> None:
        self._lock_folder()
        new = self.model.commit_open(before_rename=self._set_aside)
        if os.name == "nt":  # Windows replaces no open file
            new.close()
        self._resources.callback(new.close)  # locked, so that another export waits for the data

    def _lock_folder(self) -> None:
        """Makes exports to the folder of the model take turns, if the folder can be locked.

        If there are no old files, their locks cannot separate two exports.
        """
        if os.name == "nt":  # which opens no folder
            return
        try:
            descriptor = os.open(os.path.dirname(self._pair.model), os.O_RDONLY)
            self._resources.callback(close_unwritten, descriptor)
            self._resources.enter_context(locking.exclusive(descriptor, self._timeout))
        except LockedError as error:
            problem = "another process exports to its folder; try again, or with a longer timeout"
            raise LockedError(problem, path=self._path) from error
        except OSError:  # it is unreadable, or without locks
            pass

    def _set_aside(self) -> None:
        # It stays until the old files or the new ones are in place.
        self._record.is_to_be_removed = False
        self._pair = replace(self._pair, had_model=os.path.lexists(self._pair.model))
        with path_in_errors(self._path):
            self._write(len(self._pair.names()), self._pair.completion())
        self.data.set_aside(self._pair.old_data)
        if os.path.lexists(self._pair.model):
            try:
                os.link(self._pair.model, self._pair.old_model)
            except OSError:  # a file system without hard links
                self.model.set_aside(self._pair.old_model)
        self._pair.sync()

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):  # names that cannot be removed need the record
            self._pair.remove_old()
            self._record.is_to_be_removed = True

    def close(self) -> None:
        """Discards the new files unless they were committed."""
        self._resources.close()


@dataclass
class PairRecovery:
    """What `recover_pairs` did.

    Attributes:
        is_completed: True if new data got its name.
        is_undone: True if old files got their names back.
        removed: Paths of removed files.
    """

    is_completed: bool = False
    is_undone: bool = False
    removed: list[str] = field(default_factory=list)


def recover_pairs(
    path: str | os.PathLike[str], is_recoverable: Callable[[MappedFile], bool] | None = None
) -> PairRecovery:
    """Completes or undoes the replacement of a model and its data by killed processes.

    Args:
        path: The model or its data.
        is_recoverable: Returns True for the record of a pair to recover, and for each new file to
            remove; None means all that are unlocked.

    Raises:
        OSError: A file cannot be renamed or removed; another call continues.
    """
    recovery = PairRecovery()
    for target in targets_of(path):
        folder = os.path.dirname(target)
        names: list[str] = []
        with contextlib.suppress(OSError):  # a writable directory may be unreadable; or missing
            names = sorted(os.listdir(folder))
        for record in filter(_RECORD_NAME.fullmatch, names):
            _recover(os.path.join(folder, record), target, is_recoverable, recovery)
    return recovery


def _recover(
    path: str,
    target: str,
    is_recoverable: Callable[[MappedFile], bool] | None,
    recovery: PairRecovery,
) -> None:
    """Recovers the pair of a record if `target` is one of the two, and no process uses it."""
    try:
        record = MappedFile(path, descriptor=open_own(path, 0o600))
    except (OSError, ArchiveFormatError):  # of another user, or removed
        return
    with record:
        if not (_is_unlocked(record) and record.is_at(path)):
            return
        if is_recoverable is not None and not is_recoverable(record):
            return
        pair = _Pair.of_record(path, record.read(0, _MAX_RECORD_NBYTES))
        if pair is not None:
            if target not in (pair.model, pair.data) or not pair.is_named_by_record():
                return
            if pair.digest and not _settle(pair, recovery):
                return
            for member, kind in itertools.product((pair.model, pair.data), (TEMPORARY, NEW)):
                recovery.removed += remove_abandoned(member, kind, is_recoverable)
            pair.sync()  # before the record is removed, without which nobody finds them
            if any(hidden_names(pair.data, NEW)):  # it could not be removed, or a process writes it
                return
        if os.name == "nt":  # Windows removes no open file
            record.close()
        os.unlink(path)
        recovery.removed.append(path)


def _settle(pair: _Pair, recovery: PairRecovery) -> bool:
    """Completes or undoes a pair; False if a running process writes data under its name."""
    if not _is_free(pair.new_data):
        return False
    if pair.complete():
        recovery.is_completed = True
    elif pair.undo():
        recovery.is_undone = True
    recovery.removed += pair.remove_old()
    return True


def _is_free(path: str) -> bool:
    """True if there is no such file, or an unlocked one."""
    try:
        with MappedFile(path, is_writable=None) as file:
            return _is_unlocked(file)
    except FileNotFoundError:
        return True


def _is_unlocked(file: MappedFile) -> bool:
    """True if a file can be locked; then it is locked until it is closed."""
    try:
        return file.keep_locked(timeout=0)
    except LockedError:
        return False
