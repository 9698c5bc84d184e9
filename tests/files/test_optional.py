"""Missing libraries: functions that need one say so, and all others work."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from models import run_python
from versions import NO_OBSTORE

import onnxarchive
from onnxarchive.errors import requires_library

ROOT = Path(__file__).resolve().parents[2]
WEIGHT = "layer.0/weight"

# The first argument is the module that cannot be imported, the second an archive.
REFUSE = """
import sys
library, path = sys.argv[1:]

class Refusing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in library.split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
"""
ORT, NETRON, TORCH = (f"onnxarchive.interop.{it}" for it in ("run", "netron", "torch"))
SHTAB = "onnxarchive.cli.commands.help"
CALLS = [
    ("onnxruntime", "onnxarchive", "onnxarchive.session(path)"),
    ("onnxruntime", "onnxarchive", "onnxarchive.session_options(path)"),
    ("onnxruntime", ORT, f"{ORT}.run(path)"),
    ("onnx_ir", "onnxarchive.ir", "onnxarchive.ir.load(path)"),
    ("obstore", "onnxarchive", "onnxarchive.open('s3://bucket/m.onnxa')"),
    ("fsspec", "onnxarchive", "onnxarchive.open('hf://me/model/m.onnxa')"),
    ("platformdirs", "onnxarchive", "onnxarchive.open('s3://bucket/m.onnxa', cache=True)"),
    ("netron", NETRON, f"{NETRON}.Server(path)"),
    ("shtab", SHTAB, f"{SHTAB}.completion(None)"),
    ("torch", TORCH, f"{TORCH}.tensor(onnxarchive.open(path), {WEIGHT!r})"),
    ("torch", TORCH, f"{TORCH}.from_numpy(onnxarchive.open(path).tensors[{WEIGHT!r}])"),
]
REMOTE = "obstore fsspec platformdirs"
INSTALL = {
    "fsspec": REMOTE,
    "netron": "netron",
    "obstore": REMOTE,
    "onnx_ir": "onnx-ir",
    "onnxruntime": "onnxruntime",
    "platformdirs": REMOTE,
    "shtab": "shtab",
    "torch": "torch",
}


@pytest.mark.parametrize(("library", "module", "call"), CALLS, ids=[it[2] for it in CALLS])
def test_a_function_that_lacks_a_library_says_how_to_install_it(
    library: str, module: str, call: str, archive: Path
) -> None:
    if library == "platformdirs":
        pytest.importorskip("obstore", reason=NO_OBSTORE)
    code = f"""{REFUSE}
import onnxarchive, {module}
try:
    {call}
except ImportError as error:
    print(type(error).__name__, error.name, type(error.__cause__).__name__)
    print(error)
"""
    kind, message = run_python(code, library, archive).splitlines()
    assert kind == f"ImportError {library} ModuleNotFoundError"
    assert re.fullmatch(
        r"[\w ]+ is needed to [\w ']+, but cannot be imported "
        + re.escape(f"(No module named '{library}'): pip install {INSTALL[library]}"),
        message,
    )


@pytest.mark.parametrize("library", INSTALL)
def test_other_functions_work_without_an_optional_library(library: str, archive: Path) -> None:
    code = f"""{REFUSE}
import onnxarchive, onnxarchive.ir, onnxarchive.interop.torch, onnxarchive.interop.netron
import onnxarchive.interop.run, onnxarchive.cli
model = onnxarchive.load(path)
onnxarchive.save(model, path)
onnxarchive.export(path, path + ".onnx")
onnxarchive.convert(path + ".onnx", path)
onnxarchive.link(path, path + ".link.onnx")
assert onnxarchive.check_link(path + ".link.onnx", path) == []
assert onnxarchive.check(path, full=True) == []
print(onnxarchive.cli.main(["ls", path, "--json"]))
"""
    assert run_python(code, library, archive).splitlines()[-1] == "0"


@pytest.mark.parametrize(("command", "library"), [("run", "onnxruntime"), ("view", "netron")])
def test_a_command_that_lacks_a_library_says_so_in_one_line_and_ends_with_status_2(
    command: str, library: str, archive: Path
) -> None:
    code = f"""{REFUSE}
