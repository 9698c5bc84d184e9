"""`onnxarchive convert ... --output-dir OUT --jobs N`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import onnx
import pytest
from commands import output_of
from models import external, model_of, raw_tensor, weight_model
from processes import started, wait_until
from written import files_below, write_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.cli.commands import convert

Captured = pytest.CaptureFixture[str]


def run(*arguments: str | Path) -> int:
    return main(["convert", *map(str, arguments)])


def _write(path: Path, seed: int) -> Path:
    return write_model(path, weight_model(seed))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three models, of which one is broken, and a directory that is one and has litter."""
    top = tmp_path / "tree"
    _write(top / "a.onnx", 1)
    _write(top / "deep" / "down" / "b.onnx", 2)
    (top / "deep" / "broken.onnx").write_bytes(weight_model(0).SerializeToString()[:2000])
    onnxarchive.save(weight_model(3), tmp_path / "c.onnxa")
    onnxarchive.extract(tmp_path / "c.onnxa", top / "exported")
    (tmp_path / "c.onnxa").unlink()
    (top / "exported" / "notes.txt").touch()
    return top


GOOD = {"a.onnxa": 1, "deep/down/b.onnxa": 2, "exported.onnxa": 3}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_tree_is_converted_and_its_failures_are_listed(
    tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], jobs: str
) -> None:
    out = tmp_path / "out"
    assert run(tree, "--output-dir", out, "--jobs", jobs) == 3
    assert files_below(out) == set(GOOD)
    for name, seed in GOOD.items():
        assert onnxarchive.check(out / name, full=True) == []
        assert onnxarchive.load(out / name) == weight_model(seed)
    captured = capfd.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == ["source", "archive", "bytes"]
    rows = [re.split(" {2,}", line) for line in lines[1:5]]
    places = ["a.onnx", "deep/broken.onnx", "deep/down/b.onnx", "exported"]
    assert sorted(source for source, _, _ in rows) == [f"{tree}/{place}" for place in places]
    for source, target, size in rows:
        if source.endswith("broken.onnx"):
            assert size == "failed"
        else:
            assert size == f"{os.path.getsize(target):,}"
    assert "3 models converted, 1 failed" in lines
    (failure,) = [line for line in lines if line.startswith("failed: ")]
    assert failure.count(str(tree / "deep" / "broken.onnx")) == 1
    assert captured.err.startswith("onnxarchive: warning: ")
    assert "notes.txt" in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("jobs", [None, 1, 2, 3])
def test_jobs_limits_the_threads_of_all_conversions_together(
    tree: Path, tmp_path: Path, jobs: int | None
) -> None:
    options = [] if jobs is None else ["--jobs", str(jobs)]
    with (
        mock.patch.object(onnxarchive, "convert_many", return_value=[]) as convert_many,
        mock.patch.object(convert, "thread_pool") as pool,
    ):
        assert run(tree, "--output-dir", tmp_path / "out", *options) == 0
    assert convert_many.call_args.kwargs["jobs"] == (None if jobs is None else 1)
    threads = [call.args[0] for call in pool.call_args_list]
    assert threads == ([] if jobs in (None, 1) else [jobs])


