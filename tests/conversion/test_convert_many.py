"""Many conversions at once: finding models, results, executors."""

from __future__ import annotations

import os
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import Mock

import lock_calls
import pytest
from models import model_of, raw_tensor, run_python, weight_model
from obstore.store import MemoryStore
from written import files_below, write_model, zipped

import onnxarchive
from onnxarchive import Conversion, LockedError, convert_many
from onnxarchive.conversion import convert_many as module
from onnxarchive.conversion.convert_many import find_models
from onnxarchive.files import locking
from onnxarchive.files.threads import require_jobs
from onnxarchive.sources.zip_file import read_zip
from onnxarchive.writing.options import WriteOptions

MakeExecutor: TypeAlias = Callable[[], Any]


def _write(path: Path, seed: int = 0) -> Path:
    return write_model(path, weight_model(seed))


def _tree(top: Path) -> Path:
    """Models of every kind in a tree, and a broken one."""
    _write(top / "b.onnx", 1)
    _write(top / "deep" / "down" / "c.ONNX", 2)
    (top / "deep" / "a.onnx").write_bytes(b"broken")
    onnxarchive.save(weight_model(3), top / "deep" / "made.onnxa")
    onnxarchive.save(weight_model(4), top / "made.onnxa")
    (top / "unzipped").mkdir()
    onnxarchive.extract(top / "made.onnxa", top / "unzipped" / "model.dir")
    (top / "made.onnxa").unlink()
    (top / "notes.txt").write_bytes(b"words")
    (top / "weights.bin").write_bytes(b"data")
    return top


PLACES = ["b.onnx", "deep/a.onnx", "deep/made.onnxa", "deep/down/c.ONNX", "unzipped/model.dir"]
TARGETS = {
    "b.onnxa": 1,
    "deep/made.onnxa": 3,
    "deep/down/c.onnxa": 2,
    "unzipped/model.dir.onnxa": 4,
}


def _found(source: Path | str) -> list[tuple[str, str]]:
    return list(find_models(source))


def _check_tree(found: list[Conversion], top: Path, out: Path) -> None:
    assert [item.source for item in found] == [str(top / place) for place in PLACES]
    assert files_below(out) == set(TARGETS)
    for target, seed in TARGETS.items():
        assert onnxarchive.load(out / target) == weight_model(seed)
    (failed,) = [item for item in found if item.error is not None]
    assert failed.source == str(top / "deep" / "a.onnx")
    assert failed.error is not None
    assert str(top / "deep" / "a.onnx") in failed.error
    assert (failed.nbytes, failed.target) == (None, str(out / "deep" / "a.onnxa"))
    for item in found:
        if item is not failed:
            assert item.nbytes == os.path.getsize(item.target)


# Finding models


def test_models_of_a_tree_are_found_in_order(tmp_path: Path) -> None:
    top = _tree(tmp_path / "tree")
    assert _found(top) == [(str(top / place), place) for place in PLACES]


def test_a_file_is_a_model_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    assert _found(path) == [(str(path), "weights")]


def test_a_directory_with_a_model_of_its_own_is_one_model(tmp_path: Path) -> None:
    onnxarchive.save(weight_model(1), tmp_path / "m.onnxa", assets={"decoder.onnx": b"asset"})
    onnxarchive.extract(tmp_path / "m.onnxa", tmp_path / "export")
    assert _found(tmp_path / "export") == [(str(tmp_path / "export"), "export")]


def test_the_working_directory_may_be_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = _tree(tmp_path / "tree")
    monkeypatch.chdir(top)
    assert [place for _, place in _found(".")] == PLACES
    found = convert_many(["."], tmp_path / "out")
    assert [os.path.relpath(item.source, top) for item in found] == PLACES
    assert files_below(tmp_path / "out") == set(TARGETS)
    monkeypatch.chdir(top / "unzipped" / "model.dir")
    assert [place for _, place in _found(".")] == ["model.dir"]


