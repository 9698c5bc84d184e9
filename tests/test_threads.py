from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import flip_byte, model_of
from onnx import numpy_helper

import onnxarchive
from onnxarchive import threads

LARGE = 1 << 20


@given(st.lists(st.integers(0, 5 * LARGE), max_size=30), st.integers(1, 9))
def test_every_item_is_worked_on_once(sizes: list[int], jobs: int) -> None:
    done: list[int] = []
    threads.for_each(range(len(sizes)), sizes, done.append, jobs)
    assert sorted(done) == list(range(len(sizes)))


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


def test_the_error_of_the_first_item_is_raised_and_the_others_are_given_up() -> None:
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


@pytest.mark.parametrize("jobs", [0, -1])
def test_less_than_one_job_is_refused(jobs: int) -> None:
    with pytest.raises(ValueError, match="jobs must be 1 or more, got"):
        threads.require_jobs(jobs)


def test_there_is_a_job_for_each_core_by_default() -> None:
    assert threads.require_jobs(None) >= 1
    assert threads.require_jobs(3) == 3


@pytest.mark.parametrize("jobs", [None, 1, 2, 7])
def test_an_archive_is_verified_alike_with_any_number_of_jobs(
    tmp_path: Path, jobs: int | None
) -> None:
    path = tmp_path / "m.onnxa"
    arrays = [np.full(LARGE // 4, number, np.float32) for number in range(8)]
    onnxarchive.save(
        model_of(*(numpy_helper.from_array(it, f"w{i}") for i, it in enumerate(arrays))), path
    )
    with onnxarchive.open(path) as archive:
        told: list[tuple[int, int]] = []
        archive.verify(lambda done, total: told.append((done, total)), jobs=jobs)
        total = sum(entry.nbytes for entry in archive.entries.values())
        assert told[-1] == (total, total)
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        for name in ("w7", "w2"):
            flip_byte(path, archive.entries[name].data_offset + 5)
        with pytest.raises(onnxarchive.ChecksumError, match="'w2'"):
            archive.verify(jobs=jobs)
