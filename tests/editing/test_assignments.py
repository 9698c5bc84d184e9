"""Models, tensors and files given to an edit: what is shown and written, and what is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from edits import (
    MODEL,
    Way,
    added,
    changed,
    documented,
    fails_at,
    other_bytes,
    referring,
    refused,
    removed,
    replace_model,
    replace_tensor,
    require,
    weights,
)
from models import entry_of, external, flip_byte, model_of, raw_tensor
from onnx import TensorProto, numpy_helper
from written import saved

import onnxarchive
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    UnsupportedFeatureError,
)

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
def test_an_edit_shows_the_tensors_of_an_assigned_model(
    archive: Path, other: Path, kind: str
) -> None:
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
        with pytest.raises(KeyError, match="no initializer has the name 'w'"):
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
def test_elements_assigned_before_a_model_do_not_change_that_model(
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
        refused(
            archive, ValueError, r"tensor of .*other\.onnxa, not of this archive; assign the open"
        ),
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
        refused(
            archive,
            (ValueError, ArchiveFormatError),
            "tensor of another edit, not of this archive; assign",
        ),
        onnxarchive.edit(archive, compact=True) as edit,
    ):
        edit.models["two"] = two
        if how == "assigned":
            edit.model = kept
        else:
            edit.model.CopyFrom(kept)


def test_a_new_model_file_without_its_data_does_not_get_data_of_the_archive(
    archive: Path, tmp_path: Path
) -> None:
    alone = model_of(external(raw_tensor("w", dims=(300,)), "w"))
    (tmp_path / "alone.onnx").write_bytes(alone.SerializeToString())
    with (
        refused(archive, ArchiveFormatError, "data file 'w', of 1200 bytes or more, is missing"),
        onnxarchive.edit(archive) as edit,
    ):
        edit.models["new"] = tmp_path / "alone.onnx"


@pytest.mark.parametrize("name", ["new.onnx", "new.bin", "labels.txt"])
def test_a_file_that_is_written_to_after_it_was_assigned_is_refused(
    archive: Path, tmp_path: Path, name: str
) -> None:
    """A model, its external data, and an asset."""
    model = model_with(w=np.arange(70_000, dtype=np.float32))
    is_external = name == "new.bin"
    onnx.save(model, tmp_path / "new.onnx", save_as_external_data=is_external, location="new.bin")
    (tmp_path / "labels.txt").write_bytes(b"cat")
    assigned = tmp_path / name
    status = assigned.stat()
    with (
        refused(
            archive, ArchiveFormatError, "the file was changed after it was assigned to the edit"
        ) as caught,
        onnxarchive.edit(archive) as edit,
    ):
        edit.assets["labels.txt"] = tmp_path / "labels.txt"
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
        refused(
            archive, ValueError, r"other\.onnxa: the archive was closed before the end of the edit"
        ),
        onnxarchive.edit(archive) as edit,
        onnxarchive.open(other) as assigned,
    ):
        edit.models["other"] = assigned


def test_an_edit_shows_tensors_in_the_model_and_changes_strings_there(
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


def linked(path: Path) -> tuple[Path, onnx.ModelProto]:
    """A link to an archive, and the model in it."""
    link = path.with_name("link.onnx")
    onnxarchive.link(path, link)
    return link, onnx.load(link, load_external_data=False)


def test_a_model_file_with_its_data_in_the_archive_is_assigned(two: Path, tmp_path: Path) -> None:
    with onnxarchive.open(two) as archive:
        (tmp_path / MODEL).write_bytes(archive.read(MODEL))
    new = onnx.load(tmp_path / MODEL, load_external_data=False)
    new.doc_string = "new"
    (tmp_path / "a model.onnx").write_bytes(new.SerializeToString())
    for model_file in (tmp_path / "a model.onnx", str(tmp_path / "a model.onnx")):
        replace_model(two, model_file)
        require(two, saved(changed(weights(2), documented("new"))))


def test_a_changed_link_is_assigned(two: Path) -> None:
    link, new = linked(two)
    new.doc_string = "new"
    new.graph.initializer.append(raw_tensor("w2", dims=(300,), seed=2))
    onnx.save(new, link)
    replace_model(two, link)
    link.unlink()
    require(two, saved(changed(weights(3), documented("new"))))
    assert not referring(two).metadata_props


def test_external_data_in_the_overwritten_end_of_the_archive_is_refused(
    two: Path, way: Way
) -> None:
    offset = entry_of(two, MODEL).header_offset
    link, new = linked(two)
    into = external(raw_tensor("into", dims=(40,)), two.name, offset=offset - 1, length=160)
    new.graph.initializer.extend([raw_tensor("before", dims=(40,)), into])
    onnx.save(new, link)
    with refused(
        two, ArchiveFormatError, r"'into'.*, 160 bytes at offset \d+ of the archive, is in"
    ):
        replace_model(two, link, size_threshold=0, **way)


def test_an_empty_tensor_may_lie_at_any_offset_of_the_archive(two: Path, way: Way) -> None:
    link, new = linked(two)
    offset = two.stat().st_size
    empty = external(raw_tensor("empty", dims=(0,)), two.name, offset=offset, length=0)
    new.graph.initializer.append(empty)
    onnx.save(new, link)
    replace_model(two, link, size_threshold=0, **way)
    with onnxarchive.open(two) as archive:
        assert archive.tensors["empty"].shape == (0,)


def test_a_link_to_another_archive_is_assigned_if_its_tensors_are_equal(
    two: Path, tmp_path: Path
) -> None:
    archive, link = tmp_path / "other.onnxa", tmp_path / "link.onnx"
    new = changed(weights(2), documented("new"))
    onnxarchive.save(new, archive)
    onnxarchive.link(archive, link)
    replace_model(two, link)
    require(two, saved(new))
    different = changed(new, other_bytes)
    onnxarchive.save(different, archive)  # the same places in another file
    onnxarchive.link(archive, link)
    with refused(two, ValueError, "would use 'w1'; compact=True"):
        replace_model(two, link)
    replace_model(two, link, compact=True)
    require(two, saved(different))


def test_a_model_file_that_holds_its_data_is_assigned_if_the_data_is_equal(
    two: Path, tmp_path: Path
) -> None:
    full, before = tmp_path / "full.onnx", two.read_bytes()
    new, other = changed(weights(2), added("w2", 3000)), changed(weights(2), other_bytes)
    onnx.save(new, full)
    replace_model(two, full)
    require(two, saved(new))
    two.write_bytes(before)
    onnx.save(other, full)
    with refused(two, ValueError, "would use 'w1'; compact=True"):
        replace_model(two, full)
    replace_model(two, full, compact=True)
    require(two, saved(other))


@pytest.mark.parametrize("location", ["weights.bin", None])
def test_a_model_file_with_its_data_beside_it_is_assigned(
    two: Path, tmp_path: Path, location: str | None
) -> None:
    new = changed(weights(3), documented("new"))
    onnx.save(
        changed(new),
        tmp_path / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=location is not None,
        location=location,
        size_threshold=0,
    )
    replace_model(two, tmp_path / "model.onnx")
    require(two, saved(new))


@pytest.mark.parametrize("form", ["path", "archive", "its model"])
def test_the_tensors_of_another_archive_are_copied_or_refused(
    path: Path, tmp_path: Path, form: str
) -> None:
    """Two siblings have the same keys, and a model of one never gets the weights of the other."""
    onnxarchive.save(weights(2), path, assets={"labels": b"cat"})
    before = path.read_bytes()
    other = changed(weights(2), other_bytes, documented("new"))
    onnxarchive.save(other, tmp_path / "other.onnxa", assets={"other": b"dog"})
    with onnxarchive.open(tmp_path / "other.onnxa") as archive:
        if form == "its model":
            for name in ("", "two"):
                with pytest.raises(
                    ValueError,
                    match=r"tensor of .*other.onnxa, not of this archive; assign the open",
                ):
                    replace_model(path, archive.model, name=name)
            require(path, before)
            return
        given = archive if form == "archive" else tmp_path / "other.onnxa"
        replace_model(path, given, name="two")
        assert onnxarchive.load(path) == weights(2)
        assert onnxarchive.load(path, model="two") == other
        replace_model(path, given, compact=True)
    require(path, saved(other, models={"two": other}, assets={"labels": b"cat"}))


def test_the_model_of_an_archive_opened_before_an_edit_is_copied_or_refused(two: Path) -> None:
    """A tensor has its key and size as before, but other bytes."""
    after = changed(weights(2), other_bytes)
    with onnxarchive.open(two) as old:
        replace_tensor(two, "w1", after.graph.initializer[1])
        with pytest.raises(
            ValueError, match=r"'w1' .*: it is an external tensor of .*, not of this arch"
        ):
            replace_model(two, old.model, name="two")
        require(two, saved(after))
        replace_model(two, old, name="two")
    require(two, saved(after, models={"two": weights(2)}))


def test_damaged_data_of_another_archive_is_not_copied(two: Path, tmp_path: Path, way: Way) -> None:
    other = tmp_path / "other.onnxa"
    onnxarchive.save(weights(3), other)
    flip_byte(other, entry_of(other, "w2").data_offset + 50)
    with (
        onnxarchive.open(other) as opened,
        refused(two, ChecksumError, r"'w2'.* 0x") as caught,
    ):
        replace_model(two, opened, **way)
    assert caught.value.path == str(other)


def test_a_locked_archive_that_is_assigned_is_waited_for_as_long_as_timeout_says(
    two: Path, tmp_path: Path
) -> None:
    """Its editor may wait for this archive at the same time."""
    other = tmp_path / "other.onnxa"
    onnxarchive.save(weights(1), other)
    with onnxarchive.edit(other), refused(two, onnxarchive.LockedError, r"other\.onnxa"):
        replace_model(two, other, timeout=0)


@pytest.mark.parametrize(
    "form", [str, Path, lambda path: path.parent / ".." / path.parent.name / path.name]
)
def test_an_archive_cannot_be_assigned_to_itself(two: Path, form: Callable[[Path], Any]) -> None:
    with refused(two, ValueError, "the target is also the input"):
        replace_model(two, form(two))


def test_an_assigned_model_is_not_changed(two: Path) -> None:
    for model in (referring(two), weights(2), changed(referring(two), removed(0))):
        before = model.SerializeToString(deterministic=True)
        replace_model(two, model, compact=True, size_threshold=2000)
        assert model.SerializeToString(deterministic=True) == before
        onnxarchive.save(weights(2), two)


@pytest.mark.parametrize("model", [None, 3, {}, model_of().graph, b"bytes"])
def test_an_object_that_is_no_model_cannot_be_assigned(two: Path, model: Any) -> None:
    message = "^expected an onnx.ModelProto, onnx_ir.Model or torch.onnx.ONNXProgram, found "
    with refused(two, TypeError, f"{message}{type(model)}$"):
        replace_model(two, model)


W0 = raw_tensor("w0", dims=(300,))
BOTH = external(W0, "w0")
BOTH.raw_data = W0.raw_data
NO_KEY = "expected a key of the archive as the location of external data"
NOT_ALL = "expected all 1200 bytes of entry 'w0'"
BROKEN: dict[str, tuple[onnx.ModelProto, str]] = {
    "no graph": (onnx.ModelProto(ir_version=10), "no graph"),
    "an unknown key": (
        model_of(external(W0, "nowhere")),
        f"tensor 'w0' (graph.initializer[0]): {NO_KEY}, found 'nowhere'; store a new tensor's "
        "bytes in raw_data",
    ),
    "an unknown key of a small tensor": (
        model_of(external(raw_tensor("tiny", dims=(1,)), "nowhere")),
        f"{NO_KEY}, found 'nowhere'",
    ),
    "the model itself": (model_of(external(W0, MODEL)), NO_KEY),
    "an asset": (model_of(external(W0, "assets/labels")), NO_KEY),
    "another shape": (
        model_of(external(raw_tensor("w0", dims=(299,)), "w0")),
        f"{NOT_ALL}, found offset None and length None, and 1196 bytes by shape and data type",
    ),
    "a part": (model_of(external(raw_tensor("w0", dims=(299,)), "w0", offset=4)), NOT_ALL),
    "another offset": (
        model_of(external(W0, "w0", offset=4)),
        f"{NOT_ALL}, found offset 4 and length None, and 1200 bytes by shape and data type",
    ),
    "another length": (
        model_of(external(W0, "w0", offset=0, length=1196)),
        "offset 0 and length 1196",
    ),
    "too few bytes": (
        model_of(TensorProto(name="w0", data_type=1, dims=[300], raw_data=bytes(1199))),
        "1199",
    ),
    "data in two places": (
        model_of(BOTH),
        "tensor 'w0' (graph.initializer[0]): there is data beside data_location EXTERNAL, in "
        "raw_data; edit.tensors['w0'] = array replaces the external data",
    ),
}


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("model", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_model_that_no_archive_could_have_is_refused(
    path: Path, model: onnx.ModelProto, message: str, compact: bool
) -> None:
    onnxarchive.save(weights(1), path, assets={"labels": bytes(1200)})
    with refused(path, ArchiveFormatError) as caught:
        replace_model(path, changed(model), compact=compact)
    assert caught.value.path == str(path)
    assert message in str(caught.value)


def test_a_model_file_that_names_an_unknown_key_is_refused(two: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(model_of(external(W0, "nowhere")).SerializeToString())
    with refused(
        two, ArchiveFormatError, "data file 'nowhere', of 1200 bytes or more, is missing"
    ) as caught:
        replace_model(two, bad)
    assert caught.value.path == str(bad)
    bad.write_bytes(b"no model")
    with refused(two, ArchiveFormatError, r"bad.onnx: "):
        replace_model(two, bad)
    bad.unlink()
    with fails_at(bad, FileNotFoundError):
        replace_model(two, bad)
    require(two, saved(weights(2)))


def test_a_negative_threshold_is_refused(two: Path) -> None:
    with refused(two, ValueError, "size_threshold must not be negative, got -1"):
        replace_model(two, weights(1), size_threshold=-1)
