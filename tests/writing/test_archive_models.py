"""Archives of several models: what is stored once, in which order, and how each model is read."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import edits
import numpy as np
import onnx
import pytest
from models import (
    every_tensor,
    external,
    flip_byte,
    full_model,
    further_model,
    location,
    mixed_model,
    model_of,
    nested_model,
    raw_tensor,
    runnable_model,
    typed,
)
from onnx import TensorProto, numpy_helper
from several_models import A, B, C, entries_of, floats, keys_of, of, require_loads
from written import saved
from zip_entries import add_bytes

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, ModelNotFoundError, Writer
from onnxarchive.files.data import Crc32, are_equal
from onnxarchive.model import model_proto
from onnxarchive.zipformat.writer import ZipWriter

DEFAULT = "__MODEL_PROTO"
DECODER = "__MODEL_PROTO_decoder"
# Reading


@pytest.fixture
def pair(path: Path) -> Path:
    """An archive of two models that share a tensor."""
    onnxarchive.save(of(a=A, b=B), path, models={"decoder": of(z=A, c=C)}, assets={"x": b"y"})
    return path


def test_each_model_is_read_with_its_own_tensors(pair: Path) -> None:
    models = {"": {"a": A, "b": B}, "decoder": {"z": A, "c": C}}
    for id, contents in models.items():
        with onnxarchive.open(pair, model=id) as archive:
            assert archive.model_id == id
            assert archive.model is archive.models[id]
            assert {name: it.tobytes() for name, it in archive.tensors.items()} == contents
            assert list(archive.models) == ["", "decoder"]
            with pytest.raises(TypeError):
                archive.models["x"] = archive.model  # type: ignore[index]
            assert archive.tensor_by_key("a").tobytes() == A
            with pytest.raises(onnxarchive.TensorNotFoundError):
                archive.tensors["b" if id else "c"]
            assert bytes(archive.assets["x"]) == b"y"
            assert bytes(archive.read(DEFAULT)) != bytes(archive.read(DECODER))
    require_loads(pair, {id: of(**contents) for id, contents in models.items()})


@pytest.mark.parametrize("id", ["x", "Decoder", "__MODEL_PROTO", " ", "décodeur"])
def test_the_error_of_a_missing_model_lists_the_existing_ones(pair: Path, id: Any) -> None:
    for read in (
        lambda: onnxarchive.open(pair, model=id),
        lambda: edits.document(pair, model=id),
        lambda: onnxarchive.load(pair, model=id),
    ):
        with pytest.raises(ModelNotFoundError) as caught:
            read()
        assert str(caught.value).startswith(f"{pair}: there is no model with the id {id!r}, ")
        assert "only '', 'decoder'" in str(caught.value)
        assert caught.value.path == str(pair)
    assert onnxarchive.check(pair, full=True) == []  # nobody has it locked


def test_a_limit_bounds_the_sizes_of_all_models_together(pair: Path) -> None:
    with onnxarchive.open(pair) as archive:
        total = sum(archive.entries[name].nbytes for name in (DEFAULT, DECODER))
    onnxarchive.open(pair, max_model_nbytes=total).close()
    assert onnxarchive.check(pair, max_model_nbytes=total) == []
    for read in (
        lambda: onnxarchive.open(pair, max_model_nbytes=total - 1),
        lambda: edits.document(pair, max_model_nbytes=total - 1),
        lambda: onnxarchive.load(pair, model="decoder", max_model_nbytes=total - 1),
    ):
        with pytest.raises(ArchiveFormatError, match=f"at most {total - 1} bytes .* {total}"):
            read()
    (finding,) = onnxarchive.check(pair, max_model_nbytes=total - 1)
    assert finding.rule == "MODEL-2"


@pytest.mark.parametrize("name", [DECODER, "a"])
def test_findings_name_the_entry_at_fault(pair: Path, name: str) -> None:
    with onnxarchive.open(pair) as archive:
        entry = archive.entries[name]
        flip_byte(pair, entry.data_offset + entry.nbytes - 1)
        if name == "a":  # which both models share
            with pytest.raises(ChecksumError, match="'a'"):
                archive.verify()
    (finding,) = onnxarchive.check(pair, full=True)
    assert (finding.rule, finding.entry) == ("ZIP-15", name)
    for id in ("", "decoder"):
        with pytest.raises(ChecksumError, match=name):
            onnxarchive.load(pair, model=id)


# What is stored, and in which order


def test_tensors_are_stored_in_the_order_of_the_models_and_equal_ones_once() -> None:
    models = {"b": of(n=B, c=C), "a": of(b=B, a2=A), "a_b": of(d=C)}
    data = saved(of(w=A), models=models, assets={"x": b""})
    assert entries_of(data) == [
        *("w", "b", "d", "assets/x"),
        *("__MODEL_PROTO_a", "__MODEL_PROTO_a_b", "__MODEL_PROTO_b", DEFAULT),
    ]


def test_the_n_th_equal_tensor_takes_the_n_th_equal_entry(path: Path) -> None:
    models = {
        "one": of(x=A, y=A),
        "three": of(x=A, other=C, y=A, z=A),
        "two": of(x=A, y=A, z=A, more=A, b=B),
    }
    onnxarchive.save(of(w=A, between=B, w2=A), path, models=models)
    shared = {"x": "w", "y": "w2"}
    assert keys_of(path, "one") == shared
    assert keys_of(path, "three") == shared | {"other": "other", "z": "z"}
    assert keys_of(path, "two") == shared | {"z": "z", "more": "more", "b": "between"}
    require_loads(path, {"": of(w=A, between=B, w2=A), **models})


def test_only_type_dims_and_bytes_decide_and_no_name(path: Path) -> None:
    w = raw_tensor("w", TensorProto.INT32, (30, 40), 1)
    others = [
        TensorProto(name="w", data_type=number, dims=dims, raw_data=w.raw_data)
        for number, dims in (
            (TensorProto.FLOAT, (30, 40)),
            (TensorProto.INT32, (40, 30)),
            (TensorProto.INT32, (1, 30, 40)),
            (TensorProto.INT32, (1200,)),
        )
    ]
    equal = typed(w)
    equal.name, equal.doc_string = "another name", "and text"
    onnxarchive.save(model_of(w), path, models={"o": model_of(*others), "p": model_of(equal)})
    with onnxarchive.open(path, model="o") as archive:
        keys = [location(it) for it in archive.model.graph.initializer]
    assert keys == ["w_2", "w_3", "w_4", "w_5"]
    assert keys_of(path, "p") == {"another name": "w"}


def test_the_bytes_do_not_depend_on_the_order_in_which_models_are_given() -> None:
    models = {"b": mixed_model(), "a": of(w=A), "c": full_model()}
    data = saved(of(x=A), models=models)
    assert data == saved(of(x=A), models=dict(reversed(models.items())))
    for jobs in (1, 2, 7):
        assert data == saved(of(x=A), models=models, jobs=jobs)


def test_an_archive_with_one_model_keeps_its_bytes() -> None:
    for model in (mixed_model(), full_model(), of(a=A, b=A, c=A)):
        assert saved(model) == saved(model, models={}) == saved(model, models=None)


def test_equal_tensors_of_every_place_are_shared(path: Path) -> None:
    model = full_model()
    further = {"same": model, "third": model}
    onnxarchive.save(model, path, models=further, convert_attribute=True, size_threshold=0)
    with onnxarchive.open(path) as archive:
        count = len([it for it in every_tensor(model) if it.data_type != TensorProto.STRING])
        assert len(archive.entries) == count + 3
    require_loads(path, {"": model, **further})


def random_models(seed: int) -> dict[str, onnx.ModelProto]:
    drawn = random.Random(seed)
    return {
        id: model_of(
            *(
                raw_tensor(
                    drawn.choice("abcde") + str(number),
                    drawn.choice([TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT4]),
                    drawn.choice([(20,), (5, 4), (0,), ()]),
                    drawn.randrange(3),
                )
                for number in range(drawn.randrange(9))
            )
        )
        for id in ("", *drawn.sample(["a", "b", "c", "dd", "d_1"], drawn.randrange(4)))
    }


def expected_keys(models: dict[str, onnx.ModelProto]) -> dict[str, list[str]]:
    """The keys of each model's tensors, as the specification says (section 10.2)."""
    holding: dict[tuple[int, tuple[int, ...], bytes], list[str]] = {}
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for id, model in sorted(models.items()):
        used: dict[object, int] = {}
        for tensor in model.graph.initializer:
            content = tensor.data_type, tuple(tensor.dims), tensor.raw_data
            number = used[content] = used.get(content, 0) + 1
            keys = holding.setdefault(content, [])
            if len(keys) < number:
                name, more = tensor.name, 2
                while name in taken:
                    name, more = f"{tensor.name}_{more}", more + 1
                taken.add(name)
                keys.append(name)
            found.setdefault(id, []).append(keys[number - 1])
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_models_share_what_the_specification_says(path: Path, seed: int) -> None:
    models = random_models(seed)
    further = {id: model for id, model in models.items() if id}
    onnxarchive.save(models[""], path, models=further, size_threshold=0)
    for id, expected in expected_keys(models).items():
        with onnxarchive.open(path, model=id) as archive:
            assert [location(it) for it in archive.model.graph.initializer] == expected
    require_loads(path, models)
    before = path.read_bytes()
    onnxarchive.convert(path, path.with_name("again"), size_threshold=0)
    assert path.with_name("again").read_bytes() == before


