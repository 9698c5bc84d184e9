"""The models of `archive_digests.py`, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from models import (
    NEW_TYPES,
    NUMBERS,
    attribute,
    full_graph,
    full_model,
    model_of,
    node,
    raw_tensor,
    sparse_tensor,
    string_tensor,
    typed,
)
from onnx import ModelProto, TensorProto

_KIB, _MIB = 1 << 10, 1 << 20

_TYPES: Final = sorted(set(NUMBERS) - {*NEW_TYPES}, key=NUMBERS.__getitem__)
_PACKED: Final = (*NEW_TYPES, "UINT4", "INT4", "FLOAT4E2M1")

_NAMES: Final = ["w", "W", "w", "w_2", "w_3", "w 2", "a/b", "a.b", "a_b", "A_B", "_", "", ""]
_ODD_NAMES: Final = ["__w", "____", "1", "-", "con", "CON", "aux", "com1", "assets", "Assets"]
_LONG_NAMES: Final = [
    "x" * 253 + "/2",
    "x" * 253 + "_",
    "x" * 255,
    "X" * 300,
    "é" * 200,
    "a\nb",
    "\0",
]
_UNICODE_NAMES: Final = ["größe", "gro\u0308ße", "重み", "🧠", "İ", "\u017f", "\u212a", "\u202e"]


def floats(name: str, count: int, seed: int = 0) -> TensorProto:
    """A tensor of `count` random floats."""
    return raw_tensor(name, dims=(count,), seed=seed)


def _of_types(types: Sequence[str]) -> ModelProto:
    """Raw and typed tensors of these types: of 3 elements, and of over 1,024 bytes."""
    tensors = []
    for name in types:
        for count in (3, 4101 if name in _PACKED else 1031):
            tensor = raw_tensor(f"{name}/{count}", NUMBERS[name], (count,), count)
            tensors += [tensor, typed(tensor)]
            tensors[-1].name += "/typed"
    return model_of(*tensors)


def _empty_and_scalar() -> ModelProto:
    return model_of(
        raw_tensor("empty", dims=(0,)),
        raw_tensor("empty matrix", TensorProto.INT4, (3, 0, 2)),
        raw_tensor("scalar", dims=()),
        raw_tensor("scalar of 4 bits", TensorProto.UINT4, (), 1),
        raw_tensor("64 dims", TensorProto.DOUBLE, (1,) * 63 + (200,), 2),
        TensorProto(name="no data", data_type=TensorProto.FLOAT, dims=[0]),
        typed(raw_tensor("typed scalar", TensorProto.BOOL, (), 3)),
        raw_tensor("empty at the end", TensorProto.FLOAT16, (1, 0)),
    )


def _strings() -> ModelProto:
    return model_of(
        string_tensor("labels"),
        floats("w", 300),
        string_tensor("many", [f"label {number}" for number in range(400)]),
        string_tensor("none", []),
    )


def _unknown_fields() -> ModelProto:
    model = model_of()
    graph = model.graph
    graph.CopyFrom(full_graph("main", 260, subgraphs=False))
    for message, field in (
        (graph.initializer[0], b"\xf8\x3f\x05"),
        (graph.node[0].attribute[0].t, b"\xfa\x3f\x03cat"),
        (graph.node[0].attribute[0], b"\xfd\x3f\1\2\3\4"),
        (graph.node[0], b"\xf9\x3f\1\2\3\4\5\6\7\x08"),
        (graph.sparse_initializer[0], b"\xf8\x3f\x06"),
        (graph, b"\xf8\x3f\x07\xf8\x3f\x07"),
        (model, b"\xfa\x3f\0"),
    ):
        message.MergeFromString(field)
    return model


def _comments() -> ModelProto:
    """Fields beside the data, some of which an archive leaves out."""
    tensors = [floats(f"w{number}", 100 + number * 100, number) for number in range(6)]
    tensors[1].doc_string = tensors[3].doc_string = "about it"
    tensors[2].data_location = tensors[3].data_location = TensorProto.DEFAULT
    tensors[4].external_data.add(key="location", value="nowhere")
    model = model_of(*tensors)
    model.doc_string = "größe"
    model.producer_name, model.model_version = "tests", 7
    for key, value in (("author", "Ada"), ("b", ""), ("a", "重み")):
        model.metadata_props.add(key=key, value=value)
        model.graph.metadata_props.add(key=value, value=key)
    return model


def _named(names: Sequence[str]) -> ModelProto:
    return model_of(*(floats(name, 40 + 80 * number, number) for number, name in enumerate(names)))


def _mixed(count: int) -> ModelProto:
    """Small, large, usual and unusual tensors in turn."""
    sizes = (1, 7, 300, 0, 16, 2000, 150, 33)
    numbers = (TensorProto.FLOAT, TensorProto.INT4, TensorProto.BOOL, TensorProto.BFLOAT16)
    tensors = []
    for number in range(count):
        dims = (sizes[number * 5 % 8],)
        tensor = raw_tensor(f"layer.{number}/w", numbers[number * 7 % 11 % 4], dims, number)
        tensors.append(typed(tensor) if number % 17 == 3 else tensor)
    tensors.insert(count // 2, string_tensor("strings"))
    tensors[count // 3].doc_string = "about it"
    model = model_of(*tensors)
    model.graph.node.append(node(attribute("value", t=floats("inside", 400))))
    model.graph.sparse_initializer.append(sparse_tensor("sparse", 1, 300))
    return model


def _around(*sizes: int) -> ModelProto:
    """Tensors of a byte less than each size, of this size, and of a byte more."""
    counts = [size + more for size in sizes for more in (-1, 0, 1)]
    return model_of(*(raw_tensor(f"{count} bytes", TensorProto.INT8, (count,)) for count in counts))


def _many(count: int) -> ModelProto:
    return model_of(*(floats(f"w{number}", 1, number) for number in range(count)))


MODELS: Final[dict[str, Callable[[], ModelProto]]] = {
    "nothing": model_of,
    "tiny": lambda: model_of(floats("layer/weight", 300), floats("layer/bias", 16, 1)),
    "types": lambda: _of_types(_TYPES),
    "types of 2 and 6 bits": lambda: _of_types(NEW_TYPES),
    "empty and scalar": _empty_and_scalar,
    "strings": _strings,
    "every place": full_model,
    "unknown fields": _unknown_fields,
    "comments": _comments,
    "names": lambda: _named([*_NAMES, *_ODD_NAMES, *_LONG_NAMES]),
    "names in Unicode": lambda: _named([*_UNICODE_NAMES, *_NAMES]),
    "100 tensors": lambda: _mixed(100),
    "300 tensors": lambda: _mixed(300),
    "5,000 tensors": lambda: _mixed(5000),
    "64 KiB": lambda: _around(64 * _KIB),
    "1 MiB": lambda: _around(_MIB),
    "8 MiB": lambda: _around(8 * _MIB),
    "4, 16 and 32 MiB": lambda: _around(4 * _MIB, 16 * _MIB, 32 * _MIB),
    # With the model 65,534 entries, the most without Zip64; one more; and more than 16 bits count.
    "65,533 tensors": lambda: _many(65_533),
    "65,534 tensors": lambda: _many(65_534),
    "70,000 tensors": lambda: _many(70_000),
}


@functools.lru_cache(maxsize=4)
def model_named(name: str) -> ModelProto:
    """The model of this name, which must not be changed."""
    return MODELS[name]()


def decoder_of(model: ModelProto) -> ModelProto:
    """A model with the same tensors in another order under other names, and one of its own."""
    decoder = model_of(*reversed(model.graph.initializer), floats("own", 400, 9))
    for tensor in decoder.graph.initializer:
        tensor.name += ".decoder"
    return decoder


def encoder_of(model: ModelProto) -> ModelProto:
    """A model with every second tensor of a model, and the decoder's own."""
    return model_of(floats("own", 400, 9), *list(model.graph.initializer)[::2])
