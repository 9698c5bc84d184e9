"""Progress goes to a function or is shown by a bar, which every function with progress shows."""

from __future__ import annotations

import contextlib
import errno
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import edits
import numpy as np
import pytest
import tqdm.auto
import tqdm.std
from models import model_of, raw_tensor, runnable_model
from written import contents

import onnxarchive
from onnxarchive.files.progress import ProgressCounter


class Bar:
    """Replaces tqdm's bar."""

    made: list[Bar]

    def __init__(self, total: int, **options: Any) -> None:
        self.total, self.n, self.options, self.is_closed = total, 0, options, False
        self.made.append(self)

    def update(self, n: int) -> None:
        assert not self.is_closed
        self.n += n

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars that are made."""
    monkeypatch.setattr(Bar, "made", [], raising=False)
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return Bar.made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path)
    return path


def test_a_bar_counts_bytes_and_ends_with_the_last(bars: list[Bar]) -> None:
    counter = ProgressCounter(True, 5)
    assert [bar.total for bar in bars] == [5]
    assert bars[0].options == {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    assert list(counter([b"ab", b"cd"])) == [b"ab", b"cd"]
    assert (bars[0].n, bars[0].is_closed) == (4, False)
    counter.add(1)
    assert (bars[0].n, bars[0].is_closed) == (5, True)


@pytest.mark.parametrize("progress", [False, None])
def test_a_progress_bar_is_shown_only_if_asked_for(bars: list[Bar], progress: bool | None) -> None:
    ProgressCounter(progress, 5).add(5)
    assert not bars


def test_the_bar_of_a_terminal_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    counter = ProgressCounter(True, 2048)
    counter.add(2048)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.00k/2.00k" in err


ARRAY = np.ones(3000, np.float32)
CALLS: dict[str, Callable[..., object]] = {
    "save": lambda path, **it: onnxarchive.save(runnable_model(), path, **it),
    "convert": lambda path, **it: onnxarchive.convert(path, path.with_name("new"), **it),
    "export": lambda path, **it: onnxarchive.export(path, path.with_name("m.onnx"), **it),
    "extract": lambda path, **it: onnxarchive.extract(path, path.with_name("out"), **it),
    "verify": lambda path, **it: onnxarchive.open(path).verify(**it),
    "check": lambda path, **it: onnxarchive.check(path, full=True, **it),
    "diff": lambda path, **it: onnxarchive.diff(path, path, full=True, **it),
    "replace_model": lambda path, **it: edits.replace_model(path, model_of(), compact=True, **it),
    "replace_tensor": lambda path, **it: edits.replace_tensor(path, "w", ARRAY, **it),
    "add_asset": lambda path, **it: edits.add_asset(path, "a", b"new", **it),
    "transform": lambda path, **it: onnxarchive.transform(
        path, path, lambda model: model_of(raw_tensor("v", dims=(300,))), weights="loaded", **it
    ),
}


calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@calls
def test_every_function_with_progress_shows_a_bar(
    bars: list[Bar], path: Path, call: Callable[..., object]
) -> None:
    call(path, progress=True)
    assert [(bar.n, bar.is_closed) for bar in bars if bar.total] == [(bars[-1].total, True)]


def broken(error: BaseException) -> Any:
    """Standard error whose reader has ended, or whose disk is full."""
    return SimpleNamespace(
        encoding="utf-8", write=Mock(side_effect=error), flush=Mock(side_effect=error)
    )


STREAMS = {
    "no reader": broken(BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "full disk": broken(OSError(errno.ENOSPC, "No space left on device")),
    "closed": broken(ValueError("I/O operation on closed file")),
    "no stream": None,
}


@calls
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_a_bar_that_cannot_be_drawn_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, path: Path, call: Callable[..., object], stream: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    call(path, progress=True)


@pytest.mark.parametrize("error", [OSError(errno.EPIPE, "Broken pipe"), KeyboardInterrupt()])
def test_a_bar_that_fails_lets_the_bars_of_other_threads_go_on(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    display = tqdm.std.tqdm.display
    errors = [error]

    def fail_once(bar: Any, *arguments: Any, **options: Any) -> object:
        if errors:
            raise errors.pop()
        return display(bar, *arguments, **options)

    monkeypatch.setattr(tqdm.std.tqdm, "display", fail_once)
    with contextlib.suppress(KeyboardInterrupt):
        ProgressCounter(True, 100).add(100)
    assert not errors
    other = threading.Thread(target=lambda: ProgressCounter(True, 5).add(5), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


@calls
@pytest.mark.parametrize("kind", [OSError, ValueError, KeyboardInterrupt])
def test_an_error_of_the_progress_function_is_raised_unchanged(
    path: Path, call: Callable[..., object], kind: type[BaseException]
) -> None:
    before = path.read_bytes()
    error = kind(errno.ENOSPC, "the disk of the caller's log is full")
    with pytest.raises(kind) as raised:
        call(path, progress=Mock(side_effect=error))
    assert raised.value is error
    assert getattr(error, "filename", None) is None  # no file is at fault
    assert contents(path.parent) == {path.name: before}
