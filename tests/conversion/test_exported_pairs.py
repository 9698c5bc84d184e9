"""Exports over a model and its external data: both are the old ones, or both the new ones.

Whatever call fails, and whenever the process is killed or the power fails, there is never an old
model with new data, nor a new model with old data.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import onnx
import pytest

if not hasattr(os, "fork"):
    pytest.skip("calls are made to fail in forks", allow_module_level=True)

import faults
from faults import KILLS, Calls, after_power_failures, attempt
from models import model_of, raw_tensor

import onnxarchive
from onnxarchive.editing import pairs
from onnxarchive.errors import ArchiveError
from onnxarchive.files import hidden_files, replacement

MODEL, DATA = "m.onnx", "m.data"
State = tuple[bytes | None, bytes | None]


def archive_of(path: Path, doc_string: str, seed: int) -> Path:
    model = model_of(raw_tensor("w", dims=(1500,), seed=seed))
    model.doc_string = doc_string
    onnxarchive.save(model, path)
    return path


@dataclass
class Scene:
    """A folder in which an export replaces what is there.

    Attributes:
        old: Content of the model and of its data before the export; None if missing.
        new: Content after the export.
    """

    folder: Path
    archive: Path
    start: dict[str, bytes]
    old: State = (None, None)
    new: State = (None, None)

    def set_up(self, files: dict[str, bytes] | None = None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, content in (self.start if files is None else files).items():
            (self.folder / name).write_bytes(content)

    def export(self, model: Path) -> None:
        onnxarchive.export(self.archive, model, external_data=DATA)

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def state(self) -> State:
        found = self.files()
        return found.get(MODEL), found.get(DATA)

    def log(self) -> list[faults.Call]:
        self.set_up()
        calls = Calls()
        assert attempt(self.export, self.model, calls) == "done"
        assert self.files() == {MODEL: self.new[0], DATA: self.new[1]}
        return calls.log

    def require_no_mixture(self) -> None:
        """Requires one of the two pairs, or a model without its data."""
        model, data = self.state()
        assert model in (self.old[0], self.new[0])
        assert data in (self.old[1], self.new[1], None)
        if self.old[0] != self.new[0] and data is not None:
            assert (model, data) in (self.old, self.new)

    def require_recovered(self, name: str) -> None:
        recover(self.folder / name)
        assert self.state() in (self.old, self.new)
        assert self.files().keys() <= {MODEL, DATA}


def recover(path: Path) -> None:
    with contextlib.suppress(ArchiveError, FileNotFoundError):  # nothing is left of an export
        onnxarchive.recover(path)


STARTS = {
    "over a pair": (MODEL, DATA),
    "over a model alone": (MODEL,),
    "over data alone": (DATA,),
    "over nothing": (),
    "over a pair with the same model": (MODEL, DATA),
}


FIRST, *OTHERS = STARTS


@pytest.fixture(params=[FIRST, *(pytest.param(it, marks=pytest.mark.sweep) for it in OTHERS)])
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Scene:
    name = request.param
    text = "new" if name.endswith("the same model") else "old model"
    onnxarchive.export(
        archive_of(tmp_path / "old.onnxa", text, 1), tmp_path / MODEL, external_data=DATA
    )
    start = {it: (tmp_path / it).read_bytes() for it in STARTS[name]}
    scene = Scene(tmp_path / "scene", archive_of(tmp_path / "new.onnxa", "new", 2), start)
    scene.set_up()
    scene.old = scene.state()
    scene.export(scene.model)
    scene.new = scene.state()
    return scene


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    with patch.object(os, "fsync", lambda _: None):
        yield


@pytest.mark.parametrize(
    "has_links", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["", "no hard links"]
)
def test_a_killed_export_leaves_no_mixture_and_is_recovered_by_either_name(
    scene: Scene, has_links: bool
) -> None:
    outcomes: Counter[bool] = Counter()
    with contextlib.nullcontext() if has_links else patch.object(os, "link", side_effect=OSError):
        for at, way in faults.faults(scene.log(), ("killed after",)):
            for name in (MODEL, DATA):
                scene.set_up()
                outcome = attempt(scene.export, scene.model, Calls(at, way))
                assert outcome == "killed" or not has_links  # the call that is refused is no kill
                if has_links or scene.model.exists():
                    scene.require_no_mixture()
                scene.require_recovered(name)
                outcomes[scene.state() == scene.new] += 1
    assert outcomes[True] > 4
    assert outcomes[False] > 10


@pytest.mark.parametrize(
    "has_links", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["", "no hard links"]
)
def test_an_export_in_which_a_system_call_fails_is_rolled_back(
    scene: Scene, has_links: bool
) -> None:
    with contextlib.nullcontext() if has_links else patch.object(os, "link", side_effect=OSError):
        for at, way in faults.faults(scene.log(), ("EIO once",)):
            scene.set_up()
            outcome = attempt(scene.export, scene.model, Calls(at, way))
            assert outcome in ("OSError", "done")
            assert scene.state() == (scene.old if outcome == "OSError" else scene.new)
            recover(scene.model)  # where it was a removal that failed
            assert scene.files().keys() <= {MODEL, DATA}


def test_an_export_after_which_nothing_can_be_written_is_recovered_later(scene: Scene) -> None:
    for at, way in faults.faults(scene.log(), ("EIO on",)):
        scene.set_up()
        outcome = attempt(scene.export, scene.model, Calls(at, way))
        assert outcome in ("OSError", "ArchiveError", "done")
        scene.require_no_mixture()
        scene.require_recovered(MODEL)


def test_a_power_failure_leaves_no_mixture_and_is_recovered(scene: Scene) -> None:
    log, tried = scene.log(), set()
    for count in range(len(log) + 1):
        for files in after_power_failures(scene.start, log[:count]):
            if (state := frozenset(files.items())) not in tried:
                tried.add(state)
                scene.set_up(files)
                scene.require_no_mixture()
                scene.require_recovered((MODEL, DATA)[len(tried) % 2])
    scene.set_up(next(iter(after_power_failures(scene.start, log))))
    assert scene.state() == scene.new
    assert len(tried) > len(log)


@pytest.mark.sweep
def test_a_recovery_that_is_killed_or_fails_is_recovered(scene: Scene) -> None:
    tried = set()

    def is_new(*files: dict[str, bytes]) -> bool:
        """True if nothing was recovered from the same files before."""
        state = tuple(frozenset(it.items()) for it in files)
        known = state in tried
        tried.add(state)
        return not known

    for at, way in faults.faults(scene.log(), ("killed after",)):
        scene.set_up()
        attempt(scene.export, scene.model, Calls(at, way))
        left, calls = scene.files(), Calls()
        if not is_new(left, {}):
            continue
        with calls.caught():
            recover(scene.model)
        for number, how in faults.faults(calls.log, (*KILLS, "EIO once", "EIO on")):
            scene.set_up(left)
            attempt(recover, scene.model, Calls(number, how))
            scene.require_no_mixture()
            scene.require_recovered(DATA)
        for count in range(len(calls.log) + 1):
            for files in after_power_failures(left, calls.log[:count]):
                if is_new(files):
                    scene.set_up(files)
                    scene.require_no_mixture()
                    scene.require_recovered(MODEL)


class Interrupt:
    """Raises KeyboardInterrupt before a line of some modules is run, as Ctrl-C may do it."""

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self._at = at
        self._files = {module.__file__ for module in (pairs, hidden_files, replacement)}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Interrupt | None:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            if self.count == self._at:
                raise KeyboardInterrupt
            self.count += 1
        return self


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_between_any_two_lines_leaves_no_mixture(scene: Scene) -> None:
    def run(interrupt: Interrupt) -> None:
        scene.set_up()
        sys.settrace(interrupt)
        try:
            scene.export(scene.model)
        finally:
            sys.settrace(None)

    run(whole := Interrupt())
    assert whole.count > 200
    gc.freeze()  # so that each collection is fast
    for at in range(whole.count):
        with contextlib.suppress(KeyboardInterrupt):
            run(Interrupt(at))
        gc.collect()
        scene.require_no_mixture()
        scene.require_recovered(MODEL)
    gc.unfreeze()


# Messages, and files that stay


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An exported model, and an archive of a new one."""
    new = archive_of(tmp_path / "new.onnxa", "new", 2)
    target = tmp_path / "folder" / MODEL
    target.parent.mkdir()
    old = archive_of(tmp_path / "old.onnxa", "old model", 1)
    onnxarchive.export(old, target, external_data=DATA)
    return target, new


