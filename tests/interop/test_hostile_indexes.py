"""Packed weights whose index was made to cost time or memory."""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from models import break_local_header, entry_of, model_of, raw_tensor, weight_model
from steps import steps

import onnxarchive
from onnxarchive.interop.onnxruntime import machine
from onnxarchive.model.prepacked import MAX_BUFFERS, MAX_FORMS, PREFIX

WEIGHT = raw_tensor("w", dims=(256,), seed=1)


def named(name: str) -> onnx.TensorProto:
    """A copy of `WEIGHT` with another name."""
    copy = onnx.TensorProto()
    copy.CopyFrom(WEIGHT)
    copy.name = name
    return copy


def item(packed: Mapping[str, Any], tensor: onnx.TensorProto = WEIGHT) -> dict[str, Any]:
    """What an index says of a weight with the bytes of a tensor."""
    data = tensor.raw_data
    return {"nbytes": len(data), "crc32": zlib.crc32(data), "packed": packed}


def forms(count: int, buffers: int = 1) -> dict[str, Any]:
    """Packed forms of a weight; each names buffers of one byte."""
    numbers = itertools.count()
    return {f"k{form}": [[f"f{next(numbers)}", 1] for _ in range(buffers)] for form in range(count)}


def folder_of(version: str = "1.32.0") -> str:
    """The folder of a set as an asset."""
    return f"{PREFIX.removeprefix('assets/')}{version}-{machine()}/"


def index_of(weights: Mapping[str, Any], version: str = "1.32.0", model: str = "") -> bytes:
    index = {"onnxruntime": version, "machine": machine(), "weights": {model: weights}}
    return json.dumps({**index, "unpacked": {}}).encode()


def saved(
    path: Path, initializers: list[onnx.TensorProto], weights: Mapping[str, Any], **assets: bytes
) -> Path:
    """An archive whose index has these weights, with files `f0`, `f1`, ... of one byte."""
    files = {f"f{number}": b"x" for number in range(MAX_BUFFERS + 1)}
    named_assets = {folder_of() + name: data for name, data in {**files, **assets}.items()}
    named_assets[f"{folder_of()}index.json"] = index_of(weights)
    path.parent.mkdir(exist_ok=True, parents=True)
    onnxarchive.save(model_of(*initializers), path, assets=named_assets)
    return path


def pairs_of(path: Path) -> dict[str, list[str]]:
    """The keys of the pairs about packed weights in a link, by tensor; no name may repeat."""
    onnxarchive.link(path, path.with_suffix(".onnx"), prepack=True)
    loaded = onnx.load(path.with_suffix(".onnx"), load_external_data=False)
    return {
        tensor.name: keys
        for tensor in loaded.graph.initializer
        if (keys := [it.key for it in tensor.external_data if it.key.startswith("prepacked")])
    }


def peak(call: Callable[[], object]) -> int:
    """The most bytes of Python objects that a call has at one time.

    The collector empties Python's free lists of tuples, and tuples that are freed later stay there
    and are counted. So it runs before the call, and not during it; cycles are counted.
    """
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.enable()


def require_sum(
    call: Callable[[int, int], Callable[[], object]],
    numbers: tuple[int, int],
    others: tuple[int, int],
    *,
    cost: Callable[[Callable[[], object]], int] = steps,
) -> None:
    """Requires that a call of two numbers costs the sum of what each costs, not the product."""

    def cost_of(number: int, other: int) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cost(call(number, other))

    cost_of(numbers[0], others[0])  # imports
    few, many = cost_of(numbers[0], others[0]), cost_of(numbers[1], others[1])
    assert few + many < 1.05 * (cost_of(numbers[1], others[0]) + cost_of(numbers[0], others[1]))


def add_sets(path: Path, count: int, weights: Mapping[str, Any], model: str = "") -> None:
    """Adds sets of later versions for a model."""
    with onnxarchive.edit(path) as edit:
        for number in range(count):
            version = f"1.33.{number}"
            index = index_of(weights, version, model)
            edit.assets[f"{folder_of(version)}index.json"] = index


