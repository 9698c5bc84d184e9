"""How far the outputs of two models are apart, on the same inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.interop.inputs import STRING, Given, Port, fitting
from onnxarchive.interop.running import Model, Outcome, Value, require_repeat

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.buffers.counting import Progress

_PIECE: Final = 1 << 20  # elements looked at at a time
_BITS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Difference:
    """How an output of a model compares with that of another one.

    Attributes:
        name: The name of the output, or of an input in which the models differ.
        problem: Why no values can be compared: a name that one of them lacks, another type, another
            shape. None where they were compared.
        differing: How many elements differ by more than is allowed.
        elements: How many there are.
        greatest_absolute: The greatest absolute difference of two numbers; infinite where only one
            of them is NaN. None for strings and where nothing was compared.
        greatest_relative: The greatest difference in proportion to the other's number.
        signs_of_zero: How many of the elements that differ are the same number and differ in the
            sign of a zero alone: 0 and -0. None do unless both tolerances are 0.
    """

    name: str
    problem: str | None = None
    differing: int = 0
    elements: int = 0
    greatest_absolute: float | None = None
    greatest_relative: float | None = None
    signs_of_zero: int = 0

    @property
    def is_same(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return self.problem is None and self.differing == 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same inputs.

    Attributes:
        other: What came of running the other one; None where it does not take the same inputs.
        differences: One for each output, equal ones as well, or for each input that differs.
    """

    other: Outcome | None
    differences: tuple[Difference, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs by more than is allowed."""
        return all(difference.is_same for difference in self.differences)


def compare(
    outcome: Outcome,
    other: str | os.PathLike[str],
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
    providers: Sequence[str] | None = None,
    repeat: int = 1,
    progress: Progress | None = None,
) -> Comparison:
    """Runs another model on the inputs of one that was run, and compares the outputs.

    Args:
        outcome: What came of running the first.
        other: The other one, an archive or a `.onnx`.
        absolute: How far two numbers may be apart, and
        relative: how far beyond that in proportion to the other's. Where both are 0 every bit must
            be the same. In any case NaN is the same as NaN, and nothing else is.
        providers: As in `onnxarchive.interop.running.run`, and so are
        repeat: this and
        progress: this.

    Raises:
        ArchiveError: As in `onnxarchive.interop.running.run`, and so for other errors.
        ValueError: A tolerance is negative or NaN, or `repeat` is below 1.
    """
    require_tolerances(absolute, relative)
    require_repeat(repeat)
    model = Model(other, providers)
    misfits = tuple(_misfits(outcome, model.inputs))
    if misfits:
        return Comparison(None, misfits)
    result = model.run(outcome.feed, repeat=repeat, progress=progress)
    found = _differences(outcome.outputs, result.outputs, absolute, relative)
    return Comparison(result, tuple(found))


def require_tolerances(absolute: float, relative: float) -> None:
    """Refuses tolerances that say nothing.

    Raises:
        ValueError: One is negative or NaN.
    """
    for tolerance in (absolute, relative):
        if not tolerance >= 0:
            raise ValueError(f"expected a tolerance of 0 or more, found {tolerance}")


def _misfits(outcome: Outcome, ports: Sequence[Port]) -> Iterator[Difference]:
    """In what another model does not take the inputs of one that was run."""
    ours = {port.name: port for port in outcome.ports}
    theirs = {port.name: port for port in ports}
    for name in ours | theirs:
        problem = _only_one("an input", name, ours, theirs) or _misfit(
            ours[name], theirs[name], outcome.feed[name]
        )
        if problem is not None:
            yield Difference(name, problem)


def _only_one(
    kind: str, name: str, ours: Mapping[str, object], theirs: Mapping[str, object]
) -> str | None:
    if name not in theirs:
        return f"expected {kind} of both models, found it in the first only"
    if name not in ours:
        return f"expected {kind} of both models, found it in the other only"
    return None


def _misfit(ours: Port, theirs: Port, value: Given) -> str | None:
    if ours.type != theirs.type:
        return f"expected the same type of input, found {ours.type} and {theirs.type}"
    try:
        fitting(theirs, value)
    except ValueError as error:
        return f"the other model does not take it: {error}"
    return None


def _differences(
    ours: Sequence[Value], theirs: Sequence[Value], absolute: float, relative: float
) -> Iterator[Difference]:
    one = {value.name: value for value in ours}
    two = {value.name: value for value in theirs}
    for name in one | two:
        problem = _only_one("an output", name, one, two)
        if problem is not None:
            yield Difference(name, problem)
        else:
            yield _difference(one[name], two[name], absolute, relative)


def _difference(ours: Value, theirs: Value, absolute: float, relative: float) -> Difference:
    if ours.data_type != theirs.data_type:
        problem = f"expected the same data type, found {ours.data_type} and {theirs.data_type}"
        return Difference(ours.name, problem)
    if ours.array.shape != theirs.array.shape:
        problem = (
            f"expected the same shape, found {list(ours.array.shape)} and "
            f"{list(theirs.array.shape)}"
        )
        return Difference(ours.name, problem)
    one, two = ours.array.reshape(-1), theirs.array.reshape(-1)
    if ours.data_type == STRING:
        return Difference(ours.name, None, int(np.count_nonzero(one != two)), one.size)
    pieces = [
        _piece(one[begin : begin + _PIECE], two[begin : begin + _PIECE], absolute, relative)
        for begin in range(0, one.size, _PIECE)
    ]
    return Difference(
        ours.name,
        None,
        sum(piece.differing for piece in pieces),
        one.size,
        max((piece.absolute for piece in pieces), default=0.0),
        max((piece.relative for piece in pieces), default=0.0),
        sum(piece.signs_of_zero for piece in pieces),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """As a `Difference` has it, of some of its elements."""

    differing: int
    absolute: float
    relative: float
    signs_of_zero: int


def _piece(one: NDArray[Any], two: NDArray[Any], absolute: float, relative: float) -> _Piece:
    if one.dtype.kind == "b":  # whose bytes may be others than 0 and 1
        one, two = one.view(np.uint8), two.view(np.uint8)
    if one.dtype.kind in "iu":
        # Modulo 2^64 the difference of the greater and the lesser one is right for every integer.
        apart = np.maximum(one, two).astype(np.uint64) - np.minimum(one, two).astype(np.uint64)
        is_equal = is_same = one == two
        distance, size = apart.astype(np.float64), np.abs(two.astype(np.float64))
    else:
        kind = np.complex128 if one.dtype.kind == "c" else np.float64
        first, second = one.astype(kind), two.astype(kind)
        is_equal = _equal(first.real, second.real) & _equal(first.imag, second.imag)
        is_same = is_equal
        if absolute == relative == 0:
            is_same = _same_bits(one, two) | (is_equal & np.isnan(first))
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(first - second)
        distance[is_equal] = 0
        distance[np.isnan(distance)] = math.inf  # NaN against a number
        size = np.abs(second)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        proportion = np.where(distance > 0, distance / size, 0.0)
        proportion[np.isnan(proportion)] = math.inf  # an infinite or NaN size
        allowed = absolute + np.where(np.isfinite(size), relative * size, 0.0)
    if absolute > 0 or relative > 0:
        is_same = is_same | ((distance <= allowed) & (distance < math.inf))
    return _Piece(
        int(np.count_nonzero(~is_same)),
        float(distance.max(initial=0.0)),
        float(proportion.max(initial=0.0)),
        int(np.count_nonzero(is_equal & ~is_same)),
    )


def _equal(one: NDArray[Any], two: NDArray[Any]) -> Any:
    """Where two numbers are the same, or neither is one."""
    return (one == two) | (np.isnan(one) & np.isnan(two))


def _same_bits(one: NDArray[Any], two: NDArray[Any]) -> Any:
    if one.dtype.kind == "c":
        width = one.dtype.itemsize
        rows = (np.ascontiguousarray(it).view(np.uint8).reshape(-1, width) for it in (one, two))
        first, second = rows
        return (first == second).all(axis=1)
    bits = _BITS[one.dtype.itemsize]
    return np.ascontiguousarray(one).view(bits) == np.ascontiguousarray(two).view(bits)