# Ids


@pytest.mark.parametrize(
    "id",
    ["A", "1", "_a", "a-b", "a.b", "é", "a\n", "a ", "Decoder", "a" * 65, "__MODEL_PROTO", "a\0"],
)
def test_an_invalid_model_id_is_refused_by_every_function_that_writes(path: Path, id: str) -> None:
    source = path.with_name("m.onnx")
    source.write_bytes(of(w=A).SerializeToString())
    before = sorted(path.parent.iterdir())
    for write in (
        lambda: onnxarchive.save(of(w=A), path, models={id: of(w=A)}),
        lambda: onnxarchive.convert(source, path, models={id: source}),
        lambda: finish(path, of(w=A), {id: of(w=A)}),
    ):
        with pytest.raises(ValueError, match=r"\[a-z\]\[a-z0-9_\]\* of at most 64 bytes") as caught:
            write()
        assert repr(id) in str(caught.value)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("id", "message"),
    [
        (1, r"expected the id of a model as .*, got 1$"),
        ("", "expected an id such as 'decoder', got ''"),
    ],
)
def test_a_number_and_an_empty_text_are_no_ids_of_further_models(
    path: Path, id: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        onnxarchive.save(of(w=A), path, models={id: of(w=A)})


def test_ids_are_as_long_as_the_format_allows(path: Path) -> None:
    models = {"a": of(w=A), "a" * 64: of(w=A), "z0_9_": of(w=B)}
    onnxarchive.save(of(w=C), path, models=models)
    require_loads(path, {"": of(w=C), **models})


# What is read to find equal tensors


def uncompared() -> Any:
    """A block in which no data is compared."""
    error = AssertionError("data is compared")
    return patch("onnxarchive.writing.sharing.are_equal", side_effect=error)


@pytest.fixture
def summed() -> Iterator[list[int]]:
    """The size of all data of which a CRC-32 is computed to find equal tensors."""
    sizes: list[int] = []
    of_data = Crc32.of

    def counted(pieces: Iterable[memoryview]) -> Crc32:
        checksum = of_data(pieces)
        sizes.append(checksum.nbytes)
        return checksum

    with patch.object(Crc32, "of", counted):
        yield sizes


def planned(write: Callable[[], object]) -> None:
    """Runs what writes an archive up to where it is planned."""

    with (
        patch("onnxarchive.writing.save.write_archive", side_effect=InterruptedError),
        pytest.raises(InterruptedError),
    ):
        write()


def test_tensors_are_read_only_if_another_model_has_one_of_their_type_and_dims(
    path: Path, summed: list[int]
) -> None:
    alone = model_of(*(raw_tensor(f"{n}{it}", dims=(it,)) for n in "wv" for it in range(300, 304)))
    other = model_of(raw_tensor("w", dims=(400,)), raw_tensor("v", TensorProto.INT32, (300,)))
    planned(lambda: onnxarchive.save(alone, path, models={"other": other}))
    assert summed == []
    other.graph.initializer.append(raw_tensor("u", dims=(302,), seed=9))
    planned(lambda: onnxarchive.save(alone, path, models={"other": other}))
    assert summed == [1208, 1208, 1208]


def test_no_weight_of_an_archive_is_read_to_find_those_that_are_equal(
    pair: Path, summed: list[int]
) -> None:
    with uncompared():
        onnxarchive.convert(pair, pair.with_name("again"), dry_run=True)
        edits.replace_model(pair, further_model(), name="third")
    assert summed == [] or max(summed) < 70_000  # of the new model alone
    assert onnxarchive.check(pair, full=True) == []


def test_data_in_the_same_place_of_a_file_is_not_compared(path: Path, summed: list[int]) -> None:
    path.with_name("w.data").write_bytes(A + B)
    w = external(floats("w", A), "w.data", offset=0, length=1200)
    v = external(floats("v", B), "w.data", offset=1200, length=1200)
    for name in ("one", "two"):
        path.with_name(f"{name}.onnx").write_bytes(model_of(w, v).SerializeToString())
    one, two = (path.with_name(f"{name}.onnx") for name in ("one", "two"))
    with uncompared():
        conversion = onnxarchive.convert(one, path, models={"two": two}, dry_run=True)
        assert summed == [1200] * 4
        assert conversion.shared_nbytes == 2400
        onnxarchive.convert(one, path, models={"two": two})
    assert keys_of(path) == keys_of(path, "two") == {"w": "w", "v": "v"}


@pytest.fixture
def compared() -> Iterator[Mock]:
    """Counts the comparisons of data."""
    with patch("onnxarchive.writing.sharing.are_equal", side_effect=are_equal) as calls:
        yield calls


def with_crc32(data: bytes, crc32: int) -> bytes:
    """These bytes with the last four such that the CRC-32 of all is another."""
    # CRC-32 is affine: each bit of the last four bytes flips the same bits, whatever the others.
    base = zlib.crc32(data[:-4] + bytes(4))
    flips = [zlib.crc32(data[:-4] + (1 << bit).to_bytes(4, "little")) ^ base for bit in range(32)]
    rows = [(flip, 1 << bit) for bit, flip in enumerate(flips)]
    wanted, last = crc32 ^ base, 0
    for bit in range(32):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (flip ^ pivot[0], mask ^ pivot[1]) if flip >> bit & 1 else (flip, mask)
            for flip, mask in rows
            if (flip, mask) != pivot
        ]
        if wanted >> bit & 1:
            wanted, last = wanted ^ pivot[0], last ^ pivot[1]
    made = data[:-4] + last.to_bytes(4, "little")
    assert zlib.crc32(made) == crc32
    return made


