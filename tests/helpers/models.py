"""Models for tests: small models, a model with tensors in all places, and random models.

Uses onnx's code for tensors and not the library's, so that tests compare the two.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import onnx
import pytest
from google.protobuf.message import Message
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from processes import completed

import onnxarchive
from onnxarchive.files.local_file import MappedFile
from onnxarchive.reading.archive import Archive
from onnxarchive.zipformat.directory import Entry

# All data types of fixed width: number by onnx's name.
NUMBERS: dict[str, int] = {
    name: number
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING")
}
# Types that older versions of onnx lack.
NEW_TYPES: Final = ("UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2")
PACKED_WIDTHS = {
    "UINT2": 2,
    "INT2": 2,
    "UINT4": 4,
    "INT4": 4,
    "FLOAT4E2M1": 4,
    "FLOAT6E2M3": 6,
    "FLOAT6E3M2": 6,
}
BIT_WIDTHS: dict[int, int] = {
    number: PACKED_WIDTHS.get(name) or helper.tensor_dtype_to_np_dtype(number).itemsize * 8
    for name, number in NUMBERS.items()
}
_SIGNED = {NUMBERS[name] for name in ("INT8", "INT16", "INT32", "INT64")}


def element_count(dims: Iterable[int]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    return count


def random_raw(number: int, dims: Sequence[int], seed: int = 0) -> bytes:
    """Random valid bytes for a tensor: elements of BOOL are 0 or 1, unused bits are 0."""
    bits = element_count(dims) * BIT_WIDTHS[number]
    data = bytearray(random.Random(seed).randbytes(-(-bits // 8)))
    if number == TensorProto.BOOL:
        data = bytearray(byte & 1 for byte in data)
    if bits % 8:
        data[-1] &= (1 << bits % 8) - 1
    return bytes(data)


def raw_tensor(
    name: str, number: int = TensorProto.FLOAT, dims: Sequence[int] = (4,), seed: int = 0
) -> TensorProto:
    """A tensor of random elements in raw_data."""
    raw_data = random_raw(number, dims, seed)
    return TensorProto(name=name, data_type=number, dims=dims, raw_data=raw_data)


def typed(tensor: TensorProto) -> TensorProto:
    """A copy of the tensor with its elements in the typed field, such as float_data."""
    result = TensorProto()
    result.CopyFrom(tensor)
    result.ClearField("raw_data")
    width = BIT_WIDTHS[tensor.data_type]
    field = helper.tensor_dtype_to_field(tensor.data_type)
    if field in ("float_data", "double_data"):
        kind = "<f4" if field == "float_data" else "<f8"
        values: Iterable[Any] = np.frombuffer(tensor.raw_data, kind).tolist()
    elif width == 6:
        values = numpy_helper.to_array(tensor).reshape(-1).view(np.uint8).tolist()
    else:
        kind = "i" if tensor.data_type in _SIGNED else "u"
        values = np.frombuffer(tensor.raw_data, f"<{kind}{max(width // 8, 1)}").tolist()
    getattr(result, field).extend(values)
    return result


def string_tensor(name: str, values: Sequence[str] = ("a", "ü", "")) -> TensorProto:
    strings = [value.encode() for value in values]
    return TensorProto(
        name=name, data_type=TensorProto.STRING, dims=[len(values)], string_data=strings
    )


def external(tensor: TensorProto, location: str, **pairs: object) -> TensorProto:
    """A copy of the tensor without data, external at `location`."""
    result = TensorProto(
        name=tensor.name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in {"location": location, **pairs}.items():
        result.external_data.add(key=key, value=str(value))
    return result


def model_of(*initializers: TensorProto) -> onnx.ModelProto:
    """A model whose graph has these initializers and nothing else."""
    graph = onnx.GraphProto(name="graph", initializer=initializers)
    return onnx.ModelProto(
        ir_version=10, opset_import=[onnx.OperatorSetIdProto(version=21)], graph=graph
    )


def text_model(text: str, *initializers: TensorProto, opset: int = 21) -> onnx.ModelProto:
    """A model in ONNX's text syntax, such as `g (float[2] x) => (float[2] y) { y = Neg(x) }`."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    model.graph.initializer.extend(initializers)
    return model


def weight_model(seed: int, count: int = 1000) -> onnx.ModelProto:
    """A model with one initializer, `w`, of `count` random floats."""
    return model_of(raw_tensor("w", dims=(count,), seed=seed))


