"""The numbered content that edits.py gives an archive, so that a reader knows who wrote it."""

from __future__ import annotations

import functools
import random
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxarchive
from onnxarchive.reading.archive import Archive

WEIGHTS: Final = 6
WEIGHT_NBYTES: Final = 256 << 10
CHANGING: Final = "changing"  # the tensor that is replaced
CHANGING_NBYTES: Final = 128 << 10
ADDED: Final = "added"  # a tensor that most models have
ASSET: Final = "labels.txt"
DECODER: Final = "decoder"  # a further model, which never changes
OWN: Final = "own"  # the tensor that only the decoder has
MIN_PADDING: Final = 64 << 10  # bytes of the model's doc_string
MAX_PADDING: Final = 4 << 20


class Traits(NamedTuple):
    """Traits of a numbered model.

    Attributes:
        padding: Bytes of the doc_string.
        has_added: True if the last tensor of the model is `ADDED`.
        has_asset: True if a save with this number writes an asset.
        is_referring: True if the model of an edit gives the locations of the tensors in `weights`,
            not their data. `ADDED` always has data.
    """

    padding: int
    has_added: bool
    has_asset: bool
    is_referring: bool


def traits(number: int) -> Traits:
    """The traits of the model with this number."""
    drawn = random.Random(number)
    padding = drawn.randrange(MIN_PADDING, MAX_PADDING)
    return Traits(padding, *(drawn.random() < share for share in (0.8, 0.5, 0.5)))


@functools.cache
def weight(name: str) -> bytes:
    """The data of a tensor that never changes."""
    return random.Random(name).randbytes(WEIGHT_NBYTES)


def weights(number: int) -> list[str]:
    """Names of all tensors of the model `number`, except `CHANGING`."""
    names = [f"weight_{index}" for index in range(WEIGHTS)]
    return [*names, ADDED] if traits(number).has_added else names


@functools.lru_cache(maxsize=32)
def changing(number: int) -> bytes:
    """The data that edit `number` gives the tensor `CHANGING`; begins with `number` in 8 bytes."""
    head = number.to_bytes(8, "little")
    return head + random.Random(number).randbytes(CHANGING_NBYTES - len(head))


@functools.cache
def asset() -> bytes:
    """The data of the asset."""
    return random.Random(ASSET).randbytes(10_000)


def padding(number: int) -> str:
    """The doc_string of a model: its number, repeated."""
    size = traits(number).padding
    line = f"model {number:08} "
    return (line * (size // len(line) + 1))[:size]


def model_of(number: int, tensor: int | None) -> onnx.ModelProto:
    """Builds a numbered model.

    Args:
        number: The number of the model.
        tensor: Number of the edit that gives the tensor `CHANGING` its data; None to refer to the
            archive's `CHANGING`.
    """
    is_referring = tensor is None and traits(number).is_referring
    initializers = []
    for name in [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]:
        nbytes = CHANGING_NBYTES if name == CHANGING else WEIGHT_NBYTES
        # The archive may lack `ADDED`, so this tensor never refers to the archive.
        if (tensor is None and name == CHANGING) or (is_referring and name != ADDED):
            made = onnx.TensorProto(
                name=name, data_type=onnx.TensorProto.UINT8, dims=[nbytes], data_location="EXTERNAL"
            )
            made.external_data.add(key="location", value=name)
        else:
            data = weight(name) if tensor is None or name != CHANGING else changing(tensor)
            made = numpy_helper.from_array(np.frombuffer(data, np.uint8), name)
        initializers.append(made)
    graph = helper.make_graph([], "graph", [], [], initializers)
    opsets = [helper.make_opsetid("", 17)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    model.doc_string = padding(number)
    helper.set_model_props(model, {"number": str(number)})
    return model


@functools.cache
def decoder() -> onnx.ModelProto:
    """The further model: two tensors of the default model, and the tensor `OWN`."""
    graph = helper.make_graph([], "decoder", [], [], [])
    for name in (OWN, "weight_1", "weight_0"):
        elements = np.frombuffer(weight(name), np.uint8)
        graph.initializer.append(numpy_helper.from_array(elements, name))
    model: onnx.ModelProto = helper.make_model(graph, ir_version=8)
    return model


class State(NamedTuple):
    """The content of an archive, except the further model, which never changes.

    Attributes:
        model: The number of the edit that wrote the model; 0 at first.
        tensor: The number of the edit that wrote the tensor `CHANGING`; 0 at first.
        has_asset: True if the archive has the asset.
    """

    model: int
    tensor: int
    has_asset: bool

    def write(self, target: Any) -> None:
        """Saves an archive with this content."""
        assets = {ASSET: asset()} if self.has_asset else {}
        model = model_of(self.model, self.tensor)
        onnxarchive.save(model, target, models={DECODER: decoder()}, assets=assets)


class WrongError(Exception):
    """An archive has content that no process has written."""


def require(is_right: bool, problem: str) -> None:
    """Raises a `WrongError` with this problem unless `is_right`."""
    if not is_right:
        raise WrongError(problem)


def read_state(archive: Archive) -> State:
    """Reads the content of an open archive.

    Raises:
        WrongError: The content was not written by this tool.
    """
    number = int(archive.metadata["number"])
    require(archive.model.doc_string == padding(number), f"model {number} has another doc_string")
    names = [initializer.name for initializer in archive.model.graph.initializer]
    expected = [*weights(number)[:WEIGHTS], CHANGING, *weights(number)[WEIGHTS:]]
    require(names == expected, f"model {number} has the initializers {names}")
    for name in weights(number):
        require(bytes(archive.read(name)) == weight(name), f"the tensor {name} has other bytes")
    has_asset = ASSET in archive.assets
    if has_asset:
        require(archive.read(f"assets/{ASSET}") == asset(), "the asset has other bytes")
    data = bytes(archive.read(CHANGING))
    tensor = int.from_bytes(data[:8], "little")
    require(
        data == changing(tensor),
        f"the first 8 bytes of {CHANGING} are of edit {tensor}, but its other bytes are not",
    )
    require([*archive.models] == ["", DECODER], f"found the models {[*archive.models]}")
    for tensor_of, written in zip(
        archive.models[DECODER].graph.initializer, decoder().graph.initializer, strict=True
    ):
        (location,) = tensor_of.external_data
        is_right = tensor_of.name == written.name == location.value
        require(
            is_right and bytes(archive.read(location.value)) == weight(written.name),
            f"the tensor {written.name} of the further model has another name, key or data",
        )
    return State(number, tensor, has_asset)


def saved(number: int) -> State:
    """The state after a save with this number."""
    return State(number, number, traits(number).has_asset)
