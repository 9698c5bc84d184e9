from __future__ import annotations

import weakref
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from onnxarchive.buffers.lines import Lines, are_distinct, hashes, numbers_of, text_of

NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=4), max_size=40
)


def lines_of(names: list[str]) -> Lines:
    return Lines("".join(f"{name}\n" for name in names))


@settings(max_examples=200, deadline=None)
@given(NAMES, st.integers(-50, 50), st.integers(-50, 50), st.sampled_from([1, 2, -1]))
def test_lines_are_a_sequence_of_names(names: list[str], start: int, stop: int, step: int) -> None:
    found = lines_of(names)
    assert (list(found), len(found), found == names, names == found) == (
        names,
        len(names),
        True,
        True,
    )
    part = found[start:stop:step]
    assert part == names[start:stop:step]
    assert list(part) == names[start:stop:step]
    assert text_of(part) == text_of(names[start:stop:step])
    assert [found[index] for index in range(-len(names), len(names))] == names * 2
    for index in (len(names), -len(names) - 1):
        with pytest.raises(IndexError):
            found[index]


@settings(max_examples=200, deadline=None)
@given(NAMES, NAMES)
def test_each_line_is_found_by_its_number_and_nothing_else_is(
    names: list[str], others: list[str]
) -> None:
    names = list(dict.fromkeys(names))
    for start in (0, len(names) // 2):
        numbers = numbers_of(lines_of(names)[start:])
        assert dict(numbers) == numbers_of(names[start:])
        assert [numbers.get(name) for name in names[:start]] == [None] * start
        absent = [*({*others} - {*names}), *map("\n".join, pairwise(names)), "\ud800", 5]
        for other in absent:
            assert numbers.get(other) is None  # type: ignore[call-overload]
            assert other not in numbers
            with pytest.raises(KeyError):
                numbers[other]  # type: ignore[index]


@pytest.mark.parametrize("count", [1023, 1024, 1025, 70_000])
def test_many_lines_are_found(count: int) -> None:
    names = [f"layer.{index}/weight" for index in range(count)]
    found = lines_of(names)
    assert list(found) == names
    assert [found.numbers[name] for name in names] == list(range(count))
    assert found.numbers.are_distinct


def test_names_that_occur_twice_are_not_distinct() -> None:
    assert not lines_of(["a", "b", "a"]).numbers.are_distinct
    assert not are_distinct(hashes(["a", "b", "a"]))
    assert are_distinct(hashes(["a", "b"]))


def test_numbers_do_not_keep_the_lines_that_keep_them() -> None:
    found = lines_of(["a", "b"])
    numbers, lines = found.numbers, weakref.ref(found)
    del found
    assert lines() is None
    assert dict(numbers) == {"a": 0, "b": 1}
