"""Parts of tensors, read by index: compared with numpy, and counted at a server."""

from __future__ import annotations

import concurrent.futures
import io
import random
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import NUMBERS, break_local_header, model_of, nested_model, raw_tensor
from onnx import TensorProto, numpy_helper
from remote_archives import PATH, an_archive, arrays_of, with_byte_flipped
from versions import object_store
from web_server import Answer, WebServer
from written import saved

import onnxarchive
from onnxarchive import (
    ArchiveFormatError,
    ChecksumError,
    ObjectChangedError,
    TensorNotFoundError,
    TensorSlice,
)

SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (7,), (0,), (4, 3), (0, 3), (3, 0), (1, 5), (3, 2, 4), (2, 0, 3), (2, 3, 1, 2)),
)
# Assets of this size lie at the end, so that tensors are not among the bytes that opening reads.
LARGER_THAN_END = {"a": bytes(300_000)}
KINDS = ("path", "bytes", "BytesIO", "store")


def _strings() -> TensorProto:
    words = np.array([[["a", "größer"], ["", "b"], ["c", "d"]]], object)
    return numpy_helper.from_array(words, "strings")


def _small_model() -> onnx.ModelProto:
    """A model with a tensor of each type and shape."""
    tensors = [
        raw_tensor(f"{name}{shape}", number, shape, seed=number)
        for name, number in NUMBERS.items()
        for shape in SHAPES
    ]
    return model_of(*tensors, _strings())


MODEL = _small_model()
ARRAYS = arrays_of(MODEL)
IN_ENTRIES = saved(MODEL, size_threshold=0, assets=LARGER_THAN_END)


def _opened(data: bytes, kind: str, folder: Path) -> onnxarchive.Archive:
    if kind == "path":
        (folder / "m.onnxa").write_bytes(data)
        return onnxarchive.open(folder / "m.onnxa")
    if kind == "store":
        store = object_store("MemoryStore")
        store.put("m.onnxa", data)
        return onnxarchive.open("m.onnxa", store=store)
    return onnxarchive.open(io.BytesIO(data) if kind == "BytesIO" else data)


def _item(draw: random.Random, dim: int) -> Any:
    """An integer or a slice; some are out of range."""
    if draw.random() < 0.4:
        return draw.randint(-dim - (draw.random() < 0.05), max(dim - 1, 0))
    start, stop = (draw.choice([None, draw.randint(-dim - 2, dim + 2)]) for _ in range(2))
    return slice(start, stop, draw.choice([None, 1, 2, 3, 100, -1, -2, -100]))


def _index(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """A basic index for a shape, or one with an item too many."""
    items = [_item(draw, dim) for dim in shape[: draw.randint(0, len(shape))]]
    if draw.random() < 0.02:
        items = [0] * (len(shape) + 1)
    if draw.random() < 0.3:
        at = draw.randint(0, len(items))
        items = [
            *items[:at],
            ...,
            *(_item(draw, dim) for dim in shape[len(shape) - len(items) + at :]),
        ]
    for _ in range(draw.choice([0, 0, 1, 2])):
        items.insert(draw.randint(0, len(items)), None)
    return items[0] if len(items) == 1 and draw.random() < 0.5 else tuple(items)


def _require_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, str):
        assert found == expected
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if expected.dtype.hasobject:
        assert found.tolist() == expected.tolist()
    else:
        assert found.tobytes() == expected.tobytes()
    assert not isinstance(found, np.ndarray) or not found.flags.writeable


@pytest.mark.parametrize("kind", [*KINDS, "in the model"])
def test_a_part_is_that_of_numpy_for_every_type_shape_and_basic_index(
    kind: str, tmp_path: Path
) -> None:
    data = saved(MODEL, size_threshold=1 << 20) if kind == "in the model" else IN_ENTRIES
    draw = random.Random(kind)
    count = 4 if kind == "store" else 25  # indexes of each tensor; a request takes a millisecond
    compared = refused = 0
    with _opened(data, kind, tmp_path) as archive:
        for name, array in ARRAYS.items():
            part = archive.get_slice(name)
            for _ in range(count):
                index = _index(draw, array.shape)
                try:
                    expected = array[index]
                except IndexError:
                    with pytest.raises(IndexError, match="tensor '"):
                        part[index]
                    refused += 1
                else:
                    _require_same(part[index], expected)
                    compared += 1
    # 240 and 4 of 271 tensors, if onnx has all types.
    assert compared > 0.88 * len(ARRAYS) * count
    assert refused > 0.014 * len(ARRAYS) * count