def compact(path: Path) -> None:
    """An edit that counts the packed weights of which no model has need."""
    with onnxarchive.edit(path, compact=True):
        pass


def link(path: Path) -> Callable[[], object]:
    return lambda: onnxarchive.link(path, path.with_suffix(".onnx"), prepack=True)


def test_initializers_of_one_name_get_no_packed_weights(tmp_path: Path) -> None:
    tensors = [named("twice"), named("once"), named("twice"), named("twice, once in the model")]
    tensors.append(raw_tensor("twice, once in the model"))
    weights = {tensor.name: item(forms(1)) for tensor in tensors}
    assert pairs_of(saved(tmp_path / "m.onnxa", tensors, weights)) == {"once": ["prepacked_0"]}


@pytest.mark.parametrize(
    ("packed", "says"),
    [
        (forms(MAX_FORMS + 1, 0), f"{MAX_FORMS} packed forms of a weight, found {MAX_FORMS + 1}"),
        (forms(1, MAX_BUFFERS + 1), f"{MAX_BUFFERS} packed buffers of a weight, found 65"),
        (forms(5, 13), f"{MAX_BUFFERS} packed buffers of a weight, found 65"),
        ({"k": [["f0", 1], ["f0", 1]]}, "a packed buffer twice"),
        ({"k0": [["f0", 1]], "k1": [["f0", 1]]}, "a packed buffer twice"),
        ({"k": [["f0", -1]]}, "a number from 0"),
        ({"k": [["f0", 1 << 63]]}, "a number from 0"),
        ({"k": [[["f0"], 1]]}, "this is no index of packed weights"),
        ({"k": [7]}, "this is no index of packed weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "index",
)
def test_a_malformed_or_too_large_index_is_named_and_not_used(
    tmp_path: Path, packed: Mapping[str, Any], says: str
) -> None:
    path = saved(tmp_path / "m.onnxa", [WEIGHT], {"w": item(packed)})
    with pytest.warns(UserWarning, match=f"{says}.* its packed weights are not used"):
        assert pairs_of(path) == {}


@pytest.mark.parametrize("packed", [forms(MAX_FORMS), forms(1, MAX_BUFFERS), forms(MAX_FORMS, 0)])
def test_an_index_of_the_largest_allowed_size_is_used(
    tmp_path: Path, packed: Mapping[str, Any]
) -> None:
    path = saved(tmp_path / "m.onnxa", [WEIGHT], {"w": item(packed)})
    assert pairs_of(path) == {"w": [f"prepacked_{index}" for index in range(len(packed))]}


@pytest.mark.parametrize("count", [MAX_FORMS, 2000])
@pytest.mark.parametrize("cost", [steps, peak])
def test_forms_and_initializers_of_one_name_cost_their_sum_and_not_their_product(
    tmp_path: Path, count: int, cost: Callable[[Callable[[], object]], int]
) -> None:
    def hostile(names: int, number: int) -> Callable[[], object]:
        path = tmp_path / f"{names} {number}" / "m.onnxa"
        return link(saved(path, [named("w")] * names, {"w": item(forms(number, 0))}))

    require_sum(hostile, (1, 100), (1, count), cost=cost)


@pytest.mark.parametrize("cost", [steps, peak])
def test_the_cost_of_a_link_is_in_proportion_to_its_packed_weights(
    tmp_path: Path, cost: Callable[[Callable[[], object]], int]
) -> None:
    def cost_of(count: int) -> int:
        names = [f"w{number}" for number in range(count)]
        weights = {name: item(forms(MAX_FORMS)) for name in names}
        return cost(link(saved(tmp_path / f"{count}.onnxa", [*map(named, names)], weights)))

    cost_of(1)  # imports
    assert cost_of(24) < 2.2 * cost_of(12) < 2.2 * 2.2 * cost_of(6)


@pytest.mark.parametrize(
    "index",
    [
        json.dumps({"weights": {}, "unpacked": {}, "onnxruntime": [0] * 9999, "machine": ""}),
        json.dumps({"weights": {}, "unpacked": {}, "onnxruntime": "v" * 9999, "machine": ""}),
        index_of({"w": item({"k" * 9999: []})}).decode(),
        index_of({"w": item({"k": [["f", "1" * 9999]]})}).decode(),
        index_of({"w": item({"k": ["f" * 9999]})}).decode(),
    ],
    ids=["version", "folder", "key", "size", "buffers"],
)
def test_the_message_about_a_long_fault_is_short(tmp_path: Path, index: str) -> None:
    assets = {f"{folder_of()}index.json": index.encode()}
    onnxarchive.save(model_of(WEIGHT), tmp_path / "m.onnxa", assets=assets)
    with pytest.warns(UserWarning, match="packed weights are not used") as caught:
        assert pairs_of(tmp_path / "m.onnxa") == {}
    assert len(str(caught[0].message)) < 1000


def test_the_header_of_a_buffer_is_compared_once(tmp_path: Path) -> None:
    """A damaged header, too: weights of other names may name the same buffer."""
    names = [f"w{number}" for number in range(100)]
    weights = {name: item(forms(1)) for name in names}
    path = saved(tmp_path / "m.onnxa", [*map(named, names)], weights)
    sound = steps(link(path))
    assert len(pairs_of(path)) == len(names)
    break_local_header(path, entry_of(path, f"assets/{folder_of()}f0"))
    assert pairs_of(path) == {}
    assert steps(link(path)) < sound


def test_indexes_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    def memory(count: int) -> int:
        weights = {f"w{number}": item(forms(MAX_FORMS)) for number in range(10)}
        path = saved(tmp_path / f"{count}.onnxa", [WEIGHT], weights)
        add_sets(path, count, weights, "other")
        return peak(link(path))

    memory(1)  # imports
    assert memory(24) < 1.1 * memory(6)


def test_sets_and_initializers_cost_an_edit_their_sum_and_not_their_product(tmp_path: Path) -> None:
    def edited(sets: int, initializers: int) -> Callable[[], object]:
        tensors = [named(f"w{number}") for number in range(initializers)]
        path = saved(tmp_path / f"{sets} {initializers}.onnxa", tensors, {})
        add_sets(path, sets, {"w0": item(forms(1))})
        return lambda: compact(path)

    require_sum(edited, (1, 40), (1, 40))


def test_models_and_sets_cost_an_edit_their_sum_and_not_their_product(tmp_path: Path) -> None:
    def edited(sets: int, models: int) -> Callable[[], object]:
        path = tmp_path / f"{sets} {models}.onnxa"
        path.unlink(missing_ok=True)
        further = {f"m{number}": weight_model(number, 300) for number in range(models)}
        onnxarchive.save(model_of(WEIGHT), path, models=further)
        add_sets(path, sets, {"w": item(forms(1))}, "none")
        return lambda: compact(path)

    require_sum(edited, (1, 80), (1, 80))


def test_sets_and_models_with_one_weight_cost_links_their_sum_and_not_their_product(
    tmp_path: Path,
) -> None:
    """Also if no set of a later version has a buffer, so that each of them is read."""

    def linked(sets: int, models: int) -> Callable[[], object]:
        path = tmp_path / f"{sets} {models}" / "m.onnxa"
        further = {f"m{number}": model_of(WEIGHT) for number in range(models)}
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        onnxarchive.save(model_of(raw_tensor("other")), path, models=further)
        add_sets(path, sets, {"w": item(forms(1))}, "none")
        return lambda: onnxarchive.link(path, path.parent, prepack=True)

    require_sum(linked, (1, 40), (1, 40))
