"""Processes that fork while they write: no child changes what its parent writes.

`fork_amid(WRITE, DIRECTORY)` runs in a process of its own. It makes an archive or the like once
without forks, and then again with a fork at every chance: with children that end before the parent
goes on, or when it has finished, in each of several ways.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import edits
import numpy as np
import onnx
import pytest
from edits import on_a_clone
from lock_calls import is_free
from models import model_of, raw_tensor, run_python
from onnx import TensorProto
from written import contents

import onnxarchive
from onnxarchive.errors import ArchiveError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")

# A function that is called where a program may fork, with arguments of any kind.
Chance = Callable[..., Any]
Write = Callable[[Path, Chance], object]

NAME = "model.onnxa"
WEIGHTS = 3
NBYTES = 1 << 17  # threads take what is not smaller


def weights() -> list[TensorProto]:
    return [raw_tensor(f"w{i}", TensorProto.UINT8, (NBYTES,), seed=i) for i in range(WEIGHTS)]


def model(doc_string: str, *more: TensorProto) -> onnx.ModelProto:
    made = model_of(*weights(), *more)
    made.doc_string = doc_string
    return made


# The writes


def save(path: Path, progress: Any, jobs: int) -> None:
    onnxarchive.save(model("new"), path, assets={}, progress=progress, jobs=jobs)


def write(path: Path, chance: Chance) -> None:
    with onnxarchive.Writer(path) as writer:
        chance()
        for tensor in weights():
            writer.add(tensor.name, np.frombuffer(tensor.raw_data, np.uint8))
            chance()
        writer.add_asset("labels", b"one two")
        chance()
        writer.finish(model_of())
        chance()


def convert(path: Path, chance: Chance) -> None:
    source = path.with_name("source.onnx")
    onnx.save(model("new"), source, save_as_external_data=True, location="source.data")
    onnxarchive.convert(source, path, progress=chance, jobs=2)


def replace(path: Path, chance: Chance, **options: Any) -> None:
    new = model("new" * 99, raw_tensor("v", TensorProto.UINT8, (NBYTES,), seed=9))
    edits.replace_model(path, new, progress=chance, **options)


def replace_tensor(path: Path, chance: Chance) -> None:
    edits.replace_tensor(path, "w1", np.zeros(NBYTES, np.uint8), progress=chance)


def documented(found: onnx.ModelProto) -> onnx.ModelProto:
    found.doc_string = "new" * 99
    return found


def edit(path: Path, chance: Chance) -> None:
    with onnxarchive.edit(path) as edit:
        chance()
        edit.model.doc_string = "new" * 99
        chance()
    chance()


def assign(path: Path, chance: Chance) -> None:
    with onnxarchive.edit(path, progress=chance) as edit:
        edit.metadata["author"] = "Ada"
        chance()
        edit.model = model("new" * 99)


def recover(path: Path, chance: Chance) -> None:
    path.with_name(f".{NAME}.onnxarchive-1.tmp").touch()
    child = os.fork()
    if not child:
        replace(path, lambda *_: os._exit(0))
    os.waitpid(child, 0)
    assert onnxarchive.recover(path).is_rolled_back


WRITES: dict[str, Write] = {
    "save": lambda path, it: save(path, it, jobs=1),
    "save with threads": lambda path, it: save(path, it, jobs=3),
    "Writer": write,
    "convert": convert,
    "export": lambda path, it: onnxarchive.export(path, path.with_name("new.onnx"), progress=it),
    "export with data": lambda path, it: onnxarchive.export(
        path, path.with_name("new.onnx"), external_data="new.data", progress=it
    ),
    "extract": lambda path, it: onnxarchive.extract(path, path.with_name("new"), progress=it),
    "replace_model": replace,
    "replace_model on a clone": on_a_clone(replace),
    "replace_model with copy": functools.partial(replace, copy=True),
    "replace_model with compact": lambda path, it: edits.replace_model(
        path, model_of(*weights()[1:]), compact=True, progress=it
    ),
    "replace_tensor": replace_tensor,
    "replace_tensor on a clone": on_a_clone(replace_tensor),
    "edit": edit,
    "edit on a clone": on_a_clone(edit),
    "assign": assign,
    "transform": lambda path, it: onnxarchive.transform(path, path, documented, progress=it),
}
# Writes that call no function of the caller.
SILENT_WRITES: dict[str, Write] = {
    "link": lambda path, _: onnxarchive.link(path, path.with_name("link.onnx")),
    "recover": recover,
}


# The forks

ENDS = ("by sys.exit", "by os._exit", "by going on")
UNWINDING = "by unwinding from any call of the system"


class Forks:
    """Forks this process at every chance; the children end in one way.

    Attributes:
        count: How many forks there were.
    """

    def __init__(self, directory: Path, end: str, *, are_late: bool) -> None:
        self.count = 0
        self._process = os.getpid()
        self._directory = directory
        self._end = end
        self._children: list[int] = []
        self._gate = os.pipe() if are_late else None

    @property
    def is_child(self) -> bool:
        return os.getpid() != self._process

    def __call__(self, *_: object) -> None:
        if self.is_child or threading.current_thread() is not threading.main_thread():
            return
        self.count += 1
        before = self._found()
        child = os.fork()
        if not child:
            self._act_as_child()
        elif self._gate:
            self._children.append(child)
        else:
            self._require_ended(child)
            # Where its parent has begun nothing, a child that goes on does all of it by itself.
            if self._end != "by going on" or any(has_lock for _, has_lock in before.values()):
                assert self._found() == before, "the child changed something"

    def _act_as_child(self) -> None:
        if self._gate:
            os.close(self._gate[1])
            os.read(self._gate[0], 1)  # until the parent ends it
        if self._end == "by os._exit":
            os._exit(0)
        if self._end != "by going on":
            sys.exit()

    def finish(self) -> None:
        """Lets the children end that wait for it."""
        if self._gate:
            os.close(self._gate[1])
            for child in self._children:
                self._require_ended(child)
            os.close(self._gate[0])

    @staticmethod
    def _require_ended(child: int) -> None:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the child failed"

    def _found(self) -> dict[str, tuple[bytes, bool]]:
        """The bytes of every file, and whether it is locked."""
        return {
            str(path.relative_to(self._directory)): (path.read_bytes(), not is_free(path))
            for path in sorted(self._directory.rglob("*"))
            if path.is_file()
        }


CALLS = ("open", "pwrite", "ftruncate", "fsync", "fchown", "replace", "rename", "unlink", "mkdir")


@contextlib.contextmanager
def at_every_call(chance: Chance) -> Iterator[None]:
    """Gives a chance before and after every call to the system that changes something."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            chance()
            result = function(*arguments, **options)
            chance()
            return result

        return call

    with contextlib.ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(patch.object(os, name, watched(getattr(os, name))))
        yield


