from __future__ import annotations

import hashlib
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from edits import refused
from google.protobuf.message import Message
from hypothesis import given, settings, strategies as st
from models import (
    break_local_header,
    entry_of,
    every_tensor,
    flip_byte,
    full_model,
    further_model,
    model_of,
    model_protos,
    nested_model,
    normalised,
    raw_tensor,
    run_model,
    runnable_model,
    text_model,
    weight_model,
)
from onnx import TensorProto, numpy_helper
from opened_files import count_opens
from outcomes import count_outcome, requires_outcomes
from steps import steps
from versions import is_older
from written import write_model

import onnxarchive
from onnxarchive.interop.links import linked_archive
from onnxarchive.model import model_proto

X = np.linspace(-1, 1, 2048, dtype=np.float32).reshape(2, 1024)
KEY = "onnxarchive.link"
CHANGED = (
    "the archive has changed since it was linked: its model is another one, or its tensors have "
    "other bytes or positions; write a new link"
)


def parsed(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def without_mark(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the additions of a link."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [it for it in model.metadata_props if it.key != KEY]
    assert len(kept) == len(model.metadata_props) - 1
    del copy.metadata_props[:]
    copy.metadata_props.extend(kept)
    return normalised(copy)


def messages(link: Path, archive: Path | None = None) -> list[str]:
    return [str(it) for it in onnxarchive.check_link(link, archive)]


def require_link(
    link: Path | str, model: onnx.ModelProto | None = None, archive: Path | None = None
) -> None:
    """Requires that a link fits its archive, and that onnx reads `runnable_model` or a model."""
    assert messages(Path(link), archive) == []
    assert without_mark(onnx.load(link)) == normalised(model or runnable_model())


def every_message(message: Message) -> Iterator[Message]:
    """Every message below one."""
    for field, value in message.ListFields():
        if field.message_type:
            for child in [value] if isinstance(value, Message) else value:
                yield child
                yield from every_message(child)


# Other tools


def test_a_link_is_small_and_points_into_the_archive(archive: Path, link: Path) -> None:
    assert link.stat().st_size < 1000
    weight, bias = parsed(link).graph.initializer
    entry = entry_of(archive, "layer_0_weight")
    pairs = [archive.name, str(entry.data_offset), str(entry.nbytes)]
    assert [it.key for it in weight.external_data] == ["location", "offset", "length"]
    assert [it.value for it in weight.external_data] == pairs
    assert bias.raw_data
    assert sorted(os.listdir(link.parent)) == sorted([archive.name, link.name])


@pytest.mark.parametrize(
    "ways", [{}, {"size_threshold": 0, "convert_attribute": True}, {"alignment": 4096}]
)
@pytest.mark.parametrize("make", [full_model, lambda: nested_model(30, raw_tensor("w", 1, (300,)))])
def test_onnx_reads_tensors_of_every_place_from_a_link(
    path: Path, ways: dict[str, Any], make: Any
) -> None:
    onnxarchive.save(make(), path, **ways)
    onnxarchive.link(path, path.with_suffix(".onnx"))
    loaded = onnx.load(path.with_suffix(".onnx"))
    assert not [it for it in every_tensor(loaded) if it.data_location == TensorProto.EXTERNAL]
    require_link(path.with_suffix(".onnx"), make())


def test_onnx_infers_shapes_of_a_link(link: Path, tmp_path: Path) -> None:
    onnx.shape_inference.infer_shapes_path(os.fspath(link), os.fspath(tmp_path / "out.onnx"))
    (product,) = parsed(tmp_path / "out.onnx").graph.value_info
    assert [it.dim_value for it in product.type.tensor_type.shape.dim] == [2, 16]


def test_onnx_ir_reads_a_link(link: Path) -> None:
    onnx_ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    weight = onnx_ir.load(link).graph.initializers["layer.0/weight"].const_value
    assert weight is not None
    assert weight.tobytes() == runnable_model().graph.initializer[0].raw_data


def test_a_model_loaded_from_a_link_is_saved_and_linked_again(link: Path, tmp_path: Path) -> None:
    model = onnx.load(link)
    model.metadata_props.add(key=KEY, value="a second one")
    onnxarchive.save(model, tmp_path / "again.onnxa")
    # The mark is that of the new archive, and stands once.
    onnxarchive.link(tmp_path / "again.onnxa", tmp_path / "again.onnx")
    require_link(tmp_path / "again.onnx")


def test_a_link_is_read_by_its_path_through_linked_directories(link: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(link.parent, target_is_directory=True)
    path = tmp_path / "linked" / link.name
    require_link(path)
    onnx.checker.check_model(os.fspath(path))
    assert run_model(path, x=X)


@pytest.mark.sweep
@settings(deadline=None, max_examples=50)
@given(model=model_protos(), size_threshold=st.sampled_from([0, 64, 1024]), attribute=st.booleans())
def test_any_model_is_linked(
    tmp_path_factory: pytest.TempPathFactory,
    model: onnx.ModelProto,
    size_threshold: int,
    attribute: bool,
) -> None:
    archive = tmp_path_factory.mktemp("any") / "m.onnxa"
    onnxarchive.save(model, archive, size_threshold=size_threshold, convert_attribute=attribute)
    onnxarchive.link(archive, archive.with_suffix(".onnx"))
    require_link(archive.with_suffix(".onnx"), model, archive)


# Where a link may be


def test_the_archive_may_lie_below_the_link(archive: Path, tmp_path: Path) -> None:
    link = tmp_path / "above.onnx"
    onnxarchive.link(archive, link)
    (pair, *_) = parsed(link).graph.initializer[0].external_data
    assert pair.value == f"{archive.parent.name}/{archive.name}"
    require_link(link)
    onnx.checker.check_model(os.fspath(link))
    assert run_model(link, x=X)


def test_a_link_is_written_and_checked_by_relative_paths(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(archive.parent)
    onnxarchive.link(archive.name, "link.onnx")
    require_link("link.onnx")
    assert onnxarchive.check_link("link.onnx", archive.name) == []


def test_a_link_that_is_not_in_or_above_the_folder_of_the_archive_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    message = rf"ONNX allows no '\.\.'.*write the link to {os.path.realpath(archive.parent)}"
    with refused(archive, ValueError, message):
        onnxarchive.link(archive, other / "link.onnx")
    assert os.listdir(other) == []
    (archive.parent / "below").mkdir()
    with refused(
        archive,
        ValueError,
        "is not in the link's directory .* or below it, and ONNX allows no '..'",
    ):
        onnxarchive.link(archive, archive.parent / "below" / "link.onnx")


def test_a_link_beside_a_symbolic_link_to_the_archive_is_refused(
    archive: Path, tmp_path: Path
) -> None:
    near, far = tmp_path / "near.onnxa", tmp_path / "snapshot" / "model.onnxa"
    far.parent.mkdir()
    far.symlink_to(archive)
    with pytest.raises(ValueError, match="no symbolic links in external data"):
        onnxarchive.link(far, far.with_suffix(".onnx"))
    # Where it leads to a file that is below, that is what is named.
    near.symlink_to(archive)
    onnxarchive.link(near, tmp_path / "near.onnx")
    require_link(tmp_path / "near.onnx")


def test_a_destination_that_is_a_symbolic_link_is_refused(archive: Path) -> None:
    (archive.parent / "real.onnx").write_bytes(b"there")
    archive.with_suffix(".onnx").symlink_to("real.onnx")
    with refused(
        archive.with_suffix(".onnx"),
        ValueError,
        "the destination is a symbolic link, and tools look",
    ):
        onnxarchive.link(archive, archive.with_suffix(".onnx"))


def test_a_link_does_not_replace_its_archive(archive: Path) -> None:
    for destination in (archive, archive.parent / "." / archive.name):
        with refused(archive, ValueError, "the target is also the input"):
            onnxarchive.link(archive, destination)


def test_an_archive_with_a_second_name_is_linked_with_a_warning(archive: Path) -> None:
    os.link(archive, archive.with_name("second"))
    link = archive.with_suffix(".onnx")
    with pytest.warns(UserWarning, match=r"2 names \(hard links\); ONNX Runtime reads such"):
        onnxarchive.link(archive, link)
    assert messages(link) == []
    assert run_model(link, x=X)


@pytest.mark.filterwarnings("ignore:.*hard links:UserWarning")
@pytest.mark.skipif(is_older("onnx", "1.20"), reason="onnx 1.19 takes data with several names")
@pytest.mark.skipif(is_older("onnx-ir", "0.2.1"), reason="so does onnx_ir before 0.2.1")
def test_onnx_and_onnx_ir_refuse_data_with_a_second_name(archive: Path) -> None:
    os.link(archive, archive.with_name("second"))
    link = archive.with_suffix(".onnx")
    onnxarchive.link(archive, link)
    with pytest.raises(Exception, match="hard link"):
        onnx.checker.check_model(os.fspath(link))
    onnx_ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    with pytest.raises(ValueError, match="hard link"):
        onnx_ir.load(link).graph.initializers["layer.0/weight"].const_value.numpy()


def test_a_directory_gets_a_link_for_each_model(tmp_path: Path) -> None:
    archive = tmp_path / "model.onnx_data"
    models = {"decoder": further_model(), "decoder_with_past": further_model(1 << 17)}
    onnxarchive.save(runnable_model(), archive, models=models)
    onnxarchive.link(archive, tmp_path)
    models["model"] = runnable_model()
    assert sorted(os.listdir(tmp_path)) == [*(f"{name}.onnx" for name in models), archive.name]
    for name, model in models.items():
        require_link(tmp_path / f"{name}.onnx", model)
        dims = model.graph.input[0].type.tensor_type.shape.dim
        x = np.ones([it.dim_value for it in dims], np.float32)
        expected = run_model(write_model(tmp_path / "expected", model), x=x)
        np.testing.assert_array_equal(run_model(tmp_path / f"{name}.onnx", x=x), expected)


@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("count", [2, 7])
def test_links_of_all_models_open_the_archive_once(
    tmp_path: Path, count: int, prepack: bool
) -> None:
    archive = tmp_path / "m.onnxa"
    models = {f"m{seed}": weight_model(seed) for seed in range(1, count)}
    onnxarchive.save(weight_model(0), archive, models=models)
    assert count_opens(archive, lambda: onnxarchive.link(archive, tmp_path, prepack=prepack)) == 1
    for id, model in models.items():
        require_link(tmp_path / f"{id}.onnx", model)
    require_link(tmp_path / "m.onnx", weight_model(0))


def test_the_links_of_small_models_take_no_longer_beside_a_large_one(tmp_path: Path) -> None:
    def work(large: int, small: int) -> int:
        archive = tmp_path / f"{large} {small}" / "m.onnxa"
        archive.parent.mkdir()
        model = model_of(*(raw_tensor(f"w{number}", dims=(256,)) for number in range(large)))
        models = {f"m{number}": weight_model(number) for number in range(small)}
        onnxarchive.save(model, archive, models=models)
        return steps(lambda: onnxarchive.link(archive, archive.parent))

    def work_of_three(large: int) -> int:
        return work(large, 4) - work(large, 1)

    assert work_of_three(300) < 1.2 * work_of_three(10)


def test_no_link_is_written_if_a_target_is_not_allowed(tmp_path: Path) -> None:
    archive = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), archive, models={"further": further_model()})
    (tmp_path / "further.onnx").symlink_to(archive)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="the target is also the input"):
        onnxarchive.link(archive, tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_model_by_id_is_linked_alone_in_a_directory(tmp_path: Path) -> None:
    archive = tmp_path / "Decoder.onnxa"
    onnxarchive.save(runnable_model(), archive, models={"decoder": further_model()})
    with pytest.raises(
        ValueError, match=r"the id 'decoder' of a model is the name of the archive, .* another name"
    ):
        onnxarchive.link(archive, tmp_path)
    assert os.listdir(tmp_path) == ["Decoder.onnxa"]
    onnxarchive.link(archive, tmp_path, model="decoder")
    assert sorted(os.listdir(tmp_path)) == ["Decoder.onnxa", "decoder.onnx"]


def test_the_default_model_is_linked_alone_in_a_directory_if_it_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(runnable_model(), path, models={"decoder": runnable_model()})
    (tmp_path / "links").mkdir()
    path.rename(tmp_path / "links" / "m.onnxa")
    onnxarchive.link(tmp_path / "links" / "m.onnxa", tmp_path / "links", model="")
    assert sorted(os.listdir(tmp_path / "links")) == ["m.onnx", "m.onnxa"]


def test_a_name_that_external_data_cannot_have_is_refused(archive: Path) -> None:
    backslash = archive.with_name("a\\b.onnxa")
    os.rename(archive, backslash)
    with pytest.raises(ValueError, match="has a backslash, which separates directories on Windows"):
        onnxarchive.link(backslash, archive.with_name("link.onnx"))
    no_text = os.fsdecode(os.fsencode(archive.parent) + b"/\xff.onnxa")
    try:
        os.rename(backslash, no_text)
    except OSError:
        return  # the file system takes no such name
    with pytest.raises(ValueError, match="path in UTF-8"):
        onnxarchive.link(no_text, archive.with_name("link.onnx"))


def test_a_link_is_whole_or_not_there(archive: Path) -> None:
    link = archive.with_suffix(".onnx")
    link.write_bytes(b"before")
    error = OSError(28, "no space")
    with patch.object(os, "replace", side_effect=error), refused(link, OSError, "no space"):
        onnxarchive.link(archive, link)
    with refused(link, FileNotFoundError):
        onnxarchive.link(archive.with_name("missing"), link)
    (archive.parent / "directory").mkdir()
    with refused(link, ValueError, r"ONNX allows no '\.\.'"):
        onnxarchive.link(archive, archive.parent / "directory")
    onnxarchive.link(archive, link)
    assert messages(link) == []


def test_a_broken_archive_is_not_linked(archive: Path) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    message = rf"^{re.escape(str(archive))}: .*layer_0_weight"
    with refused(archive, onnxarchive.ArchiveFormatError, message):
        onnxarchive.link(archive, archive.with_suffix(".onnx"))


# Whether a link fits its archive


def test_a_link_fits_its_archive(archive: Path, link: Path) -> None:
    assert onnxarchive.check_link(link) == []
    assert onnxarchive.check_link(link, archive) == []
    moved = archive.parent.parent / "moved"
    os.rename(archive.parent, moved)
    assert onnxarchive.check_link(moved / link.name) == []


def test_a_link_does_not_fit_when_its_archive_is_gone(archive: Path, link: Path) -> None:
    os.rename(archive, archive.with_name("renamed.onnxa"))
    (message,) = messages(link)
    assert message == f"the archive {archive} does not exist"
    with pytest.raises(FileNotFoundError):
        onnxarchive.check_link(link, archive)
    (message,) = messages(link, archive.with_name("renamed.onnxa"))
    assert message == (
        f"external data is in {archive}, not in {archive.with_name('renamed.onnxa')}"
    )


def with_weight(model: onnx.ModelProto) -> None:
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[3, 4] += 1
    model.graph.initializer[0].raw_data = weight.tobytes()


CHANGES: dict[str, tuple[Callable[[onnx.ModelProto], object], dict[str, Any], bool]] = {
    "an asset": (lambda model: None, {"assets": {"labels.txt": b"cat"}}, True),
    "another alignment": (lambda model: None, {"alignment": 4096}, False),
    "other weights of the same layout": (with_weight, {}, False),
    "another graph": (lambda model: setattr(model.graph.node[1], "op_type", "Sub"), {}, False),
    "another tensor in the model": (
        lambda model: setattr(model.graph.initializer[1], "raw_data", bytes(64)),
        {},
        False,
    ),
}


@pytest.mark.parametrize(("change", "options", "fits"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_archive_is_found_if_it_concerns_the_linked_model(
    archive: Path, link: Path, change: Callable[..., object], options: dict[str, Any], fits: bool
) -> None:
    model = runnable_model()
    change(model)
    onnxarchive.save(model, archive, **options)
    assert messages(link) == [CHANGED] * (not fits)
    onnxarchive.link(archive, link)
    assert messages(link) == []


def test_a_tensor_that_is_replaced_is_found(archive: Path, link: Path) -> None:
    with onnxarchive.edit(archive) as edit:
        edit.tensors["layer.0/weight"] = np.zeros((1024, 16), np.float32)
    assert messages(link) == [CHANGED]


def test_tensors_that_compacting_moves_are_found(path: Path) -> None:
    link, decoder = path.with_suffix(".onnx"), model_of(raw_tensor("b", dims=(300,)))
    onnxarchive.save(model_of(raw_tensor("a", dims=(300,))), path, models={"decoder": decoder})
    onnxarchive.link(path, link, model="decoder")
    for is_removed in (False, True):
        assert messages(link) == []
        with onnxarchive.edit(path, compact=True) as edit:
            del edit.models[""].graph.initializer[: int(is_removed)]
    assert messages(link) == [CHANGED]


def _change(link: Path, change: Any) -> None:
    model = parsed(link)
    change(model)
    link.write_bytes(model.SerializeToString())


def _pair(index: int, value: str) -> Any:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].external_data[index].value = value

    return change


def _two_files(model: onnx.ModelProto) -> None:
    weight, bias = model.graph.initializer
    bias.ClearField("raw_data")
    bias.data_location = TensorProto.EXTERNAL
    bias.external_data.extend(weight.external_data)
    bias.external_data[0].value = "other"


OF_AN_ENTRY = "weight'.*expected offset and length of an entry.*found"
LINKS: dict[str, tuple[Any, str]] = {
    "another offset": (_pair(1, "128"), f"{OF_AN_ENTRY} 128 and 65536; write a new"),
    "another length": (_pair(2, "65532"), f"{OF_AN_ENTRY} 64 and 65532; write a new"),
    "no offset": (_pair(1, "-64"), "offset in at most 19 decimal .* leading zeros, found '-64'"),
    "no mark": (
        lambda model: model.ClearField("metadata_props"),
        "the metadata 'onnxarchive.link'.* is missing; write a new link",
    ),
    "two files": (
        _two_files,
        "external data is in several files, not in one archive: 2, such as 'ein .* and 'other'",
    ),
    "another file": (_pair(0, "elsewhere"), "the archive .*elsewhere does not exist"),
}


@pytest.mark.parametrize(("change", "says"), LINKS.values(), ids=LINKS.keys())
def test_a_change_of_a_link_is_found(link: Path, change: Any, says: str) -> None:
    _change(link, change)
    (finding,) = onnxarchive.check_link(link)
    assert isinstance(finding, onnxarchive.Finding)
    assert (finding.rule, finding.entry) == (None, None)
    assert re.search(says, finding.message), finding.message


def test_a_tensor_that_the_link_holds_itself_fits(link: Path) -> None:
    def hold(model: onnx.ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = runnable_model().graph.initializer[0].raw_data

    _change(link, hold)
    assert messages(link, link.with_name("ein Möbel 重み.onnxa")) == []
    with pytest.raises(ValueError, match="the link names no archive"):
        onnxarchive.check_link(link)


def test_a_file_that_is_no_link_is_refused(archive: Path, link: Path) -> None:
    contents = {"serialized ModelProto": b"no model", "one graph, found 2": link.read_bytes() * 2}
    for message, content in contents.items():
        link.write_bytes(content)
        message = rf"^{re.escape(str(link))}: .*{message}"
        with pytest.raises(onnxarchive.ArchiveFormatError, match=message):
            onnxarchive.check_link(link, archive)
    with pytest.raises(onnxarchive.ArchiveFormatError, match="regular file"):
        onnxarchive.check_link(link.parent, archive)
    with pytest.raises(FileNotFoundError):
        onnxarchive.check_link(link.with_name("missing"), archive)


@pytest.mark.parametrize("call", [onnxarchive.check_link, linked_archive])
def test_a_link_larger_than_a_model_can_be_is_refused_unread(
    tmp_path: Path, call: Callable[[Path], object]
) -> None:
    path = tmp_path / "x.onnx"
    path.touch()
    os.truncate(path, 1 << 31)  # a hole
    message = rf"^{re.escape(str(path))}: expected a link of less than .*found 2147483648"
    with pytest.raises(onnxarchive.ArchiveFormatError, match=message):
        call(path)


def test_a_link_of_more_messages_than_a_model_may_have_is_refused_unparsed(
    link: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(1 for _ in every_message(parsed(link)))
    monkeypatch.setattr(model_proto, "MAX_MESSAGES", count)
    assert onnxarchive.check_link(link) == []
    link.write_bytes(link.read_bytes() + onnx.ModelProto(metadata_props=[{}]).SerializeToString())
    with pytest.raises(onnxarchive.ArchiveFormatError) as caught:
        onnxarchive.check_link(link)
    assert str(caught.value) == f"{link}: the model has more than {count} messages, the limit"
    assert caught.value.rule is None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    onnxarchive.save(runnable_model(2048), folder / "m.onnxa", size_threshold=0)
    onnxarchive.link(folder / "m.onnxa", folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.sweep
@requires_outcomes(refused=30, fitting=5, misfits=10)
@settings(deadline=None, max_examples=500)
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 1 << 16),
            st.sampled_from(["keep", "set", "set", "set", "insert", "delete"]),
            st.integers(0, 255),
        ),
        max_size=3,
    ),
    is_named=st.booleans(),
)
def test_a_damaged_link_is_refused_or_found(
    sound: Path, changes: list[tuple[int, str, int]], is_named: bool
) -> None:
    before = sound.read_bytes()
    data = bytearray(before)
    for offset, kind, byte in changes:
        offset %= len(data)
        if kind == "set":
            data[offset] = byte
        elif kind == "insert":
            data[offset:offset] = bytes([byte])
        elif kind == "delete":
            del data[offset]
    damaged = sound.with_name("damaged.onnx")
    damaged.write_bytes(data)
    try:
        found = onnxarchive.check_link(damaged, sound.with_suffix(".onnxa") if is_named else None)
    except (onnxarchive.ArchiveError, ValueError, OSError):
        count_outcome("refused")  # no model, or no name of a file
        return
    count_outcome("misfits" if found else "fitting")
    if found == []:
        with onnxarchive.open(sound.with_suffix(".onnxa")) as archive:
            positions = {(entry.data_offset, entry.nbytes) for entry in archive.entries.values()}
        for tensor in every_tensor(onnx.ModelProto.FromString(bytes(data))):
            pairs = {pair.key: pair.value for pair in tensor.external_data}
            if tensor.data_location == TensorProto.EXTERNAL:
                assert (int(pairs.get("offset", 0)), int(pairs["length"])) in positions
                assert pairs["location"] == "m.onnxa"


def test_a_broken_archive_is_refused(archive: Path, link: Path) -> None:
    flip_byte(archive, archive.stat().st_size - 1)
    with pytest.raises(onnxarchive.ArchiveFormatError):
        onnxarchive.check_link(link)


def test_the_fingerprint_of_a_link_is_as_documented(archive: Path, link: Path) -> None:
    data = runnable_model().graph.initializer[0].raw_data
    with zipfile.ZipFile(archive) as unzipped:
        model = unzipped.getinfo("__MODEL_PROTO").CRC
    lines = f"layer_0_weight 64 65536 {zlib.crc32(data):08x}\n{model:08x}\n"
    (pair,) = parsed(link).metadata_props
    assert pair.key == KEY
    assert pair.value == hashlib.sha256(lines.encode()).hexdigest()


def test_tensors_that_may_give_a_shape_stay_in_the_link(path: Path) -> None:
    """They are small tensors, and short vectors of indices."""
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "held small": np.zeros(255, np.float32),
        "held nothing": np.zeros(0, np.float32),
        "held indices": np.zeros(128, np.int64),
        "held vector": np.zeros(8191, np.int64),
        "held vector of 4 bytes": np.zeros(16383, np.int32),
        "outside vector": np.zeros(8192, np.int64),
        "outside matrix": np.zeros((2, 200), np.int64),
        "outside small matrix": np.zeros((8, 16), np.int64),
        "outside unsigned": np.zeros(128, np.uint64),
        "outside weight": np.zeros(256, np.float32),
    }
    model = model_of(*(numpy_helper.from_array(it, name) for name, it in arrays.items()))
    onnxarchive.save(model, path, size_threshold=0)
    onnxarchive.link(path, path.with_suffix(".onnx"))
    for tensor in parsed(path.with_suffix(".onnx")).graph.initializer:
        assert bool(tensor.external_data) == tensor.name.startswith("outside")


@pytest.mark.parametrize(("count", "ways"), [(8191, {}), (8192, {"size_threshold": (1 << 16) + 1})])
def test_a_link_with_the_sizes_of_a_split_runs_as_documented(
    path: Path, count: int, ways: dict[str, Any]
) -> None:
    parts, last = ", ".join(f"y{it}" for it in range(count)), f"y{count - 1}"
    model = text_model(
        f"g (int64[{count}] x) => (int64[1] {last}) {{ {parts} = Split(x, parts) }}",
        numpy_helper.from_array(np.ones(count, np.int64), "parts"),
    )
    onnxarchive.save(model, path, **ways)
    onnxarchive.link(path, path.with_suffix(".onnx"))
    (found,) = run_model(path.with_suffix(".onnx"), x=np.arange(count))
    assert found.tolist() == [count - 1]


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../m.onnxa", "x/../m.onnxa", "m.onnxa\0", "x\\m.onnxa", "link/m.onnxa"],
)
def test_a_location_outside_the_folder_of_a_link_is_found_and_not_opened(
    archive: Path, link: Path, location: str
) -> None:
    (archive.parent / "link").symlink_to(archive.parent.parent)
    onnxarchive.save(runnable_model(), archive.parent.with_name("m.onnxa"))
    os.link(archive, archive.with_name("m.onnxa"))
    _change(link, _pair(0, location))
    for found in (messages(link), messages(link, archive)):
        assert "in the link's directory or below" in str(found)
