from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import normalised, runnable_model
from remote_archives import PATH, PLACES, placed, sends, with_byte_flipped
from web_server import WebServer
from written import saved

import onnxarchive
from onnxarchive import ChecksumError, ObjectChangedError, UnsupportedFeatureError
from onnxarchive.interop.run import run

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")

MODEL = runnable_model(1 << 20)
ARCHIVE = saved(MODEL)
INPUTS = {"x": np.ones((2, (1 << 20) // 64), np.float32)}
(EXPECTED,) = ort.InferenceSession(MODEL.SerializeToString()).run(None, INPUTS)


@pytest.mark.parametrize("kind", PLACES)
def test_a_session_of_every_source_computes_the_same(
    kind: str, tmp_path: Path, web: WebServer
) -> None:
    with placed(kind, ARCHIVE, tmp_path, web) as (source, access):
        session = onnxarchive.session(source, **access)
        assert np.array_equal(session.run(None, INPUTS)[0], EXPECTED)
        model, options = onnxarchive.session_options(source, **access)
        again = ort.InferenceSession(model, options)
        assert np.array_equal(again.run(None, INPUTS)[0], EXPECTED)
    assert np.array_equal(session.run(None, INPUTS)[0], EXPECTED)


def test_a_session_takes_a_few_requests(web: WebServer, access: dict[str, Any]) -> None:
    web.files[PATH] = ARCHIVE
    onnxarchive.session(web.url(PATH), **access)
    assert len(web.requests) <= 3
    run(web.url(PATH), INPUTS, **access)
    assert len(web.requests) <= (4 if access else 6)


def test_changed_bytes_make_no_session(web: WebServer, access: dict[str, Any]) -> None:
    web.files[PATH] = ARCHIVE
    sends(web, with_byte_flipped(ARCHIVE, 500_000))
    for make in (onnxarchive.session, onnxarchive.session_options, run):
        with pytest.raises(ChecksumError, match="entry 'layer_0_weight'"):
            make(web.url(PATH), **access)
    with pytest.raises(ChecksumError), onnxarchive.open(web.url(PATH), **access) as archive:
        onnxarchive.session(archive)
    web.change = lambda _, answer: answer
    session = onnxarchive.session(web.url(PATH), **access)
    assert np.array_equal(session.run(None, INPUTS)[0], EXPECTED)


def test_an_object_that_changes_makes_no_session(web: WebServer) -> None:
    web.files[PATH] = ARCHIVE
    with onnxarchive.open(web.url(PATH)) as archive:
        web.files[PATH] = with_byte_flipped(ARCHIVE, 500_000)
        with pytest.raises(ObjectChangedError):
            onnxarchive.session(archive)


def test_a_link_leads_to_the_cache(web: WebServer, tmp_path: Path) -> None:
    web.files[PATH] = ARCHIVE
    link = tmp_path / "l.onnx"
    with pytest.raises(UnsupportedFeatureError, match="download"):
        onnxarchive.link(web.url(PATH), link)
    assert not link.exists()
    onnxarchive.link(web.url(PATH), link, cache=tmp_path / "cache")
    assert normalised(onnx.load(link)).graph == normalised(MODEL).graph
    session = ort.InferenceSession(str(link))
    assert np.array_equal(session.run(None, INPUTS)[0], EXPECTED)
