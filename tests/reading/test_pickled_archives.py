"""An archive is pickled by its path, and opened again where it is unpickled."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from pathlib import Path

import edits
import numpy as np
import pytest
from models import model_of, raw_tensor, run_python
from written import saved

import onnxarchive
from onnxarchive import ArchiveFormatError, ModelNotFoundError
from onnxarchive.reading.archive import contents_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    decoder = model_of(raw_tensor("d", dims=(300,), seed=2))
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path, models={"decoder": decoder})
    return path


def test_a_worker_opens_the_same_model_with_the_same_limit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    archive = onnxarchive.open(path.name, model="decoder", max_model_nbytes=10_000)
    code = """
import pickle, sys
archive = pickle.loads(bytes.fromhex(sys.argv[1]))
print(archive.model_id, archive.max_model_nbytes, archive.path, type(archive).__name__)
print(archive.tensors["d"].tobytes().hex())
"""
    monkeypatch.chdir("/")
    first, data = run_python(code, pickle.dumps(archive).hex()).splitlines()
    assert first == f"decoder 10000 {path} Archive"
    assert data == archive.tensors["d"].tobytes().hex()


def test_an_unpickled_archive_has_a_file_of_its_own(path: Path) -> None:
    archive = onnxarchive.open(path)
    for again in (pickle.loads(pickle.dumps(archive)), copy.copy(archive), copy.deepcopy(archive)):
        assert contents_of(again).file is not contents_of(archive).file
        again.close()
    assert len(archive.tensors["w"]) == 300
    archive.close()
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(archive)


def test_an_unpickled_archive_is_the_one_that_then_has_the_path(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        pickled = pickle.dumps(archive)
    edits.replace_tensor(path, "w", np.ones(300, np.float32))
    with pickle.loads(pickled) as again:
        assert again.tensors["w"].tolist() == [1] * 300


def test_an_archive_that_cannot_be_opened_when_unpickled_is_an_error_that_says_why(
    path: Path,
) -> None:
    with onnxarchive.open(path, model="decoder", max_model_nbytes=1000) as archive:
        pickled = pickle.dumps(archive)
    edits.remove_model(path, "decoder", compact=True)
    with pytest.raises(ModelNotFoundError, match=r"m\.onnxa.*'decoder'"):
        pickle.loads(pickled)
    onnxarchive.save(model_of(raw_tensor("w", dims=(2000,))), path, size_threshold=10**6)
    with pytest.raises(ArchiveFormatError, match="MODEL-2"):
        pickle.loads(pickled)
    path.write_bytes(b"not an archive")
    with pytest.raises(ArchiveFormatError, match=r"m\.onnxa"):
        pickle.loads(pickled)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"m\.onnxa"):
        pickle.loads(pickled)
    path.mkdir()
    with pytest.raises(ArchiveFormatError, match="directory"):
        pickle.loads(pickled)
    shutil.rmtree(path)


def test_an_archive_without_a_file_is_not_pickled() -> None:
    data = saved(model_of())
    for source in (data, io.BytesIO(data)):
        archive = onnxarchive.open(source)
        with pytest.raises(TypeError, match="at a URL cannot be pickled"):
            pickle.dumps(archive)


def test_tensors_and_assets_are_not_pickled_alone(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        for mapping, name in ((archive.tensors, "tensors"), (archive.assets, "assets")):
            for call in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"the {name} of an .*pickle the archive, "):
                    call(mapping)
        arrays = pickle.loads(pickle.dumps(dict(archive.tensors)))
        assert arrays["w"].tolist() == archive.tensors["w"].tolist()
        assert pickle.loads(pickle.dumps(dict(archive.assets))) == dict(archive.assets)