def test_tensors_made_to_have_the_same_crc_32_are_compared_with_a_few_others_alone(
    path: Path, compared: Mock
) -> None:
    count = 100
    made = [with_crc32(raw_tensor("", dims=(300,), seed=it).raw_data, 1) for it in range(count)]
    assert len({*made}) == count
    model = of(**{f"w{number}": data for number, data in enumerate(made)})
    other = of(**{f"v{number}": data for number, data in enumerate(reversed(made))})
    onnxarchive.save(model, path, models={"other": other})
    assert 0 < compared.call_count < 20 * count
    require_loads(path, {"": model, "other": other})


def test_many_equal_tensors_are_shared_in_linear_time(path: Path, compared: Mock) -> None:
    ones = np.ones(300, np.float32)
    model = model_of(*(numpy_helper.from_array(ones, f"w{number}") for number in range(5000)))
    onnxarchive.save(model, path, models={"other": model})
    assert compared.call_count < 10_001
    assert keys_of(path) == keys_of(path, "other")
    with onnxarchive.open(path) as archive:
        assert len(archive.entries) == 5002


# Limits


def test_models_with_too_many_messages_together_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nested_model(20)
    onnxarchive.save(model, path, models={"other": model})
    before = path.read_bytes()
    monkeypatch.setattr(model_proto, "MAX_MESSAGES", 100)
    onnxarchive.save(model, path.with_name("alone"))
    path.with_name("alone").unlink()
    writes: list[Callable[[], None]] = [
        lambda: onnxarchive.save(model, path, models={"other": model}),
        lambda: finish(path, model, {"other": model}),
    ]
    for write in writes:
        with pytest.raises(
            ArchiveFormatError, match="all models together have more than 100 messages"
        ):
            write()
        assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_no_model_after_a_malformed_one_is_parsed_since_its_messages_are_not_counted(
    path: Path,
) -> None:
    with path.open("wb") as file:
        writer = ZipWriter(file)
        add_bytes(writer, DECODER, of().SerializeToString())
        add_bytes(writer, DEFAULT, b"\x07")
        writer.finish()
    parsed = onnx.ModelProto.FromString
    with patch.object(onnx.ModelProto, "FromString", side_effect=parsed) as parse:
        assert [it.entry for it in onnxarchive.check(path)] == [DEFAULT]
    assert parse.call_count == 0