def documented_model(doc_string: str = "", *, seed: int = 0) -> onnx.ModelProto:
    """A model with a doc_string and one initializer, `w`, of 300 floats."""
    model = weight_model(seed, 300)
    model.doc_string = doc_string
    return model


def mixed_model() -> onnx.ModelProto:
    """A model with large, small, empty, packed and string initializers, and a tensor attribute."""
    model = model_of(
        raw_tensor("a/w", dims=(2000,), seed=1),
        raw_tensor("b", TensorProto.INT4, (4001,), seed=2),
        raw_tensor("nothing", dims=(0, 3)),
        raw_tensor("scalar", dims=(), seed=3),
        raw_tensor("small", dims=(3,), seed=3),
        string_tensor("labels"),
        raw_tensor("c", TensorProto.BFLOAT16, (4097,), seed=4),
    )
    model.graph.node.append(node(attribute("t", t=raw_tensor("t", dims=(300,)))))
    return model


def sparse_tensor(name: str, seed: int = 0, count: int = 3) -> onnx.SparseTensorProto:
    indices = raw_tensor(f"{name}_indices", TensorProto.INT64, (count,), seed + 1)
    return onnx.SparseTensorProto(
        values=raw_tensor(name, TensorProto.FLOAT, (count,), seed), indices=indices, dims=[100]
    )


def attribute(name: str, **value: Any) -> AttributeProto:
    """An attribute with `type` set: onnx finds tensors only with the type."""
    kinds = {
        "t": AttributeProto.TENSOR,
        "tensors": AttributeProto.TENSORS,
        "sparse_tensor": AttributeProto.SPARSE_TENSOR,
        "sparse_tensors": AttributeProto.SPARSE_TENSORS,
        "g": AttributeProto.GRAPH,
        "graphs": AttributeProto.GRAPHS,
        "i": AttributeProto.INT,
    }
    (field,) = value
    return AttributeProto(name=name, type=kinds[field], **value)


def node(*attributes: AttributeProto) -> onnx.NodeProto:
    return onnx.NodeProto(op_type="Anything", domain="test", attribute=attributes)


def full_graph(prefix: str, count: int, *, subgraphs: bool = True) -> onnx.GraphProto:
    """A graph with tensors of `count` floats in every field that can hold tensors."""
    seeds = iter(range(hash_of(prefix), 1 << 62))

    def tensor(name: str) -> TensorProto:
        return raw_tensor(f"{prefix}.{name}", TensorProto.FLOAT, (count,), next(seeds))

    def sparse(name: str) -> onnx.SparseTensorProto:
        return sparse_tensor(f"{prefix}.{name}", next(seeds), count)

    graph = onnx.GraphProto(
        name=prefix,
        initializer=[tensor("initializer"), tensor("initializer2")],
        sparse_initializer=[sparse("sparse_initializer")],
        node=[
            node(
                attribute("t", t=tensor("t")),
                attribute("tensors", tensors=[tensor("tensors0"), tensor("tensors1")]),
                attribute("i", i=1),
            ),
            node(
                attribute("sparse_tensor", sparse_tensor=sparse("sparse_tensor")),
                attribute("sparse_tensors", sparse_tensors=[sparse("sparse0"), sparse("sparse1")]),
            ),
        ],
    )
    if subgraphs:
        below = [full_graph(f"{prefix}.{name}", count, subgraphs=False) for name in "abc"]
        graph.node.append(node(attribute("g", g=below[0]), attribute("graphs", graphs=below[1:])))
    return graph


def hash_of(text: str) -> int:
    """A hash of `text` that is the same in every process."""
    return int.from_bytes(text.encode()[-7:], "little")


def full_model(count: int = 300) -> onnx.ModelProto:
    """A model with tensors of `count` floats in every field that can hold tensors."""
    model = model_of()
    model.graph.CopyFrom(full_graph("main", count))
    function = onnx.FunctionProto(
        name="function",
        domain="test",
        node=[
            *full_graph("function", count).node,
            node(attribute("g", g=full_graph("in_function", count))),
        ],
        attribute_proto=[attribute("t", t=raw_tensor("default", dims=(count,), seed=5))],
    )
    model.functions.append(function)
    model.training_info.append(
        onnx.TrainingInfoProto(
            initialization=full_graph("initialization", count),
            algorithm=full_graph("algorithm", count),
        )
    )
    return model


