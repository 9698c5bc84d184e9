"""Pairs of models that PyTorch exports, as one archive: smaller, and equal to both files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import run_model
from torch_exports import INPUTS, export, inputs

import onnxarchive

pytestmark = pytest.mark.tool

# The default model and the further one.
PAIRS = [("encoder", "decoder"), ("prompt", "step")]


@dataclass(frozen=True)
class Pair:
    """Two exported models, and the archive of both.

    Attributes:
        sources: The files by the id that their model has in the archive.
        names: The names of the exported models by id.
        archive: The archive.
        shared_nbytes: Bytes that the conversion reported as saved.
    """

    sources: Mapping[str, Path]
    names: Mapping[str, str]
    archive: Path
    shared_nbytes: int

    def inputs(self, model: str) -> dict[str, Any]:
        return inputs(self.names[model])


@pytest.fixture(scope="module", params=["torchscript", "dynamo"])
def exports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The exported models by name, made by one of PyTorch's exporters."""
    return export(tmp_path_factory.mktemp("exports"), request.param, [*INPUTS])


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(
    request: pytest.FixtureRequest,
    exports: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    default, further = request.param
    archive = tmp_path_factory.mktemp("pair") / "m.onnxa"
    names = {"": default, further: further}
    sources = {model: exports[name] for model, name in names.items()}
    converted = onnxarchive.convert(sources[""], archive, models={further: sources[further]})
    return Pair(sources, names, archive, converted.shared_nbytes)


def nbytes(source: Path) -> int:
    """The size of a `.onnx` with its external data."""
    return sum(it.stat().st_size for it in source.parent.glob(f"{source.name}*"))


def test_one_archive_is_smaller_than_two_files_by_what_they_share(pair: Pair) -> None:
    assert onnxarchive.check(pair.archive, full=True) == []
    before = sum(map(nbytes, pair.sources.values()))
    after = pair.archive.stat().st_size
    names = " and ".join(pair.names.values())
    print(f"{names}: {before:,} bytes in files, {after:,} in one archive")  # noqa: T201
    embedding = 1 << 19
    assert pair.shared_nbytes >= embedding
    assert after < before - pair.shared_nbytes + (1 << 14)
    with onnxarchive.open(pair.archive) as archive:
        keys = [{*archive.contents.models[model].refs} for model in archive.models]
        shared = sum(archive.entries[key].nbytes for key in keys[0] & keys[1])
        assert shared == pair.shared_nbytes


def test_sessions_of_the_archive_compute_what_the_files_do(pair: Pair) -> None:
    for model, source in pair.sources.items():
        given = pair.inputs(model)
        expected = run_model(source, **given)
        found = onnxarchive.session(pair.archive, model=model).run(None, given)
        assert [it.tobytes() for it in found] == [it.tobytes() for it in expected]


def test_every_model_of_the_unzipped_archive_is_read_by_other_tools(
    pair: Pair, tmp_path: Path
) -> None:
    with zipfile.ZipFile(pair.archive) as zipped:
        zipped.extractall(tmp_path / "unzipped")
    onnxarchive.extract(pair.archive, tmp_path / "extracted")
    for directory in (tmp_path / "unzipped", tmp_path / "extracted"):
        found = sorted(directory.glob("__MODEL_PROTO*"))
        assert len(found) == 2
        for path, (model, source) in zip(found, sorted(pair.sources.items()), strict=True):
            assert path.name == "__MODEL_PROTO" + f"_{model}" * bool(model)
            loaded, original = onnx.load(path), onnx.load(source)
            assert weights(loaded) == weights(original)
            onnx.checker.check_model(path, full_check=True)
            given = pair.inputs(model)
            for ours, theirs in zip(
                run_model(path, **given), run_model(source, **given), strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)


def test_an_exported_model_is_the_one_that_went_in(pair: Pair, tmp_path: Path) -> None:
    for model, source in pair.sources.items():
        for external_data in (None, "m.data"):
            path = tmp_path / "m.onnx"
            onnxarchive.export(pair.archive, path, model=model, external_data=external_data)
            exported, original = onnx.load(path), onnx.load(source)
            assert weights(exported) == weights(original)
            for it in (exported, original):
                del it.graph.initializer[:]
            assert exported == original


def test_links_of_both_models_are_valid_and_run(pair: Pair) -> None:
    for model, source in pair.sources.items():
        link = pair.archive.parent / f"{model or 'default'}.onnx"
        onnxarchive.link(pair.archive, link, model=model)
        assert onnxarchive.check_link(link) == []
        given = pair.inputs(model)
        found, expected = run_model(link, **given), run_model(source, **given)
        assert [it.tobytes() for it in found] == [it.tobytes() for it in expected]


def weights(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Data type, dims and bytes of the initializers by name."""
    return {
        it.name: (it.data_type, tuple(it.dims), onnx.numpy_helper.to_array(it).tobytes())
        for it in model.graph.initializer
    }
