"""The recipe of a session in C++, compiled and run against the library of ONNX Runtime's wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from models import break_local_header, entry_of, further_model, runnable_model
from processes import completed

import onnxarchive

ort = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
pytestmark = pytest.mark.tool

RECIPE = Path(__file__).resolve().parents[3] / "tools" / "recipes" / "cpp"
HEADERS = RECIPE / "build" / "headers"
MIB = 1 << 20


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled recipe, which also prints its anonymous memory in bytes to standard error."""
    compiler = shutil.which("c++")
    (library, *_) = [*Path(ort.__file__).parent.glob("capi/libonnxruntime.so.*"), None]
    if compiler is None or library is None or not HEADERS.is_dir():
        pytest.skip("needs a C++ compiler, and headers and library of ONNX Runtime")
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "libonnxruntime.so").symlink_to(library)
    (folder / "libonnxruntime.so.1").symlink_to(library)
    source = (RECIPE / "main.cpp").read_text()
    end = "} catch"
    assert source.count(end) == 1
    measured = 'std::ifstream status("/proc/self/status"); std::cerr << status.rdbuf();'
    source = f"#include <fstream>\n{source.replace(end, measured + end)}"
    (folder / "main.cpp").write_text(source)
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command += [f"-I{onnxarchive.get_include()}", f"-isystem{HEADERS}", str(folder / "main.cpp")]
    command += [f"-L{folder}", "-lonnxruntime", f"-Wl,-rpath,{folder}", "-o", str(folder / "run")]
    subprocess.run(command, check=True)
    return folder / "run"


def run(program: Path, *arguments: object) -> tuple[float, int]:
    """The sum that the program prints, and its anonymous memory in bytes."""
    command = [str(program), *map(str, arguments)]
    done = completed(command, status=0)
    kinds = dict(line.split(":", 1) for line in done.stderr.splitlines())
    return float(done.stdout), int(kinds["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize("model", ["", "further"])
def test_the_recipe_gives_the_outputs_of_the_session_in_python(
    program: Path, path: Path, model: str
) -> None:
    onnxarchive.save(runnable_model(), path, models={"further": further_model()})
    session = onnxarchive.session(path, model=model, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": np.ones((2, 1024), np.float32)})
    assert run(program, path, model)[0] == pytest.approx(y.sum(), rel=1e-5)


def test_cmake_builds_the_recipe(program: Path, path: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    build, library = tmp_path / "build", program.with_name("libonnxruntime.so")
    values = {"ONNXA_INCLUDE": onnxarchive.get_include(), "ORT_INCLUDE": HEADERS}
    options = [f"-D{name}={value}" for name, value in {**values, "ORT_LIBRARY": library}.items()]
    completed(["cmake", "-S", str(RECIPE), "-B", str(build), *options], status=0)
    completed(["cmake", "--build", str(build)], status=0)
    onnxarchive.save(runnable_model(), path)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    done = completed([str(build / "run"), str(path)], status=0, env=variables)
    assert float(done.stdout) == run(program, path)[0]


def test_the_weights_stay_in_the_map(program: Path, tmp_path: Path) -> None:
    if tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31):
        pytest.skip("this ONNX Runtime copies buffers of external data")
    small, large = tmp_path / "small.onnxa", tmp_path / "large.onnxa"
    onnxarchive.save(runnable_model(), small)
    onnxarchive.save(runnable_model(64 * MIB), large)
    taken = run(program, large)[1] - run(program, small)[1]
    print(f"{taken / MIB:.1f} MiB for weights of 64 MiB")  # noqa: T201
    # The recipe's input has 4 MiB.
    assert taken < 16 * MIB


def test_the_recipe_names_file_and_fault(program: Path, path: Path, tmp_path: Path) -> None:
    onnxarchive.save(runnable_model(), path)
    break_local_header(path, entry_of(path, "layer_0_weight"))
    (tmp_path / "empty").touch()
    for arguments, message in (
        ([path], f"{path}: "),
        ([path, "other"], f"{path}: no model has the id 'other'"),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'}: cannot be mapped"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: cannot be opened"),
        ([os.devnull], f"{os.devnull}: no regular file"),
    ):
        command = [str(program), *map(str, arguments)]
        done = completed(command, status=1)
        assert done.stderr.startswith(message)


def test_the_headers_are_where_get_include_says() -> None:
    assert {"onnxa.h", "onnxa_ort.hpp"} <= {*os.listdir(onnxarchive.get_include())}
