"""tools/bench.py at a size that takes no time: that it measures, judges and tells; not how fast."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import namedtuple
from pathlib import Path
from typing import Any

import bench
import bench_cases
import bench_inputs
import bench_process
import bench_report
import numpy as np
import onnx
import pytest
from bench_cases import CASES, Case, Measure, Target
from bench_process import Figures
from bench_report import Result, Verdict
from onnx import numpy_helper
from processes import started

import onnxarchive
from onnxarchive.storage import filesystem

pytestmark = pytest.mark.tool

TOOL = Path(bench.__file__)
SCALE = 0.001
MIB = 1 << 20
HAS_PROC = os.path.exists("/proc/self/status")

# Stands in for a machine without a package: nobody finds it, and nobody can import it.
HIDE = "import sys\nsys.modules[{package!r}] = None\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that all cases read, as far as their packages are installed."""
    path = tmp_path_factory.mktemp("bench")
    absent = bench_cases.missing()
    wanted = {
        (group, kind)
        for case in CASES.values()
        for measure in case.measures
        for kind in measure.reads
        for group in (measure.group, "warm")
        if not absent.keys() & set(measure.needs)
    }
    for group, place in bench_inputs.places(path, SCALE).items():
        bench_inputs.make(place, sorted(kind for name, kind in wanted if name == group))
        place.output.mkdir()
    return path