@pytest.mark.parametrize("kind", KINDS)
def test_shape_type_and_size_are_those_of_the_array(kind: str, tmp_path: Path) -> None:
    with _opened(IN_ENTRIES, kind, tmp_path) as archive:
        for name, array in ARRAYS.items():
            part = archive.get_slice(name)
            assert isinstance(part, TensorSlice)
            assert (part.name, part.shape, part.dtype) == (name, array.shape, array.dtype)
            assert part.nbytes == archive.tensors[name].nbytes
        shown = repr(archive.get_slice("INT4(4, 3)"))
        assert shown == "<TensorSlice 'INT4(4, 3)', int4, [4, 3]>"


# What a mapped file gives


@pytest.mark.parametrize("kind", ["path", "bytes"])
def test_a_part_of_a_map_is_a_view_that_outlives_the_archive(kind: str, tmp_path: Path) -> None:
    data = saved(model_of(raw_tensor("w", dims=(100, 30))))
    with _opened(data, kind, tmp_path) as archive:
        whole, part = archive.tensors["w"], archive.get_slice("w")[10:-2:3, ::-1]
        assert np.shares_memory(part, whole)
        expected = whole[10:-2:3, ::-1].copy()
    assert np.array_equal(part, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["BytesIO", "store"])
def test_a_copied_part_keeps_nothing_else_in_memory(kind: str, tmp_path: Path) -> None:
    model = model_of(raw_tensor("w", dims=(100, 30)), raw_tensor("n", TensorProto.INT4, (4000,)))
    with _opened(saved(model), kind, tmp_path) as archive:
        for index in (slice(0, 90, 30), (slice(3), 0), (slice(0, 1), slice(2))):
            assert archive.get_slice("w")[index].base is None
        assert archive.get_slice("n")[:4].base is None


def test_rows_that_are_read_are_not_copied_again(counted: Counted) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(counted.web.files[PATH])
        with onnxarchive.open(file) as archive:
            part = archive.get_slice("w")
            part[0]
            tracemalloc.start()
            try:
                rows = part[:1000]
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
    assert rows.nbytes <= peak < 1.1 * rows.nbytes


# Indexes that are refused


