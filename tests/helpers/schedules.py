"""Runs several editors of a file in every order that their locks allow.

An editor stops before each call that other editors may notice: locks, `os.replace`, and `stop` in
its code. One editor runs at a time, until its next stop; then the schedule chooses the
next editor. An editor that waits for a lock cannot be chosen until the lock is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lock_calls
import pytest

_REPLACE = os.replace
_WAIT = 60  # seconds for one step of an editor


@dataclass
class Outcome:
    """The outcome of an editor.

    Attributes:
        error: The raised error, or None.
        begin: Index of the editor's first step, among the steps of all editors.
        end: Index of the editor's last step.
    """

    error: BaseException | None
    begin: int
    end: int


class _Editor:
    """An editor in a thread, run one step at a time."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._may_go = threading.Semaphore(0)
        self._has_stopped = threading.Semaphore(0)
        # Descriptor and kind of the lock to take next.
        self._lock: tuple[int, lock_calls.Kind] | None = None
        self.error: BaseException | None = None
        self.is_done = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._may_go.acquire()
        try:
            self._call()
        except BaseException as error:
            self.error = error
        self.is_done = True
        self._has_stopped.release()

    def go_on(self) -> None:
        """Lets the editor run to its next stop, or to its end."""
        self._may_go.release()
        assert self._has_stopped.acquire(timeout=_WAIT), (
            "an editor waits for something other than a lock"
        )

    def stop(self, lock: tuple[int, lock_calls.Kind] | None = None) -> None:
        """Stops the editor until `go_on`; called in its thread, before a step.

        Args:
            lock: Descriptor and kind of the lock that the step takes, or None."""
        self._lock = lock
        self._has_stopped.release()
        self._may_go.acquire()
        self._lock = None

    def can_go_on(self) -> bool:
        if self.is_done or self._lock is None:
            return not self.is_done
        descriptor, kind = self._lock
        try:
            lock_calls.lock(descriptor, kind)
        except BlockingIOError:
            return False
        lock_calls.lock(descriptor, "unlock")
        return True


@dataclass
class Run:
    """One schedule that was run.

    Attributes:
        choices: The editor that ran at each step.
        others: The other editors that could have run at each step.
        outcomes: The outcome of each editor.
    """

    choices: list[str] = field(default_factory=list)
    others: list[list[str]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def stop() -> None:
    """Stops the editor of this thread; does nothing in a thread without editor."""
    editor = _editors.get(threading.get_ident())
    if editor is not None:
        editor.stop()


_editors: dict[int, _Editor] = {}
# Open descriptors of all files that `path` named; open files keep their inodes from being reused.
_known: dict[tuple[int, int], int] = {}


def _identity(file: Any) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _know(path: Any) -> None:
    _known[_identity(path)] = os.open(path, os.O_RDONLY)


def _forget() -> None:
    for descriptor in _known.values():
        os.close(descriptor)
    _known.clear()


def _run(calls: Mapping[str, Callable[[], object]], prefix: list[str]) -> Run:
    """Runs one schedule: `prefix`, then always the first editor that can run."""
    run = Run()
    editors = {name: _Editor(call) for name, call in calls.items()}
    _editors.clear()
    _editors.update((editor.thread.ident or 0, editor) for editor in editors.values())
    begins: dict[str, int] = {}
    while waiting := [name for name, editor in editors.items() if not editor.is_done]:
        step = len(run.choices)
        ready = [name for name in waiting if editors[name].can_go_on()]
        assert ready, f"{waiting} wait for each other after {run.choices}"
        name = prefix[step] if step < len(prefix) else ready[0]
        run.choices.append(name)
        run.others.append([other for other in ready if other != name])
        begins.setdefault(name, step)
        editors[name].go_on()
        if editors[name].is_done:
            run.outcomes[name] = Outcome(editors[name].error, begins[name], step)
    _editors.clear()
    return run


def all_runs(
    path: Path, prepare: Callable[[], Mapping[str, Callable[[], object]]], *, first: str = ""
) -> Iterator[Run]:
    """Runs every schedule of some editors, one after the other.

    Args:
        path: The edited file. Locks of files that `path` never named are no stops.
        prepare: Restores the files; returns the calls of the editors by name.
        first: The editor that takes the first step; none for each of them.
    """

    def lock(file: int, kind: lock_calls.Kind, call: Callable[[], object]) -> None:
        editor = _editors.get(threading.get_ident())
        if editor is not None and _identity(file) in _known:
            editor.stop(None if kind == "unlock" else (file, kind))
        call()

    def replace(source: Any, target: Any) -> None:
        stop()
        _know(source)
        _REPLACE(source, target)

    prefixes: list[list[str]] = [[first] if first else []]
    while prefixes:
        prefix = prefixes.pop()
        calls = prepare()
        _know(path)
        with (
            pytest.MonkeyPatch.context() as patches,
            patch.object(os, "replace", replace),
            patch.object(os, "fsync", lambda descriptor: None),  # power failures are not tested
        ):
            lock_calls.watch(patches, lock)
            run = _run(calls, prefix)
        _forget()
        for step in range(len(prefix), len(run.choices)):
            prefixes += [[*run.choices[:step], other] for other in run.others[step]]
        yield run
