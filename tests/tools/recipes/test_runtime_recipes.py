"""The recipes that run a model of an archive in a browser, in Node and in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_sessions import needs_mapped_buffers, ort
from models import break_local_header, entry_of, flip_byte, further_model, runnable_model
from processes import completed
from web_server import WebServer

import onnxarchive

pytestmark = pytest.mark.tool

ROOT = Path(__file__).resolve().parents[3]
BROWSER, NODE, CPP = (ROOT / "tools" / "recipes" / it for it in ("browser", "node", "cpp"))
HEADERS = CPP / "build" / "headers"
MIB = 1 << 20
CHANGED = 'expected data of the entry "layer_0_weight"'


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive of two models and an asset that no runtime reads."""
    path = tmp_path / "model.onnxa"
    models, assets = {"further": further_model(MIB)}, {"unread": bytes(4 * MIB)}
    onnxarchive.save(runnable_model(MIB), path, models=models, assets=assets)
    return path


def output_in_python(archive: Path, model: str) -> tuple[str, np.ndarray]:
    """Name and elements of a model's output for ones, by a session in Python."""
    session = onnxarchive.session(archive, model=model, providers=["CPUExecutionProvider"])
    (x,) = session.get_inputs()
    (found,) = session.run(None, {"x": np.ones(x.shape, np.float32)})
    return session.get_outputs()[0].name, np.asarray(found)


def require_output_of_python(printed: str, archive: Path, model: str) -> None:
    """Requires that a recipe has printed name, dims and elements of the output."""
    name, expected = output_in_python(archive, model)
    first, dims, *numbers = printed.split()
    assert (first, dims) == (name, f"[{','.join(map(str, expected.shape))}]:")
    found = np.array(numbers, np.float32)
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-4, atol=1e-3)


# In a browser


@pytest.fixture
def page(archive: Path, tmp_path: Path, web: WebServer) -> str:
    """The address of the page, with the archive beside it."""
    if not (BROWSER / "node_modules").exists():
        pytest.skip(f"npm install --prefix {BROWSER.relative_to(ROOT)} brings the runtime")
    site = tmp_path / "site"
    folder = site / "tools" / "recipes" / "browser"
    folder.mkdir(parents=True)
    site.joinpath("conformance").symlink_to(ROOT / "conformance")
    for file in (*BROWSER.iterdir(), archive):
        folder.joinpath(file.name).symlink_to(file)
    web.folder = site
    return web.url("/tools/recipes/browser/index.html")


def run_in(browser: Any, page: str, model: str = "") -> tuple[str, str]:
    """Runs a model on ones; gives the status and the outputs that the page shows."""
    from selenium.webdriver.support.ui import WebDriverWait

    def outputs_shown(driver: Any) -> str | None:
        text: str = driver.find_element("id", "status").text
        return None if text in ("", "Running") else text

    browser.get(page)
    browser.find_element("id", "model").clear()
    browser.find_element("id", "model").send_keys(model)
    browser.find_element("css selector", "button").click()
    status = str(WebDriverWait(browser, 120).until(outputs_shown))
    return status, browser.find_element("id", "outputs").text


@pytest.mark.parametrize("model", ["", "further"])
def test_a_page_computes_what_python_does_and_reads_only_what_it_needs(
    browser: Any, page: str, web: WebServer, archive: Path, model: str
) -> None:
    status, outputs = run_in(browser, page, model)
    assert status == "Done", browser.get_log("browser")
    require_output_of_python(outputs, archive, model)
    spans = [it.removeprefix("bytes=").split("-") for it in web.ranges() if it]
    assert MIB < sum(int(last) + 1 - int(first) for first, last in spans) < MIB + 100_000
    own = entry_of(archive, "own").header_offset
    assert (own in [int(first) for first, _ in spans]) == (model == "further")


def test_a_page_names_a_weight_that_has_changed(browser: Any, page: str, archive: Path) -> None:
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset)
    status, outputs = run_in(browser, page)
    assert status.startswith(CHANGED)
    assert outputs == ""


# In Node