# Writer


def finish(
    path: Path, model: onnx.ModelProto, models: dict[str, onnx.ModelProto], **added: bytes
) -> None:
    with Writer(path) as writer:
        for name, data in added.items():
            writer.add(name, np.frombuffer(data, np.float32))
        writer.finish(model, models)


def named(*names: str) -> onnx.ModelProto:
    return model_of(*(TensorProto(name=name) for name in names))


def test_an_added_tensor_belongs_to_the_models_that_name_it(path: Path) -> None:
    models = {"x": named("b", "c"), "y": named("c"), "z": of(own=A, d=B)}
    finish(path, named("a", "c"), models, a=A, b=B, c=C, unnamed=A)
    require_loads(
        path, {"": of(a=A, c=C, unnamed=A), "x": of(b=B, c=C), "y": of(c=C), "z": of(own=A, d=B)}
    )
    with onnxarchive.open(path) as archive:
        assert list(archive.entries)[:-4] == ["a", "b", "c", "unnamed", "own", "d"]


def test_tensors_that_models_hold_themselves_are_shared(path: Path) -> None:
    finish(path, of(a=A, b=B), {"x": of(n=B, a=A), "y": of(m=C, n=B)})
    assert path.read_bytes() == saved(of(a=A, b=B), models={"x": of(n=B, a=A), "y": of(m=C, n=B)})