@pytest.mark.parametrize("kind", [str, Path, os.fsencode], ids=["str", "Path", "bytes"])
def test_a_path_in_place_of_a_list_of_sources_is_refused(
    tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    source = _write(tmp_path / "m.onnx")
    with pytest.raises(TypeError, match=r"a list of sources.*pass \[source\]"):
        convert_many(kind(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_empty_tree_and_a_missing_source_are_failures_and_stop_nothing(tmp_path: Path) -> None:
    empty, missing = tmp_path / "empty", tmp_path / "missing.onnx"
    empty.mkdir()
    assert _found(empty) == []
    with pytest.raises(FileNotFoundError, match=r"missing\.onnx"):
        _found(missing)
    found = convert_many([empty, missing, _write(tmp_path / "m.onnx")], tmp_path / "out")
    assert f"{empty}: there is no model in this tree" in str(found[0].error)
    assert found[1].error == f"{missing}: No such file or directory"
    assert found[2].error is None


def test_a_dry_run_of_a_compressed_zip_makes_nothing(tmp_path: Path) -> None:
    files = {"m.onnx": weight_model(1).SerializeToString()}
    zipped(tmp_path / "m.zip", files, zipfile.ZIP_DEFLATED)
    (done,) = convert_many([tmp_path / "m.zip"], tmp_path / "out", dry_run=True)
    assert (done.error, (done.nbytes or 0) > 0) == (None, True)
    assert files_below(tmp_path) == {"m.zip"}


# Executors


@contextmanager
def _no_executor() -> Iterator[None]:
    yield None


def _processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


@pytest.mark.parametrize(
    "make",
    [_no_executor, lambda: ThreadPoolExecutor(4), _processes],
    ids=["none", "threads", "processes"],
)
def test_a_tree_keeps_its_shape_and_a_failure_stops_nothing(
    tmp_path: Path, make: MakeExecutor
) -> None:
    top = _tree(tmp_path / "tree")
    done: list[tuple[str, int, int]] = []
    with make() as executor:
        found = convert_many(
            [top],
            tmp_path / "out",
            executor,
            on_done=lambda item, count, total: done.append((item.source, count, total)),
        )
    _check_tree(found, top, tmp_path / "out")
    assert sorted(source for source, _, _ in done) == sorted(item.source for item in found)
    assert [(count, total) for _, count, total in done] == [(n, 5) for n in range(1, 6)]


class _Backwards(Executor):
    """Runs so many calls in the opposite order, each when `taken` was released for the last one."""

    def __init__(self, count: int) -> None:
        self.taken = threading.Semaphore()
        self._count = count
        self._calls: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.append((future, lambda: fn(*args, **kwargs)))
        if len(self._calls) == self._count:
            threading.Thread(target=self._run, daemon=True).start()
        return future

    def _run(self) -> None:
        for future, call in reversed(self._calls):
            self.taken.acquire()
            future.set_result(call())


def test_results_come_in_order_whichever_conversion_ends_first(tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"{index}.onnx", index) for index in (3, 1, 2)]
    done: list[str] = []
    executor = _Backwards(3)

    def on_done(item: Conversion, *_: int) -> None:
        done.append(item.source)
        executor.taken.release()

    found = convert_many(paths, tmp_path / "out", executor, on_done=on_done)
    assert [item.source for item in found] == list(map(str, paths))
    assert done == [str(path) for path in reversed(paths)]


@pytest.mark.parametrize(
    ("make", "jobs", "expected"),
    [
        (_no_executor, None, require_jobs(None)),
        (_no_executor, 3, 3),
        (lambda: ThreadPoolExecutor(4), None, 1),
        (lambda: ThreadPoolExecutor(4), 3, 3),
    ],
)
def test_conversions_beside_others_use_one_thread_each_unless_more_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: MakeExecutor,
    jobs: int | None,
    expected: int,
) -> None:
    used: list[int] = []

    def convert(source: str, target: str, options: WriteOptions, *_: Any, **__: Any) -> Conversion:
        used.append(require_jobs(options.jobs))
        return Conversion(source, target)

    monkeypatch.setattr(module, "convert_locations", convert)
    paths = [_write(tmp_path / f"{index}.onnx", index) for index in range(3)]
    with make() as executor:
        convert_many(paths, tmp_path / "out", executor, jobs=jobs)
    assert used == [expected] * 3


# Results


@pytest.mark.parametrize(
    "make",
    [_no_executor, lambda: ThreadPoolExecutor(8), _processes],
    ids=["none", "threads", "processes"],
)
def test_each_model_has_its_own_warnings(tmp_path: Path, make: MakeExecutor) -> None:
    count = 24
    (tmp_path / "tree").mkdir()
    for index in range(count):
        directory = tmp_path / "tree" / f"{index:02}"
        onnxarchive.save(weight_model(index), tmp_path / "m.onnxa")
        onnxarchive.extract(tmp_path / "m.onnxa", directory)
        (directory / f"litter{index:02}").touch()
    with make() as executor:
        found = convert_many([tmp_path / "tree"], tmp_path / "out", executor)
    assert [item.error for item in found] == [None] * count
    for index, item in enumerate(found):
        (warning,) = item.warnings
        assert f"litter{index:02}" in warning


def test_threads_leave_the_warnings_of_the_process_as_they_were(tmp_path: Path) -> None:
    code = """
import sys, warnings
from concurrent.futures import ThreadPoolExecutor
from onnxarchive import convert_many
before = (warnings.showwarning, list(warnings.filters))
with ThreadPoolExecutor(8) as executor:
    convert_many([sys.argv[1]], sys.argv[2], executor)
assert (warnings.showwarning, list(warnings.filters)) == before
"""
    for index in range(40):
        _write(tmp_path / "tree" / f"{index}.onnx", index)
    for attempt in range(3):
        run_python(code, tmp_path / "tree", tmp_path / f"out{attempt}")


def test_convert_many_passes_its_options_to_each_conversion(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.onnx")
    options: dict[str, Any] = {"alignment": 4096, "assets": {"a.txt": b"a"}, "size_threshold": 0}
    (found,) = convert_many([path], tmp_path / "out", **options)
    onnxarchive.convert(path, tmp_path / "m.onnxa", **options)
    assert Path(found.target).read_bytes() == (tmp_path / "m.onnxa").read_bytes()


# Targets


@pytest.mark.parametrize(
    ("system", "are_one"), [("darwin", True), ("linux", False)], ids=["macOS", "Linux"]
)
@pytest.mark.parametrize("name", ["M\u00c4.onnx", "ma\u0308.onnx"])
def test_names_that_macos_takes_for_one_are_one_target_on_macos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, system: str, are_one: bool
) -> None:
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform=system))
    sources = [_write(tmp_path / "a" / "m\u00e4.onnx", 1), _write(tmp_path / "b" / name, 2)]
    found = convert_many(sources, tmp_path / "out")
    assert [item.error is None for item in found] == [True, not are_one]
    if are_one:
        assert "has the same target" in str(found[1].error)