def run_node(*arguments: str | Path, cwd: Path = NODE, status: int = 0) -> Any:
    if shutil.which("node") is None or not (NODE / "node_modules").exists():
        pytest.skip("npm install in the recipe's directory brings ONNX Runtime")
    return completed(["node", *arguments], cwd=cwd, status=status)


@pytest.mark.parametrize("model", ["", "further"])
def test_a_model_gives_in_node_what_it_gives_in_python(archive: Path, model: str) -> None:
    done = run_node(NODE / "run.mjs", archive.name, *[model] * bool(model), cwd=archive.parent)
    require_output_of_python(done.stdout, archive, model)


def test_a_weight_that_has_changed_is_refused_in_node(archive: Path) -> None:
    flip_byte(archive, entry_of(archive, "layer_0_weight").data_offset)
    assert CHANGED in run_node(NODE / "run.mjs", archive, status=1).stderr


def test_a_session_of_a_link_without_packed_copies_maps_the_archive(archive: Path) -> None:
    link = archive.with_suffix(".onnx")
    onnxarchive.link(archive, link)
    program = """
import { readFileSync } from 'node:fs';
import * as ort from 'onnxruntime-node';
const extra = { session: { disable_prepacking: '1' } };
const session = await ort.InferenceSession.create(process.argv[1], { extra });
console.log(readFileSync('/proc/self/maps', 'utf8').includes('model.onnxa'));
"""
    assert run_node("--input-type=module", "--eval", program, link).stdout == "true\n"


# In C++, against the library of ONNX Runtime's wheel


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
    source = (CPP / "main.cpp").read_text()
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
    done = completed([program, *arguments], status=0)
    kinds = dict(line.split(":", 1) for line in done.stderr.splitlines())
    return float(done.stdout), int(kinds["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize("model", ["", "further"])
def test_the_recipe_gives_the_outputs_of_the_session_in_python(
    program: Path, archive: Path, model: str
) -> None:
    _, y = output_in_python(archive, model)
    assert run(program, archive, model)[0] == pytest.approx(y.sum(), rel=1e-5)


def test_cmake_builds_the_recipe_in_c(program: Path, archive: Path, tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    build, library = tmp_path / "build", program.with_name("libonnxruntime.so")
    values = {"ONNXA_INCLUDE": onnxarchive.get_include(), "ORT_INCLUDE": HEADERS}
    options = [f"-D{name}={value}" for name, value in {**values, "ORT_LIBRARY": library}.items()]
    completed(["cmake", "-S", CPP, "-B", build, *options], status=0)
    completed(["cmake", "--build", build], status=0)
    variables = {**os.environ, "LD_LIBRARY_PATH": str(program.parent)}
    done = completed([build / "run", archive], status=0, env=variables)
    assert float(done.stdout) == run(program, archive)[0]


@needs_mapped_buffers
def test_a_session_in_c_takes_no_memory_for_the_weights(
    program: Path, archive: Path, path: Path
) -> None:
    onnxarchive.save(runnable_model(64 * MIB), path)
    taken = run(program, path)[1] - run(program, archive)[1]
    # The recipe's input has 4 MiB.
    assert taken < 16 * MIB


def test_the_recipe_names_file_and_fault(program: Path, archive: Path, tmp_path: Path) -> None:
    break_local_header(archive, entry_of(archive, "layer_0_weight"))
    (tmp_path / "empty").touch()
    for arguments, message in (
        ([archive], f"{archive}: "),
        ([archive, "other"], f"{archive}: no model has the id 'other'"),
        ([tmp_path / "empty"], f"{tmp_path / 'empty'}: cannot be mapped"),
        ([tmp_path / "none"], f"{tmp_path / 'none'}: cannot be opened"),
        ([os.devnull], f"{os.devnull}: no regular file"),
    ):
        assert completed([program, *arguments], status=1).stderr.startswith(message)


def test_the_headers_are_where_get_include_says() -> None:
    assert {"onnxa.h", "onnxa_ort.hpp"} <= {*os.listdir(onnxarchive.get_include())}
