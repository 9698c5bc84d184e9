"""Several assignments in one edit: the last one counts, and what is read will be written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import refused, weights
from models import external, model_of, raw_tensor
from onnx import numpy_helper

import onnxarchive
from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnsupportedFeatureError

A, B, C = (np.full(300, number, np.float32) for number in (1, 2, 3))


def model_with(**arrays: np.ndarray) -> onnx.ModelProto:
    return model_of(*(numpy_helper.from_array(array, name) for name, array in arrays.items()))


def arrays_of(path: Path, model: str = "") -> dict[str, np.ndarray]:
    assert onnxarchive.check(path, full=True) == []
    loaded = onnxarchive.load(path, model=model)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}


def require_arrays(found: dict[str, np.ndarray], **expected: np.ndarray) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.fixture
def archive(path: Path) -> Path:
    """An archive of the initializers v and w."""
    onnxarchive.save(model_with(v=A, w=B), path)
    return path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another archive, of w alone."""
    path = tmp_path / "other.onnxa"
    onnxarchive.save(model_with(w=C), path)
    return path


# Tensors of the edited model


@pytest.mark.parametrize("kind", ["onnx", "onnxa", "open archive"])
def test_tensors_of_a_model_from_elsewhere_are_shown(archive: Path, other: Path, kind: str) -> None:
    given: Any = other
    if kind == "onnx":
        onnx.save(model_with(w=C), other, format="protobuf")
    with contextlib.ExitStack() as stack:
        if kind == "open archive":
            given = stack.enter_context(onnxarchive.open(other))
        edit = stack.enter_context(onnxarchive.edit(archive, compact=True))
        edit.model = given
        np.testing.assert_array_equal(edit.tensors["w"], C)
        edit.tensors["w"] = edit.tensors["w"] * 2
    require_arrays(arrays_of(archive), w=C * 2)


