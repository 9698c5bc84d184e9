"""Models whose graphs are large, not their tensors: long lists in attributes, nodes, functions.

Each function returns nodes and functions that follow the value `x0`; `length` is the number of
values in each list, of nodes or of functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import onnx

Contents: TypeAlias = "tuple[list[onnx.NodeProto], list[onnx.FunctionProto]]"

CLASSICAL: Final = "ai.onnx.ml"  # domain of scikit-learn's operators
LOCAL: Final = "local"  # domain of the functions
LABELED: Final = 1000  # classes of the support vectors
CONSTANT_NBYTES: Final = 16 << 20
CONSTANT_ROWS: Final = 32


def forest(length: int) -> Contents:
    """A tree ensemble, as skl2onnx writes it: eight lists of numbers and one of strings."""
    import numpy as np
    from onnx import helper

    numbers, zeros = [*range(length)], [0] * length
    thresholds = np.random.default_rng(seed=0).random(length).tolist()
    ensemble = helper.make_node(
        "TreeEnsembleClassifier",
        ["x0"],
        ["label", "x1"],
        domain=CLASSICAL,
        class_ids=zeros,
        class_nodeids=numbers,
        class_treeids=zeros,
        class_weights=[0.25] * length,
        classlabels_int64s=[0, 1],
        nodes_falsenodeids=numbers,
        nodes_featureids=zeros,
        nodes_modes=["BRANCH_LEQ", "LEAF"] * (length // 2),
        nodes_nodeids=numbers,
        nodes_treeids=zeros,
        nodes_truenodeids=numbers,
        nodes_values=thresholds,
    )
    return [ensemble], []


def svm(length: int) -> Contents:
    """Support vectors: one long list of floats."""
    import numpy as np
    from onnx import helper

    classifier = helper.make_node(
        "SVMClassifier",
        ["x0"],
        ["label", "x1"],
        domain=CLASSICAL,
        classlabels_ints=[*range(LABELED)],
        coefficients=[0.5] * LABELED,
        support_vectors=np.random.default_rng(seed=0).random(length).tolist(),
    )
    return [classifier], []


def labels(length: int) -> Contents:
    """A vocabulary and labels: two lists of strings, and one of numbers, half as long each."""
    from onnx import helper

    words = [f"word{index:06d}" for index in range(length // 2)]
    vocabulary = helper.make_node(
        "TfIdfVectorizer",
        ["x0"],
        ["x1"],
        max_gram_length=1,
        max_skip_count=0,
        min_gram_length=1,
        mode="TF",
        ngram_counts=[0],
        ngram_indexes=[*range(len(words))],
        pool_strings=words,
    )
    encoder = helper.make_node(
        "LabelEncoder",
        ["x0"],
        ["label"],
        domain=CLASSICAL,
        keys_strings=words,
        values_int64s=[*range(len(words))],
    )
    return [vocabulary, encoder], []


def nodes(length: int) -> Contents:
    """A chain of nodes, every second of them with attributes."""
    from onnx import helper

    return [
        helper.make_node("Relu", [f"x{index}"], [f"x{index + 1}"], name=f"/layer.{index}/Relu")
        if index % 2
        else helper.make_node(
            "LpNormalization",
            [f"x{index}"],
            [f"x{index + 1}"],
            name=f"/layer.{index}/Normalize",
            axis=-1,
            p=2,
        )
        for index in range(length)
    ], []


def functions(length: int) -> Contents:
    """A call of the first of many functions."""
    from onnx import helper

    opset = [helper.make_opsetid("", 17)]
    body = [
        helper.make_node("Relu", ["a"], ["b"], name="activation"),
        helper.make_node("LpNormalization", ["b"], ["c"], axis=-1, p=2),
    ]
    made = [
        helper.make_function(LOCAL, f"function_{index}", ["a"], ["c"], body, opset)
        for index in range(length)
    ]
    return [helper.make_node(made[0].name, ["x0"], ["x1"], domain=LOCAL)], made


def constants(length: int) -> Contents:
    """Products with weights in Constant nodes, of 16 MiB each, and the sum of their results."""
    import numpy as np
    from onnx import helper, numpy_helper

    weight = np.full((CONSTANT_ROWS, CONSTANT_NBYTES // 4 // CONSTANT_ROWS), 0.5, np.float32)
    made = []
    for index in range(length):
        weight[0, 0] = index
        value = numpy_helper.from_array(weight, f"weight {index}")
        made.append(helper.make_node("Constant", [], [f"w{index}"], value=value))
        made.append(helper.make_node("MatMul", ["x0", f"w{index}"], [f"h{index}"]))
    made.append(helper.make_node("Sum", [f"h{index}" for index in range(length)], ["x1"]))
    return made, []


MAKERS: Final[Mapping[str, Callable[[int], Contents]]] = {
    "forest": forest,
    "svm": svm,
    "labels": labels,
    "nodes": nodes,
    "functions": functions,
    "constants": constants,
}
