from __future__ import annotations

import contextlib
import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, strategies as st
from models import flip_byte, model_of
from onnx import numpy_helper

import onnxarchive
from onnxarchive.files import threads

LARGE = 1 << 20


@given(st.lists(st.integers(0, 5 * LARGE), max_size=30), st.integers(1, 9))
def test_every_item_is_worked_on_once_and_results_come_in_order(
    sizes: list[int], jobs: int
) -> None:
    done: list[int] = []
    threads.for_each(range(len(sizes)), sizes, done.append, jobs)
    assert sorted(done) == list(range(len(sizes)))
    items = [f"item {number}" for number in range(len(sizes))]
    assert list(threads.in_order(items, sizes, str.upper, jobs)) == [it.upper() for it in items]


def test_large_items_are_shared_out_by_their_size() -> None:
    seen: dict[int, int] = {}
    all_there = threading.Barrier(3)

    def work(item: int) -> None:
        seen[item] = threading.get_ident()
        if item in (0, 1, 3):  # the first of each share
            all_there.wait(timeout=60)

    threads.for_each(range(5), [3 * LARGE, 2 * LARGE, LARGE, 2 * LARGE, LARGE], work, 3)
    assert seen[1] == seen[2]
    assert seen[3] == seen[4]
    assert len(set(seen.values())) == 3


def test_small_items_and_one_job_stay_in_the_callers_thread() -> None:
    seen: set[int] = set()
    for sizes, jobs in (([100] * 50, 4), ([LARGE] * 50, 1)):
        threads.for_each(range(50), sizes, lambda _: seen.add(threading.get_ident()), jobs)
    assert seen == {threading.get_ident()}


def test_the_error_of_the_first_failing_item_is_raised_and_later_items_are_given_up() -> None:
    has_failed = threading.Event()
    done: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            assert has_failed.wait(timeout=60)
            raise ValueError("the first")
        if item == 2:
            has_failed.set()
            raise ValueError("the last")
        done.append(item)

    with pytest.raises(ValueError, match="the first"):
        threads.for_each(range(4), [LARGE] * 4, work, 2)
    assert done == [0]


def test_there_is_a_job_for_each_core_by_default_and_one_at_least() -> None:
    assert threads.require_jobs(None) >= 1
    assert threads.require_jobs(3) == 3
    for jobs in (0, -1):
        with pytest.raises(ValueError, match="jobs must be 1 or more, got"):
            threads.require_jobs(jobs)


@pytest.mark.parametrize("jobs", [None, 1, 2, 7])
def test_an_archive_is_verified_with_the_same_result_for_any_number_of_jobs(
    path: Path, jobs: int | None
) -> None:
    arrays = (np.full(LARGE // 4, number, np.float32) for number in range(8))
    tensors = (numpy_helper.from_array(it, f"w{number}") for number, it in enumerate(arrays))
    onnxarchive.save(model_of(*tensors), path)
    with onnxarchive.open(path) as archive:
        told: list[tuple[int, int]] = []
        archive.verify(lambda done, total: told.append((done, total)), jobs=jobs)
        total = sum(entry.nbytes for entry in archive.entries.values())
        assert told[-1] == (total, total)
        assert told == sorted(told)
        for name in ("w7", "w2"):
            flip_byte(path, archive.entries[name].data_offset + 5)
        with pytest.raises(onnxarchive.ChecksumError, match="'w2'"):
            archive.verify(jobs=jobs)


# One after another, made ahead


def test_the_next_items_are_worked_on_while_the_caller_works_on_one() -> None:
    has_begun = [threading.Event() for _ in range(4)]

    def work(item: int) -> int:
        has_begun[item].set()
        return threading.get_ident()

    made = threads.in_order(range(4), [LARGE] * 4, work, 3)
    with contextlib.closing(made):
        assert next(made) == threading.get_ident()  # nobody has begun with it
        for event in has_begun[:3]:
            assert event.wait(timeout=60)
        assert next(made) != threading.get_ident()
        assert has_begun[3].wait(timeout=60)


def test_no_more_items_are_worked_on_ahead_than_jobs_and_bytes_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "AHEAD_SIZE", 10 * LARGE)
    handed: list[int] = []

    class Recorder(ThreadPoolExecutor):
        def submit(self, work: Any, /, *items: Any, **options: Any) -> Any:
            handed.extend(items)
            return super().submit(work, *items, **options)

    monkeypatch.setattr(futures, "ThreadPoolExecutor", Recorder)
    for jobs, sizes, expected in (
        (3, [LARGE] * 9, [1, 2, 3]),
        (8, [4 * LARGE] * 9, [1, 2]),
        (8, [LARGE, 11 * LARGE, 10 * LARGE, LARGE], [2]),
        (8, [100, 100, LARGE, 100, LARGE], [2, 4]),
        (8, [100] * 9, []),
    ):
        handed.clear()
        with contextlib.closing(
            threads.in_order(range(len(sizes)), sizes, lambda _: None, jobs)
        ) as made:
            next(made)
            assert handed == expected


def test_small_and_very_large_items_are_made_in_the_callers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "AHEAD_SIZE", LARGE)
    sizes = [LARGE, 100, LARGE + 1, LARGE, 0]
    made = list(threads.in_order(range(5), sizes, lambda _: threading.get_ident(), 4))
    caller = threading.get_ident()
    assert [it == caller for it in made] == [True, True, True, False, True]


