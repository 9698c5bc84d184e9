"""The benchmark at a tiny size: it measures, judges and reports; how fast is not tested."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from pages import needs_smaps
from processes import completed, started, wait_until

import onnxarchive
from tools.bench import cases, inputs, process, report, run as bench, server
from tools.bench.cases import CASES, Target
from tools.bench.process import Figures

pytestmark = pytest.mark.tool

TOOL = Path(bench.__file__)
SCALE = 0.001
MIB = 1 << 20
HAS_PROC = os.path.exists("/proc/self/status")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that all cases read, as far as their packages are installed."""
    path = tmp_path_factory.mktemp("bench")
    absent = cases.missing()
    wanted = {
        (group, kind)
        for case in CASES.values()
        for measure in case.measures
        for kind in measure.reads
        for group in (measure.group, "warm")
        if not absent.keys() & set(measure.needs)
    }
    for group, place in inputs.places(path, SCALE).items():
        inputs.make(place, sorted(kind for name, kind in wanted if name == group))
        place.output.mkdir()
    return path


def run(path: Path, *arguments: str, sitecustomize: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the tool in its tiny size; it writes below `path` and leaves nothing there."""
    work, extra = path / "work", path / "extra"
    work.mkdir(exist_ok=True)
    extra.mkdir(exist_ok=True)
    (extra / "sitecustomize.py").write_text(sitecustomize)
    places = os.pathsep.join(filter(None, [str(extra), os.environ.get("PYTHONPATH")]))
    done = completed(
        [sys.executable, TOOL, "--scale", str(SCALE), "--directory", work, *arguments],
        env={**os.environ, "PYTHONPATH": places},
    )
    assert list(work.iterdir()) == []
    return done


@pytest.mark.parametrize("name", CASES)
def test_every_measure_of_a_case_gives_figures_and_syncs_what_it_writes(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = cases.missing()
    measures = [it for it in CASES[name].measures if not absent.keys() & set(it.needs)]
    groups = inputs.places(folder, SCALE)
    synced: set[int] = set()
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    is_served = CASES[name].is_served and measures
    with server.serve(folder) if is_served else contextlib.nullcontext():
        for measure in measures:
            place = groups[measure.group]
            if measure.clock == "warm":
                figures = process.measure(name, measure.name, folder, SCALE)
                assert figures.seconds > 0
                assert figures.cpu_seconds is not None
                assert (figures.anonymous is not None) == HAS_PROC
                assert (figures.resident is not None) == HAS_PROC
                written = list(place.output.iterdir())
                nbytes = sum(path.stat().st_size for path in written)
                assert nbytes >= place.group.nbytes * measure.writes
                assert {path.stat().st_ino for path in written} <= synced
                for output in (groups["warm"].output, place.output):
                    for path in output.iterdir():
                        path.unlink()
            else:
                assert process.run_whole(measure, place, SCALE).seconds > 0


def test_a_first_step_is_a_part_of_its_process(folder: Path) -> None:
    place = inputs.places(folder, SCALE)["light"]
    whole, first = (
        process.run_whole(replace(measure, clock=clock), place, SCALE)
        for measure in CASES["start"].measures[:1]
        for clock in ("process", "first")
    )
    assert 0 < first.seconds < whole.seconds


def test_a_whole_process_imports_nothing_but_what_the_way_needs() -> None:
    program = f"import sys; sys.path[0] = {os.fspath(TOOL.parents[2])!r}; import tools.bench.ways"
    done = completed([sys.executable, "-c", f"{program}; print(*sys.modules)"], status=0)
    heavy = {"numpy", "onnx", "onnxarchive", "dataclasses", "inspect", "json", "subprocess"}
    modules = set(done.stdout.split())
    assert "tools.bench.ways" in modules
    assert not heavy & modules


def tensors_of(place: inputs.Place, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of an input file, read with the library of its kind."""
    path = place.file(kind)
    if kind == "archive":
        with onnxarchive.open(path) as archive:
            archive.verify()
            return dict(archive.tensors)
    if kind == "safetensors":
        library: Any = importlib.import_module("safetensors.numpy")
        return dict(library.load_file(path))
    if kind == "pickled":
        library = importlib.import_module("torch")
        return {name: value.numpy() for name, value in library.load(path).items()}
    model = onnx.load(path)
    onnx.checker.check_model(model)
    return {it.name: numpy_helper.to_array(it) for it in model.graph.initializer}


def test_files_of_every_kind_hold_the_same_tensors(folder: Path) -> None:
    place = inputs.places(folder, SCALE)["large"]
    expected = dict(place.arrays())
    assert len({array.tobytes() for array in expected.values()}) == place.group.count
    for kind in ("archive", "external", "single", "safetensors", "pickled"):
        if inputs.MADE_WITH.get(kind) not in cases.missing():
            inputs.make(place, [kind])
            found = tensors_of(place, kind)
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name], array)
    place.file("single").unlink()


