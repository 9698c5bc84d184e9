"""Compares loading archives and other files onto a CUDA device; prints medians and ratios.

python3 tools/dev.py python tools/benchmark_cuda.py [--gib 1] [--rounds 5] [--json FILE] ...

Writes a chain of 64 matrix products with float32 weights as an archive, a `.onnx` with external
data, a PyTorch file and a safetensors file: up to four files of the size of the weights. Leaves out
the file of a package that is missing or cannot use the device. Measures

- sessions of ONNX Runtime with the CUDA provider, from the archive and from the `.onnx`, and the
  first run of each session;
- copies of all tensors to the device by PyTorch: from the archive, from torch.load with mmap=True,
  and from safetensors.torch.

Every figure is a median of rounds. In each round the ways take turns, each in a new process that
has used the device before the clock starts. Files are in the page cache: the disk is not measured.
Memory is the peak growth of anonymous memory (RssAnon) of the process on the host.

Exit status: 0; 1 if two ways gave different results; 2 if neither ONNX Runtime nor PyTorch can use
the device. `--device cpu` tries the tool without a CUDA device, and measures the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxarchive
from onnxarchive.cli.table import table
from onnxarchive.interop import torch as archived

GIB: Final = 1 << 30
MIB: Final = 1 << 20
LAYERS: Final = 64
ITEM_NBYTES: Final = 4
MIN_WIDTH: Final = 16  # weights below 1 KiB would be passed to ONNX Runtime in the model
WARM_NBYTES: Final = 64 * MIB
SAMPLING_INTERVAL: Final = 0.002

PROVIDERS: Final = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
NO_DEVICE: Final = 2

ARCHIVE: Final = "model.onnxa"
EXTERNAL: Final = "external/model.onnx"
PICKLED: Final = "tensors.pt"
SAFETENSORS: Final = "tensors.safetensors"


@dataclass
class Figures:
    """The figures of one process.

    Attributes:
        seconds: The time to make the session, or to copy the tensors.
        result: The computed numbers, for `_compare`.
        run_seconds: The time of the first run of a session; None for copies.
        anonymous: Peak growth of anonymous memory in bytes; None if unknown.
    """

    seconds: float
    result: list[float]
    run_seconds: float | None = None
    anonymous: int | None = None


@dataclass(frozen=True)
class Way:
    """A way to bring weights onto the device.

    Attributes:
        name: The name of the way in the table.
        runtime: The required package.
        file: The file to read, relative to the directory of all files.
        measure: Takes the figures once, given the file and the device.
        archived: The name of the way to compare with; None if this way itself reads the archive.
    """

    name: str
    runtime: str
    file: str
    measure: Callable[[Path, str], Figures]
    archived: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights in GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="directory for temporary files")
    parser.add_argument("--json", type=Path, help="write the figures of all rounds to this file")
    parser.add_argument("--device", choices=sorted(PROVIDERS), default="cuda")
    parser.add_argument("--measure", choices=[*WARM, *WAYS], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.measure is not None:  # a process that this tool started, see `_in_process`
        with contextlib.redirect_stdout(sys.stderr):
            told = _measure(arguments.measure, arguments.device, arguments.directory)
        print(json.dumps(told))
        return 0
    width = math.isqrt(max(int(arguments.gib * GIB) // LAYERS // ITEM_NBYTES, 0))
    if width < MIN_WIDTH or arguments.rounds < 1:
        parser.error(
            "expected --rounds of at least 1 and --gib of at least "
            f"{LAYERS * MIN_WIDTH**2 * ITEM_NBYTES / GIB}, "
            f"found --rounds {arguments.rounds} and --gib {arguments.gib}"
        )
    used, missing = _look(arguments.device)
    left_out = {it.name: missing[it.runtime] for it in WAYS.values() if it.runtime in missing}
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    if {"onnxruntime", "torch"} <= set(missing):
        what = f"the device {arguments.device!r}"
        print(f"neither ONNX Runtime nor PyTorch can use {what}", file=sys.stderr)
        return NO_DEVICE
    ways = [it for it in WAYS.values() if it.name not in left_out]
    with tempfile.TemporaryDirectory(prefix="onnxarchive-cuda-", dir=arguments.directory) as folder:
        _write(Path(folder), width, {it.file for it in ways})
        rounds = _measure_in_turn(ways, arguments.device, Path(folder), arguments.rounds)
    nbytes = LAYERS * width**2 * ITEM_NBYTES
    medians = {name: _medians(figures) for name, figures in rounds.items()}
    size = f"{nbytes / MIB:.0f} MiB in {LAYERS} tensors"
    print(f"{size}; rounds: {arguments.rounds} (the table has medians); {', '.join(used)}\n")
    if arguments.device != "cuda":
        print("--device cpu: these are figures of the CPU\n")
    print(_table(ways, medians, nbytes))
    if arguments.json is not None:
        told = {
            "device": arguments.device,
            "used": used,
            "nbytes": nbytes,
            "tensors": LAYERS,
            "left_out": left_out,
            "medians": medians,
            "ratios": {it.name: _ratio(it, medians) for it in ways if it.archived is not None},
            "rounds": {name: [asdict(it) for it in figures] for name, figures in rounds.items()},
        }
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return _compare(ways, rounds)


# Devices and packages


def _look(device: str) -> tuple[list[str], dict[str, str]]:
    """Descriptions of the packages that can use the device; a reason for each other package."""
    used, missing = [], {}
    for package in WARM:
        found, reason = _in_process(package, device, Path())
        if found is None:
            missing[package] = reason
        else:
            used.append(found)
    if "torch" in missing:
        missing["safetensors"] = missing["torch"]
    elif importlib.util.find_spec("safetensors") is None:
        missing["safetensors"] = "safetensors is not installed"
    return used, missing


def _try(package: str, device: str) -> tuple[str | None, str | None]:
    """Returns (description of the package and device, None), or (None, reason of the failure)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return WARM[package](device), None
        except Exception as error:  # ONNX Runtime's errors share only this base class
            return None, str(error).strip().split("\n")[0]


