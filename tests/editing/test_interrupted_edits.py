"""Edits that are cancelled, interrupted or killed, files that replace them, and the next operation.

An edit of an archive is interrupted; something is done to the file, with the tools of the system;
then it is recovered, opened, edited or saved. A file that is whole is never changed by that, and no
reader gets anything but an archive that somebody has written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import edits
import onnx
import pytest
from edits import added, changed, new_model, replace_model, require, weights
from interruptions import Interrupted, interrupt
from models import model_of, raw_tensor
from written import saved

import onnxarchive
from onnxarchive.editing.recover import Recovery, recover
from onnxarchive.errors import ArchiveError

CANCELLED: dict[str, Callable[..., None]] = {
    **edits.EDITS,
    "a larger model": partial(replace_model, model=changed(new_model(), added("w2", 100_000))),
    "with copy": partial(edits.document, copy=True),
    "with compact": partial(replace_model, model=model_of(), compact=True),
}


@pytest.mark.usefixtures("clones_or_none")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("call", CANCELLED.values(), ids=CANCELLED.keys())
def test_an_edit_that_an_exception_ends_is_rolled_back_at_once(
    two: Path, call: Callable[..., None], error: type[BaseException]
) -> None:
    before = two.read_bytes()
    calls: list[tuple[int, int]] = []
    call(two, progress=lambda *numbers: calls.append(numbers))
    done, totals = zip(*calls, strict=True)
    assert len(set(totals)) == 1
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]
    two.write_bytes(before)
    for at in range(len(calls)):
        seen = 0

        def interrupt(done: int, total: int, at: int = at) -> None:
            nonlocal seen
            seen += 1
            if seen > at:
                raise error

        with pytest.raises(error):
            call(two, progress=interrupt)
        require(two, before)


# Files left behind


def test_files_of_killed_processes_are_removed_if_they_have_names_of_temporary_files(
    path: Path,
) -> None:
    onnxarchive.save(weights(1), path)
    half = path.read_bytes()[:700]
    assert recover(path) == Recovery(is_rolled_back=False, removed=())
    require(path, saved(weights(1)))
    left = [path.with_name(f".{path.name}.onnxarchive-{number}.tmp") for number in range(2)]
    kept = {
        path.with_name(f".{path.name}.tmp"): half,
        path.with_name(f".{path.name}.4242-2.tmp"): b"somebody's own",
        path.with_name(f"{path.name}.onnxarchive-3.tmp"): half,
    }
    left[0].write_bytes(half)
    left[1].write_bytes(b"")
    for name, content in kept.items():
        name.write_bytes(content)
    assert recover(path) == Recovery(False, tuple(str(name.resolve()) for name in left))
    assert {name: name.read_bytes() for name in kept} == kept
    assert sorted(path.parent.iterdir()) == sorted([*kept, path])
    path.unlink()
    left[0].write_bytes(half)
    assert recover(path) == Recovery(False, (str(left[0].resolve()),))
    with pytest.raises(FileNotFoundError):
        recover(path)


# What is done to the file before it is recovered, opened, edited or saved

NAME = "model.onnxa"


def model(doc_string: str, *seeds: int) -> onnx.ModelProto:
    """A model with a tensor of 1,200 bytes for each seed."""
    made = model_of(
        *(raw_tensor(f"w{number}", dims=(300,), seed=seed) for number, seed in enumerate(seeds))
    )
    made.doc_string = doc_string
    return made


# The seeds of the tensors of the archive that is edited.
EDITED: dict[str, tuple[int, ...]] = {"a model alone": (), "one tensor": (1,)}
OLD = "old " * 50
# The models that it gets, from its seeds.
EDITS: dict[str, Callable[..., onnx.ModelProto]] = {
    "a shorter end": lambda *seeds: model("new", *seeds),
    "an equal end": lambda *seeds: model("new " * 50, *seeds),
    "a longer end": lambda *seeds: model("new " * 200, *seeds),
    "new tensors": lambda *seeds: model("new", *seeds, 2, 3),
}
# Files put in its place.
OTHERS: dict[str, Callable[..., onnx.ModelProto]] = {
    "a model alone": lambda *seeds: model("other"),
    "one tensor": lambda *seeds: model("other", 7),
    "the same weights": lambda *seeds: model("another model", *seeds),
    "another archive": lambda *seeds: model("other " * 100, 7, 8, 9),
}
# How it is put there: others/*/model.onnxa in the places of targets/*/model.onnxa.
EACH = "for n in $(ls targets); do {}; done"
COMMANDS = {
    "cp": "cp -r others/. targets/",
    "rm and cp": EACH.format(f"rm targets/$n/{NAME}; cp others/$n/{NAME} targets/$n/"),
    "mv": EACH.format(f"mv -f others/$n/{NAME} targets/$n/"),
    "rsync": "rsync -rI others/ targets/",
    "rsync --inplace": "rsync -rI --inplace --no-whole-file others/ targets/",
    "dd": EACH.format(
        f"dd if=others/$n/{NAME} of=targets/$n/{NAME} conv=notrunc status=none || exit 1"
    ),
}
# Changes without another archive.
ACTS: dict[str, Callable[[Path, Interrupted], object]] = {
    "nothing": lambda path, edit: None,
    "overwritten by a .onnx": lambda path, edit: onnx.save(model("of onnx"), path, "protobuf"),
    "emptied": lambda path, edit: os.truncate(path, 0),
    "truncated amid the old archive": lambda path, edit: os.truncate(path, edit.offset + 40),
    "truncated to the old size": lambda path, edit: os.truncate(path, len(edit.old)),
    "truncated to the new size": lambda path, edit: os.truncate(path, len(edit.new)),
    "truncated to where the log begins": lambda path, edit: os.truncate(path, edit.copy_offset),
    "truncated by a byte": lambda path, edit: os.truncate(path, path.stat().st_size - 1),
    "extended by a byte": lambda path, edit: os.truncate(path, path.stat().st_size + 1),
    "extended": lambda path, edit: os.truncate(path, path.stat().st_size + 5000),
}
SAVED = model("saved", 4)


@dataclass(frozen=True)
class Case:
    """A file, and the operations that follow.

    Attributes:
        path: The file.
        phase: When the edit was interrupted.
        other: The archive that was put in its place, or None.
        next: One of `NEXT`.
    """

    path: Path
    phase: str
    other: bytes | None
    next: str


def edit_nothing(path: Path) -> None:
    with onnxarchive.edit(path):
        pass


def read(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        archive.verify()


def replace(path: Path, base: bytes) -> None:
    """Gives an archive its own model with another doc_string."""
    made = onnxarchive.load(base)
    made.doc_string = "replaced"
    replace_model(path, made)


NEXT: dict[str, Callable[[Path, bytes], object]] = {
    "recover": lambda path, base: recover(path),
    "edit": lambda path, base: edit_nothing(path),
    "open": lambda path, base: read(path),
    "replace_model": replace,
    "save": lambda path, base: onnxarchive.save(SAVED, path),
}


@pytest.fixture(params=EDITED)
def seeds(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Those of the archive that is edited."""
    return EDITED[request.param]


