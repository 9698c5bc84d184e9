"""Every function that writes an archive or a directory keeps the assets.

A ModelProto cannot keep them, since it has no place for them: `save` gets them again.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from models import flip_byte, model_of, normalised, run_model, runnable_model

import onnxarchive
from onnxarchive.interop.transform import transform

ASSETS = {
    "tokenizer.json": b'{"model": "bpe"}',
    "deep/er/labels.txt": "cat\nd\u00f6g\n".encode(),
    "gr\u00f6\u00dfe": b"",
    "model.onnx": b"not that one",
}
TOKENIZER = ASSETS["tokenizer.json"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source" / "m.onnx"
    path.parent.mkdir()
    path.write_bytes(runnable_model().SerializeToString())
    return path


@pytest.fixture
def archive(tmp_path: Path, source: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.convert(source, path, assets=ASSETS)
    return path


def _assets(path: Path) -> dict[str, bytes]:
    assert onnxarchive.check(path, full=True) == []
    with onnxarchive.open(path) as opened:
        return {name: bytes(data) for name, data in opened.assets.items()}


# Assets that are given


def test_a_damaged_asset_is_refused_when_it_is_looked_up(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        flip_byte(archive, opened.entries["assets/tokenizer.json"].data_offset)
        with pytest.raises(onnxarchive.ChecksumError, match=r"tokenizer\.json.*ZIP-15"):
            opened.assets["tokenizer.json"]


# Assets that are kept: see also conversion/test_archives_from_archives.py


def _described(model: onnx.ModelProto) -> onnx.ModelProto:
    model.doc_string = "described"
    return model


NEW = {"new": b"n", "tokenizer.json": b"{}"}
GIVEN: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda one, other: onnxarchive.convert(one, other, assets=NEW),
    "transform": lambda one, other: transform(one, other, _described, assets=NEW),
}


@pytest.mark.parametrize("rewrite", GIVEN)
def test_given_assets_are_added_to_those_that_are_kept(
    archive: Path, tmp_path: Path, rewrite: str
) -> None:
    target = tmp_path / "rewritten.onnxa"
    GIVEN[rewrite](archive, target)
    assert _assets(target) == {**ASSETS, **NEW}


# A .onnx has no place for assets: they stay in the archive


@pytest.mark.parametrize("external_data", [None, "weights.data"])
def test_an_exported_model_comes_without_assets(
    archive: Path, tmp_path: Path, external_data: str | None
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    onnxarchive.export(archive, folder / "m.onnx", external_data=external_data)
    assert sorted(os.listdir(folder)) == sorted(filter(None, ["m.onnx", external_data]))
    assert normalised(onnx.load(folder / "m.onnx")) == runnable_model()


def test_links_and_functions_of_onnx_come_without_assets(archive: Path, tmp_path: Path) -> None:
    onnxarchive.link(archive, tmp_path / "link.onnx")
    assert TOKENIZER not in (tmp_path / "link.onnx").read_bytes()
    onnx.save(onnx.load(archive), tmp_path / "out.onnxa")
    assert _assets(tmp_path / "out.onnxa") == {}
    assert _assets(archive) == ASSETS


def test_a_session_of_an_archive_with_assets_runs(archive: Path, source: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    session = onnxarchive.session(archive, providers=["CPUExecutionProvider"])
    x = np.ones((2, 1024), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], run_model(source, x=x)[0])


# A model in memory has no place for assets: `save` gets them as views of the archive


def test_a_model_that_was_loaded_is_saved_with_the_archive_s_assets(
    archive: Path, tmp_path: Path
) -> None:
    model = onnxarchive.load(archive)
    onnxarchive.save(model, tmp_path / "without.onnxa")
    assert _assets(tmp_path / "without.onnxa") == {}
    with onnxarchive.open(archive) as opened:
        onnxarchive.save(model, tmp_path / "with.onnxa", assets=opened.assets)
        onnxarchive.save(model, archive, assets=opened.assets)  # over itself as well
    assert _assets(tmp_path / "with.onnxa") == ASSETS
    assert _assets(archive) == ASSETS


def test_a_model_of_onnx_ir_is_saved_with_the_archive_s_assets(
    archive: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    import onnxarchive.ir

    model = onnxarchive.ir.load(archive)
    onnxarchive.save(model, tmp_path / "without.onnxa")
    assert _assets(tmp_path / "without.onnxa") == {}
    with onnxarchive.open(archive) as opened:
        onnxarchive.save(model, tmp_path / "with.onnxa", assets=opened.assets)
        onnxarchive.save(model, archive, assets=opened.assets)  # over itself as well
    assert _assets(tmp_path / "with.onnxa") == ASSETS
    assert _assets(archive) == ASSETS


def test_an_asset_whose_path_is_not_composed_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = "e\u0301/labels.txt"
    with pytest.raises(ValueError, match=r"found 'e\\u0301/.*unicodedata.normalize\('NFC', path\)"):
        onnxarchive.save(model_of(), tmp_path / "m.onnxa", assets={path: b""})
    normalized = unicodedata.normalize("NFC", path)
    onnxarchive.save(model_of(), tmp_path / "m.onnxa", assets={normalized: b""})
    assert onnxarchive.check(tmp_path / "m.onnxa") == []