@pytest.mark.parametrize("name", ["size-10000000", "size-100000000000"])
def test_a_sparse_archive_breaks_no_rule_and_takes_no_disk(name: str, folder: Path) -> None:
    place = inputs.places(folder, SCALE)[name]
    assert onnxarchive.check(place.archive, full=name == "size-10000000") == []
    status = place.archive.stat()
    assert status.st_size > place.group.nbytes
    if hasattr(status, "st_blocks"):
        assert status.st_blocks * 512 < min(place.group.nbytes, 64 * MIB)


@pytest.mark.parametrize("name", ["large", "many", "single", "chain", "light", "real"])
@pytest.mark.parametrize("scale", [1, 0.1, 0.01, 0.001])
def test_a_scaled_group_has_the_scaled_number_of_bytes(name: str, scale: float) -> None:
    group = inputs.GROUPS[name]
    assert group.scaled(scale).nbytes == pytest.approx(group.nbytes * scale, rel=0.05)


def test_the_figures_are_written_as_json(tmp_path: Path) -> None:
    cases = ["convert-large", "verify"]
    written = tmp_path / "written.json"
    options = ["--rounds", "1", "--json", os.fspath(written)]
    done = run(tmp_path, "--only", *cases, *options)
    assert done.returncode == 0, done.stderr
    figures_of_run = json.loads(written.read_text())
    assert figures_of_run["settings"] == {"rounds": 1, "scale": SCALE}
    assert "Python" in figures_of_run["machine"]
    assert list(figures_of_run["cases"]) == cases
    for name, case in figures_of_run["cases"].items():
        assert list(case["rounds"]) == [it.name for it in CASES[name].measures]
        for row, figures in case["rounds"].items():
            assert len(figures) == 1
            assert case["medians"][row]["seconds"] == figures[0]["seconds"]
        for target in case["targets"]:
            spread = target["spread"]
            assert spread["low"] <= spread["median"] <= spread["high"]
            assert target["met"] is None  # the sizes are scaled
            limited = Target(**target["target"])
            assert target["rounds_met"] == report.is_met(limited, spread["median"])
    assert f"onnxarchive {onnxarchive.__version__}" in done.stdout
    assert "targets met:" in done.stdout


class Fault(NamedTuple):
    """A fault of a run, and what it prints.

    Attributes:
        cases: The cases that are run.
        site: Python that all its processes run first.
        status: The exit status.
        words: What is printed.
        rows: The measures of the first case that have figures.
    """

    cases: list[str]
    site: str
    status: int
    words: list[str]
    rows: list[str]