@pytest.mark.parametrize(
    "index",
    [
        np.array([1]),
        np.array(1),
        [0, 1],
        True,
        np.True_,
        (0, np.array([True])),
        (slice(2), [1]),
        (0, (1, 2)),
        1.0,
        "a",
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_lists_and_booleans_are_refused_with_what_to_do(
    kind: str, index: Any, tmp_path: Path
) -> None:
    with _opened(IN_ENTRIES, kind, tmp_path) as archive:
        for name in ("FLOAT(4, 3)", "INT4(4, 3)", "strings"):
            with pytest.raises(
                TypeError, match=r"take the array by `\[\.\.\.\]`, then index"
            ) as caught:
                archive.get_slice(name)[index]
            assert str(caught.value).startswith(
                f"{archive.path}: tensor '{name}': expected integers"
            )


@pytest.mark.parametrize(
    ("index", "kind", "text"),
    [
        (4, IndexError, "index 4 is out of bounds for axis 0 with size 4"),
        ((0, -4), IndexError, "index -4 is out of bounds for axis 1 with size 3"),
        ((0, 0, 0), IndexError, "too many indices"),
        ((..., 0, ...), IndexError, "single ellipsis"),
        (1 << 70, IndexError, "within the shape [4, 3], found an integer of 71 bits"),
        ((0, -(1 << 70)), IndexError, "within the shape [4, 3], found an integer of 71 bits"),
        (slice(0, 4, 0), ValueError, "slice step cannot be zero"),
        (slice(0.0, 4), TypeError, "slice indices must be integers"),
    ],
)
@pytest.mark.parametrize("source", ["path", "store"])
def test_a_wrong_index_is_refused_with_the_tensors_name(
    index: Any, kind: type[Exception], text: str, source: str, tmp_path: Path
) -> None:
    with _opened(IN_ENTRIES, source, tmp_path) as archive:
        for name in ("FLOAT(4, 3)", "INT4(4, 3)"):
            with pytest.raises(kind) as caught:
                archive.get_slice(name)[index]
            assert type(caught.value) is kind
            assert str(caught.value).startswith(f"{archive.path}: tensor '{name}': ")
            assert text in str(caught.value)


def test_numpys_integers_are_indexes(tmp_path: Path) -> None:
    with _opened(IN_ENTRIES, "store", tmp_path) as archive:
        part, array = archive.get_slice("FLOAT(4, 3)"), ARRAYS["FLOAT(4, 3)"]
        _require_same(part[np.int64(2)], array[2])
        _require_same(part[np.uint8(1) : np.int32(3), np.int16(-1)], array[1:3, -1])


# Names


def test_names_are_those_of_the_chosen_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnxa"
    path.write_bytes(an_archive())
    with onnxarchive.open(path, model="further") as archive:
        assert archive.get_slice("own").shape == (5000,)
        with pytest.raises(TensorNotFoundError):
            archive.get_slice("large1")
    with onnxarchive.open(path) as archive:
        assert archive.get_slice("large1")[1:3].tobytes() == archive.read("large1")[4:12]
        with pytest.raises(
            TensorNotFoundError, match="there is no initializer 'larg1'; did you mean 'large1'"
        ):
            archive.get_slice("larg1")


def test_a_name_of_several_initializers_is_refused() -> None:
    data = saved(nested_model(3, raw_tensor("w", dims=(300,))))
    several = pytest.raises(TensorNotFoundError, match="several initializers have the name 'w'")
    with onnxarchive.open(data) as archive, several:
        archive.get_slice("w")


def test_data_in_the_model_that_does_not_fit_is_refused() -> None:
    tensor = raw_tensor("w", dims=(4,))
    tensor.raw_data = tensor.raw_data[:-1]
    misfit = pytest.raises(ArchiveFormatError, match="'w'")
    with onnxarchive.open(saved(model_of(tensor))) as archive, misfit:
        archive.get_slice("w")


# What is checked


@pytest.mark.parametrize("kind", KINDS)
def test_the_local_header_is_compared_before_data_is_given_out(kind: str, tmp_path: Path) -> None:
    data = saved(model_of(raw_tensor("w", dims=(100, 30))), assets=LARGER_THAN_END)
    with onnxarchive.open(data) as archive:
        entry = archive.entries["w"]
    (tmp_path / "damaged").write_bytes(data)
    break_local_header(tmp_path / "damaged", entry)
    with _opened((tmp_path / "damaged").read_bytes(), kind, tmp_path) as archive:
        for index in (slice(4, 8), slice(4, 4), (0, 0), ...):
            with pytest.raises(ArchiveFormatError, match=r"entry 'w': .*\[ZIP-7\]"):
                archive.get_slice("w")[index]


@pytest.mark.parametrize("kind", ["BytesIO", "store"])
def test_only_parts_that_need_all_rows_are_compared_with_the_crc(kind: str, tmp_path: Path) -> None:
    data = saved(
        model_of(raw_tensor("w", dims=(100, 30)), raw_tensor("n", TensorProto.INT4, (4000,)))
    )
    with onnxarchive.open(data) as archive:
        for name in ("w", "n"):
            data = with_byte_flipped(data, archive.entries[name].data_offset + 10)
    with _opened(data, kind, tmp_path) as archive:
        part = archive.get_slice("w")
        assert part[:4].shape == (4, 30)
        for index in (..., slice(None), (slice(None), 3), (slice(None, None, 99), 3)):
            with pytest.raises(ChecksumError, match="entry 'w'"):
                part[index]
        with pytest.raises(ChecksumError, match="entry 'n'"):
            archive.get_slice("n")[:4]  # packed types are read whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_archive_gives_no_part(kind: str, tmp_path: Path) -> None:
    archive = _opened(IN_ENTRIES, kind, tmp_path)
    parts = [archive.get_slice(name) for name in ("FLOAT(4, 3)", "INT4(4, 3)", "FLOAT(3, 0)")]
    parts[0][1]
    archive.close()
    for part in parts:
        assert len(part.shape) == 2
        for index in (0, slice(0, 0), ...):
            with pytest.raises(ValueError, match="closed"):
                part[index]


def test_a_file_object_that_becomes_shorter_is_an_error() -> None:
    file = io.BytesIO(IN_ENTRIES)
    with onnxarchive.open(file) as archive:
        part = archive.get_slice("FLOAT(4, 3)")
        part[0]
        file.truncate(archive.entries["FLOAT_4__3_"].data_offset + 20)
        assert part[0].shape == (3,)
        with pytest.raises(
            ArchiveFormatError, match=r"expected 12 bytes .*, found 8; the file"
        ) as it:
            part[1]
        assert it.value.entry == "FLOAT_4__3_"


# Remote archives: requests and bytes

ROW_NBYTES = 2048


class Counted:
    """An archive at a server that counts: the tensor `w` of some rows, and then a small one."""

    def __init__(self, web: WebServer, folder: Path, count: int) -> None:
        self.rows = np.arange(count * ROW_NBYTES // 4, dtype=np.int32).reshape(count, -1)
        with onnxarchive.Writer(folder / "m.onnxa") as writer:
            writer.add("w", self.rows)
            writer.add("last", np.arange(60_000, dtype=np.int32))
            writer.finish(model_of())
        web.files[PATH] = (folder / "m.onnxa").read_bytes()
        self.web = web
        self.archive = onnxarchive.open(web.url(PATH))
        self.w = self.archive.get_slice("w")

    def cost(self, index: Any) -> tuple[int, int]:
        """The numbers of requests and bytes for a part of `w`, which is compared with numpy's."""
        self.web.requests.clear()
        found = self.w[index]
        cost = len(self.web.requests), self.asked()
        _require_same(found, self.rows[index])
        return cost

    def asked(self) -> int:
        """The bytes of all ranges that were asked for."""
        bounds = [it.removeprefix("bytes=").split("-") for it in self.web.ranges()]
        return sum(int(last) + 1 - int(first) for first, last in bounds)


@pytest.fixture
def counted(web: WebServer, tmp_path: Path) -> Iterator[Counted]:
    counted = Counted(web, tmp_path, 2000)
    yield counted
    counted.archive.close()


def test_four_rows_of_a_large_remote_tensor_are_two_requests_and_then_one(
    web: WebServer, tmp_path: Path
) -> None:
    counted = Counted(web, tmp_path, 32_768)
    assert (counted.w.shape, counted.w.nbytes) == ((32_768, 512), 1 << 26)
    assert len(web.requests) == 1  # of opening
    requests, nbytes = counted.cost(np.s_[1000:1004])
    assert requests == 2
    assert 4 * ROW_NBYTES < nbytes <= 12 << 10
    assert counted.cost(np.s_[20_000:20_004]) == (1, 8192)
    counted.archive.close()


def test_only_the_rows_of_an_index_are_read(counted: Counted) -> None:
    counted.cost(0)
    assert counted.cost(np.s_[-4, ..., 5:]) == (1, ROW_NBYTES)
    assert counted.cost(np.s_[None, 7:7]) == (0, 0)
    assert counted.cost(np.s_[3:1:-1, ::7]) == (1, 2 * ROW_NBYTES)
    counted.w = counted.archive.get_slice("w")  # its header is not read again
    assert counted.cost(np.s_[5, 5]) == (1, ROW_NBYTES)


def test_near_rows_of_a_step_are_one_request_and_far_rows_are_read_alone(counted: Counted) -> None:
    counted.cost(0)
    assert counted.cost(np.s_[100:200:10]) == (1, 91 * ROW_NBYTES)
    assert counted.cost(np.s_[::-500]) == (4, 4 * ROW_NBYTES)
    assert counted.cost(np.s_[:2000:600, 3]) == (4, 4 * ROW_NBYTES)


def test_a_part_of_a_tensor_near_the_end_reads_only_its_header_and_the_part(
    counted: Counted,
) -> None:
    counted.web.requests.clear()
    assert counted.archive.get_slice("last")[10:12].tolist() == [10, 11]
    assert counted.asked() <= 4096 + 8


def test_parts_may_be_read_by_several_threads(counted: Counted) -> None:
    def is_right(start: int) -> bool:
        part = counted.archive.get_slice("w")
        return np.array_equal(part[start : start + 3], counted.rows[start : start + 3])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_right, range(0, 1600, 100)))


# Remote archives: errors


def test_an_object_that_changes_between_two_parts_is_an_error(web: WebServer) -> None:
    web.files[PATH] = IN_ENTRIES
    with onnxarchive.open(web.url(PATH)) as archive:
        part = archive.get_slice("FLOAT(4, 3)")
        part[0]
        web.files[PATH] = with_byte_flipped(IN_ENTRIES, 1000)
        with pytest.raises(ObjectChangedError):
            part[1]


def test_a_server_that_stops_giving_ranges_causes_the_error_of_open(web: WebServer) -> None:
    web.files[PATH] = IN_ENTRIES

    def whole(_: object, answer: Answer) -> Answer:
        return Answer(200, {**answer.headers, "Content-Range": None}, [IN_ENTRIES])

    with onnxarchive.open(web.url(PATH)) as archive:
        web.change = whole
        part = archive.get_slice("FLOAT(4, 3)")
        with pytest.raises(OSError, match="does not answer requests for ranges") as caught:
            part[0]
    with pytest.raises(OSError, match="does not answer requests for ranges") as of_open:
        onnxarchive.open(web.url(PATH))
    assert str(caught.value) == str(of_open.value)


@pytest.mark.parametrize("count", [0, 1])
def test_an_answer_that_is_too_short_gives_no_part(web: WebServer, count: int) -> None:
    web.files[PATH] = IN_ENTRIES
    with onnxarchive.open(web.url(PATH), storage_options={"max_retries": 0}) as archive:
        part = archive.get_slice("FLOAT(4, 3)")
        if count:
            part[0]  # reads the local header
        web.change = lambda _, answer: Answer(
            answer.status, answer.headers, [b"".join(answer.body)[:-1]]
        )
        with pytest.raises(OSError, match=r"expected \d+ bytes"):
            part[1:3]
        web.change = lambda _, answer: answer
        _require_same(part[1:3], ARRAYS["FLOAT(4, 3)"][1:3])
