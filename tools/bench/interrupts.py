"""Handles interrupts of run.py, which then ends its children and removes its files.

SIGINT and SIGTERM raise KeyboardInterrupt once and are ignored afterwards, so that nothing stops
the clean-up. Signals are held back while a child process or the temporary directory is created and
noted for the clean-up.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_before: dict[int, Any] = {}  # signal: the handler before `listen`
_children: list[subprocess.Popen[str]] = []
_is_held = False
_has_come = False


def listen() -> None:
    """Installs the handlers."""
    global _is_held, _has_come
    _is_held = _has_come = False
    for number in _SIGNALS:
        _before[number] = signal.signal(number, _interrupt)


def leave() -> None:
    """Restores the previous handlers."""
    for number, handler in _before.items():
        signal.signal(number, handler)


def hold() -> None:
    """Holds interrupts back from now on."""
    global _is_held
    _is_held = True


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Holds interrupts back until the block ends."""
    global _is_held
    hold()
    try:
        yield
    finally:
        _is_held = False
        if _has_come:
            _interrupt()


def _interrupt(number: int = 0, frame: FrameType | None = None) -> None:
    global _has_come
    if _is_held:
        _has_come = True
        return
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Starts a child process and notes it for `end_children`."""
    with held():
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, **options)
        _children.append(child)
    return child


def end_children() -> None:
    """Kills the children that still run, and waits for them."""
    while _children:
        child = _children.pop()
        child.kill()
        child.wait()
