from __future__ import annotations

import numpy as np
import pytest
from models import raw_tensor
from onnx import TensorProto

from onnxarchive.model import dtypes
from onnxarchive.model.dtypes import DataType
from onnxarchive.model.shapes import Shapes


def listed(shapes: Shapes) -> list[tuple[DataType, tuple[int, ...]]]:
    return [shapes[number] for number in range(len(shapes))]


@pytest.mark.parametrize("rank", [0, 1, 2, 31, dtypes.MAX_RANK])
def test_a_shape_of_any_rank_is_given_between_others(rank: int) -> None:
    others = raw_tensor("before", dims=(3, 5)), raw_tensor("behind", dims=(7,))
    tensor = raw_tensor("w", TensorProto.INT8, (1,) * rank)
    shapes = Shapes.of([others[0], tensor, others[1]])
    float32, int8 = dtypes.BY_NUMBER[TensorProto.FLOAT], dtypes.BY_NUMBER[TensorProto.INT8]
    assert len(shapes) == 3
    assert listed(shapes) == [(float32, (3, 5)), (int8, (1,) * rank), (float32, (7,))]


@pytest.mark.parametrize("number", dtypes.BY_NUMBER)
def test_every_data_type_is_given(number: int) -> None:
    shapes = Shapes.of([TensorProto(data_type=number, dims=[0, 1 << 62])])
    assert listed(shapes) == [(dtypes.BY_NUMBER[number], (0, 1 << 62))]


def test_numbers_of_no_tensor_move_no_other_shape() -> None:
    tensors = [None, raw_tensor("w", dims=(2, 3)), None, None, raw_tensor("v", dims=(4,))]
    shapes = Shapes.of(tensors)
    assert (len(shapes), shapes[1][1], shapes[4][1]) == (5, (2, 3), (4,))


def test_shapes_with_equal_hashes_stay_apart() -> None:
    # The second dim adds h ^ (h >> 32) to the hash of a shape, with h the product of this dim plus
    # one and a multiplier. If h is below zero, the dim whose product is -h - 1 adds the same.
    multiplier = 5 * -0x61C8864680B583EB
    inverse = pow(multiplier, -1, 1 << 64)
    for dim in range(100):
        partner = ((-(dim + 1) * multiplier - 1) * inverse - 1) % (1 << 64)
        shapes = Shapes.of_columns(
            np.ones(2, np.uint8), np.full(2, 2, np.uint8), np.array([1, dim, 1, partner])
        )
        assert [shape for _, shape in listed(shapes)] == [(1, dim), (1, partner)]


def test_of_no_tensors_there_are_no_shapes() -> None:
    assert listed(Shapes.of([])) == []