def test_tensors_follow_the_names_in_the_model(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        first, second = edit.model.graph.initializer
        first.name, second.name = "w", "v"
        np.testing.assert_array_equal(edit.tensors["w"], A)
        edit.tensors["w"] = C
        first.name = "renamed"
        with pytest.raises(KeyError, match="found 0"):
            edit.tensors["w"]
        assert "w" not in edit.tensors
        assert list(edit.tensors) == ["renamed", "v"]
        first.name = "w"
    require_arrays(arrays_of(archive), w=C, v=B)


def test_tensors_have_the_dims_in_the_model(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        edit.model.graph.initializer[0].dims[:] = [20, 15]
        assert edit.tensors["v"].shape == (20, 15)
        edit.tensors["v"] = edit.tensors["v"] + 1
    require_arrays(arrays_of(archive), v=A.reshape(20, 15) + 1, w=B)


def test_an_initializer_that_replaces_another_of_its_name_takes_elements_of_its_shape(
    archive: Path,
) -> None:
    with onnxarchive.edit(archive, compact=True) as edit:
        edit.tensors["w"] = C
        del edit.model.graph.initializer[1]
        edit.model.graph.initializer.add().CopyFrom(raw_tensor("w", dims=(2,)))
        edit.tensors["w"] = C[:2]
    require_arrays(arrays_of(archive), v=A, w=C[:2])


# The last assignment


@pytest.mark.parametrize("model", [model_with(v=B, w=C), model_with(u=C), model_with(w=C[:9])])
def test_elements_assigned_before_a_model_are_not_put_into_it(
    archive: Path, model: onnx.ModelProto
) -> None:
    with onnxarchive.edit(archive, compact=True) as edit:
        edit.tensors["w"] = A
        edit.model = model
    expected = {it.name: numpy_helper.to_array(it) for it in model.graph.initializer}
    require_arrays(arrays_of(archive), **expected)


def test_a_model_assigned_to_itself_keeps_its_new_elements(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        edit.tensors["w"] = C
        edit.model = edit.model  # as after `edit.model += ...`
    require_arrays(arrays_of(archive), v=A, w=C)


def test_a_copy_of_a_model_has_its_new_elements(archive: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        edit.tensors["w"] = C
        edit.models["copy"] = edit.model
        edit.tensors["v"] = B
    require_arrays(arrays_of(archive), v=B, w=C)
    require_arrays(arrays_of(archive, "copy"), v=A, w=C)


# Models of other archives and files


def test_a_model_of_another_edit_is_refused(archive: Path, other: Path) -> None:
    with (
        refused(archive, ValueError, r"archive, found one of .*other\.onnxa; assign the open"),
        onnxarchive.edit(other) as others,
        onnxarchive.edit(archive) as edit,
    ):
        edit.model = others.model


@pytest.mark.parametrize("how", ["assigned", "merged"])
def test_data_of_another_edit_is_refused(
    archive: Path, other: Path, tmp_path: Path, how: str
) -> None:
    one, two = tmp_path / "one.onnx", tmp_path / "two.onnx"
    onnx.save(model_with(w=A), one)
    onnx.save(model_with(w=B), two)
    with onnxarchive.edit(other, compact=True) as edit:
        edit.model = one
        kept = edit.model
    with (
        refused(archive, (ValueError, ArchiveFormatError), "found one of another edit; assign"),
        onnxarchive.edit(archive, compact=True) as edit,
    ):
        edit.models["two"] = two
        if how == "assigned":
            edit.model = kept
        else:
            edit.model.CopyFrom(kept)


def test_a_new_model_file_without_its_data_does_not_get_the_archives(
    archive: Path, tmp_path: Path
) -> None:
    alone = model_of(external(raw_tensor("w", dims=(300,)), "w"))
    (tmp_path / "alone.onnx").write_bytes(alone.SerializeToString())
    with (
        refused(archive, ArchiveFormatError, "expected 1200 bytes in 'w', found no such file"),
        onnxarchive.edit(archive) as edit,
    ):
        edit.models["new"] = tmp_path / "alone.onnx"


@pytest.mark.parametrize("name", ["new.onnx", "new.bin", "labels.txt"])
def test_a_file_that_is_written_to_after_it_was_assigned_is_refused(
    archive: Path, tmp_path: Path, name: str
) -> None:
    """A model, its external data, and an asset."""
    assigned = tmp_path / name
    assigned.write_bytes(b"cat")
    model = model_with(w=np.arange(70_000, dtype=np.float32))
    is_external = name == "new.bin"
    onnx.save(model, tmp_path / "new.onnx", save_as_external_data=is_external, location=name)
    status = assigned.stat()
    with (
        refused(archive, ArchiveFormatError, "as it was assigned until the edit ends") as caught,
        onnxarchive.edit(archive) as edit,
    ):
        edit.assets["labels.txt"] = tmp_path / "labels.txt" if name == "labels.txt" else b"cat"
        edit.models["new"] = tmp_path / "new.onnx"
        with assigned.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(assigned, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert os.path.realpath(caught.value.path or "") == os.path.realpath(assigned)


def test_an_error_after_a_model_file_was_assigned_names_the_archive(
    archive: Path, tmp_path: Path
) -> None:
    onnx.save(weights(1), tmp_path / "other.onnx")
    with (
        refused(archive, ArchiveError, "expected") as caught,
        onnxarchive.edit(archive) as edit,
    ):
        edit.models["other"] = tmp_path / "other.onnx"
        edit.model.graph.initializer[0].external_data[0].value = "nowhere"
    assert caught.value.path == str(archive)


# Assignments that cannot be written


def test_a_model_that_onnx_ir_made_of_the_edited_message_names_tensor_and_advice(
    archive: Path,
) -> None:
    ir = pytest.importorskip("onnx_ir")
    with (
        refused(archive, FileNotFoundError, r"tensor 'v': .*onnx_ir\.to_proto"),
        onnxarchive.edit(archive) as edit,
    ):
        edit.model = ir.from_proto(edit.model)
    with onnxarchive.edit(archive) as edit:
        edit.model = ir.to_proto(ir.from_proto(edit.model))
    require_arrays(arrays_of(archive), v=A, w=B)


def test_an_assigned_archive_that_is_closed_before_the_edit_ends_is_named(
    archive: Path, other: Path
) -> None:
    with (
        refused(archive, ValueError, r"other\.onnxa: .* to stay open until the edit ends"),
        onnxarchive.edit(archive) as edit,
        onnxarchive.open(other) as assigned,
    ):
        edit.models["other"] = assigned


def test_tensors_that_the_model_itself_holds_are_shown_and_strings_are_changed_there(
    archive: Path,
) -> None:
    strings = numpy_helper.from_array(np.array([b"a", b"b"], object), "names")
    with onnxarchive.edit(archive) as edit:
        initializers = edit.model.graph.initializer
        initializers.extend([numpy_helper.from_array(C[:2], "small"), strings])
        np.testing.assert_array_equal(edit.tensors["small"], C[:2])
        assert edit.tensors["names"].tolist() == ["a", "b"]
        with pytest.raises(UnsupportedFeatureError, match=r"'names'.*`string_data` in edit\.model"):
            edit.tensors["names"] = np.array([b"c", b"d"], object)
        initializers[-1].string_data[0] = b"c"
    with onnxarchive.open(archive) as opened:
        assert list(opened.tensors["names"]) == ["c", "b"]