def nested_model(depth: int, tensor: TensorProto | None = None) -> onnx.ModelProto:
    """A model with `depth` nested graphs, each with one initializer."""
    model = model_of()
    graph = model.graph
    for level in range(depth):
        graph.name = f"level{level}"
        graph.initializer.append(tensor or raw_tensor(f"weight{level}", seed=level))
        if level + 1 < depth:
            graph.node.add(op_type="If", attribute=[attribute("b", g=onnx.GraphProto())])
            graph = graph.node[0].attribute[0].g
    return model


def every_tensor(message: Message) -> Iterator[TensorProto]:
    """Every TensorProto below a message, found by reflection."""
    return (tensor for _, tensor in tensors_by_path(message))


def tensors_by_path(message: Message, path: str = "") -> Iterator[tuple[str, TensorProto]]:
    """Every TensorProto below a message with its path, such as `.graph.initializer[0]`."""
    if isinstance(message, TensorProto):
        yield path, message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for index, child in enumerate([value] if isinstance(value, Message) else value):
            yield from tensors_by_path(child, f"{path}.{field.name}[{index}]")


def little_endian(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """A type as arrays of the library have it: little-endian, but the machine's for ml_dtypes."""
    return dtype if dtype.isbuiltin == 2 else dtype.newbyteorder("<")


def location(tensor: TensorProto) -> str:
    """The location of a tensor's external data."""
    return {pair.key: pair.value for pair in tensor.external_data}["location"]


def external_tensors(model: onnx.ModelProto) -> dict[str, TensorProto]:
    """The external tensors of a model, by location."""
    tensors = every_tensor(model)
    return {location(it): it for it in tensors if it.data_location == TensorProto.EXTERNAL}


def keys_by_path(model: onnx.ModelProto) -> dict[str, str]:
    """The locations of a model's external tensors, by path in the model."""
    tensors = tensors_by_path(model)
    return {path: location(it) for path, it in tensors if it.data_location == TensorProto.EXTERNAL}


def keys_of(archive: Archive) -> list[str]:
    """The names of the entries that hold tensors, in the order of the archive."""
    names = (name for name in archive.entries if name != "__MODEL_PROTO")
    return [name for name in names if not name.startswith("assets/")]


def normalised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with all elements in raw_data, converted by onnx.

    Removes a data_location of DEFAULT, which onnx sets on loading.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in every_tensor(copy):
        if tensor.data_location == TensorProto.DEFAULT:
            tensor.ClearField("data_location")
        if tensor.data_type in BIT_WIDTHS and not tensor.HasField("raw_data"):
            raw_data = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
            tensor.ClearField(helper.tensor_dtype_to_field(tensor.data_type))
            tensor.raw_data = raw_data
    return copy


def runnable_model(nbytes: int = 1 << 16) -> onnx.ModelProto:
    """A model that ONNX Runtime runs: y = x @ w + b, where w has `nbytes` bytes."""
    rows = nbytes // 4 // 16
    weight = np.random.default_rng(1).standard_normal((rows, 16), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "layer.0/weight"], ["product"]),
            helper.make_node("Add", ["product", "layer.0/bias"], ["y"]),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 16])],
        [
            numpy_helper.from_array(weight, "layer.0/weight"),
            numpy_helper.from_array(np.arange(16, dtype=np.float32), "layer.0/bias"),
        ],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="test"
    )


def further_model(nbytes: int = 1 << 16) -> onnx.ModelProto:
    """A model that ONNX Runtime runs: z = relu(x @ e) @ v, where e is w of `runnable_model`."""
    shared = runnable_model(nbytes).graph.initializer[0]
    shared.name = "embedding"
    own = np.random.default_rng(2).standard_normal((16, 32), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "embedding"], ["product"]),
            helper.make_node("Relu", ["product"], ["rectified"]),
            helper.make_node("MatMul", ["rectified", "own"], ["z"]),
        ],
        "further",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, shared.dims[0]])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 32])],
        [shared, numpy_helper.from_array(own, "own")],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name="further"
    )