@pytest.fixture(params=EDITS)
def edit(request: pytest.FixtureRequest, seeds: tuple[int, ...], tmp_path: Path) -> Interrupted:
    """The edit that is interrupted."""
    path = tmp_path / NAME
    onnxarchive.save(model(OLD, *seeds), path)
    found = interrupt(path, lambda path: replace_model(path, EDITS[request.param](*seeds)))
    path.unlink()
    assert len({found.old, found.new, *found.states.values()}) == 2 + len(found.states)
    return found


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def require_right(case: Case, edit: Interrupted) -> None:
    """Performs the next operation and checks the file."""
    content = case.path.read_bytes()
    written = {edit.old, edit.new, case.other or edit.old}
    is_whole = content in written
    # What is read, or comes back, if anything is: zeros may be a log that did not reach the disk.
    base = next((it for it in written if content.rstrip(b"\0") == it.rstrip(b"\0")), edit.old)
    error: Exception | None = None
    try:
        NEXT[case.next](case.path, base)
    except (OSError, ArchiveError) as raised:
        error = raised
    found = case.path.read_bytes()
    if case.next == "save":
        assert error is None, case
        assert onnxarchive.load(case.path) == SAVED, case
    elif error is not None:
        assert not is_whole, case
        assert found == content, case
    elif case.next == "replace_model":
        assert found.startswith(base[: base.index(b"__MODEL_PROTO") - 30]), case
        assert onnxarchive.check(case.path, full=True) == [], case
        with onnxarchive.open(case.path) as archive:
            assert archive.model.doc_string == "replaced", case
    else:
        assert found == base, case
        assert case.next != "open" or is_whole, case
    assert os.listdir(case.path.parent) == [NAME], case


@edits.posix
@pytest.mark.sweep
@pytest.mark.parametrize("way", [*COMMANDS, "onnx.save"])
def test_an_archive_put_in_the_place_of_an_interrupted_edit_is_not_changed(
    tmp_path: Path,
    edit: Interrupted,
    seeds: tuple[int, ...],
    way: str,
    record_property: Callable[[str, Any], None],
) -> None:
    if way in COMMANDS and shutil.which(way.split()[0]) is None:
        pytest.skip(f"{way.split()[0]} is not installed")
    cases: list[Case] = []
    others = [(made, saved(made)) for made in (other(*seeds) for other in OTHERS.values())]
    for (made, content), phase, following in product(others, edit.states, NEXT):
        number = f"{len(cases)}"
        case = Case(tmp_path / "targets" / number / NAME, phase, content, following)
        put(case.path, edit.states[phase])
        put(tmp_path / "others" / number / NAME, content)
        cases.append(case)
        if way == "onnx.save":
            onnx.save(made, case.path)
    if way in COMMANDS:
        subprocess.run(["sh", "-ec", COMMANDS[way]], cwd=tmp_path, check=True, timeout=120)
    for case in cases:
        assert case.other is not None
        rest = edit.states[case.phase][len(case.other) :] if way == "dd" else b""
        assert case.path.read_bytes() == case.other + rest
        require_right(case, edit)
    record_property("interrupted edits recovered", len(cases))
    assert len(cases) == 4 * 6 * 5


@edits.posix
@pytest.mark.sweep
def test_a_file_whose_edit_was_interrupted_gives_the_old_archive_or_is_left_as_it_is(
    tmp_path: Path, edit: Interrupted, record_property: Callable[[str, Any], None]
) -> None:
    cases = list(product(ACTS, edit.states, NEXT))
    for way, phase, following in cases:
        case = Case(tmp_path / way / f"{phase}, {following}" / NAME, phase, None, following)
        put(case.path, edit.states[phase])
        ACTS[way](case.path, edit)
        if (way, following) == ("nothing", "recover"):
            recover(case.path)
            assert case.path.read_bytes() == edit.old
        require_right(case, edit)
    record_property("interrupted edits recovered", len(cases))
    assert len(cases) == 10 * 6 * 5