def _warm_onnxruntime(device: str) -> str:
    """Uses the device once; describes ONNX Runtime. Raises if the device is unusable."""
    import onnxruntime as ort

    provider = PROVIDERS[device]
    if provider not in ort.get_available_providers():
        raise RuntimeError(f"ONNX Runtime {ort.__version__} has no {provider}")
    if device == "cuda" and hasattr(ort, "preload_dlls"):  # CUDA's libraries in Python packages
        ort.preload_dlls()
    model = _model(MIN_WIDTH, 1)
    weight = np.ones((MIN_WIDTH, MIN_WIDTH), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, _weight_name(0)))
    session = ort.InferenceSession(model.SerializeToString(), providers=[provider])
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"ONNX Runtime has {provider} and falls back to another")
    session.run(None, {"x0": _input(MIN_WIDTH)})
    return f"ONNX Runtime {ort.__version__}"


def _warm_torch(device: str) -> str:
    """Uses the device once; describes PyTorch and the device. Raises if the device is unusable."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} has no CUDA device")
    torch.ones(WARM_NBYTES // ITEM_NBYTES).to(device, copy=True).sum().item()
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    return f"PyTorch {torch.__version__} on {name}"


WARM: Final[Mapping[str, Callable[[str], str]]] = {
    "onnxruntime": _warm_onnxruntime,
    "torch": _warm_torch,
}


# The files


def _weight_name(layer: int) -> str:
    return f"layer.{layer}/weight"


def _model(width: int, layers: int) -> onnx.ModelProto:
    """A chain of matrix products, without its weights."""
    nodes = [
        helper.make_node("MatMul", [f"x{layer}", _weight_name(layer)], [f"x{layer + 1}"])
        for layer in range(layers)
    ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, width])],
        [helper.make_tensor_value_info(f"x{layers}", TensorProto.FLOAT, [1, width])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _input(width: int) -> Any:
    return np.linspace(-1, 1, width, dtype=np.float32)[None]


def _write(folder: Path, width: int, files: set[str]) -> None:
    """Writes the archive, and makes the other requested files from the archive."""
    random = np.random.default_rng(seed=0)
    path = folder / ARCHIVE
    with onnxarchive.Writer(path) as writer:
        for layer in range(LAYERS):
            weight = random.standard_normal((width, width), np.float32)
            writer.add(_weight_name(layer), weight / np.float32(width**0.5))
        writer.finish(_model(width, LAYERS))
    if EXTERNAL in files:
        (folder / EXTERNAL).parent.mkdir()
        onnxarchive.export(path, folder / EXTERNAL, external_data="weights.data")
    with onnxarchive.open(path) as archive:
        if PICKLED in files:
            import torch

            torch.save(dict(archived.tensors(archive)), folder / PICKLED)
        if SAFETENSORS in files:
            safetensors = importlib.import_module("safetensors.torch")
            safetensors.save_file(dict(archived.tensors(archive)), folder / SAFETENSORS)


# The ways, each measured in a process of its own


class Memory:
    """Samples the growth of anonymous memory during a block.

    Attributes:
        peak: The greatest growth, in bytes; None if unknown.
    """

    peak: int | None = None

    def __enter__(self) -> Memory:
        self._before = _anonymous()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample_often, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        self._sample()

    def _sample_often(self) -> None:
        while not self._is_done.wait(SAMPLING_INTERVAL):
            self._sample()

    def _sample(self) -> None:
        now = _anonymous()
        if now is not None and self._before is not None:
            self.peak = max(self.peak or 0, now - self._before)


def _anonymous() -> int | None:
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return None


def _archive_session(path: Path, device: str) -> Figures:
    return _session(
        lambda providers: onnxarchive.session(path, providers=providers, enable_fallback=0), device
    )


def _onnx_session(path: Path, device: str) -> Figures:
    import onnxruntime as ort

    return _session(
        lambda providers: ort.InferenceSession(
            os.fspath(path), providers=providers, enable_fallback=0
        ),
        device,
    )


def _session(make: Callable[[list[str]], Any], device: str) -> Figures:
    _warm_onnxruntime(device)
    with Memory() as memory:
        begun = time.perf_counter()
        session = make([PROVIDERS[device]])
        made = time.perf_counter()
        (taken,) = session.get_inputs()
        (y,) = session.run(None, {taken.name: _input(taken.shape[1])})
        done = time.perf_counter()
    if session.get_providers()[0] != PROVIDERS[device]:
        raise RuntimeError(f"the session fell back to {session.get_providers()}")
    return Figures(made - begun, y.ravel()[:8].tolist(), done - made, memory.peak)


def _archive_tensors(path: Path, device: str) -> Figures:
    def load() -> dict[str, Any]:
        with onnxarchive.open(path) as archive:
            return _copied(archived.tensors(archive), device)

    return _tensors(load, device)


def _pickled_tensors(path: Path, device: str) -> Figures:
    import torch

    return _tensors(lambda: _copied(torch.load(path, mmap=True, weights_only=True), device), device)


def _safetensors(path: Path, device: str) -> Figures:
    load = importlib.import_module("safetensors.torch").load_file

    def load_on_device() -> dict[str, Any]:
        loaded: dict[str, Any] = load(path, device=device)
        return loaded if device == "cuda" else _copied(loaded, device)

    return _tensors(load_on_device, device)


def _copied(tensors: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}


def _tensors(load: Callable[[], dict[str, Any]], device: str) -> Figures:
    import torch

    _warm_torch(device)
    with Memory() as memory:
        begun = time.perf_counter()
        tensors = load()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    if {it.device.type for it in tensors.values()} != {device}:
        raise RuntimeError(f"expected all tensors on {device}")
    bits = [int(tensors[name].view(torch.int32).sum().item()) for name in sorted(tensors)]
    return Figures(seconds, [*map(float, bits)], anonymous=memory.peak)


_ARCHIVE_SESSION: Final = Way("session of archive", "onnxruntime", ARCHIVE, _archive_session)
_ARCHIVE_TENSORS: Final = Way("torch from archive", "torch", ARCHIVE, _archive_tensors)
WAYS: Final[Mapping[str, Way]] = {
    it.name: it
    for it in (
        _ARCHIVE_SESSION,
        Way("session of .onnx", "onnxruntime", EXTERNAL, _onnx_session, _ARCHIVE_SESSION.name),
        _ARCHIVE_TENSORS,
        Way("torch.load(mmap=True)", "torch", PICKLED, _pickled_tensors, _ARCHIVE_TENSORS.name),
        Way("safetensors.torch", "safetensors", SAFETENSORS, _safetensors, _ARCHIVE_TENSORS.name),
    )
}


def _measure(measure: str, device: str, folder: Path) -> Any:
    if measure in WARM:
        return _try(measure, device)
    way = WAYS[measure]
    return asdict(way.measure(folder / way.file, device))


def _in_process(measure: str, device: str, folder: Path) -> Any:
    """The result of `_measure` in a new process."""
    command = [sys.executable, __file__, "--measure", measure, "--device", device]
    done = subprocess.run(
        [*command, "--directory", os.fspath(folder)], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # libraries may have printed before


def _measure_in_turn(
    ways: Sequence[Way], device: str, folder: Path, rounds: int
) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            found[way.name].append(Figures(**_in_process(way.name, device, folder)))
    return found


# The report


def _medians(figures: Sequence[Figures]) -> dict[str, float | None]:
    return {
        "seconds": statistics.median(it.seconds for it in figures),
        "run_seconds": _median(it.run_seconds for it in figures),
        "anonymous": _median(it.anonymous for it in figures),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(way: Way, medians: Mapping[str, Mapping[str, float | None]]) -> float | None:
    """The time of the way that reads the archive, divided by the time of `way`; None if unknown."""
    if way.archived is None:
        return None
    own, archive = (medians[name]["seconds"] for name in (way.name, way.archived))
    return archive / own if own and archive else None


def _table(
    ways: Sequence[Way], medians: Mapping[str, Mapping[str, float | None]], nbytes: int
) -> str:
    rows = []
    for way in ways:
        found = medians[way.name]
        seconds = found["seconds"]
        row = [
            _shown(seconds, 3),
            _shown(found["run_seconds"], 4),
            _shown(nbytes / GIB / seconds if seconds else None, 2),
            _shown(None if found["anonymous"] is None else found["anonymous"] / MIB, 1),
            _shown(_ratio(way, medians), 3),
        ]
        rows.append([way.name, *row])
    header = ["way", "seconds", "first run", "GiB/s", "MiB of RssAnon", "archive's seconds / these"]
    return "\n".join(table(header, rows))


def _shown(number: float | None, digits: int) -> str:
    return "" if number is None else f"{number:.{digits}f}"


def _compare(ways: Sequence[Way], rounds: Mapping[str, Sequence[Figures]]) -> int:
    """Prints the names of ways with different results; returns 1 if any results differ, else 0."""
    status = 0
    first: dict[bool, tuple[str, list[float]]] = {}
    for way in ways:
        is_session = way.runtime == "onnxruntime"
        for figures in rounds[way.name]:
            name, expected = first.setdefault(is_session, (way.name, figures.result))
            tolerance = 1e-2 if is_session else 0.0
            if not np.allclose(figures.result, expected, rtol=tolerance, atol=tolerance):
                print(f"{way.name} and {name} gave different results", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