def run_model(path: str | os.PathLike[str], **inputs: NDArray[Any]) -> list[NDArray[Any]]:
    """Runs a model with ONNX Runtime; returns its outputs."""
    ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(os.fspath(path), options, ["CPUExecutionProvider"])
    outputs: list[NDArray[Any]] = session.run(None, inputs)
    return outputs


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """Runs a Python program in a new process; requires success and returns the output."""
    tests = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    done = completed(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        status=0,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    return done.stdout


# First lines of a program that measures memory: `anonymous()` returns the anonymous bytes,
# `growth(call)` its peak growth during a call, which may invoke `sample` for additional samples.
MEASURE_MEMORY = """
import sys, threading
peak = 0
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
def sample(*_):
    global peak
    peak = max(peak, anonymous())
def growth(call):
    global peak
    done = threading.Event()
    def watch():
        while not done.wait(0.005):
            sample()
    watcher = threading.Thread(target=watch)
    before = peak = anonymous()
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return peak - before
"""


def open_below(directory: str | os.PathLike[str]) -> list[str]:
    """The open and mapped files below a directory, one item for each descriptor or mapping."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps") as maps:
        found += [line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")]
    prefix = os.path.join(os.path.realpath(directory), "")
    return sorted(path for path in found if path.startswith(prefix))


def copying_clone(source: MappedFile, target: int) -> bool:
    """Replaces `clones_and_sync.clone`: a copy instead of shared blocks."""
    content, written = source.read(0, source.size), 0
    while written < len(content):  # a fault of a test may write a part alone
        written += os.pwrite(target, content[written:], written)
    return True


def entry_of(source: Any, name: str) -> Entry:
    """An entry of an archive."""
    with onnxarchive.open(source) as archive:
        return archive.entries[name]


def flip_byte(path: str | os.PathLike[str], offset: int) -> None:
    """Changes one byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def break_local_header(path: str | os.PathLike[str], entry: Entry) -> None:
    """Changes the signature of an entry's local header."""
    flip_byte(path, entry.header_offset)


# Few and awkward names, so that keys collide.
names = st.sampled_from(
    ["", "w", "W", "w_2", "a/b", "a.b", "con", "assets", "__w", "7", "größe", "w" * 300]
)


@st.composite
def tensor_protos(draw: st.DrawFn) -> TensorProto:
    """Tensors of every type, of 0 to 125 elements, raw or typed."""
    name = draw(names)
    if draw(st.integers(0, 15)) == 0:
        return string_tensor(name, draw(st.lists(st.text(max_size=3), max_size=3)))
    number = draw(st.sampled_from(sorted(BIT_WIDTHS)))
    dims = draw(st.lists(st.integers(0, 5), max_size=3))
    tensor = raw_tensor(name, number, dims, draw(st.integers(0, 1 << 32)))
    return typed(tensor) if draw(st.booleans()) else tensor


@st.composite
def sparse_tensor_protos(draw: st.DrawFn) -> onnx.SparseTensorProto:
    return onnx.SparseTensorProto(
        values=draw(tensor_protos()), indices=draw(tensor_protos()), dims=[1000]
    )


@st.composite
def node_protos(draw: st.DrawFn, depth: int) -> onnx.NodeProto:
    kinds: dict[str, st.SearchStrategy[Any]] = {
        "t": tensor_protos(),
        "tensors": st.lists(tensor_protos(), max_size=2),
        "sparse_tensor": sparse_tensor_protos(),
        "sparse_tensors": st.lists(sparse_tensor_protos(), max_size=2),
        "i": st.integers(-5, 5),
    }
    if depth:
        kinds["g"] = graph_protos(depth - 1)
        kinds["graphs"] = st.lists(graph_protos(depth - 1), max_size=2)
    fields = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=2))
    return node(*(attribute(f"{field}_", **{field: draw(kinds[field])}) for field in fields))


@st.composite
def graph_protos(draw: st.DrawFn, depth: int = 2) -> onnx.GraphProto:
    return onnx.GraphProto(
        name=draw(names),
        initializer=draw(st.lists(tensor_protos(), max_size=3)),
        sparse_initializer=draw(st.lists(sparse_tensor_protos(), max_size=1)),
        node=draw(st.lists(node_protos(depth), max_size=2)),
    )


@st.composite
def model_protos(draw: st.DrawFn) -> onnx.ModelProto:
    """Models with tensors of every type in every place; not runnable."""
    model = model_of()
    model.graph.CopyFrom(draw(graph_protos()))
    model.doc_string = draw(st.text(max_size=5))
    for key in draw(st.lists(st.text(max_size=3), max_size=2)):
        model.metadata_props.add(key=key, value="value")
    if draw(st.integers(0, 3)) == 0:
        function = model.functions.add(name="f", node=draw(st.lists(node_protos(1), max_size=2)))
        function.attribute_proto.append(attribute("t", t=draw(tensor_protos())))
    if draw(st.integers(0, 3)) == 0:
        model.training_info.add(
            initialization=draw(graph_protos(0)), algorithm=draw(graph_protos(0))
        )
    return model
