"""The command in a program that is packed: a zip that Python runs, or a frozen program."""

from __future__ import annotations

import modulefinder
import shutil
import subprocess
import sys
import tomllib
import zipapp
import zipfile
from pathlib import Path

import pytest
from models import runnable_model
from processes import completed
from written import write_model

import onnxarchive

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package in a zip, with the files that a wheel adds; libraries are the installed ones."""
    folder = tmp_path_factory.mktemp("app")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "onnxarchive", folder / "onnxarchive", ignore=ignored)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in wheel["force-include"].items():
        (folder / target).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / source, folder / target)
    program = folder.with_name("onnxarchive.pyz")
    zipapp.create_archive(folder, program, main="onnxarchive.cli:run")
    shutil.rmtree(folder)
    return program


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.onnx", runnable_model())


def output_of(program: Path, *arguments: object, cwd: Path) -> str:
    """The output of a command of the program."""
    return completed([sys.executable, program, *arguments], status=0, cwd=cwd).stdout


def test_a_zip_of_the_package_converts_and_checks(program: Path, source: Path) -> None:
    folder = source.parent
    assert "1 tensor" in output_of(program, "convert", "m.onnx", "m.onnxa", cwd=folder)
    assert onnxarchive.load(folder / "m.onnxa") == runnable_model()
    assert "valid (" in output_of(program, "check", "--full", "m.onnxa", cwd=folder)


def test_a_zip_without_the_table_of_rules_says_what_it_lacks(program: Path, source: Path) -> None:
    onnxarchive.convert(source, source.with_name("m.onnxa"))
    bare = source.with_name("bare.pyz")
    with zipfile.ZipFile(program) as whole, zipfile.ZipFile(bare, "w") as rest:
        for name in whole.namelist():
            if name != "onnxarchive/rules.toml":
                rest.writestr(name, whole.read(name))
    done = completed([sys.executable, bare, "check", "m.onnxa"], status=2, cwd=source.parent)
    assert "packed without the table of rules of onnxarchive; pack its data" in done.stderr


def test_a_zip_of_the_package_has_the_help_of_all_commands(program: Path, tmp_path: Path) -> None:
    help = output_of(program, "--help", cwd=tmp_path)
    assert all(name in help for name in ("convert", "link", "models", "diff", "recover", "view"))


def test_a_zip_of_the_package_converts_in_several_threads(program: Path, source: Path) -> None:
    folder = source.parent
    shutil.copy(source, folder / "n.onnx")
    output_of(program, "convert", ".", "--output-dir", "out", "--jobs", 2, cwd=folder)
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["m.onnxa", "n.onnxa"]


def test_a_zip_of_the_package_says_that_it_has_no_directory_of_headers(
    program: Path, tmp_path: Path
) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import onnxarchive; "
    code += "onnxarchive.get_include()"
    done = completed([sys.executable, "-c", code, program], cwd=tmp_path)
    assert "FileNotFoundError" in done.stderr
    assert "packed without the headers of onnxarchive" in done.stderr


def test_the_imports_of_all_modules_are_seen_without_running_the_command() -> None:
    finder = modulefinder.ModuleFinder([str(ROOT)])  # reads imports as programs that freeze do
    finder.run_script(str(ROOT / "onnxarchive" / "__main__.py"))
    paths = [path.relative_to(ROOT) for path in (ROOT / "onnxarchive").rglob("*.py")]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
    # These have to be imported by name.
    modules -= {"onnxarchive.__main__", "onnxarchive.ir", "onnxarchive.interop.torch"}
    assert len(modules) > 80
    assert modules <= finder.modules.keys()


def test_a_frozen_program_becomes_a_process_of_multiprocessing_when_it_is_started_as_one() -> None:
    code = """
import multiprocessing, sys
sys.frozen = True
multiprocessing.freeze_support = lambda: sys.exit("process")
from onnxarchive import cli
cli.run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert (done.returncode, done.stderr) == (1, "process\n")
