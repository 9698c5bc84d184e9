"""The commands for other programs: ONNX Runtime (`run`, `prepack`) and Netron (`view`)."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.commands.show import described_sets, save_array, set_lines
from onnxarchive.cli.output import say
from onnxarchive.cli.parser import access, add_command, directory_name, file_name, pairs, path_name
from onnxarchive.cli.terminal import count, progress_bar, table
from onnxarchive.files.local_file import PositionalWriter
from onnxarchive.files.new_directory import NewDirectory, new_directory, temporary_directory
from onnxarchive.model.keys import ASSET_PREFIX, PACKED_PREFIX, Keys
from onnxarchive.remote.urls import url_without_secrets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.interop.run import Input, Outcome

_MIB: Final = 1 << 20
_MS: Final = 1000.0


def add_run(commands: Any) -> None:
    help = "Run a model with ONNX Runtime, and print inputs, outputs, time and memory growth."
    command = add_command(commands, run, help, "model.onnxa --repeat 5", archive=False)
    command.add("path MODEL", "an archive or a .onnx", type=file_name)
    command.add_model("run this model of the archive")
    help = "an input (.npz for a sequence); other inputs are random"
    command.add_repeated("--input NAME=FILE.npy", help)
    help = (
        "the size of a dimension that the model leaves open (default 1); NAME is x[0] for an "
        "unnamed first dimension of the input x"
    )
    command.add_repeated("--dim NAME=SIZE", help)
    help = "an execution provider, such as cpu or cuda; repeat --provider in order of preference"
    command.add("--provider NAME", help, action="append")
    help = "run the model N times and print the median time (default %(default)s)"
    command.add("--repeat N", help, type=int, default=1)
    command.add("--no-prepack", "make no packed copies of weights, so that memory stays small")
    help = (
        "save the outputs as .npy files in a new directory, which --input reads; types that numpy "
        "lacks, such as BFLOAT16, as raw bytes: np.load(PATH).view(ml_dtypes.bfloat16)"
    )
    command.add("--output-dir DIR", help, type=directory_name)
    command.add_url_options()


def run(arguments: argparse.Namespace) -> None:
    from onnxarchive.interop import run

    paths = pairs("--input NAME=FILE.npy", arguments.input, path_name)
    inputs = {name: _load(path) for name, path in paths.items()}
    dims = pairs("--dim NAME=SIZE", arguments.dim, int)
    output = arguments.output_dir
    with new_directory(output) if output is not None else contextlib.nullcontext() as directory:
        outcome = run.run(
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
    result = _as_json(outcome) | {"saved": saved}
    lines = _lines(result)
    lines += [f"saved     {name} as {path}" for name, path in saved.items()]
    say(arguments, result, lines)


def _load(path: str) -> Input:
    """Loads an array, or the arrays of a sequence."""
    import numpy as np

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


def _save(outputs: Mapping[str, NDArray[Any]], directory: NewDirectory) -> dict[str, str]:
    """Saves each output as a `.npy` file; returns the file names by output."""
    keys, files = Keys(), {}
    for name, output in outputs.items():
        files[name] = f"{keys.assign(name[:200])}.npy"  # valid in every file system
        with directory.make_file(files[name]) as file:
            writer = PositionalWriter(file)  # its errors name the file
            save_array(writer, output, f"output {name!r}", "run without --output-dir")
            file.flush()
    return files


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "path": outcome.path,
        "session_ms": outcome.session_seconds * _MS,
        "packed": outcome.packed,
        "run_ms": statistics.median(outcome.run_seconds) * _MS,
        "runs_ms": [seconds * _MS for seconds in outcome.run_seconds],
        "memory": {f"{kind}_nbytes": nbytes for kind, nbytes in outcome.memory.items()},
        "providers": list(outcome.providers),
        "assumed_dims": dict(outcome.assumed),
        "inputs": [
            _described(name, array) | {"random": name in outcome.random}
            for name, array in outcome.inputs.items()
        ],
        "outputs": [_described(name, array) for name, array in outcome.outputs.items()],
    }


def _described(name: str, array: NDArray[Any]) -> dict[str, Any]:
    from onnxarchive.model import dtypes

    data_type = "STRING" if array.dtype.kind in "UO" else dtypes.of_array(array).name
    return {"name": name, "data_type": data_type, "dims": list(array.shape)}


def _lines(result: Mapping[str, Any]) -> list[str]:
    header = ["data type", "shape"]
    inputs = [
        [*_row(value), "random" if value["random"] else "given"] for value in result["inputs"]
    ]
    lines = [*table(["input", *header, "from"], inputs), ""]
    lines += [*table(["output", *header], map(_row, result["outputs"])), ""]
    if result["assumed_dims"]:
        assumed = ", ".join(f"{name}={size}" for name, size in result["assumed_dims"].items())
        lines.append(f"assumed   {assumed} (--dim NAME=SIZE sets another size)")
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
        *([f"packed    {count(result['packed'], 'weight')}"] if result["packed"] else []),
    ]


def _row(value: Mapping[str, Any]) -> list[str]:
    from onnxarchive.model.wording import describe_dims

    return [value["name"], value["data_type"], describe_dims(value["dims"])]


def add_prepack(commands: Any) -> None:
    help = (
        "Store the weights as ONNX Runtime packs them, so that sessions run fast and share memory."
    )
    command = add_command(commands, prepack, help, "model.onnxa")
    command.add_model("pack the weights of this model alone")
    command.add("--remove", "remove all packed weights instead")
    command.add_copy()


def prepack(arguments: argparse.Namespace) -> None:
    path = arguments.archive
    options = {"copy": arguments.copy, "timeout": arguments.timeout}
    if arguments.remove and arguments.model is not None:
        raise ValueError("give --remove, for all models, or --model, not both")
    with progress_bar("prepack") as progress:
        if arguments.remove:
            with onnxarchive.edit(path, progress=progress, **options) as changes:
                for name in [name for name in changes.entries if name.startswith(PACKED_PREFIX)]:
                    del changes.assets[name.removeprefix(ASSET_PREFIX)]
        else:
            onnxarchive.prepack(path, model=arguments.model, progress=progress, **options)
    with onnxarchive.open(path) as archive:
        sets = described_sets(archive)
    lines = [f"{path}: {line}" for described in sets for line in set_lines(described)]
    say(arguments, {"path": path, "packed": sets}, lines or f"{path}: no packed weights")


def add_view(commands: Any) -> None:
    help = "Show the graph and the weights of an archive in a browser, with Netron."
    command = add_command(commands, view, help, "model.onnxa --model decoder")
    help = "the server's port (default: any free)"
    command.add("--port N", help, type=int, default=0)
    command.add_model("show this model")
    command.add("--no-browser", "print the address without starting a browser")
    command.add_url_options()


def view(arguments: argparse.Namespace) -> None:
    from onnxarchive.interop.netron import Server

    archive, port, model = arguments.archive, arguments.port, arguments.model
    with (
        Server(archive, port=port, model=model, **access(arguments)) as server,
        temporary_directory(os.path.join(tempfile.gettempdir(), "onnxarchive")) as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        # The address is secret. Other users can see the browser's arguments, but not the page.
        content = f'<meta http-equiv="refresh" content="0; url={server.url}">'
        with folder.make_file("view.html") as page:
            page.write(0, content.encode())
        path, url = url_without_secrets(archive), server.url
        hint = "If no browser shows it, open this address. Ctrl-C ends the server."
        say(arguments, {"path": path, "url": url}, [f"Netron shows {path} at {url}", hint])
        if not arguments.no_browser:
            webbrowser.open(Path(folder.path, "view.html").as_uri())
        while True:
            time.sleep(1)
