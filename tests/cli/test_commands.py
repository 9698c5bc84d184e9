from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from commands import error_of, output_of, result_of, run
from models import (
    attribute,
    entry_of,
    flip_byte,
    model_of,
    raw_tensor,
    run_python,
    runnable_model,
    string_tensor,
)
from onnx import numpy_helper
from processes import completed, started, wait_until
from written import write_model

import onnxarchive
from onnxarchive.cli import program, terminal
from onnxarchive.model import dtypes

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "a model.onnx", runnable_model())


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "an archive.onnxa"
    onnxarchive.save(runnable_model(), path, assets={"labels.txt": b"cat\n"})
    return path


def run_apart(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-m", "onnxarchive", *arguments]
    return subprocess.run(command, check=False, **options)


def test_convert_writes_what_save_writes_to_a_file_or_a_pipe(
    source: Path, archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "my labels.txt").write_bytes(b"cat\n")
    asset = ("--asset", f"labels.txt={tmp_path / 'my labels.txt'}")
    assert "1 tensor, 1 asset, 66," in output_of(
        capsys, "convert", source, tmp_path / "out.onnxa", *asset
    )
    assert (tmp_path / "out.onnxa").read_bytes() == archive.read_bytes()
    done = run_apart("convert", source, "-", *asset, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, archive.read_bytes())


def test_convert_passes_its_options_on(source: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "out.onnxa"
    options = ("--size-threshold", "0", "--alignment", "4096")
    result = result_of(capsys, "convert", source, target, *options)
    assert result == {
        "source": str(source),
        "path": str(target),
        "error": None,
        "tensors": 2,
        "assets": 0,
        "added_files": [],
        "left_out": [],
        "nbytes": target.stat().st_size,
        "shared_nbytes": 0,
        "attribute_tensors": 0,
        "attribute_nbytes": 0,
        "warnings": [],
        "is_skipped": False,
    }
    with onnxarchive.open(target) as opened:
        assert all(entry.data_offset % 4096 == 0 for entry in opened.entries.values())


def test_convert_and_info_report_weights_in_constant_nodes(
    tmp_path: Path, capsys: Captured
) -> None:
    model = runnable_model()
    for index, size in enumerate((300, 256, 255)):
        constant = attribute("value", t=raw_tensor(f"c{index}", dims=(size,)))
        model.graph.node.add(op_type="Constant", output=[f"c{index}"], attribute=[constant])
    onnx.save(model, tmp_path / "m.onnx")
    target = tmp_path / "m.onnxa"
    stay = "2 tensors in Constant nodes and other attributes, 2,224 bytes (2.2 KiB), stay inside; "
    text = output_of(capsys, "convert", tmp_path / "m.onnx", target)
    assert f"{stay}--convert-attribute stores them outside\n" in text
    text = output_of(capsys, "info", target)
    assert (
        "\nattributes    2 tensors in Constant nodes and others, 2,224 bytes (2.2 KiB), in" in text
    )
    assert result_of(capsys, "info", target)["attributes"] == {"tensors": 2, "nbytes": 2224}
    many = ("convert", tmp_path / "m.onnx", "--output-dir", tmp_path / "many", "--dry-run")
    (result,) = result_of(capsys, *many)
    assert (result["attribute_tensors"], result["attribute_nbytes"]) == (2, 2224)
    options = ("--force", "--convert-attribute")
    text = output_of(capsys, "convert", tmp_path / "m.onnx", target, *options)
    assert "Constant" not in text
    assert "attributes" not in output_of(capsys, "info", target)
    result = result_of(capsys, "convert", target, tmp_path / "back.onnxa")
    assert (result["attribute_tensors"], result["attribute_nbytes"]) == (2, 2224)


def test_ls_shows_an_aligned_table_and_totals(archive: Path, capsys: Captured) -> None:
    header, *lines, _, total = output_of(capsys, "ls", archive).splitlines()
    titles = ["name", "key", "data type", "shape", "bytes", "offset", "CRC-32"]
    assert re.split("  +", header) == titles
    crc = f"{entry_of(archive, 'layer_0_weight').crc32:08x}"
    weight = ["layer.0/weight", "layer_0_weight", "FLOAT", "[1024, 16]", "65,536", "64", crc]
    assert re.split("  +", lines[0]) == weight
    names = ["layer.0/weight", "assets/labels.txt", "__MODEL_PROTO"]
    assert [line.split()[0] for line in lines] == names
    crcs = [f"{entry_of(archive, name).crc32:08x}" for name in names[1:]]
    assert [line.split()[-1] for line in lines[1:]] == crcs
    assert total.startswith(
        "1 tensor, 65,536 bytes (64.0 KiB) in all; 1 more in the model; 1 asset"
    )


def test_ls_gives_correct_offsets_in_json(archive: Path, capsys: Captured) -> None:
    result = result_of(capsys, "ls", archive)
    (tensor,) = result["tensors"]
    expected = {"name": "layer.0/weight", "key": "layer_0_weight", "data_type": "FLOAT"}
    assert tensor.items() >= {**expected, "dims": [1024, 16]}.items()
    data = archive.read_bytes()[tensor["data_offset"] :][: tensor["nbytes"]]
    assert data == runnable_model().graph.initializer[0].raw_data
    assert result["totals"]["nbytes"] == archive.stat().st_size


def test_ls_escapes_control_characters_in_names(tmp_path: Path, capsys: Captured) -> None:
    weight = raw_tensor("evil\x1b[2J\nname", dims=(300,))
    onnxarchive.save(model_of(weight), tmp_path / "a.onnxa")
    printed = output_of(capsys, "ls", tmp_path / "a.onnxa")
    assert "\x1b" not in printed
    assert "evil\\x1b[2J\\nname" in printed


def test_info_prints_producer_types_parameters_and_bytes(tmp_path: Path, capsys: Captured) -> None:
    model = runnable_model()
    model.producer_version = "1.2"
    onnxarchive.save(model, tmp_path / "m.onnxa")
    printed = output_of(capsys, "info", tmp_path / "m.onnxa")
    for label, value in (
        ("producer", "test 1.2"),
        ("opsets", "ai.onnx: 21"),
        ("inputs", "x: FLOAT [2, 1024]"),
        ("outputs", "y: FLOAT [2, 16]"),
        ("parameters", "16,400"),
        ("weights", "65,536 bytes (64.0 KiB)"),
    ):
        assert f"{label:<14}{value}\n" in printed


def test_info_accounts_for_every_byte_in_json(archive: Path, capsys: Captured) -> None:
    parts = result_of(capsys, "info", archive)["bytes"]
    assert parts.pop("archive") == archive.stat().st_size == sum(parts.values())
    assert (parts["weights"], parts["assets"]) == (1 << 16, 4)


def test_check_names_the_broken_rules_of_a_damaged_archive(archive: Path, capsys: Captured) -> None:
    assert output_of(capsys, "check", archive, "--full") == f"{archive}: valid (47 rules checked)\n"
    flip_byte(archive, 64)
    assert run("check", archive) == 0
    (finding,) = result_of(capsys, "check", archive, "--full", status=1)
    assert (finding["rule"], finding["entry"]) == ("ZIP-15", "layer_0_weight")


def test_check_takes_several_archives_and_goes_on_after_one_that_it_cannot_read(
    archive: Path, capsys: Captured
) -> None:
    broken, missing = archive.with_name("broken.onnxa"), archive.with_name("missing.onnxa")
    broken.write_bytes(archive.read_bytes()[:-1])
    for files, status in (([], 1), ([missing], 2)):
        assert run("check", *files, archive, broken, archive) == status
        captured = capsys.readouterr()
        sound, explanation, fault, again = captured.out.splitlines()
        valid = "valid (43 rules checked; weights not read, --full reads them)"
        assert sound == again == f"{archive}: {valid}"
        assert "the file lacks the last 1 of the " in explanation
        assert "bytes of the archive; its download or copy may have been" in explanation
        assert fault.startswith(f"{broken}: ZIP-2: there is no end record")
        error = f"onnxarchive: {missing}: No such file or directory\n"
        assert captured.err == (error if files else "")
        assert run("check", *files, archive, broken, "--json") == status
        (finding,) = json.loads(capsys.readouterr().out)
        assert (finding["archive"], finding["rule"]) == (str(broken), "ZIP-2")


def test_check_ends_with_the_highest_status_of_several_archives(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def check(path: str, **options: Any) -> list[onnxarchive.Finding]:
        if path.startswith("unfinished"):
            raise onnxarchive.UnfinishedEditError("run 'onnxarchive recover'")
        return original(path, **options)

    original = onnxarchive.check
    monkeypatch.setattr(onnxarchive, "check", check)
    assert run("check", "unfinished", "missing", archive) == 3
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "onnxarchive: run 'onnxarchive recover'",
        "onnxarchive: missing: No such file or directory",
    ]
    assert captured.out.startswith(f"{archive}: valid")


def test_every_command_takes_jobs_and_force_with_the_same_words(capsys: Captured) -> None:
    texts: dict[str, set[str]] = {"--force": set(), "--jobs N": set()}
    for command in ("convert", "export", "link", "run", "check"):
        printed = output_of(capsys, command, "--help")
        for option, found in texts.items():
            found.update(re.findall(rf"^  {option} +(\S.*)$", printed, re.MULTILINE))
    assert texts == {
        "--force": {"replace files that exist"},
        "--jobs N": {"use N cores (default: all)"},
    }


def test_check_of_a_zip_of_another_tool_begins_with_advice_and_counts_by_rule(
    tmp_path: Path, capsys: Captured
) -> None:
    path, zipped = tmp_path / "a.onnxa", tmp_path / "zipped.onnxa"
    onnxarchive.save(
        model_of(*(raw_tensor(f"w{index}") for index in range(300))), path, size_threshold=0
    )
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(zipped, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    lines = output_of(capsys, "check", zipped, status=1).splitlines()
    advice, *first, more, summary = [line.removeprefix(f"{zipped}: ") for line in lines]
    assert advice == (
        "another tool made this zip of the files of an archive; 'onnxarchive convert "
        f"{shlex.quote(str(zipped))} NEW.onnxa' makes an archive of it"
    )
    assert [line.partition(": expected")[0] for line in first] == [
        f"ZIP-6: entry 'w{index}'" for index in range(3)
    ]
    assert (more, summary) == ("ZIP-6: and 298 more", "301 faults (ZIP-6 301); --json lists them")
    assert run("check", zipped, "--json") == 1
    assert len(json.loads(capsys.readouterr().out)) == 301


def test_check_as_json_prints_the_advice_as_a_warning(archive: Path, capsys: Captured) -> None:
    with open(archive, "ab") as file:
        file.write(b"hello")
    assert run("check", archive, "--json") == 1
    output, error = capsys.readouterr()
    assert [finding["rule"] for finding in json.loads(output)] == ["ZIP-2"]
    advice = json.loads(error)["warning"]
    assert advice.startswith(f"{archive}: the archive ends at ")
    assert f"'onnxarchive recover --cut {shlex.quote(str(archive))}'" in advice


def test_check_names_the_kind_of_another_file(
    source: Path, archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    output = output_of(capsys, "check", source, status=1)
    other = "expected an ONNX archive, found"
    assert output.startswith(f"{source}: {other} an ONNX model; 'onnxarchive convert ")
    assert output.splitlines()[1].startswith(f"{source}: ZIP-2: ")
    (tmp_path / "empty").touch()
    assert f"{tmp_path / 'empty'}: {other} an empty file; " in output_of(
        capsys, "check", tmp_path / "empty", status=1
    )
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as file:
        file.write(source, "__MODEL_PROTO.onnx")
    output = output_of(capsys, "check", tmp_path / "m.zip", status=1)
    assert f": {other} a plain zip with a model; 'onnxarchive convert " in output
    assert "another tool may have made this zip" in output
    assert "upgrade" not in output
    archive.write_bytes(archive.read_bytes()[:-1])
    assert f"{archive}: {other}" not in output_of(capsys, "check", archive, status=1)


@pytest.mark.parametrize("jobs", [None, 1, 3])
def test_one_file_is_checked_or_converted_by_as_many_threads_as_asked_for(
    source: Path, archive: Path, jobs: int | None
) -> None:
    options = [] if jobs is None else ["--jobs", str(jobs)]
    with (
        mock.patch.object(onnxarchive, "check", wraps=onnxarchive.check) as check,
        mock.patch.object(onnxarchive, "convert", wraps=onnxarchive.convert) as convert,
    ):
        assert run("check", archive, *options) == 0
        assert run("convert", source, archive, "--force", *options) == 0
    assert check.call_args.kwargs["jobs"] == convert.call_args.kwargs["jobs"] == jobs
    assert onnxarchive.check(archive, full=True) == []


def test_export_gives_the_model_back_and_names_the_files(
    archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    target, data = tmp_path / "back.onnx", tmp_path / "back.data"
    assert f"{target}: " in output_of(capsys, "export", archive, target)
    assert onnx.load(target) == runnable_model()
    options = ("--external-data", data.name, "--force")
    files = result_of(capsys, "export", archive, target, *options)["files"]
    assert [file["path"] for file in files] == [str(target), str(data)]
    weight = numpy_helper.to_array(onnx.load(target).graph.initializer[0])
    assert weight.tobytes() == runnable_model().graph.initializer[0].raw_data


def test_extract_gives_a_directory_that_onnx_loads(
    archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    directory = tmp_path / "un zipped"
    assert run("extract", archive, directory) == 0
    weight = onnx.load(directory / "__MODEL_PROTO").graph.initializer[0]
    assert weight.raw_data == runnable_model().graph.initializer[0].raw_data
    assert (directory / "assets" / "labels.txt").read_bytes() == b"cat\n"
    assert str(directory / "__MODEL_PROTO") in capsys.readouterr().out


@pytest.mark.parametrize("size_threshold", [0, 1 << 20])
def test_cat_writes_tensors_of_all_types_so_that_numpy_loads_them(
    tmp_path: Path, size_threshold: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "m.onnxa"
    weights = [raw_tensor(it.name, it.number, (3, 5)) for it in dtypes.BY_NUMBER.values()]
    onnxarchive.save(model_of(*weights), path, size_threshold=size_threshold)
    with onnxarchive.open(path) as archive:
        for name, expected in archive.tensors.items():
            assert run("cat", path, name) == 0
            loaded = np.load(io.BytesIO(capfdbinary.readouterr().out))
            assert loaded.shape == (3, 5)
            assert loaded.view(expected.dtype).tobytes() == expected.tobytes()
    assert len(weights) == len(archive.tensors) == 27


def test_cat_refuses_a_damaged_tensor_before_it_writes(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(300,))), path)
    flip_byte(path, entry_of(path, "w").data_offset)
    assert run("cat", path, "w") == 3
    captured = capfdbinary.readouterr()
    assert captured.out == b""
    assert b"m.onnxa: entry 'w': expected 1200 bytes with CRC-32" in captured.err


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("0:4", slice(0, 4)),
        ("2:", slice(2, None)),
        ("-3:", slice(-3, None)),
        ("::-2", slice(None, None, -2)),
        ("8:100", slice(8, 100)),
        ("5:2", slice(0, 0)),
    ],
)
def test_cat_writes_the_rows_of_a_range_as_in_python(
    tmp_path: Path, rows: str, expected: slice, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "m.onnxa"
    strings = string_tensor("strings", [*"abcdefghij"])
    weights = [raw_tensor(it.name, it.number, (10, 5)) for it in dtypes.BY_NUMBER.values()]
    onnxarchive.save(model_of(*weights, strings), path, size_threshold=200)
    with onnxarchive.open(path) as archive:
        for name in ("FLOAT", "INT4", "BFLOAT16", "strings"):
            assert run("cat", path, name, f"--rows={rows}") == 0
            loaded = np.load(io.BytesIO(capfdbinary.readouterr().out))
            array = archive.tensors[name][expected]
            assert loaded.shape == array.shape
            if name == "strings":
                assert loaded.tolist() == array.tolist()
            else:
                assert loaded.view(array.dtype).tobytes() == array.tobytes()


def test_cat_writes_strings_unless_a_file_would_change_them(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "m.onnxa"
    words, changed = string_tensor("words", ["größer", ""]), string_tensor("changed", ["a\0"])
    onnxarchive.save(model_of(words, changed), path)
    assert run("cat", path, "words") == 0
    assert np.load(io.BytesIO(capfdbinary.readouterr().out)).tolist() == ["größer", ""]
    assert run("cat", path, "changed") == 2
    captured = capfdbinary.readouterr()
    assert captured.out == b""
    assert b"m.onnxa: tensor 'changed': a string ends with a null character" in captured.err


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("options", [["--force"], ["--size-threshold", "0", "--force"]])
def test_options_may_come_before_between_and_after_the_paths(
    source: Path, archive: Path, place: int, options: list[str]
) -> None:
    arguments: list[Any] = [source, archive]
    arguments[place:place] = options
    assert run("convert", *arguments) == 0
    with onnxarchive.open(archive) as opened:
        assert len(opened.assets) == 0  # the target was replaced


def test_a_path_that_begins_with_a_dash_is_taken_after_two_dashes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(source, "-x.onnx")
    assert run("convert", "--", "-x.onnx", "-x.onnxa") == 0
    assert onnxarchive.check("-x.onnxa") == []


def test_several_arguments_may_come_on_both_sides_of_an_option(archive: Path) -> None:
    assert run("metadata", "set", archive, "a=1", "--domain", "d", "b=2") == 0
    with onnxarchive.open(archive) as opened:
        assert opened.metadata == {"a": "1", "b": "2"}
        assert opened.model.domain == "d"
    assert run("check", archive, "--full", archive) == 0


def test_a_target_that_cannot_grow_is_reported_and_removed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.onnx", runnable_model(1 << 19))
    done = run_apart(
        *("convert", source, tmp_path / "new.onnxa"),
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 2
    assert done.stderr.decode() == f"onnxarchive: {tmp_path / 'new.onnxa'}: File too large\n"
    assert list(tmp_path.iterdir()) == [source]


def _status_without_reader(*arguments: str | Path) -> int:
    """Runs a command whose output nobody reads; returns the exit status."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_apart(*arguments, stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert done.stderr == b""
    return done.returncode


def test_a_reader_that_closes_the_pipe_early_does_not_change_the_status(archive: Path) -> None:
    assert _status_without_reader("ls", archive) == 0
    assert _status_without_reader("check", archive) == 0
    archive.write_bytes(archive.read_bytes()[:-1])
    assert _status_without_reader("check", archive) == 1


def test_a_command_whose_bytes_nobody_reads_fails(source: Path, archive: Path) -> None:
    assert _status_without_reader("convert", source, "-") == 141
    with onnxarchive.open(archive) as opened:
        name = next(iter(opened.tensors))
    assert _status_without_reader("cat", archive, name) == 141


def test_converting_an_archive_to_a_onnx_name_warns_and_suggests_export(
    archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    output_of(capsys, "convert", archive, tmp_path / "copy.onnxa")
    assert run("convert", archive, tmp_path / "copy.onnx") == 0
    assert "'onnxarchive export ARCHIVE TARGET' writes a .onnx" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudoterminals")
def test_an_archive_is_not_written_to_a_terminal(source: Path) -> None:
    controller, terminal = os.openpty()
    done = run_apart("convert", source, "-", stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    os.close(controller)
    assert done.returncode == 2
    assert b"standard output is a terminal: direct it to a file or a pipe" in done.stderr


# A command whose new file is complete, but for its name, waits.
WAITING = """
import time
from onnxarchive import cli
from onnxarchive.files.replacement import Replacement
Replacement.commit_open = lambda *_: time.sleep(600)
cli.run()
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing_behind(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", WAITING, "convert", source, tmp_path / "new.onnxa"]
    with started(command) as process:
        wait_until(lambda: any(tmp_path.glob(".*.tmp")), process)
        process.send_signal(number)
        error = process.communicate(timeout=280)[1]
    assert (process.returncode, error) == (
        128 + number,
        "onnxarchive: interrupted; temporary files were removed\n",
    )
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_a_destructor_ends_a_command_all_the_same(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    code = """
import signal, sys, time
from onnxarchive import cli
from onnxarchive.files.replacement import Replacement
number = int(sys.argv.pop(1))

class Interrupted:
    def __del__(self):
        signal.raise_signal(number)

def wait(*_):
    Interrupted()
    time.sleep(600)

Replacement.commit_open = wait
cli.run()
"""
    command = [sys.executable, "-c", code, str(int(number))]
    done = completed([*command, "convert", source, tmp_path / "new.onnxa"], status=128 + number)
    assert done.stderr == "onnxarchive: interrupted; temporary files were removed\n"
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.skipif(os.name == "nt", reason="a signal ends no process on Windows")
@pytest.mark.parametrize(
    ("importing", "expected"),
    [
        ("mmap", (-signal.SIGINT, "")),  # 130 in a shell
        ("onnx", (130, "onnxarchive: interrupted; temporary files were removed\n")),
    ],
)
@pytest.mark.parametrize("module", ["onnxarchive", "script"])
def test_a_command_that_is_interrupted_while_it_is_imported_ends_without_a_traceback(
    tmp_path: Path, module: str, importing: str, expected: tuple[int, str]
) -> None:
    interrupt = "import signal, sys\nsignal.raise_signal(signal.SIGINT)\n"
    (tmp_path / f"{importing}.py").write_text(interrupt)
    (tmp_path / "script.py").write_text("from onnxarchive.cli import run\nrun()\n")
    (tmp_path / "m.onnxa").write_bytes(b"")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", module, "ls", "m.onnxa"]
    with started(command, env=environment, cwd=tmp_path) as process:
        output, error = process.communicate(timeout=280)
    assert (output, (process.returncode, error)) == ("", expected)


def test_a_command_that_is_interrupted_while_its_module_is_imported_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "parser", mock.Mock(side_effect=KeyboardInterrupt))
    assert run("ls", "m.onnxa") == 130
    assert capsys.readouterr().err == "onnxarchive: interrupted; temporary files were removed\n"


def test_a_program_that_imports_the_library_can_catch_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "onnx.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
try:
    import onnxarchive
    onnxarchive.open
except KeyboardInterrupt:
    print("caught")
"""
    assert run_python(code, tmp_path, "onnxarchive") == "caught\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_when_a_command_starts_stays_ignored(
    number: signal.Signals,
) -> None:
    code = """
import signal, sys
number = int(sys.argv.pop())
signal.signal(number, signal.SIG_IGN)
from onnxarchive import cli
try:
    cli.run()
except SystemExit:
    signal.raise_signal(number)
    print("goes on")
"""
    output = run_python(code, "--version", int(number))
    assert output.startswith(f"{onnxarchive.__version__} ")
    assert output.endswith("\ngoes on\n")


@pytest.mark.parametrize(
    ("closed", "status"), [(">&-", 2), (">&- 2>&-", 2), ("2>&-", 0)], ids=["out", "both", "error"]
)
@pytest.mark.parametrize("target", ["-", "new.onnxa"])
def test_a_closed_stream_ends_no_command_with_a_traceback(
    source: Path, tmp_path: Path, target: str, closed: str, status: int
) -> None:
    script = f'"$0" -m onnxarchive convert "$1" "$2" {closed}'
    command: list[str | Path] = ["sh", "-c", script, sys.executable, source, target]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    expected = b"onnxarchive: standard output is closed\n"
    assert done.stderr == (expected if closed == ">&-" else b"")
    assert (tmp_path / "new.onnxa").exists() == (status == 0 and target != "-")


@pytest.mark.parametrize(
    "command",
    ["convert {source} -", "ls {archive}", "info {archive} --json", "cat {archive} layer.0/weight"],
)
def test_a_full_device_as_standard_output_is_named(
    command: str, source: Path, archive: Path
) -> None:
    arguments = [it.format(source=source, archive=archive) for it in command.split()]
    with open("/dev/full", "wb") as full:
        done = run_apart(*arguments, stdout=full, stderr=subprocess.PIPE)
    message = "standard output: No space left on device"
    if "--json" in arguments:
        assert json.loads(done.stderr)["error"]["message"] == message
    else:
        assert done.stderr.decode() == f"onnxarchive: {message}\n"
    assert done.returncode == 2


def test_messages_name_options_and_no_arguments_of_functions(
    archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("onnxarchive.model.model_proto.SIZE_LIMIT", 1 << 10)
    assert error_of(capsys, "export", archive, archive.with_name("m.onnx")).endswith(
        "; export with --external-data NAME.data\n"
    )


def test_a_bar_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    with open(theirs, "w", encoding="utf-8") as pseudo_terminal:
        monkeypatch.setattr(sys, "stderr", pseudo_terminal)
        monkeypatch.setattr(terminal, "DELAY", 0)
        assert run("convert", source, tmp_path / "new.onnxa") == 0
        os.set_blocking(ours, False)
        shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "convert:" in shown
    assert "B/s" in shown


def test_no_bar_is_shown_if_standard_error_is_no_terminal(source: Path, tmp_path: Path) -> None:
    done = run_apart("convert", source, tmp_path / "new.onnxa", stderr=subprocess.PIPE)
    assert done.stderr == b""


def test_version_and_help_end_with_0(capsys: Captured) -> None:
    assert output_of(capsys, "--version").startswith(f"{onnxarchive.__version__} (CRC-32: zlib")
    assert "Exit status" in output_of(capsys, "--help")


def test_the_end_of_a_command_searches_no_cycles_of_references(archive: Path) -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(len(gc.get_objects()) < 100 < gc.get_freeze_count()))
from onnxarchive import cli
cli.run()
"""
    assert run_python(code, "ls", archive).endswith("\nTrue\n")