def killed(target: Path, archive: Path, at: str) -> None:
    """Kills an export after it has given a file its name."""
    process = os.fork()
    if not process:
        move = os.replace

        def replace(source: str, name: str) -> None:
            move(source, name)
            if os.path.basename(name) == at:
                os.kill(os.getpid(), 9)

        with patch.object(os, "replace", replace):
            onnxarchive.export(archive, target, external_data=DATA)
    assert os.WIFSIGNALED(os.waitpid(process, 0)[1])


OLD_DATA = f".{DATA}.onnxarchive-0.old"


@pytest.mark.parametrize(("at", "what"), [(OLD_DATA, "undone"), (MODEL, "completed")])
@pytest.mark.parametrize("name", [MODEL, DATA])
def test_recovery_says_what_it_did(
    pair: tuple[Path, Path], at: str, what: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, archive = pair
    killed(target, archive, at)
    with pytest.raises(Exception, match=DATA):
        onnx.load(target)
    recovery = onnxarchive.recover(target.with_name(name))
    assert (recovery.export, recovery.is_rolled_back) == (what, False)
    assert all(not os.path.exists(path) for path in recovery.removed)
    assert sorted(os.listdir(target.parent)) == [DATA, MODEL]
    loaded = onnx.load(target)
    assert loaded.doc_string == ("new" if what == "completed" else "old model")
    seed = 2 if what == "completed" else 1
    expected = raw_tensor("w", dims=(1500,), seed=seed).raw_data
    assert loaded.graph.initializer[0].raw_data == expected


@pytest.mark.parametrize("at", [OLD_DATA, MODEL, DATA])
def test_the_next_export_recovers_an_interrupted_one(pair: tuple[Path, Path], at: str) -> None:
    target, archive = pair
    for _ in range(3):
        killed(target, archive, at)
    onnxarchive.export(archive, target, external_data=DATA)
    assert sorted(os.listdir(target.parent)) == [DATA, MODEL]
    assert onnx.load(target).doc_string == "new"


def test_an_export_in_progress_is_not_recovered(pair: tuple[Path, Path]) -> None:
    target, archive = pair
    move = os.replace
    seen: list[onnxarchive.Recovery] = []

    def replace(source: str, name: str) -> None:
        move(source, name)
        for path in (target, target.with_name(DATA)):
            with contextlib.suppress(ArchiveError, FileNotFoundError):
                seen.append(onnxarchive.recover(path, timeout=0))

    with patch.object(os, "replace", replace):
        onnxarchive.export(archive, target, external_data=DATA)
    assert seen == []
    assert onnx.load(target).doc_string == "new"


def test_exports_take_turns_where_there_are_no_old_files(pair: tuple[Path, Path]) -> None:
    target, archive = pair
    for path in (target, target.with_name(DATA)):
        path.unlink()
    move = os.replace
    statuses: list[int] = []

    def replace(source: str, name: str) -> None:
        if os.path.basename(name) == MODEL:
            process = os.fork()
            if not process:
                statuses.append(export_beside(archive.with_name("old.onnxa"), target))
                os._exit(statuses[0])
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        move(source, name)

    with patch.object(os, "replace", replace):
        onnxarchive.export(archive, target, external_data=DATA)
    assert statuses == [LOCKED]
    assert sorted(os.listdir(target.parent)) == [DATA, MODEL]
    assert onnx.load(target).doc_string == "new"


LOCKED = 3


def export_beside(archive: Path, target: Path) -> int:
    """Exports in a fork, while another export replaces the files; returns LOCKED if it waits."""
    with patch.object(os, "replace", os.rename):
        try:
            onnxarchive.export(archive, target, external_data=DATA, timeout=0)
        except onnxarchive.LockedError:
            return LOCKED
    return 0


def test_a_target_that_is_a_link_stays_one_when_it_is_recovered(pair: tuple[Path, Path]) -> None:
    target, archive = pair
    for name in (MODEL, DATA):
        (target.parent / name).rename(target.parent.parent / name)
        (target.parent / name).symlink_to(f"../{name}")
    killed(target, archive, MODEL)
    assert onnxarchive.recover(target.with_name(DATA)).export == "completed"
    assert sorted(os.listdir(target.parent)) == [DATA, MODEL]
    assert target.is_symlink()
    assert target.with_name(DATA).is_symlink()
    assert not [name for name in os.listdir(target.parent.parent) if name.startswith(".")]


@pytest.mark.parametrize("at", [OLD_DATA, "real"])
def test_the_data_beside_a_link_to_a_model_elsewhere_stay_until_the_model_is_recovered(
    pair: tuple[Path, Path], tmp_path: Path, at: str
) -> None:
    target, archive = pair
    real = tmp_path / "elsewhere" / "real"
    real.parent.mkdir()
    target.rename(real)
    target.symlink_to(real)
    killed(target, archive, at)
    with contextlib.suppress(ArchiveError, FileNotFoundError):  # the record is beside the model
        onnxarchive.recover(target.with_name(DATA))
    assert onnxarchive.recover(target).export == ("completed" if at == "real" else "undone")
    assert sorted(os.listdir(target.parent)) == [DATA, MODEL]
    assert os.listdir(real.parent) == ["real"]


def test_the_record_of_another_user_is_not_followed(pair: tuple[Path, Path]) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    target, archive = pair
    killed(target, archive, MODEL)
    (record,) = target.parent.glob(".*.pair")
    os.chown(record, 65534, -1)
    with contextlib.suppress(ArchiveError):
        onnxarchive.recover(target)
    assert not target.with_name(DATA).exists()
    assert record.exists()


def record_of(names: object, **completion: object) -> bytes:
    finished = {"sha256": "0" * 64, "number": 0, "had_model": True, **completion}
    return f"{json.dumps(names)}\n{json.dumps(finished)}\n".encode()


@pytest.mark.parametrize(
    ("names", "completion"),
    [
        ({"model": "{outside}/new", "data": MODEL}, {}),
        ({"model": "../outside/new", "data": MODEL}, {}),
        ({"model": MODEL, "data": "link/new"}, {}),
        ({"model": MODEL, "data": DATA}, {"number": "0/../../outside/kept"}),
    ],
)
def test_a_record_that_came_with_a_folder_leads_to_no_other_file(
    pair: tuple[Path, Path], tmp_path: Path, names: dict[str, str], completion: dict[str, str]
) -> None:
    target, archive = pair
    outside = tmp_path / "outside"
    outside.mkdir()
    for kept in ("kept.old", "kept.new", ".new.onnxarchive-0.old", ".new.onnxarchive-0.new"):
        (outside / kept).touch()
    before = sorted(os.listdir(outside))
    target.unlink()
    (target.parent / f".{DATA}.onnxarchive-0").mkdir()
    (target.parent / "link").symlink_to(outside)
    (target.parent / f".{MODEL}.onnxarchive-0.old").write_bytes(b"theirs")
    names = {kind: name.format(outside=outside) for kind, name in names.items()}
    (target.parent / f".{MODEL}.onnxarchive-0.pair").write_bytes(record_of(names, **completion))
    with contextlib.suppress(ArchiveError, FileNotFoundError):
        onnxarchive.recover(target)
    onnxarchive.export(archive, target, external_data=DATA)
    assert sorted(os.listdir(outside)) == before
    assert onnx.load(target).doc_string == "new"


def test_a_link_that_came_with_a_folder_does_not_become_the_model(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, archive = pair
    precious = tmp_path / "precious"
    precious.write_bytes(b"kept")
    for path in (target, target.with_name(DATA)):
        path.unlink()
    for name in (MODEL, DATA):
        (target.parent / f".{name}.onnxarchive-0.old").symlink_to(precious)
    record = record_of({"model": MODEL, "data": DATA})
    (target.parent / f".{MODEL}.onnxarchive-0.pair").write_bytes(record)
    onnxarchive.export(archive, target, external_data=DATA)
    assert precious.read_bytes() == b"kept"
    assert onnx.load(target).doc_string == "new"


@pytest.mark.parametrize("content", [b"[" * (1 << 14), b"[]\n", b'{"model": 1, "data": 2}\n'])
def test_a_malformed_record_of_an_export_is_removed(
    pair: tuple[Path, Path], content: bytes
) -> None:
    target, _ = pair
    record = target.parent / f".{MODEL}.onnxarchive-0.pair"
    record.write_bytes(content)
    assert onnxarchive.recover(target).removed == (str(record),)


def test_attributes_of_both_files_are_kept(pair: tuple[Path, Path]) -> None:
    target, archive = pair
    target.chmod(0o640)
    target.with_name(DATA).chmod(0o600)
    onnxarchive.export(archive, target, external_data=DATA)
    assert [path.stat().st_mode & 0o777 for path in (target, target.with_name(DATA))] == [
        0o640,
        0o600,
    ]
