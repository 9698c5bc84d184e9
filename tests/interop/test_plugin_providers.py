"""Execution providers that come as plug-ins: OpenVINO's, of which there is a build for CPUs."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from models import run_python, text_model
from onnx import numpy_helper

import onnxarchive

pytestmark = pytest.mark.tool

# Integers that are exact in every type that a processor may take for float, and so are the sums of
# their products.
SIDE = 64
X = (np.arange(2 * SIDE) % 3 - 1).astype(np.float32).reshape(2, SIDE)
WEIGHT = (np.arange(SIDE * SIDE) % 5 - 2).astype(np.float32).reshape(SIDE, SIDE)

# A process of its own, since the plug-in brings libraries that the package openvino has, too.
RUN = """
import json, sys
import numpy as np, onnxruntime as ort, onnxruntime_ep_openvino as plug_in, onnxarchive

path, link, x = sys.argv[1], sys.argv[2], np.array(json.loads(sys.argv[3]), np.float32)
ort.register_execution_provider_library("openvino", plug_in.get_library_path())
name = plug_in.get_ep_name()
kind = ort.OrtHardwareDeviceType.CPU
devices = [it for it in ort.get_ep_devices() if (it.ep_name, it.device.type) == (name, kind)]

def with_plug_in(options):
    options.add_provider_for_devices(devices[:1], {})
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options

def own_options(source):
    model, options = onnxarchive.session_options(source)
    return ort.InferenceSession(model, with_plug_in(options))

def session(source):
    return onnxarchive.session(source, with_plug_in(ort.SessionOptions()))

onnxarchive.link(path, link)
with open(path, "rb") as file:
    content = file.read()
sessions = {
    "session": session(path),
    "session of bytes": session(content),
    "session_options": own_options(path),
    "session_options of bytes": own_options(content),
    "link": ort.InferenceSession(link, with_plug_in(ort.SessionOptions())),
}
for way, session in sessions.items():
    assert session.get_providers()[0] == name
    sessions[way] = session.run(None, {"x": x})[0].tolist()
print(json.dumps(sessions))
"""


def test_a_plug_in_runs_every_node_of_session_session_options_and_link(path: Path) -> None:
    for library in ("onnxruntime", "onnxruntime_ep_openvino"):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    text = f"linear (float[2, {SIDE}] x) => (float[2, {SIDE}] y) {{ y = MatMul(x, w) }}"
    onnxarchive.save(text_model(text, numpy_helper.from_array(WEIGHT, "w"), opset=17), path)
    link = path.with_name("link.onnx")
    printed = run_python(RUN, path, link, json.dumps(X.tolist()))
    outputs = json.loads(printed.splitlines()[-1])
    assert len(outputs) == 5
    for way, y in outputs.items():
        assert np.array_equal(np.array(y, np.float32), X @ WEIGHT), way
