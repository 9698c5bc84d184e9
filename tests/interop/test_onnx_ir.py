"""Archives as onnx_ir models: views of the file, changed and saved without loading the weights."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import sys
from pathlib import Path
from typing import Any

import edits
import numpy as np
import onnx
import pytest
from models import (
    MEASURE_MEMORY,
    break_local_header,
    entry_of,
    flip_byte,
    keys_of,
    model_of,
    open_below,
    raw_tensor,
    run_model,
    run_python,
    runnable_model,
    sparse_tensor,
    text_model,
)
from onnx import AttributeProto, TensorProto, helper
from pages import needs_smaps
from versions import is_older
from written import Target, saved

import onnxarchive
import onnxarchive.ir
from onnxarchive import ArchiveError, ArchiveFormatError, ChecksumError, UnsupportedFeatureError

ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")

from ir_models import KNOWN, MODELS, tensors_everywhere, tensors_of_all_types  # noqa: E402
from onnx_ir.passes import common  # noqa: E402

from onnxarchive.writing.onnx_ir import ArchiveTensor  # noqa: E402

MIB = 1 << 20


def _as_ir_writes_it(model: onnx.ModelProto) -> onnx.ModelProto:
    return ir.to_proto(ir.from_proto(model))  # type: ignore[no-any-return]


def _tensor(model: Any, name: str) -> Any:
    return model.graph.initializers[name].const_value


# Loading


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__)
def test_a_loaded_model_equals_the_saved_one(path: Path, make: Any) -> None:
    onnxarchive.save(make(), path, size_threshold=0, convert_attribute=True)
    assert ir.to_proto(onnxarchive.ir.load(path)) == _as_ir_writes_it(make())


def test_every_external_tensor_refers_to_the_file_of_the_archive(path: Path) -> None:
    onnxarchive.save(tensors_everywhere(), path, convert_attribute=True)
    model = onnxarchive.ir.load(path)
    found = []
    for graph in [*model.graphs(), *(g for f in model.functions.values() for g in f.subgraphs())]:
        for value in graph.initializers.values():
            found.append(value.const_value)
    nodes = [*model.graph.all_nodes(), *(n for f in model.functions.values() for n in f)]
    nodes += [n for f in model.functions.values() for g in f.subgraphs() for n in g.all_nodes()]
    attributes = [attribute for node in nodes for attribute in node.attributes.values()]
    attributes += [a for f in model.functions.values() for a in f.attributes.values()]
    for attribute in attributes:
        if attribute.type == ir.AttributeType.TENSOR:
            found.append(attribute.as_tensor())
        elif attribute.type == ir.AttributeType.TENSORS:
            found += attribute.as_tensors()
    keys = {tensor.key for tensor in found if isinstance(tensor, ArchiveTensor)}
    with onnxarchive.open(path) as archive:
        assert keys == set(keys_of(archive))
        assert len(keys) == 13
    assert not any(isinstance(tensor, ir.ExternalTensor) for tensor in found)


@pytest.mark.parametrize("name", [*KNOWN, "odd", "nothing", "scalar"])
def test_a_tensor_of_every_type_is_all_that_onnx_ir_expects(tmp_path: Path, name: str) -> None:
    onnxarchive.save(tensors_of_all_types(), tmp_path / "m.onnxa", size_threshold=0)
    tensor = _tensor(onnxarchive.ir.load(tmp_path / "m.onnxa"), name)
    expected = _tensor(ir.from_proto(tensors_of_all_types()), name)
    assert isinstance(tensor, ir.TensorProtocol)
    assert isinstance(tensor, ArchiveTensor)
    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
    assert (tensor.size, tensor.nbytes) == (expected.size, expected.nbytes)
    assert tensor.name == name
    assert tensor.tobytes() == expected.tobytes() == bytes(tensor.raw)
    assert type(tensor.tobytes()) is bytes
    array = tensor.numpy()
    assert array.dtype == expected.numpy().dtype == tensor.dtype.numpy()
    assert array.shape == tuple(expected.shape)
    assert array.tobytes() == expected.numpy().tobytes()
    assert not array.flags.writeable
    assert np.asarray(tensor).tobytes() == array.tobytes()
    file = io.BytesIO()
    tensor.tofile(file)
    assert file.getvalue() == expected.tobytes()
    assert name in repr(tensor)
    assert "m.onnxa" in repr(tensor)


def test_arrays_are_views_and_copies_are_made_if_asked_for(archive: Path) -> None:
    tensor = _tensor(onnxarchive.ir.load(archive), "layer.0/weight")
    view = tensor.numpy()
    for other in (np.asarray(tensor), np.frombuffer(tensor.raw, np.uint8)):
        assert np.shares_memory(view, other)
    assert not np.shares_memory(view, np.array(tensor, copy=True))
    doubles = np.asarray(tensor, np.float64)
    assert doubles.dtype == np.float64
    assert np.array_equal(doubles, view)
    with pytest.raises(ValueError, match="copy"):
        np.array(tensor, np.float64, copy=False)
    assert view.ctypes.data % 64 == 0


@pytest.mark.skipif(is_older("numpy", "2.1"), reason="numpy 2.0 exports no read-only arrays")
def test_dlpack_gives_a_view(archive: Path) -> None:
    tensor = _tensor(onnxarchive.ir.load(archive), "layer.0/weight")
    assert np.shares_memory(tensor.numpy(), np.from_dlpack(tensor))


def test_a_deep_copy_has_a_name_of_its_own_and_shares_the_bytes(archive: Path) -> None:
    tensor = _tensor(onnxarchive.ir.load(archive), "layer.0/weight")
    tensor.metadata_props["key"] = "value"
    other = copy.deepcopy(tensor)
    other.name = "other"
    other.metadata_props["key"] = "changed"
    assert (tensor.name, tensor.metadata_props["key"]) == ("layer.0/weight", "value")
    assert np.shares_memory(other.numpy(), tensor.numpy())
    assert (other.shape, other.dtype) == (tensor.shape, tensor.dtype)


def test_a_tensor_keeps_its_names_and_props(path: Path) -> None:
    model = tensors_everywhere()
    model.graph.initializer[0].metadata_props.add(key="a", value="b")
    onnxarchive.save(model, path)
    tensor = _tensor(onnxarchive.ir.load(path), "outer")
    assert (tensor.key, tensor.doc_string) == ("outer", "a weight")
    assert tensor.metadata_props == {"a": "b"}
    tensor.name = "other"
    tensor.metadata_props["c"] = "d"
    assert (tensor.name, tensor.key) == ("other", "outer")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is mapped")
def test_tensors_outlive_the_model_and_let_go_of_the_file_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path)
    model = onnxarchive.ir.load(path)
    tensor = _tensor(model, "layer.0/weight")
    del model
    gc.collect()
    path.unlink()
    expected = runnable_model().graph.initializer[0].raw_data
    assert tensor.tobytes() == expected
    view = tensor.numpy()
    del tensor
    gc.collect()
    assert view.tobytes() == expected
    del view
    gc.collect()
    assert open_below(tmp_path) == []


def test_a_local_header_is_compared_when_its_tensor_is_first_read(archive: Path) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    model = onnxarchive.ir.load(archive)
    tensor = _tensor(model, "layer.0/weight")
    assert tensor.nbytes == 1 << 16
    for read in (tensor.numpy, tensor.tobytes, lambda: tensor.raw):
        with pytest.raises(ArchiveFormatError, match=r"\.onnxa: .*'layer_0_weight'"):
            read()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is open")
@pytest.mark.parametrize("kind", ["sparse", "sparse attribute", "training_info"])
def test_a_model_of_which_onnx_ir_would_lose_a_part_is_refused(tmp_path: Path, kind: str) -> None:
    model = model_of(raw_tensor("w", dims=(400,)))
    if kind == "sparse":
        model.graph.sparse_initializer.append(sparse_tensor("s"))
    elif kind == "sparse attribute":
        attribute = AttributeProto(
            name="a", type=AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse_tensor("s")
        )
        model.graph.node.add(op_type="Odd", output=["y"], attribute=[attribute])
    else:
        model.training_info.add(algorithm=onnx.GraphProto(name="g"))
    onnxarchive.save(model, tmp_path / "m.onnxa")
    expected = "training_info" if kind == "training_info" else r"tensor 's' .*no sparse tensors"
    with pytest.raises(
        UnsupportedFeatureError, match=rf"m\.onnxa: .*{expected}.*onnxarchive.load"
    ) as caught:
        onnxarchive.ir.load(tmp_path / "m.onnxa")
    assert open_below(tmp_path) == []  # while the error, and what its traceback holds, lives
    del caught


def test_a_model_that_onnx_ir_cannot_hold_is_refused_by_name(path: Path) -> None:
    model = runnable_model()
    model.graph.output[0].type.map_type.key_type = TensorProto.INT64
    onnxarchive.save(model, path)
    with pytest.raises(UnsupportedFeatureError, match=r"\.onnxa: .*onnx_ir cannot hold.*Map types"):
        onnxarchive.ir.load(path)


def test_a_type_that_onnx_ir_does_not_know_is_refused_by_number(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> object:
        return ir.DataType(99)

    onnxarchive.save(runnable_model(), path)
    monkeypatch.setattr(ir.serde, "deserialize_tensor", unknown)
    with pytest.raises(UnsupportedFeatureError, match=r"\.onnxa: .*ValueError: 99 is not a valid"):
        onnxarchive.ir.load(path)


def test_loading_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(runnable_model().SerializeToString())
    with pytest.raises(ArchiveFormatError, match=r"m\.onnx: "):
        onnxarchive.ir.load(tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError):
        onnxarchive.ir.load(tmp_path / "none.onnxa")


def test_importing_the_module_does_not_import_onnx_ir() -> None:
    assert run_python("import sys, onnxarchive.ir; print('onnx_ir' in sys.modules)") == "False\n"


# Changing and saving


@pytest.mark.parametrize("make", MODELS, ids=lambda it: it.__name__)
@pytest.mark.parametrize("stored", [False, True], ids=["attributes in", "attributes out"])
@pytest.mark.parametrize("convert_attribute", [False, True])
@pytest.mark.parametrize("size_threshold", [0, 1024, 1 << 30])
def test_a_loaded_model_is_saved_as_the_archive_of_its_proto(
    path: Path, make: Any, stored: bool, convert_attribute: bool, size_threshold: int
) -> None:
    proto = _as_ir_writes_it(make())
    options: dict[str, Any] = {"convert_attribute": convert_attribute}
    options["size_threshold"] = size_threshold
    onnxarchive.save(proto, path, size_threshold=0, convert_attribute=stored)
    data = saved(onnxarchive.ir.load(path), **options)
    assert data == saved(proto, **options)
    assert onnxarchive.check(data, full=True) == []


def test_a_loaded_model_is_saved_over_its_archive_again_and_again(path: Path) -> None:
    onnxarchive.save(_as_ir_writes_it(tensors_everywhere()), path, convert_attribute=True)
    before = path.read_bytes()
    models = []
    for _ in range(3):
        models.append(onnxarchive.ir.load(path))
        onnxarchive.save(models[-1], path, convert_attribute=True)
        assert path.read_bytes() == before
    # The first ones lie in files that have lost their name.
    expected = tensors_everywhere().graph.initializer[0].raw_data
    for model in models:
        assert _tensor(model, "outer").tobytes() == expected
    models[-1].graph.initializers["outer"].name = "renamed"
    onnxarchive.save(models[-1], path, convert_attribute=True)
    with onnxarchive.open(path) as archive:
        assert "renamed" in archive.tensors


def test_passes_of_onnx_ir_run_on_a_loaded_model(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    model = runnable_model()
    constant = raw_tensor("constant", dims=(16,), seed=5)
    matmul, add = model.graph.node
    add.output[0] = "sum"
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Constant", [], ["c"], value=constant),
            matmul,
            helper.make_node("Add", ["sum", "c"], ["y"]),
            helper.make_node("Identity", ["y"], ["unused"]),
            add,  # after a node that needs it
        ]
    )
    model.graph.initializer.append(raw_tensor("never used", dims=(5000,)))
    onnxarchive.save(model, path, size_threshold=0, convert_attribute=True)
    loaded = onnxarchive.ir.load(path)
    passes = [
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.NameFixPass(),
        common.TopologicalSortPass(),
        common.IdentityEliminationPass(),
        common.DeduplicateInitializersPass(),
        common.ShapeInferencePass(),
    ]
    for run in passes:
        run(loaded)
    onnxarchive.save(loaded, path, size_threshold=0)
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert set(archive.tensors) == {"layer.0/weight", "layer.0/bias", "c"}
        assert len(archive.entries) == 4
    model.graph.node.insert(2, model.graph.node.pop())  # where ONNX has it
    onnxarchive.export(path, tmp_path / "after.onnx")
    onnx.save(model, tmp_path / "before.onnx")
    x = np.random.default_rng(2).standard_normal((2, 1024), np.float32)
    (before,) = run_model(tmp_path / "before.onnx", x=x)
    (after,) = run_model(tmp_path / "after.onnx", x=x)
    assert np.array_equal(before, after)


def test_a_changed_tensor_is_not_saved_as_if_it_were_right(archive: Path) -> None:
    model = onnxarchive.ir.load(archive)
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset + 100)
    with edits.refused(archive, ChecksumError, r"\.onnxa: entry 'layer_0_weight'.*CRC-32"):
        onnxarchive.save(model, archive)


def test_onnx_ir_saves_a_loaded_model_as_onnx_with_external_data(tmp_path: Path) -> None:
    onnxarchive.save(tensors_everywhere(), tmp_path / "m.onnxa", convert_attribute=True)
    model = onnxarchive.ir.load(tmp_path / "m.onnxa")
    ir.save(model, tmp_path / "m.onnx", external_data="m.data")
    assert (tmp_path / "m.data").stat().st_size >= 3 * 1600
    expected = _as_ir_writes_it(tensors_everywhere())
    loaded = onnx.load(tmp_path / "m.onnx")
    for tensor, other in zip(loaded.graph.initializer, expected.graph.initializer, strict=True):
        assert (tensor.name, tensor.raw_data) == (other.name, other.raw_data)


def test_a_file_that_takes_fewer_bytes_at_a_time_gets_all_of_them(archive: Path) -> None:
    tensor = _tensor(onnxarchive.ir.load(archive), "layer.0/weight")
    target = Target([1000])
    tensor.tofile(target)
    assert target.content == tensor.tobytes()


# External tensors of onnx_ir


def test_external_tensors_of_packed_types_are_not_kept_unpacked(tmp_path: Path) -> None:
    tensor = raw_tensor("w", TensorProto.INT4, (2000,))
    onnx.save(
        model_of(tensor, raw_tensor("nothing", dims=(0,))),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    model = ir.load(tmp_path / "m.onnx")
    onnxarchive.save(model, tmp_path / "m.onnxa", size_threshold=0)
    assert _tensor(model, "w")._array is None
    loaded = onnxarchive.load(tmp_path / "m.onnxa").graph.initializer
    assert [it.raw_data for it in loaded] == [tensor.raw_data, b""]


# Memory


def _save_large(path: Path, count: int = 12, nbytes: int = 32 * MIB, *, number: int = 2) -> int:
    """An archive of `count` tensors of `nbytes` each, mostly zeros; gives the size of all."""
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(number))
    array = np.zeros(nbytes * (1 if dtype == np.uint8 else 2), dtype)  # else INT4
    names = [f"w{index}" for index in range(count)]
    with onnxarchive.Writer(path) as writer:
        for index, name in enumerate(names):
            array[index] = 1
            writer.add(name, array)
        text = f"g () => ({dtype}[n] y) {{ y = Concat<axis = 0>({', '.join(names)}) }}"
        writer.finish(text_model(text))
    return count * nbytes


@pytest.mark.large
@needs_smaps
@pytest.mark.parametrize("number", [TensorProto.UINT8, TensorProto.INT4], ids=["uint8", "int4"])
def test_load_pass_and_save_hold_no_weights(path: Path, number: int) -> None:
    _save_large(path, number=number)
    code = f"""
{MEASURE_MEMORY}
import onnx_ir, onnxarchive, onnxarchive.ir, onnxarchive.writing.onnx_ir
from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass
path = sys.argv[1]
def work():
    model = onnxarchive.ir.load(path)
    model.graph.initializers["w3"].name = "renamed"
    RemoveUnusedNodesPass()(model)
    NameFixPass()(model)
    onnxarchive.save(model, path, progress=sample)