def test_an_error_is_raised_when_its_item_is_due() -> None:
    has_failed = threading.Event()

    def work(item: int) -> int:
        if item == 2:
            has_failed.set()
            raise ValueError("the second")
        assert has_failed.wait(timeout=60)
        if item == 1:
            raise ValueError("the first")
        return item

    made = threads.in_order(range(4), [LARGE] * 4, work, 3)
    assert next(made) == 0
    with pytest.raises(ValueError, match="the first"):
        next(made)


def test_items_that_are_not_begun_are_given_up_and_the_threads_end() -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()
    ended: list[int] = []

    def work(item: int) -> None:
        if item == 1:
            has_begun.set()
            assert may_go_on.wait(timeout=60)
        ended.append(item)

    before = threading.active_count()
    made = threads.in_order(range(9), [LARGE] * 9, work, 2)
    next(made)
    assert has_begun.wait(timeout=60)
    release = threading.Timer(0.2, may_go_on.set)
    release.start()
    made.close()
    assert ended == [0, 1]
    release.join()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "message", ["can't start new thread", "cannot schedule new futures after interpreter shutdown"]
)
def test_if_no_thread_starts_the_callers_thread_does_all_the_work(
    monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError(message)))
    done: list[int] = []
    threads.for_each(range(4), [LARGE] * 4, done.append, 3)
    assert done == list(range(4))
    assert list(threads.in_order(range(4), [LARGE] * 4, str, 3)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("available", [1, 2, 3])
def test_if_only_some_threads_start_they_do_all_the_work(
    monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    start = threading.Thread.start
    before = threading.active_count()

    def start_some(thread: threading.Thread) -> None:
        if threading.active_count() == before + available:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    done: list[int] = []
    workers: set[int] = set()

    def work(item: int) -> str:
        workers.add(threading.get_ident())
        done.append(item)
        return str(item)

    assert list(threads.in_order(range(40), [LARGE] * 40, work, 9)) == [*map(str, range(40))]
    assert sorted(done) == list(range(40))
    done.clear()
    workers.clear()
    threads.for_each(range(40), [LARGE] * 40, lambda item: done.append(int(work(item))), 9)
    assert sorted({*done}) == list(range(40))
    assert threading.get_ident() not in workers
    assert len(workers) <= available
    assert threading.active_count() == before


def test_there_are_no_more_threads_than_items(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock(side_effect=threading.Thread.start)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: start(thread))
    threads.for_each(range(3), [LARGE] * 3, lambda item: None, 1000)
    assert start.call_count == 3
    assert list(threads.in_order(range(3), [LARGE] * 3, str, 1000)) == ["0", "1", "2"]
    assert start.call_count == 6
    sizes = [threads.AHEAD_SIZE // 2] * 9
    assert list(threads.in_order(range(9), sizes, str, 1000)) == [*map(str, range(9))]
    assert start.call_count == 8
    threads.for_each([], [], lambda item: None, 1000)
    threads.for_each([1], [LARGE], lambda item: None, 1000)
    assert start.call_count == 8
