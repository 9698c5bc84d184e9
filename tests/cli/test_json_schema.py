"""The output of commands with `--json` has the schema in the guide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import result_of, run
from models import flip_byte, runnable_model
from web_server import WebServer

import onnxarchive
from onnxarchive.cli.all_commands import parser
from onnxarchive.cli.parser import Command

Captured = pytest.CaptureFixture[str]
GUIDE = Path(__file__).resolve().parents[2] / "tools" / "docs" / "guide.md"
SCHEMA: dict[str, Any] = json.loads(
    re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
)
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "integer or string": (int, str),
}
FIELDS_OF_KIND = {
    "tensor": {"data_type", "dims"},
    "sparse_tensor": {"data_type", "dims"},
    "sequence": {"element"},
    "optional": {"element"},
    "map": {"key", "value"},
}


def require(value: Any, schema: Any, where: str) -> None:
    """Requires that a value has a schema of the guide."""
    if isinstance(schema, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            require(item, schema[0], f"{where}[{index}]")
    elif isinstance(schema, Mapping):
        assert isinstance(value, dict), where
        named = set(schema) - {"*"}
        assert named <= set(value), where
        assert "*" in schema or named == set(value), where
        for name, item in value.items():
            require(item, schema.get(name, schema.get("*")), f"{where}.{name}")
    elif value is None:
        assert schema.endswith("?") or schema == "DIMS", where
    elif schema.removesuffix("?") == "TYPE":
        fields = {"kind"} | FIELDS_OF_KIND.get(value["kind"], set())
        require(value, {name: SCHEMA["TYPE"][name] for name in fields}, where)
    elif schema.removesuffix("?") in SCHEMA:
        require(value, SCHEMA[schema.removesuffix("?")], where)
    else:
        kinds = KINDS[schema.removesuffix("?")]
        assert isinstance(value, kinds), where
        assert bool in kinds or not isinstance(value, bool), where


COMMANDS = {
    "convert": ["m.onnx", "new.onnxa"],
    "info": ["m.onnxa"],
    "ls": ["m.onnxa", "--all"],
    "models list": ["m.onnxa"],
    "check": ["damaged.onnxa", "--full"],
    "diff": ["m.onnxa", "other.onnxa", "--values"],
    "metadata get": ["m.onnxa"],
    "metadata set": ["m.onnxa", "a=b"],
    "metadata remove": ["m.onnxa", "k"],
    "models add": ["m.onnxa", "encoder=m.onnx"],
    "models replace": ["m.onnxa", "m.onnx"],
    "models remove": ["m.onnxa", "decoder"],
    "models rename": ["m.onnxa", "decoder", "encoder"],
    "assets list": ["m.onnxa"],
    "assets add": ["m.onnxa", "m.onnx"],
    "assets remove": ["m.onnxa", "a.txt"],
    "assets extract": ["m.onnxa", "assets"],
    "export": ["m.onnxa", "new.onnx", "--external-data", "new.data"],
    "link": ["m.onnxa", "link.onnx"],
    "extract": ["m.onnxa", "unzipped"],
    "recover": ["m.onnxa"],
    "run": ["m.onnxa", "--output-dir", "outputs"],
    "prepack": ["m.onnxa"],
    "view": ["m.onnxa", "--no-browser"],
    "download": ["m.onnxa", "copy.onnxa"],
    "cache list": ["--cache-dir", "cache"],
    "cache clear": ["--cache-dir", "cache"],
    "completion": ["bash"],
}
LIBRARIES = {
    "run": "onnxruntime",
    "prepack": "onnxruntime",
    "view": "netron",
    "cache list": "obstore",
    "cache clear": "obstore",
    "completion": "shtab",
}


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", COMMANDS)
def test_the_result_of_a_command_has_the_schema_of_the_guide(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    web: WebServer,
) -> None:
    library = LIBRARIES.get(command)
    if library is not None and find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    model = runnable_model()
    model.graph.input.append(onnx.helper.make_tensor_value_info("z", 1, ["batch", None]))
    onnx.save(model, "m.onnx")
    onnxarchive.save(model, "m.onnxa", models={"decoder": model}, assets={"a.txt": b"a"})
    with onnxarchive.edit("m.onnxa") as edit:
        edit.metadata["k"] = "v"
    for name in ("other.onnxa", "damaged.onnxa"):
        Path(name).write_bytes(Path("m.onnxa").read_bytes())
    with onnxarchive.edit("other.onnxa") as edit:
        edit.tensors["layer.0/weight"] = np.ones((1024, 16), np.float32)
    flip_byte(Path("damaged.onnxa"), 64)
    if command.startswith("cache"):
        web.files["/m.onnxa"] = Path("m.onnxa").read_bytes()
        onnxarchive.open(web.url("/m.onnxa"), cache="cache").close()
    if command == "view":
        monkeypatch.setattr("time.sleep", interrupt)
    status = 1 if command in ("check", "diff") else 0
    result = result_of(capsys, *command.split(), *COMMANDS[command], status=status)
    assert result
    require(result, SCHEMA[command], command)


def test_errors_and_warnings_have_the_schema_of_the_guide(tmp_path: Path, capsys: Captured) -> None:
    onnx.save(runnable_model(), tmp_path / "m.onnx")
    assert run("info", tmp_path / "m.onnx", "--json") == 3
    require(json.loads(capsys.readouterr().err), SCHEMA["ERROR"], "error")
    assert run("convert", tmp_path / "m.onnx", tmp_path / "n.onnx", "--json") == 0
    require(json.loads(capsys.readouterr().err), SCHEMA["WARNING"], "warning")


def test_lists_have_the_schema_of_the_guide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(runnable_model(), "m.onnx")
    Path("text.onnx").write_bytes(b"text")
    sources = ["m.onnx", "text.onnx"]
    result = result_of(capsys, "convert", *sources, "--output-dir", "out", status=3)
    require(result, [SCHEMA["convert"]], "convert")
    result = result_of(capsys, "link", "out/m.onnxa", "out")
    require(result, [SCHEMA["link"]], "link")


def _printing_json(command: Command, name: str = "") -> Iterator[str]:
    """Yields the names of the commands that have `--json`."""
    for word, each in command.commands.items():
        yield from _printing_json(each, f"{name} {word}".strip())
    if not command.commands and "--json" in command.format_help():
        yield name


def test_every_command_with_json_is_in_the_schema_and_has_a_test() -> None:
    assert {name for name in SCHEMA if not name.isupper()} == set(COMMANDS)
    assert set(COMMANDS) == set(_printing_json(parser()))