def set_up(directory: Path) -> Path:
    directory.mkdir()
    onnxarchive.save(model("old"), directory / NAME, assets={"labels": b"one"})
    return directory / NAME


def fork_amid(name: str, scratch: str) -> None:
    """Makes a write with forks at every chance; an assertion fails where that shows."""
    act = {**WRITES, **SILENT_WRITES}[name]
    expected = Path(scratch, "expected")
    act(set_up(expected), lambda *_: None)
    ends = ENDS if name in WRITES else ()
    for number, (end, are_late) in enumerate(itertools.product((*ends, UNWINDING), (False, True))):
        directory = Path(scratch, str(number))
        path = set_up(directory)
        forks = Forks(directory, end, are_late=are_late)
        try:
            act_with_forks(act, path, forks, is_at_every_call=end == UNWINDING)
            if forks.is_child:
                return
            require_written(path, forks, contents(expected))
        except BaseException as error:
            if forks.is_child:
                raise
            when = "at last" if are_late else "at once"
            raise AssertionError(f"{name}, with children that end {when} {end}") from error


def act_with_forks(act: Write, path: Path, forks: Forks, *, is_at_every_call: bool) -> None:
    try:
        with at_every_call(forks) if is_at_every_call else contextlib.nullcontext():
            act(path, forks)
    except ArchiveError:
        if not forks.is_child:
            raise
        # It went on with what its parent has begun, and was refused.
    except SystemExit:
        if not is_at_every_call:
            raise
        # These are many, and what Python does else at its end takes long.
        atexit._run_exitfuncs()
        os._exit(0)


def require_written(path: Path, forks: Forks, expected: dict[str, bytes]) -> None:
    """That all is as without forks, nothing is locked, and the last children change nothing."""
    assert forks.count
    assert contents(path.parent) == expected
    # Children that end at last live yet, and have whatever they share open.
    edits.replace_model(path, model("last"), compact=True, timeout=0)
    after = contents(path.parent)
    forks.finish()
    assert contents(path.parent) == after
    assert onnxarchive.check(path, full=True) == []


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*WRITES, *SILENT_WRITES])
def test_a_forked_child_changes_nothing_that_its_parent_writes(name: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    code += "import test_forks; test_forks.fork_amid(*sys.argv[1:])"
    assert run_python(code, name, tmp_path) == ""
