"""Every model of the test data that comes with onnx gives the same as a session of its archive."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

import onnxarchive

DATA = Path(onnx.backend.test.__file__).parent / "data"
PATHS = sorted(DATA.rglob("*.onnx"))
EVERYTHING = {"size_threshold": 0, "convert_attribute": True}

every_model = pytest.mark.parametrize(
    "path", PATHS, ids=[str(it.relative_to(DATA)) for it in PATHS]
)
every_way = pytest.mark.parametrize("ways", [{}, EVERYTHING], ids=["1024", "everything"])


def _options() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def _original(path: Path) -> Any:
    """onnxruntime's session of a model, or None where it makes none of it."""
    try:
        return ort.InferenceSession(
            os.fspath(path), _options(), ["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception:
        return None


def _feeds(path: Path, session: Any) -> list[dict[str, Any]]:
    """The inputs of each test data set; where there is none, one that is made."""
    names = [it.name for it in session.get_inputs()]
    feeds = []
    for directory in sorted(path.parent.glob("test_data_set_*")):
        files = [directory / f"input_{index}.pb" for index in range(len(names))]
        if all(map(Path.exists, files)):
            tensors = [TensorProto.FromString(file.read_bytes()) for file in files]
            feeds.append(dict(zip(names, map(numpy_helper.to_array, tensors), strict=True)))
    if not feeds and path.parent.name == "light":
        (value,) = session.get_inputs()
        count = int(np.prod(value.shape))
        feeds.append(
            {value.name: (np.arange(count, dtype=np.float32) / count).reshape(value.shape)}
        )
    return feeds


def _bits(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        elements = value.tolist() if value.dtype == object else value.tobytes()
        return value.dtype, value.shape, elements
    if isinstance(value, list):
        return [_bits(it) for it in value]
    return value


@every_model
@every_way
def test_a_session_of_an_archive_gives_the_bits_of_the_model(
    tmp_path: Path, path: Path, ways: dict[str, Any]
) -> None:
    original = _original(path)
    if original is None:
        return  # `test_onnxruntime_runs_most_models` counts these
    archive = tmp_path / "model.onnxa"
    onnxarchive.convert(path, archive, **ways)
    onnxarchive.link(archive, tmp_path / "model.onnx")
    assert onnxarchive.check_link(tmp_path / "model.onnx", archive) == []
    sessions = [
        onnxarchive.session(source, _options(), ["CPUExecutionProvider"], enable_fallback=0)
        for source in (archive, archive.read_bytes())
    ]
    sessions.append(_original(tmp_path / "model.onnx"))
    for feeds in _feeds(path, original):
        expected = _bits(original.run(None, feeds))
        for session in sessions:
            assert _bits(session.run(None, feeds)) == expected


def test_onnxruntime_runs_most_models() -> None:
    sessions = [(path, _original(path)) for path in PATHS]
    made = [(path, session) for path, session in sessions if session is not None]
    assert len(made) >= 107
    assert sum(bool(_feeds(path, session)) for path, session in made) >= 100
