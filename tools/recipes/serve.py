"""Serves the model of an archive over HTTP; all workers share the memory of its weights.

pip install 'onnxarchive[ort]' uvicorn starlette
MODEL=model.onnxa uvicorn serve:app --workers 4
curl localhost:8000 --json '{"x": [[1, 2, 3]]}'

A request contains the inputs by name; the response contains the outputs by name.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
import onnxruntime
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import onnxarchive

# Input types by ONNX Runtime's names. Add those of your model.
TYPES: Final = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}


def make_session() -> Any:
    """Starts a session with one thread (one core per worker) and without packed weights."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxarchive.session(
        os.environ["MODEL"], options, ["CPUExecutionProvider"], prepack=False
    )


session = make_session()


def run(inputs: dict[str, Any]) -> dict[str, Any]:
    """Runs the model; inputs and outputs are nested lists of numbers, by name."""
    feed: dict[str, Any] = {
        port.name: np.array(inputs[port.name], TYPES[port.type])
        for port in session.get_inputs()
        if port.name in inputs
    }
    outputs = session.run(None, feed)
    names = [port.name for port in session.get_outputs()]
    return {name: output.tolist() for name, output in zip(names, outputs, strict=True)}


async def answer(request: Request) -> JSONResponse:
    """Answers a request in a thread, so the worker can accept other requests."""
    try:
        return JSONResponse(await run_in_threadpool(run, await request.json()))
    except Exception as error:  # ONNX Runtime's exceptions share only this base class
        return JSONResponse({"error": str(error)}, status_code=400)


app = Starlette(routes=[Route("/", answer, methods=["POST"])])
