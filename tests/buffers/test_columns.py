from __future__ import annotations

import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxarchive.buffers import columns


def numbers(*of: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(of, np.int64)


@pytest.mark.parametrize("column", [np.arange(0), np.arange(5)[::2], np.array([-1, 1 << 62])])
def test_integers_are_those_of_the_column(
    column: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    found = columns.integers(column)
    assert list(found) == column.tolist()
    assert {*map(type, found)} <= {int}


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=30),
)
def test_lines_are_the_spans_in_their_order(data: bytes, spans: list[tuple[int, int]]) -> None:
    within = [tuple(sorted((min(a, len(data)), min(b, len(data))))) for a, b in spans]
    begins, ends = (numbers(*(span[i] for span in within)) for i in range(2))
    assert columns.lines(data, begins, ends) == b"".join(data[a:b] + b"\n" for a, b in within)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_any_number_of_lines_is_joined(count: int) -> None:
    data = b"".join(b"%d;" % index for index in range(count))
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(";"))
    begins = np.append(0, ends[:-1] + 1)[:count]
    assert columns.lines(data, begins, ends) == data.replace(b";", b"\n")


def test_parts_of_columns_are_joined_and_freed_one_column_after_another() -> None:
    freed: list[int] = []
    parts = [(b"ab", np.arange(2)), (b"", np.arange(0)), (b"c", np.arange(2, 3))]
    weakref.finalize(parts[0][1], freed.append, 1)
    joined = columns.joined(parts)
    assert next(joined) == b"abc"
    assert (parts, freed) == ([], [])
    assert next(joined).tolist() == [0, 1, 2]
    assert freed == [1]
    assert [*joined] == []


def test_long_lines_take_little_more_than_themselves() -> None:
    data = bytes(range(1, 251)) * 40_000
    begins = np.arange(0, len(data), 10_000)
    ends = begins + 9_999
    tracemalloc.start()
    joined = columns.lines(data, begins, ends)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert joined == b"".join(data[a:b] + b"\n" for a, b in zip(begins, ends, strict=True))
    assert peak < 3.5 * len(data)