def test_two_models_with_one_target_are_one_model_and_one_failure(tmp_path: Path) -> None:
    first = _write(tmp_path / "tree" / "m.onnx", 1)
    onnxarchive.save(weight_model(2), tmp_path / "tree" / "m.onnxa")
    found = convert_many([tmp_path / "tree"], tmp_path / "out")
    assert [item.error is None for item in found] == [True, False]
    assert found[1].error is not None
    assert found[1].error == (
        f"{first} has the same target {found[1].target}; convert one of them to another directory"
    )
    assert onnxarchive.load(tmp_path / "out" / "m.onnxa") == weight_model(1)


def test_a_remote_tree_is_searched_without_the_archives_that_were_made_in_it() -> None:
    store = MemoryStore()
    store.put("tree/m.onnx", weight_model(1).SerializeToString())
    for _ in range(2):
        (done,) = convert_many(["tree"], "tree/out", store=store)
        assert (done.source, done.target, done.error) == ("tree/m.onnx", "tree/out/m.onnxa", None)


def test_a_remote_tree_that_cannot_be_searched_is_a_failure(tmp_path: Path) -> None:
    (done,) = convert_many(["https://host.invalid/tree"], tmp_path)
    assert "the URL of a store to list, such as s3://, gs:// or az://, found a web" in str(
        done.error
    )


