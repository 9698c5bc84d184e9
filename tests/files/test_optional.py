"""Missing libraries: functions that need one say so, and all others work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models import run_python

from onnxarchive.errors import needing

ROOT = Path(__file__).resolve().parents[2]
WEIGHT = "layer.0/weight"

# The first argument is the module that cannot be imported, the second an archive.
REFUSE = """
import sys
library, path = sys.argv[1:]

class Refusing:
    def find_spec(self, name, *_):
        if name.split(".")[0] == library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusing())
"""
ORT, NETRON, TORCH = (f"onnxarchive.interop.{it}" for it in ("running", "netron", "torch"))
SHTAB = "onnxarchive.cli.commands.helping"
CALLS = [
    ("onnxruntime", "onnxarchive", "onnxarchive.session(path)"),
    ("onnxruntime", "onnxarchive", "onnxarchive.session_options(path)"),
    ("onnxruntime", ORT, f"{ORT}.run(path)"),
    ("onnx_ir", "onnxarchive.ir", "onnxarchive.ir.load(path)"),
    ("obstore", "onnxarchive", "onnxarchive.open('s3://bucket/m.onnxa')"),
    ("fsspec", "onnxarchive", "onnxarchive.open('hf://me/model/m.onnxa')"),
    ("netron", NETRON, f"{NETRON}.Server(path)"),
    ("shtab", SHTAB, f"{SHTAB}.completion(None)"),
    ("torch", TORCH, f"{TORCH}.tensor(onnxarchive.open(path), {WEIGHT!r})"),
    ("torch", TORCH, f"{TORCH}.from_numpy(onnxarchive.open(path).tensors[{WEIGHT!r}])"),
]
INSTALL = {
    "fsspec": "'onnxarchive[remote]'",
    "netron": "'onnxarchive[view]'",
    "obstore": "'onnxarchive[remote]'",
    "onnx_ir": "'onnxarchive[ir]'",
    "onnxruntime": "'onnxarchive[ort]'",
    "shtab": "'onnxarchive[completion]'",
    "torch": "torch",
}


@pytest.mark.parametrize(("library", "module", "call"), CALLS, ids=[it[2] for it in CALLS])
def test_what_needs_a_library_says_how_to_install_it(
    library: str, module: str, call: str, archive: Path
) -> None:
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
def test_everything_else_works_without_it(library: str, archive: Path) -> None:
    code = f"""{REFUSE}
import onnxarchive, onnxarchive.ir, onnxarchive.interop.torch, onnxarchive.interop.netron
import onnxarchive.interop.running, onnxarchive.cli
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
def test_a_command_says_it_in_one_line_and_ends_with_status_2(
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


def test_a_library_that_is_broken_is_told_in_one_line_with_its_reason(
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


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="of its own"), needing("torch", "be imported"):
        raise ValueError("of its own")


def test_the_extras_bring_the_libraries() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for library, package in INSTALL.items():
        extra = re.fullmatch(r"'onnxarchive\[(\w+)\]'", package)
        if extra:
            requirement = rf'^{extra[1]} = \[.*"{library.replace("_", "-")}\b'
            assert re.search(requirement, text, re.MULTILINE), library
