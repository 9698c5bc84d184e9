"""Measures sessions with, without and with stored packed weights: time and private memory.

Writes two archives: one with float32 weights (1 GiB), one with 4-bit weights (160 MiB). Each holds
a model of 64 layers with weights of shape 2048 x 2048. Runs each model in one process, then in four
processes at once, with one and with several threads per process, on inputs of 1 and of 64 rows.
Prints a table; with --json, adds it to a file of run.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tqdm import tqdm

import onnxarchive

SIDE: Final = 2048  # rows and columns of a weight
BLOCK: Final = 32  # elements of a 4-bit weight that share a scale
BATCHES: Final = (1, 64)
PROCESSES: Final = (1, 4)
MODES: Final = ("yes", "no", "stored")  # packed copies in each process, none, in the archive
RUNS: Final = 5
MIB: Final = 1 << 20
HEADER: Final = (
    *("weights", "prepack", "processes", "threads", "start", "run, 1 row", "run, 64 rows"),
    "private memory",
)


def layer(kind: str, number: int) -> Iterator[onnx.TensorProto | onnx.NodeProto]:
    """Yields the weights of a layer, then its node from `y{number}` to `y{number + 1}`."""
    rng = np.random.default_rng(number)
    weight, names = f"w{number}", ([f"y{number}"], [f"y{number + 1}"])
    if kind == "float32":
        values = rng.standard_normal((SIDE, SIDE), np.float32) / np.float32(SIDE**0.5)
        yield numpy_helper.from_array(values, weight)
        yield helper.make_node("MatMul", [*names[0], weight], names[1])
        return
    packed = rng.integers(0, 256, (SIDE, SIDE // BLOCK, BLOCK // 2), np.uint8)
    scales = np.full(SIDE * SIDE // BLOCK, 0.2 / SIDE**0.5, np.float32)
    yield numpy_helper.from_array(packed, weight)
    yield numpy_helper.from_array(scales, f"s{number}")
    yield helper.make_node(
        "MatMulNBits",
        [*names[0], weight, f"s{number}"],
        names[1],
        domain="com.microsoft",
        K=SIDE,
        N=SIDE,
        bits=4,
        block_size=BLOCK,
    )


def write_archive(path: Path, kind: str, layers: int) -> None:
    """Writes an archive of layers of one kind."""
    rows = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", SIDE])
        for name in ("y0", f"y{layers}")
    ]
    graph = helper.make_graph([], kind, rows[:1], rows[1:])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    with onnxarchive.Writer(path) as writer:
        for number in range(layers):
            for it in layer(kind, number):
                if isinstance(it, onnx.NodeProto):
                    graph.node.append(it)
                else:
                    writer.add(it.name, numpy_helper.to_array(it))
        writer.finish(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def private_nbytes() -> int:
    """Bytes of anonymous memory: memory that this process shares with no other process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(it.split()[1]) << 10 for it in lines if it.startswith("Anonymous:"))


def measure(path: Path, mode: str, threads: int, together: Barrier, results: Any) -> None:
    """Measures a session in step with the other processes; puts its figures into `results`.

    The figures: seconds to make the session, median seconds of a run for each number of rows of the
    input, and the growth of anonymous memory in bytes.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    before = private_nbytes()
    together.wait()
    begin = time.perf_counter()
    session = onnxarchive.session(path, options, ["CPUExecutionProvider"], prepack=mode != "no")
    figures: list[float] = [time.perf_counter() - begin]
    for batch in BATCHES:
        rows = np.ones((batch, SIDE), np.float32)
        session.run(None, {"y0": rows})
        together.wait()
        seconds = []
        for _ in range(RUNS):
            begin = time.perf_counter()
            session.run(None, {"y0": rows})
            seconds.append(time.perf_counter() - begin)
        figures.append(statistics.median(seconds))
    results.put([*figures, private_nbytes() - before])


def measure_together(path: Path, mode: str, processes: int, threads: int) -> list[list[float]]:
    """Runs `measure` in several processes at once; returns the figures of each process."""
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(processes), context.Queue()
    arguments = (path, mode, threads, together, results)
    workers = [context.Process(target=measure, args=arguments) for _ in range(processes)]
    for worker in workers:
        worker.start()
    measured = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return measured


def row(kind: str, mode: str, threads: int, measured: list[list[float]]) -> list[str]:
    """A row of the table: median times of the processes, and total memory of all processes."""
    *times, private = zip(*measured, strict=True)
    start, *runs = map(statistics.median, times)
    cells = [kind, mode, str(len(measured)), str(threads), f"{start:.2f} s"]
    cells += [f"{seconds * 1000:,.0f} ms" for seconds in runs]
    return [*cells, f"{sum(private) / MIB:,.0f} MiB"]


def main() -> None:
    """Measures everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64, help="layers of each model (default 64)")
    help = "threads of each process (default 1 and 4)"
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4], help=help)
    parser.add_argument("--directory", help="directory for the archives (default: the system's)")
    parser.add_argument("--json", type=Path, help="add the table to this file of run.py")
    arguments = parser.parse_args()
    rows = [list(HEADER)]
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for kind in tqdm(("float32", "4 bits"), leave=False):
            path = Path(directory) / "m.onnxa"
            write_archive(path, kind, arguments.layers)
            for mode in MODES:
                if mode == "stored":
                    onnxarchive.prepack(path)
                for threads, processes in itertools.product(arguments.threads, PROCESSES):
                    measured = measure_together(path, mode, processes, threads)
                    rows.append(row(kind, mode, threads, measured))
            path.unlink()
    for cells in rows:
        print(*cells, sep="\t")
    if arguments.json is not None:
        run = json.loads(arguments.json.read_text(encoding="utf-8"))
        arguments.json.write_text(json.dumps({**run, "packed weights": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
