"""What PyTorch's newer exporter gives, an ONNXProgram, saved as an archive."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import MEASURE_MEMORY, run_python

import onnxarchive
from onnxarchive import ArchiveFormatError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("onnxscript", reason="PyTorch's newer exporter needs onnxscript")

pytestmark = pytest.mark.tool

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
    print(f"256 MiB: {taken / MIB:.1f} MiB")  # noqa: T201
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


def test_the_older_exporter_writes_a_onnx_whatever_its_name_which_is_converted(
    tmp_path: Path,
) -> None:
    _export(_module(), tmp_path / "m.onnxa", dynamo=False)
    exported = onnx.load_from_string((tmp_path / "m.onnxa").read_bytes())
    onnxarchive.convert(tmp_path / "m.onnxa", tmp_path / "converted.onnxa")
    assert onnxarchive.load(tmp_path / "converted.onnxa") == exported