def test_existing_archives_are_replaced_unless_replace_is_false(tmp_path: Path) -> None:
    _write(tmp_path / "tree" / "a.onnx", 1)
    _write(tmp_path / "tree" / "b.onnx", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.onnxa").write_bytes(b"old")
    found = convert_many([tmp_path / "tree"], tmp_path / "out", replace=False)
    assert [item.error is None for item in found] == [False, True]
    assert "exists" in str(found[0].error)
    assert (tmp_path / "out" / "a.onnxa").read_bytes() == b"old"
    found = convert_many([tmp_path / "tree"], tmp_path / "out")
    assert [item.error for item in found] == [None, None]
    assert onnxarchive.load(tmp_path / "out" / "a.onnxa") == weight_model(1)


def test_a_model_is_not_written_over_by_its_own_archive(tmp_path: Path) -> None:
    onnxarchive.save(weight_model(1), tmp_path / "m.onnxa")
    before = (tmp_path / "m.onnxa").read_bytes()
    (found,) = convert_many([tmp_path / "m.onnxa"], tmp_path)
    assert "input" in str(found.error)
    assert (tmp_path / "m.onnxa").read_bytes() == before


def test_archives_of_an_earlier_run_are_no_sources(tmp_path: Path) -> None:
    _write(tmp_path / "tree" / "a.onnx", 1)
    for _ in range(2):
        (found,) = convert_many([tmp_path / "tree"], tmp_path / "tree" / "out")
        assert found.error is None
    assert files_below(tmp_path / "tree") == {"a.onnx", "out/a.onnxa"}


@pytest.mark.parametrize("folder", ["", "tree"])
def test_archives_may_go_beside_or_above_their_models(tmp_path: Path, folder: str) -> None:
    _write(tmp_path / "tree" / "deep" / "a.onnx", 1)
    (found,) = convert_many([tmp_path / "tree"], tmp_path / folder)
    assert (found.error, found.target) == (None, str(tmp_path / folder / "deep" / "a.onnxa"))


def test_a_target_that_cannot_be_made_is_one_failure(tmp_path: Path) -> None:
    _write(tmp_path / "tree" / "deep" / "a.onnx", 1)
    _write(tmp_path / "tree" / "b.onnx", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deep").touch()  # a file where a folder is needed
    found = convert_many([tmp_path / "tree"], tmp_path / "out")
    assert [item.error is None for item in found] == [True, False]


# Workers that die


def _die() -> None:
    os._exit(3)


def test_workers_that_die_are_failures_and_no_exception(tmp_path: Path) -> None:
    for index in range(6):
        _write(tmp_path / "tree" / f"{index}.onnx", index)
    done: list[int] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=_die) as executor:
        found = convert_many(
            [tmp_path / "tree"],
            tmp_path / "out",
            executor,
            on_done=lambda _, count, __: done.append(count),
        )
    assert len(found) == 6
    assert all("worker failed" in str(item.error) for item in found)
    assert done == list(range(1, 7))
    assert files_below(tmp_path / "out") == set()


class _Breaking(Executor):
    """Takes two calls; then its workers are dead, as those of a pool may be at any moment."""

    def __init__(self) -> None:
        self._taken = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._taken += 1
        if self._taken > 2:
            raise BrokenProcessPool("a child process terminated abruptly")
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_workers_that_die_before_all_work_is_given_out_are_failures(tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"{index}.onnx", index) for index in range(4)]
    found = convert_many(paths, tmp_path / "out", _Breaking())
    assert [item.error is None for item in found] == [True, True, False, False]
    assert "terminated abruptly" in str(found[3].error)