@pytest.mark.parametrize("id", ["", "x"])
def test_an_added_tensor_must_fit_each_model_that_names_it(path: Path, id: str) -> None:
    fitting, other = named("a"), named("a")
    other.graph.initializer[0].data_type = TensorProto.FLOAT
    other.graph.initializer[0].dims.append(299)
    model, further = (other, fitting) if not id else (fitting, other)
    with pytest.raises(ArchiveFormatError, match=r"FLOAT of shape \[299\] as in the model, found"):
        finish(path, model, {"x": further}, a=A)
    assert os.listdir(path.parent) == []


def test_a_model_names_an_added_tensor_once(path: Path) -> None:
    twice = named("a")
    twice.graph.node.add(
        op_type="If", attribute=[onnx.helper.make_attribute("g", named("a").graph)]
    )
    with pytest.raises(
        ArchiveFormatError, match="both have the data of 'a'; add a tensor for each"
    ):
        finish(path, named("a"), {"x": twice}, a=A)
    assert os.listdir(path.parent) == []


def test_a_writer_gives_the_bytes_of_save_for_the_tensors_of_one_model(path: Path) -> None:
    model, decoder = runnable_model(), further_model()
    onnxarchive.save(model, path, models={"decoder": decoder})
    expected = path.read_bytes()
    embedding, own = decoder.graph.initializer[:2]
    weight = model.graph.initializer[0]
    with Writer(path) as writer:
        for tensor in (weight, own):
            writer.add(tensor.name, numpy_helper.to_array(tensor))
            tensor.ClearField("raw_data")
        embedding.CopyFrom(external(embedding, "layer_0_weight"))
        writer.finish(model, {"decoder": decoder})
    assert path.read_bytes() == expected
