"""Every model of the test data that comes with onnx gives the same as a session of its archive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test
import pytest
from onnx import TensorProto, numpy_helper

import onnxarchive

pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

from compared_sessions import (
    COMPARED,
    ONLY_MADE,
    run,
    session_of_archive,
    session_of_model,
)

pytestmark = pytest.mark.sweep

DATA = Path(onnx.backend.test.__file__).parent / "data"
PATHS = sorted(DATA.rglob("*.onnx"))
EVERYTHING = {"size_threshold": 0, "convert_attribute": True}

every_model = pytest.mark.parametrize(
    "path", PATHS, ids=[str(it.relative_to(DATA)) for it in PATHS]
)
every_way = pytest.mark.parametrize("ways", [{}, EVERYTHING], ids=["1024", "everything"])


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


@every_model
@every_way
def test_a_session_of_an_archive_gives_the_bits_of_the_model(
    tmp_path: Path,
    path: Path,
    ways: dict[str, Any],
    record_property: Callable[[str, object], None],
) -> None:
    original = session_of_model(os.fspath(path))
    if original is None:
        return  # `test_onnxruntime_runs_most_models` counts these
    archive = tmp_path / "model.onnxa"
    onnxarchive.convert(path, archive, **ways)
    onnxarchive.link(archive, tmp_path / "model.onnx")
    assert onnxarchive.check_link(tmp_path / "model.onnx", archive) == []
    sessions = [session_of_archive(source) for source in (archive, archive.read_bytes())]
    sessions.append(session_of_model(os.fspath(tmp_path / "model.onnx")))
    feeds = _feeds(path, original)
    for values in feeds:
        does_run, expected = run(original, values)
        assert does_run, expected
        for session in sessions:
            assert run(session, values) == (True, expected)
    record_property(COMPARED if feeds else ONLY_MADE, 1)


def test_onnxruntime_runs_most_models() -> None:
    sessions = [(path, session_of_model(os.fspath(path))) for path in PATHS]
    made = [(path, session) for path, session in sessions if session is not None]
    assert len(made) >= 107
    assert sum(bool(_feeds(path, session)) for path, session in made) >= 100