def test_a_tree_is_converted_without_threads_if_the_system_permits_none(
    tree: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = RuntimeError("can't start new thread")
    monkeypatch.setattr(ThreadPoolExecutor, "submit", mock.Mock(side_effect=refusal))
    assert run(tree, "--output-dir", tmp_path / "out", "--jobs", "2") == 3
    assert "3 models converted, 1 failed" in capsys.readouterr().out
    assert files_below(tmp_path / "out") == set(GOOD)


def test_the_status_distinguishes_corrupt_files_from_other_errors(
    tree: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    missing = tmp_path / "missing.onnx"
    sound = tree / "deep" / "down"
    assert run(sound, "--output-dir", out) == 0
    (out / "b.onnxa").write_bytes(b"old")
    assert run(sound, "--output-dir", out) == 2  # it exists
    assert (out / "b.onnxa").read_bytes() == b"old"
    assert run(missing, "--output-dir", out) == 2
    assert run(sound, missing, "--output-dir", out, "--force") == 2
    assert onnxarchive.load(out / "b.onnxa") == weight_model(2)
    assert run(missing, tree / "deep" / "broken.onnx", "--output-dir", out, "--jobs", "2") == 3


def test_json_has_every_model_with_any_number_of_jobs(
    tree: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    printed = []
    for jobs in ("1", "2"):
        assert run(tree, "--output-dir", out, "--jobs", jobs, "--force", "--json") == 3
        contents = {name: (out / name).read_bytes() for name in GOOD}
        printed.append((capsys.readouterr().out, contents))
    assert printed[0] == printed[1]
    found = {item["source"]: item for item in json.loads(printed[0][0])}
    broken = found.pop(str(tree / "deep" / "broken.onnx"))
    assert broken["nbytes"] is None
    assert "broken.onnx" in broken["error"]
    for item in found.values():
        assert (item["error"], item["nbytes"]) == (None, os.path.getsize(item["path"]))
    (warning,) = found[str(tree / "exported")]["warnings"]
    assert "notes.txt" in warning
    assert {os.path.relpath(item["path"], out) for item in found.values()} == set(GOOD)


def test_files_and_trees_may_be_mixed_and_a_tree_without_models_fails(
    tree: Path, tmp_path: Path, capsys: Captured
) -> None:
    other = _write(tmp_path / "elsewhere" / "other.onnx", 5)
    arguments = (tree / "deep" / "down", other, "--output-dir", tmp_path / "out", "--force")
    assert run(*arguments) == 0
    assert files_below(tmp_path / "out") == {"b.onnxa", "other.onnxa"}
    assert "2 models converted, 0 failed" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    told = output_of(capsys, "convert", tmp_path / "empty", *arguments, status=2)
    assert f"{tmp_path / 'empty'}: there is no model in this tree" in told
    assert "2 models converted, 1 failed" in told


def test_a_dry_run_of_a_tree_prints_what_would_be_written_and_writes_nothing(
    tree: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "out"
    assert run(tree, "--output-dir", out, "--dry-run", "--json", "--jobs", "2") == 3
    planned = json.loads(capsys.readouterr().out)
    assert not out.exists()
    assert run(tree, "--output-dir", out, "--json") == 3
    written = json.loads(capsys.readouterr().out)
    assert {item["path"]: item["nbytes"] for item in planned} == {
        item["path"]: os.path.getsize(item["path"]) if item["error"] is None else None
        for item in written
    }
    assert run(tree, "--output-dir", out, "--dry-run", "--force") == 3
    assert "3 models would be converted, 1 failed" in capsys.readouterr().out


def test_options_apply_to_every_model(tree: Path, tmp_path: Path, capsys: Captured) -> None:
    asset = tmp_path / "licence.txt"
    asset.write_bytes(b"words")
    options = ["--alignment", "4096", "--asset", str(asset), "--jobs", "2"]
    assert run(tree, "--output-dir", tmp_path / "out", *options) == 3
    for name in GOOD:
        with onnxarchive.open(tmp_path / "out" / name) as archive:
            assert bytes(archive.assets["licence.txt"]) == b"words"
            assert all(entry.data_offset % 4096 == 0 for entry in archive.entries.values())


def test_control_characters_in_names_are_escaped(tmp_path: Path, capfd: Captured) -> None:
    _write(tmp_path / "tree" / "evil\x1b[2J.onnx", 1)
    (tmp_path / "tree" / "evil\x1b[3J.onnx").write_bytes(b"broken")
    assert run(tmp_path / "tree", "--output-dir", tmp_path / "out") == 3
    captured = capfd.readouterr()
    assert "\x1b" not in captured.out + captured.err


# Interrupts


COUNT = 40  # of 100 MB: more than are done before they are interrupted

needs_signals = pytest.mark.skipif(os.name == "nt", reason="a signal ends no process on Windows")


@contextlib.contextmanager
def _converting(
    tmp_path: Path, *options: str, nbytes: int = 100_000_000
) -> Iterator[subprocess.Popen[str]]:
    """Starts to convert `COUNT` models, which are one file under many names."""
    (tmp_path / "tree").mkdir()
    tensor = onnx.TensorProto(
        name="w", data_type=onnx.TensorProto.UINT8, dims=[nbytes], raw_data=bytes(nbytes)
    )
    content = model_of(tensor).SerializeToString()
    (tmp_path / "tree" / "0.onnx").write_bytes(content)
    for index in range(1, COUNT):
        os.link(tmp_path / "tree" / "0.onnx", tmp_path / "tree" / f"{index}.onnx")
    command = [sys.executable, "-m", "onnxarchive", "convert", tmp_path / "tree", *options]
    with started([*command, "--output-dir", tmp_path / "out"]) as process:
        yield process


@pytest.mark.tool
@needs_signals
@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(
    ("send", "number"),
    [
        (os.kill, signal.SIGINT),
        (os.kill, signal.SIGTERM),
        (os.killpg, signal.SIGINT),  # as Ctrl-C: to all of them
        (os.killpg, signal.SIGHUP),  # as a terminal that is closed
    ],
)
def test_an_interrupt_leaves_no_temporary_file(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals, jobs: int
) -> None:
    out = tmp_path / "out"
    with _converting(tmp_path, "--jobs", str(jobs)) as process:
        wait_until(lambda: len(list(out.glob(".*.tmp"))) == jobs, process)
        send(process.pid, number)
        output, error = process.communicate(timeout=280)
        assert process.returncode == 128 + number, error
    assert error == "onnxarchive: interrupted; temporary files were removed\n"
    assert output == ""
    assert [name for name in os.listdir(out) if not name.endswith(".onnxa")] == []
    for name in os.listdir(out):
        assert onnxarchive.check(out / name, full=True) == []
    assert len(os.listdir(out)) < COUNT


@pytest.mark.sweep
@needs_signals
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupt_that_left_complete_archives_does_not_say_that_nothing_was_written(
    tmp_path: Path, jobs: str
) -> None:
    out = tmp_path / "out"
    with _converting(tmp_path, "--jobs", jobs) as process:
        wait_until((out / "0.onnxa").exists, process)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=280)[1]
        assert process.returncode == 130, error
    assert (out / "0.onnxa").exists()
    assert "nothing was written" not in error
    assert list(out.glob(".*")) == []
    assert len(list(out.iterdir())) < COUNT


# Conversions that never end; "converting" is printed when all have begun or wait for a thread, and
# "waiting" when the command waits for them to end.
STUCK = """
import threading
from concurrent.futures import ThreadPoolExecutor
from onnxarchive import cli
from onnxarchive.conversion import convert_many
from onnxarchive.files.replacement import Replacement
shutdown = ThreadPoolExecutor.shutdown

def wait(executor, *arguments, **options):
    print("waiting", flush=True)
    shutdown(executor, *arguments, **options)

as_completed = convert_many.as_completed

def begin(futures):
    print("converting", flush=True)
    return as_completed(futures)

convert_many.as_completed = begin
ThreadPoolExecutor.shutdown = wait
Replacement.commit_open = lambda *_: threading.Event().wait()
cli.run()
"""


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_does_not_wait_for_conversions_and_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    for index in range(3):
        _write(tmp_path / "tree" / f"{index}.onnx", index)
    out = tmp_path / "out"
    command = [sys.executable, "-c", STUCK, "convert", tmp_path / "tree", "--jobs", "2"]
    with started([*command, "--output-dir", out]) as process:
        wait_until(lambda: len(list(out.glob(".*.tmp"))) == 2, process)
        assert process.stdout is not None
        assert process.stdout.readline() == "converting\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        output, error = process.communicate(timeout=280)
    assert (process.returncode, output, error) == (
        128 + number,
        "",
        "onnxarchive: interrupted; temporary files were removed\n",
    )
    assert list(out.iterdir()) == []


@pytest.mark.tool
@needs_signals
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_command_leaves_whole_archives_and_hidden_files_that_recover_removes(
    tmp_path: Path, jobs: str
) -> None:
    out = tmp_path / "out"
    with _converting(tmp_path, "--jobs", jobs) as process:
        wait_until(lambda: len(list(out.glob(".*.tmp"))) == int(jobs), process)
        process.kill()
        process.wait()
    for path in out.glob("*.onnxa"):
        assert onnxarchive.check(path, full=True) == []
    assert len(list(out.glob("*.onnxa"))) < COUNT
    for path in list(out.glob(".*.tmp")):
        onnxarchive.recover(out / path.name[1:].partition(".onnxarchive-")[0])
    assert list(out.glob(".*")) == []


def test_names_that_are_no_utf_8_are_converted_and_printed(tmp_path: Path, capfd: Captured) -> None:
    content = weight_model(1).SerializeToString()
    (tmp_path / "tree").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "tree") + b"/\xff.onnx")).write_bytes(content)
    (tmp_path / "tree" / "z.onnx").write_bytes(content)
    for options in ([], ["--json", "--jobs", "2"]):
        assert run(tmp_path / "tree", "--output-dir", tmp_path / "out", "--force", *options) == 0
        assert len(files_below(tmp_path / "out")) == 2
        assert capfd.readouterr().err == ""


def test_a_failure_of_several_tensors_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "in").mkdir()
    tensors = [external(raw_tensor(name, dims=(600,)), f"{name}.bin") for name in "ab"]
    (tmp_path / "in" / "m.onnx").write_bytes(model_of(*tensors).SerializeToString())
    output = output_of(
        capsys, "convert", tmp_path / "in", "--output-dir", tmp_path / "out", status=3
    )
    (failure,) = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert "2 tensors have faulty data: tensor 'a'" in failure
    assert "; tensor 'b'" in failure


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit of open files for a shell")
def test_a_limit_of_open_files_is_named_with_what_helps(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for number in range(8):
        write_model(
            tmp_path / "models" / f"m{number}.onnx", model_of(raw_tensor("w", dims=(9000,)))
        )
    script = 'ulimit -n 6; exec "$0" -m onnxarchive convert models --output-dir new --jobs 8'
    done = subprocess.run(
        ["sh", "-c", script, sys.executable],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(onnxarchive.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    reasons = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert reasons
    for reason in reasons:
        assert "raise the limit of open files ('ulimit -n')" in reason
