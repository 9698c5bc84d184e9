"""The commands `run`, and `view`, which shows an archive in a browser."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import webbrowser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxarchive.cli.frame import DONE, access, pairs, say
from onnxarchive.cli.terminal import printable, shape, table
from onnxarchive.files.local_file import PositionalWriter, make_file
from onnxarchive.files.replacement import new_directory
from onnxarchive.interop.inputs import Input, npy_array
from onnxarchive.interop.running import Outcome, Value, run
from onnxarchive.model.keys import Keys
from onnxarchive.remote.urls import shown_url

_MIB: Final = 1 << 20
_MS: Final = 1000.0


def run_command(arguments: argparse.Namespace) -> int:
    """Runs `run`."""
    given = pairs("--input NAME=FILE.npy", arguments.input)
    inputs = {name: _load(path) for name, path in given.items()}
    dims = pairs("--dim NAME=SIZE", arguments.dim, int)
    output = arguments.output
    with new_directory(output) if output is not None else contextlib.nullcontext() as directory:
        outcome = run(
            arguments.path,
            inputs,
            model=arguments.model,
            dims=dims,
            providers=arguments.provider,
            repeat=arguments.repeat,
            prepack=False if arguments.no_prepack else None,
            **access(arguments),
        )
        files = _save(outcome.outputs, directory) if directory is not None else {}
    saved = {name: os.path.join(output, file) for name, file in files.items()}
    result = _result(outcome) | {"saved": saved}
    lines = _lines(result)
    lines += [f"saved     {printable(name)} as {printable(path)}" for name, path in saved.items()]
    say(arguments, result, lines)
    return DONE


def _load(path: str) -> Input:
    """Loads an array, or the arrays of a sequence."""
    with open(path, "rb") as file:
        try:
            # For other bytes, the error of `np.load` would suggest unpickling the file.
            if file.peek(4)[:4] not in (b"\x93NUM", b"PK\3\4"):
                raise ValueError("its first bytes match neither format")
            loaded = np.load(file, allow_pickle=False)
            return loaded if isinstance(loaded, np.ndarray) else list(loaded.values())
        except Exception as error:  # numpy raises many types for damaged files
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: expected a .npy or .npz file; {reason}") from error


def _save(outputs: Iterable[Value], directory: str) -> dict[str, str]:
    """Saves each output as a `.npy` file; returns the file names by output."""
    keys, files = Keys(), {}
    for output in outputs:
        name = f"output {output.name!r}"
        array = npy_array(output.array, name, "run without --output")
        files[output.name] = f"{keys.assign(output.name[:200])}.npy"  # valid in every file system
        with make_file(os.path.join(directory, files[output.name])) as file:
            np.save(PositionalWriter(file), array, allow_pickle=False)  # errors name the file
    return files


def _result(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a dict for JSON."""
    return {
        "path": outcome.path,
        "session_ms": outcome.session_seconds * _MS,
        "packed": outcome.packed,
        "run_ms": statistics.median(outcome.run_seconds) * _MS,
        "runs_ms": [seconds * _MS for seconds in outcome.run_seconds],
        "memory": {f"{kind}_nbytes": nbytes for kind, nbytes in outcome.memory.items()},
        "providers": list(outcome.providers),
        "assumed_dims": dict(outcome.assumed),
        "inputs": [_value(it) | {"random": it.name in outcome.random} for it in outcome.inputs],
        "outputs": [_value(it) for it in outcome.outputs],
    }


def _value(value: Value) -> dict[str, Any]:
    return {"name": value.name, "data_type": value.data_type, "dims": list(value.array.shape)}


def _lines(result: Mapping[str, Any]) -> list[str]:
    """An outcome as lines of text."""
    header = ["data type", "shape"]
    inputs = [[*_row(it), "random" if it["random"] else "given"] for it in result["inputs"]]
    lines = [*table(["input", *header, "from"], inputs), ""]
    lines += [*table(["output", *header], map(_row, result["outputs"])), ""]
    if result["assumed_dims"]:
        assumed = ", ".join(f"{name}={size}" for name, size in result["assumed_dims"].items())
        lines.append(f"assumed   {printable(assumed)} (--dim NAME=SIZE sets another size)")
    runs = len(result["runs_ms"])
    median = f" (median of {runs:,})" if runs > 1 else ""
    memory = ", ".join(
        f"{nbytes / _MIB:+,.1f} MiB {kind.removesuffix('_nbytes')}"
        for kind, nbytes in result["memory"].items()
    )
    return [
        *lines,
        f"provider  {', '.join(result['providers'])}",
        f"time      session {result['session_ms']:,.1f} ms, run {result['run_ms']:,.3f} ms{median}",
        f"memory    {memory or 'not reported by this system'}",
        *([f"packed    {result['packed']:,} weights"] if result["packed"] else []),
    ]


def _row(value: Mapping[str, Any]) -> list[str]:
    return [value["name"], value["data_type"], shape(value["dims"])]


def view_command(arguments: argparse.Namespace) -> int:
    """Runs `view` until it is interrupted."""
    from onnxarchive.interop.netron import Server

    archive, port, model = arguments.archive, arguments.port, arguments.model
    with (
        Server(archive, port=port, model=model, **access(arguments)) as server,
        tempfile.TemporaryDirectory(prefix="onnxarchive-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        # The address is secret. Other users can see the browser's arguments, but not the page.
        page = Path(folder, "view.html")
        page.touch(0o600)
        page.write_text(f'<meta http-equiv="refresh" content="0; url={server.url}">')
        text = f"Netron shows {printable(shown_url(archive))} at {server.url}\n"
        text += "If no browser shows it, open this address. Ctrl-C ends the server."
        say(arguments, {"path": shown_url(archive), "url": server.url}, text)
        if not arguments.no_browser:
            webbrowser.open(page.as_uri())
        while True:
            time.sleep(1)
    return DONE