print(growth(work))
"""
    found = int(run_python(code, path))
    assert found < 24 * MIB  # less than one tensor
    with onnxarchive.open(path) as archive:
        archive.verify()
        assert "renamed" in archive.tensors
        assert len(archive.tensors) == 12


@pytest.mark.large
@needs_smaps
def test_attributes_that_come_back_into_the_model_are_not_copied(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "m.onnxa", 128 * MIB
    value = TensorProto(name="v", data_type=TensorProto.UINT8, dims=[nbytes])
    value.raw_data = bytes(nbytes)
    constant = helper.make_node("Constant", [], ["k"], value=value)
    graph = helper.make_graph([constant], "graph", [], [])
    onnxarchive.save(helper.make_model(graph), path, convert_attribute=True)
    code = f"""
{MEASURE_MEMORY}
import onnx_ir, onnxarchive, onnxarchive.ir, onnxarchive.writing.onnx_ir
def work():
    model = onnxarchive.ir.load(sys.argv[1])
    onnxarchive.save(model, sys.argv[1] + ".2", convert_attribute=False, progress=sample)
print(growth(work))
"""
    assert int(run_python(code, path)) < 24 * MIB
    with onnxarchive.open(tmp_path / "m.onnxa.2") as archive:
        assert archive.entries["__MODEL_PROTO"].nbytes > nbytes


@needs_smaps
def test_writing_a_tensor_to_a_file_copies_a_few_mib_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    total = _save_large(path, count=1, nbytes=256 * MIB)
    code = f"""
{MEASURE_MEMORY}
import onnx_ir, onnxarchive.ir, onnxarchive.writing.onnx_ir
tensor = onnxarchive.ir.load(sys.argv[1]).graph.initializers["w0"].const_value
def write():
    with open(sys.argv[1] + ".bin", "wb") as file:
        tensor.tofile(file)
