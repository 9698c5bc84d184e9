"""PyTorch's exports as archives: pairs of models in files, programs of the newer exporter."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import MEASURE_MEMORY, run_model, run_python

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.reading.archive import contents_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's newer exporter needs onnxscript")


from torch_exports import INPUTS, export, inputs  # noqa: E402

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
    embedding = 1 << 19
    assert pair.shared_nbytes >= embedding
    before = sum(map(nbytes, pair.sources.values()))
    assert pair.archive.stat().st_size < before - pair.shared_nbytes + (1 << 14)
    with onnxarchive.open(pair.archive) as archive:
        keys = [{*contents_of(archive).models[model].refs} for model in archive.models]
        shared = sum(archive.entries[key].nbytes for key in keys[0] & keys[1])
        assert shared == pair.shared_nbytes


def test_sessions_of_the_archive_compute_what_the_files_do(pair: Pair) -> None:
    for model, source in pair.sources.items():
        given = pair.inputs(model)
        found = onnxarchive.session(pair.archive, model=model).run(None, given)
        assert [it.tobytes() for it in found] == [it.tobytes() for it in run_model(source, **given)]


def link(archive: Path, model: str, folder: Path) -> Path:
    path = archive.parent / f"{model or 'default'}.onnx"
    onnxarchive.link(archive, path, model=model)
    assert onnxarchive.check_link(path) == []
    return path


def unzip(archive: Path, model: str, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as zipped:
        zipped.extractall(folder)
    return folder / f"__MODEL_PROTO{'_' * bool(model)}{model}"


def extract(archive: Path, model: str, folder: Path) -> Path:
    onnxarchive.extract(archive, folder)
    return folder / f"__MODEL_PROTO{'_' * bool(model)}{model}"


def export_file(archive: Path, model: str, folder: Path) -> Path:
    onnxarchive.export(archive, folder / "m.onnx", model=model)
    return folder / "m.onnx"


def export_data(archive: Path, model: str, folder: Path) -> Path:
    onnxarchive.export(archive, folder / "m.onnx", model=model, external_data="m.data")
    return folder / "m.onnx"


@pytest.mark.parametrize("way", [link, unzip, extract, export_file, export_data])
def test_other_tools_read_each_model_as_it_was_saved(
    pair: Pair, tmp_path: Path, way: Callable[[Path, str, Path], Path]
) -> None:
    for model, source in pair.sources.items():
        folder = tmp_path / (model or "default")
        folder.mkdir()
        path = way(pair.archive, model, folder)
        onnx.checker.check_model(path, full_check=True)
        loaded, original = onnx.load(path), onnx.load(source)
        assert weights(loaded) == weights(original)
        for it in (loaded, original):
            del it.graph.initializer[:]
        if way is not link:  # which has a mark in its metadata
            assert loaded == original
        given = pair.inputs(model)
        for ours, theirs in zip(run_model(path, **given), run_model(source, **given), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def weights(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Data type, dims and bytes of the initializers by name."""
    return {
        it.name: (it.data_type, tuple(it.dims), onnx.numpy_helper.to_array(it).tobytes())
        for it in model.graph.initializer
    }


# Programs of the newer exporter

MIB = 1 << 20
VOCABULARY, WIDTH = 2048, 64
TOKENS = np.arange(6).reshape(2, 3)


def _module(dtype: Any = torch.float32) -> Any:
    """An embedding whose weight is that of the output layer, too."""
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
    head.weight = embedding.weight
    return torch.nn.Sequential(embedding, head).to(dtype).eval()


def _export(module: Any, *path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            module, (torch.from_numpy(TOKENS),), *path, verbose=False, **options
        )


def test_a_program_is_saved_and_computes_what_the_module_does(path: Path) -> None:
    module = _module()
    onnxarchive.save(_export(module), path)
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        weight = archive.tensors["1.weight"]
        assert np.array_equal(weight, module[1].weight.detach().numpy())
    session = onnxarchive.session(path)
    (found,) = session.run(None, {session.get_inputs()[0].name: TOKENS})
    expected = module(torch.from_numpy(TOKENS)).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_program_gives_the_archive_of_its_proto(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        program = _export(_module(dtype))
        onnxarchive.save(program, tmp_path / "program.onnxa")
        onnxarchive.save(program.model_proto, tmp_path / "proto.onnxa")
        written = [(tmp_path / name).read_bytes() for name in ("program.onnxa", "proto.onnxa")]
        assert written[0] == written[1]


def test_programs_are_saved_together_and_share_weights(path: Path) -> None:
    module = _module()
    embedding, whole = _export(module[0]), _export(module)
    onnxarchive.save(whole, path, models={"embedding": embedding})
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as archive:
        assert list(archive.models) == ["", "embedding"]
        shape = (VOCABULARY, WIDTH)
        assert [it.nbytes for it in archive.entries.values()].count(4 * VOCABULARY * WIDTH) == 1
        assert archive.tensors["1.weight"].shape == shape


def test_weights_of_a_program_are_copied_one_at_a_time(path: Path) -> None:
    code = f"""
{MEASURE_MEMORY}
import logging, warnings, torch, onnxarchive, onnxarchive.writing.onnx_ir
logging.disable()
warnings.simplefilter("ignore")
layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)]
module = torch.nn.Sequential(*layers).eval()
program = torch.onnx.export(module, (torch.zeros(1, 2048),), verbose=False)
print(growth(lambda: onnxarchive.save(program, sys.argv[1], progress=sample)))
"""
    printed = run_python(code, path)
    taken = int(printed.split()[-1])
    assert taken < 40 * MIB
    assert path.stat().st_size > 256 * MIB


def test_exporting_to_an_archive_names_the_line_to_write_instead(path: Path) -> None:
    line = r"write onnxarchive\.save\(torch\.onnx\.export\(model, args\), path\).*\.onnxa\.data'"
    with pytest.raises(ArchiveFormatError, match=line):
        _export(_module(), path)
    assert os.listdir(path.parent) == [f"{path.name}.data"]  # PyTorch's, which the message names


def test_exporting_to_an_archive_works_with_the_weights_in_the_model(tmp_path: Path) -> None:
    program = _export(_module(), tmp_path / "m.onnxa", external_data=False)
    onnxarchive.save(program, tmp_path / "saved.onnxa")
    assert (tmp_path / "m.onnxa").read_bytes() == (tmp_path / "saved.onnxa").read_bytes()


def test_a_file_of_the_older_exporter_is_converted_whatever_its_name(
    tmp_path: Path,
) -> None:
    _export(_module(), tmp_path / "m.onnxa", dynamo=False)
    exported = onnx.load_from_string((tmp_path / "m.onnxa").read_bytes())
    onnxarchive.convert(tmp_path / "m.onnxa", tmp_path / "converted.onnxa")
    assert onnxarchive.load(tmp_path / "converted.onnxa") == exported