FAULTS = {
    "a peer that is not installed": Fault(
        ["open-many"],
        "import sys\nsys.modules['safetensors'] = None\n",
        0,
        [
            "left out: safetensors: safetensors is not installed",
            "not measured  time relative to safetensors: at most 5",
        ],
        ["onnxarchive"],
    ),
    "a peer that fails": Fault(
        ["convert-single"],
        "import onnx\nonnx.load = None\n",  # which is what the measure calls
        0,
        [
            "FAILED: onnx: TypeError: 'NoneType' object is not callable; exit status 1",
            "not measured  time relative to onnx: at most 0.2",
            "times as fast as copy",
        ],
        ["onnxarchive", "copy"],
    ),
    "a measure that fails": Fault(
        ["verify"],
        "import onnxarchive\nonnxarchive.check = None\n",
        bench.FAILED,
        ["FAILED: check --full: TypeError: 'NoneType' object is not callable; exit status 1"],
        ["onnxarchive", "map"],
    ),
    "input files that cannot be made": Fault(
        ["open-many", "session-unpacked"],
        "import os, sys\n"
        "command = ' '.join(sys.orig_argv)\n"
        "if 'inputs.py' in command and '\"many\"' in command:\n    os._exit(7)\n",
        bench.FAILED,
        [
            "FAILED: onnxarchive: its input files cannot be made: exit status 7",
            "not measured  time relative to safetensors",
            "  time relative to onnxruntime:",
        ],
        [],
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_missing_or_failing_way_is_reported_and_all_others_are_measured(
    fault: Fault, tmp_path: Path
) -> None:
    written = tmp_path / "run.json"
    options = ["--rounds", "1", "--json", os.fspath(written)]
    done = run(tmp_path, "--only", *fault.cases, *options, sitecustomize=fault.site)
    assert done.returncode == fault.status, done.stderr
    assert [it for it in fault.words if it not in done.stdout] == []
    case = json.loads(written.read_text())["cases"][fault.cases[0]]
    assert list(case["rounds"]) == fault.rows
    assert any(target["met"] is None for target in case["targets"])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--scale", str(SCALE), "--directory", tmp_path]
    with started([*command, "--only", "start"]) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "start ...\n"
        (folder,) = tmp_path.iterdir()
        wait_until(lambda: any(folder.iterdir()), process)  # the first tool has begun to write
        process.send_signal(number)
        assert process.wait() == bench.INTERRUPTED
        assert "nothing is left behind" in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets disks have so many free bytes."""
    usage = namedtuple("usage", "free")
    return lambda nbytes: monkeypatch.setattr("shutil.disk_usage", lambda path: usage(nbytes))


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, free_disk: Callable[[int], None]
) -> None:
    free_disk(5 << 30)
    with pytest.raises(SystemExit, match=r"expected .* GB of free disk, found 5.4 GB; give"):
        bench.main(["--only", "view-large", "--directory", os.fspath(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_the_real_archive_is_skipped_with_a_sentence_where_the_disk_is_too_small(
    tmp_path: Path, free_disk: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    free_disk(20 * 10**9)
    assert bench.main(["--only", "real", "--directory", os.fspath(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name, size in (("real-open", "22.5"), ("real", "45.1"), ("real-convert", "45.1")):
        assert f"{name} is skipped: expected {size} GB of free disk, found 20.0 GB" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", ["--rounds 0", "--scale 0", "--scale 2", "--only nothing", "--only save --readme"]
)
def test_wrong_use_of_the_benchmark_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.main(arguments.split())
    assert raised.value.code == 2
    assert capsys.readouterr().err


def test_ways_take_turns_forwards_and_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def run_warm(case: str, name: str, folder: Path, scale: float) -> Figures:
        measured.append(name)
        return Figures(len(measured), 1)

    monkeypatch.setattr(bench, "run_warm", run_warm)
    for name in ("run_tool", "_warm"):
        monkeypatch.setattr(bench, name, lambda *_: None)
    arguments = argparse.Namespace(rounds=3, scale=SCALE, quick=False)
    (result,) = bench.Run(tmp_path, arguments, {}).cases(["open-many"])
    names = ["onnxarchive", "safetensors"]
    count = 3 * CASES["open-many"].times
    forwards, reverse = names, names[::-1]
    assert measured == ([*forwards, *reverse, *reverse, *forwards] * count)[: 2 * count]
    assert [it.seconds for it in result.rounds["onnxarchive"]] == [4, 9, 15]
    assert list(result.rounds) == names
    measured.clear()
    arguments = argparse.Namespace(rounds=4, scale=SCALE, quick=True)
    bench.Run(tmp_path, arguments, {}).cases(["verify"])
    names = [it.name for it in CASES["verify"].measures]
    turned = [*names[1:], names[0]]
    assert measured == [*names, *reversed(names), *turned, *reversed(turned)]


@needs_smaps
def test_memory_that_is_freed_during_a_measurement_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes 200 MiB, waits, and gives them back before the clock stops."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {os.fspath(TOOL.parents[2])!r})\n"
        "from tools.bench import cases, process\nimport time\n"
        "def prepare(place):\n"
        "    def step():\n"
        "        taken = bytearray(200 << 20)\n"
        "        time.sleep(1)\n"
        "    return step\n"
        "measure = cases.Measure('taking', 'warm', prepare)\n"
        "cases.CASES['taking'] = cases.Case('', (measure,))\n"
        "sys.exit(process.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(process, "__file__", os.fspath(program))
    figures = process.run_warm("taking", "taking", tmp_path, SCALE)
    assert figures.anonymous is not None
    assert figures.resident is not None
    assert 190 * MIB < figures.anonymous < 220 * MIB
    assert 190 * MIB < figures.resident < 220 * MIB


# Packed weights


@needs_smaps
def test_the_table_shows_what_packed_copies_take(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    told = tmp_path / "told.json"
    told.write_text('{"cases": {}}')
    tool = TOOL.with_name("prepacking.py")
    command = [sys.executable, tool, "--layers", "4", "--threads", "1", "--json", told]
    completed(command, status=0)
    run = json.loads(told.read_text())
    assert run["cases"] == {}
    rows = run["packed weights"]
    found = {
        tuple(cells[:3]): int(cells[-1].removesuffix(" MiB").replace(",", "")) for cells in rows[1:]
    }
    assert list(found) == [
        (weights, prepack, processes)
        for weights in ("float32", "4 bits")
        for prepack in ("yes", "no", "stored")
        for processes in "14"
    ]
    for processes in "14":
        packed = int(processes) * 4 * 16  # MiB
        assert found["float32", "yes", processes] >= packed
        assert found["float32", "no", processes] < packed / 2
        assert found["float32", "stored", processes] < packed
