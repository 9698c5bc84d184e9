"""Compares the outputs of two models on the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.interop.running import STRING, Outcome, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE: Final = 1 << 20  # elements compared at a time


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Comparison of an output of the first model with the same output of the other model.

    Attributes:
        name: Name of the output.
        problem: Reason why values cannot be compared; None if they were compared.
        differing: Number of elements that differ by more than the tolerances.
        elements: Number of elements.
        greatest_absolute: Greatest absolute difference of two numbers; a NaN and a number differ
            infinitely. None for strings, or if there is a `problem`.
        greatest_relative: Greatest quotient of an absolute difference and the absolute value of the
            other model's number. None as above.
        unequal: Number of elements that differ at all, including those within the tolerances.
            A pair of 0.0 and -0.0 counts only if both tolerances are 0.
    """

    name: str
    problem: str | None = None
    differing: int = 0
    elements: int = 0
    greatest_absolute: float | None = None
    greatest_relative: float | None = None
    unequal: int = 0

    @property
    def is_same(self) -> bool:
        """True if values were compared and none differs by more than the tolerances."""
        return self.problem is None and self.differing == 0


def compare(
    ours: Outcome, theirs: Outcome, *, absolute: float = 0.0, relative: float = 0.0
) -> list[OutputDifference]:
    """Compares the outputs of two models on the same inputs, with a result for each output.

    Args:
        ours: Results of one model.
        theirs: Results of the other model, run on the inputs of the first (`Outcome.feed`).
        absolute: Absolute tolerance.
        relative: Relative tolerance: `relative` times the other model's number is added to
            `absolute`. 0.0 and -0.0 differ if both tolerances are 0. NaN equals only NaN.

    Raises:
        ValueError: A tolerance is negative or NaN, or the first model lacks an input of the other.
    """
    require_tolerances(absolute, relative)
    further = sorted(theirs.feed.keys() - ours.feed.keys())
    if further:
        raise ValueError(
            f"{theirs.path}: expected only the inputs of {ours.path}, found {further} as well"
        )
    one, two = ({value.name: value for value in it.outputs} for it in (ours, theirs))
    return [
        _difference(one[name], two[name], absolute, relative)
        if name in one and name in two
        else OutputDifference(
            name, f"found in the {'first' if name in one else 'other'} model only"
        )
        for name in one | two
    ]


def require_tolerances(absolute: float, relative: float) -> None:
    """Raises a ValueError if a tolerance is negative or NaN."""
    for tolerance in (absolute, relative):
        if not tolerance >= 0:
            raise ValueError(f"expected a tolerance of 0 or more, found {tolerance}")


def _difference(ours: Value, theirs: Value, absolute: float, relative: float) -> OutputDifference:
    """Compares two arrays."""
    for noun, one, two in (
        ("data type", ours.data_type, theirs.data_type),
        ("shape", list(ours.array.shape), list(theirs.array.shape)),
    ):
        if one != two:
            return OutputDifference(ours.name, f"expected the same {noun}, found {one} and {two}")
    first, second = ours.array.reshape(-1), theirs.array.reshape(-1)
    if ours.data_type == STRING:
        count = int(np.count_nonzero(first != second))
        return OutputDifference(ours.name, None, count, first.size, unequal=count)
    differing, unequal, greatest_absolute, greatest_relative = 0, 0, 0.0, 0.0
    for begin in range(0, first.size, PIECE):
        piece = slice(begin, begin + PIECE)
        is_same, distance, proportion = _compare(first[piece], second[piece], absolute, relative)
        differing += int(np.count_nonzero(~is_same))
        unequal += int(np.count_nonzero(~is_same | (distance > 0)))
        greatest_absolute = max(greatest_absolute, float(distance.max()))
        greatest_relative = max(greatest_relative, float(proportion.max()))
    return OutputDifference(
        ours.name, None, differing, first.size, greatest_absolute, greatest_relative, unequal
    )


def _compare(
    one: NDArray[Any], two: NDArray[Any], absolute: float, relative: float
) -> tuple[Any, Any, Any]:
    """Compares numbers; gives equality, absolute and relative difference of each pair."""
    if one.dtype.kind in "iu":
        # The difference in uint64 is exact for all integers: negative numbers wrap modulo 2**64.
        gap = np.maximum(one, two).astype(np.uint64) - np.minimum(one, two).astype(np.uint64)
        is_same, distance, size = one == two, gap.astype(np.float64), np.abs(two.astype(np.float64))
    else:
        first, second = one.astype(np.float64), two.astype(np.float64)
        size = np.abs(second)
        are_nan = np.isnan(first) & np.isnan(second)
        is_same = are_nan | (first == second)
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.where(is_same, 0.0, np.abs(first - second))
        distance[np.isnan(distance)] = math.inf  # NaN and a number
        if absolute == relative == 0:  # then 0.0 and -0.0 are not the same
            is_same = are_nan | (is_same & (np.signbit(first) == np.signbit(second)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        proportion = np.where(distance > 0, distance / size, 0.0)
        proportion[np.isnan(proportion)] = math.inf  # `second` is infinite or NaN
        if absolute > 0 or relative > 0:
            is_same |= (distance <= absolute + relative * size) & np.isfinite(distance)
    return is_same, distance, proportion