def test_an_interrupt_is_not_taken_for_a_failure(tmp_path: Path) -> None:
    paths = [_write(tmp_path / f"{index}.onnx", index) for index in range(4)]

    interrupt = Mock(side_effect=KeyboardInterrupt)
    for executor in (None, _Backwards(4)):
        with pytest.raises(KeyboardInterrupt):
            convert_many(paths, tmp_path / "out", executor, on_done=interrupt)


class _Interrupted(Executor):
    """Makes the first call, has begun the second one, and keeps the others waiting.

    `call_begun` makes the second call; `is_remote` makes it with copies, as another process does.
    """

    def __init__(self, *, is_remote: bool) -> None:
        self.futures: list[Future[Any]] = []
        self.call_begun: Callable[[], Any] = Mock()
        self._is_remote = is_remote

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.futures.append(future)
        if len(self.futures) == 1:
            future.set_result(fn(*args, **kwargs))
        if len(self.futures) == 2:
            future.set_running_or_notify_cancel()
            call = partial(fn, *args, **kwargs)
            self.call_begun = pickle.loads(pickle.dumps(call)) if self._is_remote else call
        return future


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("is_remote", [False, True])
def test_after_an_interrupt_running_conversions_end_and_none_begin(
    tmp_path: Path, error: type[BaseException], is_remote: bool
) -> None:
    paths = [_write(tmp_path / f"{index}.onnx", index) for index in range(4)]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "1.onnxa").write_bytes(b"old")
    executor = _Interrupted(is_remote=is_remote)
    with pytest.raises(error):
        convert_many(paths, tmp_path / "out", executor, on_done=Mock(side_effect=error))
    assert [future.cancelled() for future in executor.futures] == [False, False, True, True]
    outcome = executor.call_begun()
    assert files_below(tmp_path / "out") == {"0.onnxa", "1.onnxa"}
    if is_remote:
        assert outcome.error is None
        assert onnxarchive.load(tmp_path / "out" / "1.onnxa") == weight_model(1)
    else:
        assert outcome.error is not None
        assert (tmp_path / "out" / "1.onnxa").read_bytes() == b"old"


def test_an_archive_without_the_usual_suffix_is_found_while_it_is_edited(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path)
    with onnxarchive.edit(path):
        assert [found for found, _ in find_models(tmp_path)] == [str(path)]


def test_a_file_is_locked_against_edits_while_its_kind_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path)

    def read_locked(view: memoryview, temporary: str | None) -> Any:
        with pytest.raises(LockedError), onnxarchive.edit(path, timeout=0):
            pass
        return read_zip(view, temporary)

    monkeypatch.setattr("onnxarchive.sources.zip_file.read_zip", read_locked)
    assert [found for found, _ in find_models(tmp_path)] == [str(path)]


@pytest.mark.skipif(os.name == "nt", reason="locks of POSIX")
def test_files_that_other_programs_have_locked_are_waited_for_only_if_they_may_be_archives(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    tree = tmp_path / "tree"
    _write(tree / "m.onnx")
    (tree / "run.lock").touch()
    (tree / "notes").write_text("locked, too")
    with ExitStack() as locks:
        for path in tree.iterdir():
            locks.enter_context(lock_calls.locked(path, "exclusive"))
        (outcome,) = convert_many([tree], tmp_path / "out")
        assert (outcome.source, outcome.error) == (str(tree / "m.onnx"), None)
        assert clock.now == 0
        onnxarchive.save(weight_model(1), tree / "weights")
        locks.enter_context(lock_calls.locked(tree / "weights", "exclusive"))
        assert [os.path.basename(path) for path, _ in find_models(tree)] == ["m.onnx", "weights"]
        assert clock.now == 0
        _, outcome = convert_many([tree], tmp_path / "out")
        assert outcome.error is None
        assert locking.TIMEOUT <= clock.now < 2 * locking.TIMEOUT