from onnxarchive.cli import main
sys.stderr = sys.stdout
print(main([{command!r}, path]))
"""
    told, status = run_python(code, library, archive).splitlines()
    assert " is needed to " in told
    assert told.endswith(f": pip install {INSTALL[library]}")
    assert status == "2"


def test_a_broken_library_is_reported_in_one_line_with_the_reason(
    archive: Path, tmp_path: Path
) -> None:
    broken = "raise ImportError('lib.so:\\n\\n  cannot open shared object file')"
    (tmp_path / "onnxruntime.py").write_text(broken)
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from onnxarchive.cli import main
sys.stderr = sys.stdout
print(main(["run", sys.argv[1]]))
"""
    told, status = run_python(code, archive, tmp_path).splitlines()
    assert "but cannot be imported (lib.so: cannot open shared object file): pip" in told
    assert status == "2"


def test_an_error_that_is_no_missing_library_is_raised_unchanged() -> None:
    with pytest.raises(ValueError, match="of its own"), requires_library("torch", "be imported"):
        raise ValueError("of its own")


def packages_of_the_extra(name: str) -> set[str]:
    """The packages that an extra of pyproject.toml installs, without their versions."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = extras["optional-dependencies"][name]
    return {re.split("[>=<]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("deflate64", "zipfile-deflate64"),
        ("remote", REMOTE),
        ("view", INSTALL["netron"]),
        ("ir", INSTALL["onnx_ir"]),
        ("ort", INSTALL["onnxruntime"]),
        ("completion", INSTALL["shtab"]),
    ],
)
def test_the_packages_that_messages_name_are_those_of_the_extra(extra: str, packages: str) -> None:
    assert packages_of_the_extra(extra) == set(packages.split())


@pytest.mark.parametrize("library", INSTALL)
def test_the_command_of_a_message_installs_the_library(library: str) -> None:
    for module in ("pip", *(it for it in INSTALL if INSTALL[it] == INSTALL[library])):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    packages = INSTALL[library].split()
    # What is installed already satisfies the command, so that pip asks no index.
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    providers = {it.lower() for it in packages_distributions()[library]}
    assert providers & set(packages), (library, providers)


def test_no_message_names_a_package_that_no_index_has() -> None:
    modules = sorted((ROOT / "onnxarchive").rglob("*.py"))
    assert [it for it in modules if re.search(r"pip install.*onnxarchive", _code(it))] == []


def _code(module: Path) -> str:
    """The source text without its comments."""
    lines = module.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def test_without_zlib_ng_zlib_computes_the_same_checksums_and_version_names_it(
    archive: Path,
) -> None:
    code = f"""{REFUSE}
import onnxarchive
from onnxarchive.cli import main
with onnxarchive.open(path) as archive:
    archive.verify()
onnxarchive.save(onnxarchive.load(path), path + "2")
print(main(["--version"]))
"""
    without = run_python(code, "zlib_ng", archive)
    assert without == f"{onnxarchive.__version__} (CRC-32: zlib)\n0\n"
    bytes_of_zlib = Path(f"{archive}2").read_bytes()
    assert run_python(code, "none", archive).replace("zlib-ng", "zlib") == without
    assert Path(f"{archive}2").read_bytes() == bytes_of_zlib


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "ls --help", "help models add", "completion bash", "cache list"],
)
def test_help_version_completion_and_cache_need_neither_onnx_nor_numpy(
    command: str, tmp_path: Path
) -> None:
    if command == "cache list":
        command += f" --cache-dir {tmp_path}"
    elif command.startswith("completion"):
        pytest.importorskip("shtab")
    code = f"""{REFUSE}
from onnxarchive.cli import main
print(main({command.split()!r}))
"""
    assert run_python(code, "onnx,numpy,ml_dtypes,google,tqdm", "").endswith("\n0\n")


def test_without_tqdm_no_bar_is_shown(archive: Path) -> None:
    code = f"""{REFUSE}
import onnxarchive
print(onnxarchive.check(path, full=True, progress=True))
"""
    assert run_python(code, "tqdm", archive) == "[]\n"