print(growth(write))
"""
    assert int(run_python(code, path)) < 24 * MIB
    assert (tmp_path / "m.onnxa.bin").stat().st_size == total


# Models whose archive others have edited since


def _rebuilt(model: Any) -> Any:
    graph = model.graph
    values = list(graph.initializers.values())
    for value in values:
        graph.initializers.pop(value.name)
    made = ir.Graph(
        graph.inputs, [], nodes=[], initializers=values, opset_imports=graph.opset_imports, name="g"
    )
    return ir.Model(made, ir_version=model.ir_version)


COPIES: dict[str, Any] = {
    "itself": lambda model: model,
    "a deep copy": copy.deepcopy,
    "a clone": lambda model: model.clone(),
    "its tensors": _rebuilt,
}
if "deep_copy" in inspect.signature(ir.Model.clone).parameters:  # from onnx_ir 0.2.1 on
    COPIES["a deep clone"] = lambda model: model.clone(deep_copy=True)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_an_edit_by_another_is_not_overwritten(path: Path, make: Any) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path)
    model = make(onnxarchive.ir.load(path))
    edits.document(path, "by another")
    with edits.refused(path, ArchiveError, "changed since it was opened"):
        onnxarchive.save(model, path)


def test_a_second_save_over_its_archive_is_refused_with_the_way_to_change_it(path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path)
    model = onnxarchive.ir.load(path)
    model.doc_string = "one"
    onnxarchive.save(model, path)
    other = copy.deepcopy(model)
    other.doc_string = "other"
    for one in (model, other):
        one.producer_name = "again"
        with edits.refused(
            path, ArchiveError, "since it was opened; load the .*edit.model = model"
        ):
            onnxarchive.save(one, path)
        with onnxarchive.edit(path) as edit:
            edit.model = one
        assert onnxarchive.load(path) == ir.to_proto(one)


def test_the_archive_of_a_model_is_known_after_the_process_changes_its_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path.name)
    model = onnxarchive.ir.load(path.name)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        onnxarchive.save(model, path.name)  # another archive
    edits.document(path, "by another")
    with edits.refused(path, ArchiveError, "changed since it was opened"):
        onnxarchive.save(model, path)


def test_a_clone_or_a_model_that_shares_tensors_does_not_overwrite_a_later_save(
    path: Path,
) -> None:
    onnxarchive.save(model_of(raw_tensor("w", dims=(3000,))), path)
    model = onnxarchive.ir.load(path)
    clone, sharing = model.clone(), _rebuilt(onnxarchive.ir.load(path).clone())
    clone.doc_string = "clone"
    onnxarchive.save(clone, path)
    for other in (model, sharing):
        for size_threshold in (0, 1 << 30):
            with edits.refused(path, ArchiveError, "changed since it was opened"):
                onnxarchive.save(other, path, size_threshold=size_threshold)