def run(path: Path, *arguments: str, sitecustomize: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the tool in its tiny size; it writes below `path` and leaves nothing there."""
    work, extra = path / "work", path / "extra"
    work.mkdir(exist_ok=True)
    extra.mkdir(exist_ok=True)
    (extra / "sitecustomize.py").write_text(sitecustomize)
    places = os.pathsep.join(filter(None, [str(extra), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, TOOL, "--scale", str(SCALE), "--directory", work, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert list(work.iterdir()) == []
    return done


@pytest.mark.parametrize("name", CASES)
def test_every_measure_of_a_case_gives_figures(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = bench_cases.missing()
    for measure in CASES[name].measures:
        if absent.keys() & set(measure.needs):
            continue
        with monkeypatch.context() as context:
            context.setattr(
                filesystem, "sync", filesystem.sync
            )  # put back what a measure takes away
            context.setattr(filesystem, "sync_directory", filesystem.sync_directory)
            figures = bench_process.measure(name, measure.name, folder, SCALE, rehearses=False)
        assert figures.seconds > 0
        assert figures.cpu_seconds > 0
        is_told = HAS_PROC and not measure.is_process
        assert (figures.anonymous is not None) == is_told
        assert (figures.resident is not None) == is_told
        place = bench_inputs.places(folder, SCALE)[measure.group]
        written = [path.stat().st_size for path in place.output.iterdir()]
        assert sum(written) >= place.group.nbytes * measure.writes
        for group in ("warm", measure.group):
            for path in bench_inputs.places(folder, SCALE)[group].output.iterdir():
                path.unlink()


def test_files_of_every_kind_hold_the_same_tensors(folder: Path) -> None:
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
    place = bench_inputs.places(folder, SCALE)["large"]
    for kind in ("archive", "external", "single", "safetensors", "pickled"):
        package = bench_inputs.MADE_WITH.get(kind)
        if package is not None and package in bench_cases.missing():
            continue
        bench_inputs.make(place, [kind])
        if kind == "archive":
            with onnxarchive.open(place.archive) as archive:
                archive.verify()
                found[kind] = dict(archive.tensors)
        elif kind in ("external", "single"):
            model = onnx.load(place.file(kind))
            onnx.checker.check_model(model)
            tensors = model.graph.initializer
            found[kind] = {it.name: numpy_helper.to_array(it) for it in tensors}
        elif kind == "safetensors":
            found[kind] = importlib.import_module("safetensors.numpy").load_file(place.safetensors)
        else:
            torch = importlib.import_module("torch")
            found[kind] = {it: value.numpy() for it, value in torch.load(place.pickled).items()}
    place.single.unlink()
    expected = dict(place.arrays())
    assert len({array.tobytes() for array in expected.values()}) == place.group.count
    for tensors_of_kind in found.values():
        assert tensors_of_kind.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(tensors_of_kind[name], array)


@pytest.mark.parametrize("name", ["small", "huge"])
def test_a_sparse_archive_breaks_no_rule_and_takes_no_disk(name: str, folder: Path) -> None:
    place = bench_inputs.places(folder, SCALE)[name]
    assert onnxarchive.check(place.archive, full=name == "small") == []
    status = place.archive.stat()
    assert status.st_size > place.group.nbytes
    if hasattr(status, "st_blocks"):
        assert status.st_blocks * 512 < min(place.group.nbytes, 64 * MIB)


@pytest.mark.parametrize("name", ["large", "many", "one", "single", "chain", "light"])
@pytest.mark.parametrize("scale", [1, 0.1, 0.01, 0.001])
def test_a_scaled_group_has_so_many_bytes(name: str, scale: float) -> None:
    group = bench_inputs.GROUPS[name]
    assert group.scaled(scale).nbytes == pytest.approx(group.nbytes * scale, rel=0.05)


def test_the_figures_are_written_as_json_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = ["convert-external", "verify"]
    told, drawn = tmp_path / "told.json", tmp_path / "drawn.svg"
    options = ["--rounds", "1", "--json", os.fspath(told), "--plot", os.fspath(drawn)]
    done = run(tmp_path, "--only", *cases, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())
    assert found["settings"] == {"rounds": 1, "scale": SCALE, "cold": False}
    assert "Python" in found["machine"]
    assert list(found["cases"]) == cases
    for name, case in found["cases"].items():
        assert list(case["rounds"]) == [it.name for it in CASES[name].measures]
        for measure, figures in case["rounds"].items():
            assert len(figures) == 1
            seconds = sorted(it["seconds"] for it in figures)
            assert seconds[0] <= case["medians"][measure]["seconds"] <= seconds[-1]
        for target in case["targets"]:
            spread = target["spread"]
            assert spread["low"] <= spread["median"] <= spread["high"]
            assert target["met"] == bench_report.is_met(
                Target(**target["target"]), spread["median"]
            )
    ElementTree.parse(drawn)
    for name in cases:  # which matplotlib draws, and says in a comment
        assert f"<!-- {name} [" in drawn.read_text()
    assert f"onnxarchive {onnxarchive.__version__}" in done.stdout
    assert "targets met:" in done.stdout


def test_files_are_dropped_from_the_cache_if_asked(tmp_path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no posix_fadvise")
    told = tmp_path / "told.json"
    rehearses = "import os\ndef fork():\n    raise AssertionError('what was dropped comes back')\n"
    done = run(
        tmp_path,
        *("--only", "verify", "--rounds", "2", "--cold", "--json", os.fspath(told)),
        sitecustomize=f"{rehearses}os.fork = fork\n",
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(told.read_text())["cases"]["verify"]["rounds"]
    assert [len(figures) for figures in rounds.values()] == [2 * CASES["verify"].times] * 2
    assert "files dropped from the page cache" in done.stdout


def test_a_peer_that_is_not_installed_is_named_and_its_target_not_judged(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = run(
        tmp_path,
        *("--only", "open-many", "--rounds", "1", "--json", os.fspath(told)),
        sitecustomize=HIDE.format(package="safetensors"),
    )
    assert done.returncode == 0, done.stderr
    assert "left out: safetensors: safetensors is not installed" in done.stdout
    assert "not measured  time, of that of safetensors: at most 0.8" in done.stdout
    case = json.loads(told.read_text())["cases"]["open-many"]
    assert list(case["rounds"]) == ["onnxarchive"]
    assert case["targets"][0]["met"] is None


def test_a_measure_that_fails_is_told_and_the_others_are_taken(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    broken = """
import os, sys
pwrite = os.pwrite
def broken(*arguments):
    if "bench_cases" in sys._getframe(1).f_code.co_filename:
        raise OSError("broken on purpose")
    return pwrite(*arguments)
os.pwrite = broken
"""
    done = run(
        tmp_path,
        *("--only", "save-synced", "--rounds", "1", "--json", os.fspath(told)),
        sitecustomize=broken,
    )
    assert done.returncode == 1
    assert "FAILED: pwrite" in done.stdout
    case = json.loads(told.read_text())["cases"]["save-synced"]
    assert list(case["rounds"]) == ["onnxarchive"]
    assert "exit status 1" in case["failures"]["pwrite"]
    assert "broken on purpose" in case["failures"]["pwrite"]


def test_a_peer_that_fails_is_told_and_no_failure_of_the_run(tmp_path: Path) -> None:
    broken = "import onnx\nonnx.load = None\n"  # which is what the measure calls
    done = run(tmp_path, "--only", "convert-single", "--rounds", "1", sitecustomize=broken)
    assert done.returncode == 0, done.stderr
    assert (
        "FAILED: onnx: TypeError: 'NoneType' object is not callable; exit status 1" in done.stdout
    )
    assert "not measured  times as fast as onnx" in done.stdout
    assert "times as fast as copy" in done.stdout


def test_files_that_cannot_be_made_fail_the_case_and_no_other(tmp_path: Path) -> None:
    broken = "import os, sys\nif 'bench_inputs.py' in sys.argv[0]: os._exit(7)\n"
    broken = broken.replace("sys.argv[0]", "' '.join(sys.orig_argv)")
    done = run(tmp_path, "--only", "ls", "import", "--rounds", "1", sitecustomize=broken)
    assert done.returncode == 1
    assert "FAILED: onnxarchive: its files: exit status 7" in done.stdout
    assert "not measured  time, of that of import onnx" in done.stdout
    assert "time, of that of onnx:" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--scale", str(SCALE), "--directory", tmp_path]
    with started([*command, "--only", "ls"]) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ls ...\n"
        (folder,) = tmp_path.iterdir()
        while not any(folder.iterdir()):  # until the first tool has begun to write
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == bench.INTERRUPTED
        assert "nothing is left behind" in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(5 << 30))
    with pytest.raises(SystemExit, match=r"expected .* GiB of free disk, found 5 GiB; give"):
        bench.main(["--only", "view-large", "--directory", os.fspath(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--rounds", "0"], ["--scale", "0"], ["--scale", "2"], ["--only", "nothing"]]
)
def test_wrong_use_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench.main(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err


# Judging


def result_of(
    target: Target,
    ours: list[float],
    others: list[float],
    anonymous: tuple[int | None, int | None] = (None, None),
) -> Result:
    """The result of a case with two measures and one target."""
    measures = tuple(Measure(name, "warm", bench_cases.open_archive) for name in ("ours", "other"))
    rounds = {
        name: [Figures(it, it / 2, memory, memory) for it in seconds]
        for name, seconds, memory in zip(("ours", "other"), (ours, others), anonymous, strict=True)
    }
    return Result("case", Case("title", measures, (target,)), "size", 1, rounds)


@pytest.mark.parametrize(
    ("ours", "others", "met", "rounds_met"),
    [
        ([1, 1, 1], [2, 2, 2], True, 3),
        ([8, 8, 8], [10, 10, 10], True, 3),  # the limit itself
        ([9, 9, 9], [10, 10, 10], False, 0),
        ([5, 9, 5], [10, 10, 10], True, 2),
        ([5, 9, 9], [10, 10, 10], False, 1),
        ([1, 20, 300], [2, 40, 600], True, 3),  # compared within each round
        ([1, 10, 100], [100, 10, 1], False, 1),  # as their medians are not
    ],
)
def test_at_most_is_met_by_the_median_of_the_ratios_of_rounds(
    ours: list[float], others: list[float], met: bool, rounds_met: int
) -> None:
    result = result_of(Target("at most", 0.8, "other"), ours, others)
    (verdict,) = result.verdicts()
    assert (verdict.met, verdict.rounds_met, verdict.rounds) == (met, rounds_met, 3)
    assert ("NOT MET" in bench_report.text(result)) == (not met)


@pytest.mark.parametrize(("bound", "expected"), [("at most", 0.5), ("at least", 2)])
def test_beside_the_ratio_of_rounds_stands_that_of_the_best_figures(
    bound: Any, expected: float
) -> None:
    (verdict,) = result_of(Target(bound, 1, "other"), [9, 3, 1], [2, 6, 4]).verdicts()
    assert verdict.best == expected
    assert f"of the best {expected}" in bench_report.describe(verdict)


def test_another_way_begins_in_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def take(case: str, name: str, folder: Path, scale: float, *, rehearses: bool) -> Figures:
        assert rehearses
        taken.append(name)
        return Figures(len(taken), 1)

    monkeypatch.setattr(bench, "run_measure", take)
    arguments = argparse.Namespace(rounds=3, scale=SCALE, cold=False)
    (result,) = bench.Run(tmp_path, arguments, bench_cases.missing()).cases(["replace-large"])
    count = 3 * CASES["replace-large"].times
    assert taken == [*(["large", "light", "light", "large"] * count)][: 2 * count]
    assert [it.seconds for it in result.rounds["large"]][:3] == [1, 4, 5]
    assert [it.seconds for it in result.rounds["light"]][:3] == [2, 3, 6]


@pytest.mark.parametrize(
    ("ours", "others", "met"),
    [([2], [10], True), ([2], [9.9], False), ([1], [10], True), ([10], [1], False)],
)
def test_at_least_is_how_many_times_as_fast_as_the_other(
    ours: list[float], others: list[float], met: bool
) -> None:
    (verdict,) = result_of(Target("at least", 5, "other"), ours, others).verdicts()
    assert verdict.met == met
    assert verdict.spread is not None
    assert verdict.spread.median == others[0] / ours[0]


@pytest.mark.parametrize(
    ("nbytes", "met"), [(15 * MIB, True), (16 * MIB, True), (16 * MIB + 1, False), (0, True)]
)
@pytest.mark.parametrize("figure", ["anonymous", "resident"])
def test_a_figure_alone_is_held_against_its_limit(figure: Any, nbytes: int, met: bool) -> None:
    target = Target("at most", 16 * MIB, figure=figure)
    result = result_of(target, [1], [1], (nbytes, 0))
    (verdict,) = result.verdicts()
    assert verdict.met == met
    assert f"{nbytes / MIB:.1f} MiB" in bench_report.describe(verdict)


@pytest.mark.parametrize(("nbytes", "met"), [(105, True), (106, False), (1, True)])
def test_memory_is_compared_with_that_of_the_other(nbytes: int, met: bool) -> None:
    target = Target("at most", 1.05, "other", figure="anonymous")
    (verdict,) = result_of(target, [1], [1], (nbytes, 100)).verdicts()
    assert verdict.met == met


def test_a_target_without_its_figures_is_not_judged() -> None:
    target = Target("at most", 0.8, "other")
    left_out = result_of(target, [1], [])
    left_out.left_out["other"] = "other is not installed"
    failed = result_of(target, [], [1])
    failed.failures["ours"] = "Traceback\nexit status 1"
    untold = result_of(Target("at most", 1, figure="anonymous"), [1], [1])
    for result, reason in (
        (left_out, "other: other is not installed"),
        (failed, "ours: exit status 1"),
        (untold, "this system does not tell anonymous"),
    ):
        (verdict,) = result.verdicts()
        assert verdict == Verdict(verdict.target, "ours", reason=reason)
        assert reason in bench_report.describe(verdict)
    assert bench_report.summary([left_out, failed, untold]).startswith("targets met: 0 of 3")


def test_a_table_tells_medians_ratios_and_their_spread() -> None:
    result = result_of(Target("at most", 0.8, "other"), [1, 2, 3], [2, 2, 2])
    ours, other = bench_report.table(result).splitlines()[1:]
    assert ours.split() == ["ours", "2.00", "s", "1.00", "s..3.00", "s", "1.00", "s"]
    assert "1 (0.5..1.5)" in other


@pytest.mark.skipif(not HAS_PROC, reason="/proc/self/status says what is anonymous")
def test_memory_that_is_given_back_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes 200 MiB, waits, and gives them back before the clock stops."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {os.fspath(TOOL.parent)!r})\n"
        "import bench_cases, bench_process, time, os, pathlib\n"
        "def prepare(place):\n"
        "    def step():\n"
        "        taken = bytearray(200 << 20)\n"
        "        time.sleep(0.1)\n"
        "    return step\n"
        "measure = bench_cases.Measure('taking', 'warm', prepare)\n"
        "bench_cases.CASES['taking'] = bench_cases.Case('', (measure,))\n"
        "sys.exit(bench_process.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(bench_process, "__file__", os.fspath(program))
    figures = bench_process.run_measure("taking", "taking", tmp_path, SCALE)
    assert figures.anonymous is not None
    assert figures.resident is not None
    assert 190 * MIB < figures.anonymous < 220 * MIB
    assert 190 * MIB < figures.resident < 220 * MIB
