"""Saves a model to a bucket, then reads one tensor, runs the model, and downloads the archive.

pip install 'onnxarchive[ort,remote]'
python object_store.py s3://bucket/models

Credentials come from the environment (`AWS_ACCESS_KEY_ID` and so on); each function also takes
`storage_options`. `gs://` and `az://` work the same way.
"""

from __future__ import annotations

import os
import sys
import tempfile

import numpy as np
import onnx
from onnx import numpy_helper

import onnxarchive

MODEL = """
<ir_version: 10, opset_import: ["": 21]>
linear (float[n, 1024] x) => (float[n, 1024] y) { y = MatMul(x, w) }
"""


def make_model() -> onnx.ModelProto:
    """A model with one weight of 4 MiB."""
    model = onnx.parser.parse_model(MODEL)
    weight = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def main() -> None:
    """Saves a model to the given folder of a bucket, then reads, runs and downloads the archive."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    url = f"{sys.argv[1]}/model.onnxa"
    onnxarchive.save(make_model(), url)  # the object appears when it is complete

    with onnxarchive.open(url) as archive:  # one request: directory and model are at the end
        for entry in archive.entries.values():
            print(entry.name, entry.nbytes)
        weight = archive.tensors["w"]  # one more request, for the bytes of this tensor
    print(weight.shape, weight.dtype)

    with tempfile.TemporaryDirectory() as directory:
        x = np.ones((2, 1024), np.float32)
        for _ in range(2):  # the second session downloads no weight; cache=True uses a default path
            session = onnxarchive.session(url, cache=os.path.join(directory, "cache"))
            (y,) = session.run(None, {"x": x})
        np.testing.assert_allclose(y, x @ weight, rtol=1e-3, atol=1e-3)

        path = os.path.join(directory, "model.onnxa")
        onnxarchive.download(url, path)  # resumes after an interruption, and checks every byte
        print(f"{os.path.getsize(path):,} bytes downloaded")


if __name__ == "__main__":
    main()
