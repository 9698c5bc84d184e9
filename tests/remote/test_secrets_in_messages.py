"""No error, warning or output shows the password of an address, however it is malformed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import weight_model

import onnxarchive
from onnxarchive.cli import main

ADDRESSES = [
    "http:///user:SECRET@127.0.0.1:1/m.onnxa",
    "http:////SECRET@127.0.0.1:1/m.onnxa",
    "http://user:SECRET/m.onnxa",
    "http://user:SECRET@127.0.0.1:port/m.onnxa",
    "http://user:SECRET@[::1/m.onnxa",
    "http://user:SECRET@",
    "http://?user:SECRET@127.0.0.1:1/m.onnxa",
    "http://\\user:SECRET@127.0.0.1:1/m.onnxa",
    "s3:///user:SECRET@bucket/m.onnxa",
    "gs:///user:SECRET@bucket/m.onnxa",
    "simplecache::http:///user:SECRET@127.0.0.1:1/m.onnxa",
    "simplecache::http:/user:SECRET@127.0.0.1:1/m.onnxa",
    "http:/user:SECRET@127.0.0.1:1/m.onnxa",
    "http:user:SECRET@127.0.0.1:1/m.onnxa",
    "http//user:SECRET@127.0.0.1:1/m.onnxa",
    " http://user:SECRET@127.0.0.1:1/m.onnxa",
    "see http://127.0.0.1:1/m.onnxa?sig=SECRET",
]
ONCE: dict[str, Any] = {"storage_options": {"max_retries": 0, "timeout": "2s"}}


def convert_many(source: str, target: str) -> None:
    """Raises an error with all that a failed conversion shows."""
    [conversion] = onnxarchive.convert_many([source], target, **ONCE)
    assert conversion.error is not None
    raise OSError(repr(conversion))


def assign(kind: str, path: str) -> None:
    """Assigns a path in an edit: as an asset or as a model."""
    with onnxarchive.edit("m.onnxa") as edit:
        getattr(edit, kind)["new"] = path


def add_from(path: str) -> None:
    with onnxarchive.Writer("out.onnxa") as writer:
        writer.add_from(path)


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "open": lambda it: onnxarchive.open(it, **ONCE),
    "open a path": lambda it: onnxarchive.open(Path(it), **ONCE),
    "open by a cache": lambda it: onnxarchive.open(it, cache="cache", **ONCE),
    "a cache": lambda it: onnxarchive.open("http://127.0.0.1:1/m.onnxa", cache=it, **ONCE),
    "check": lambda it: onnxarchive.check(it, **ONCE),
    "check_link": onnxarchive.check_link,
    "convert": lambda it: onnxarchive.convert(it, "out.onnxa", **ONCE),
    "convert to": lambda it: onnxarchive.convert("m.onnxa", it, **ONCE),
    "convert_many": lambda it: convert_many(it, "out"),
    "convert_many to": lambda it: convert_many("m.onnxa", it),
    "download": lambda it: onnxarchive.download(it, "out.onnxa", **ONCE),
    "download to": lambda it: onnxarchive.download("http://127.0.0.1:1/m.onnxa", it, **ONCE),
    "diff": lambda it: onnxarchive.diff("m.onnxa", it, **ONCE),
    "load": lambda it: onnxarchive.load(it, **ONCE),
    "save": lambda it: onnxarchive.save(weight_model(seed=1), it, **ONCE),
    "Writer": onnxarchive.Writer,
    "edit": lambda it: onnxarchive.edit(it).__enter__(),
    "recover": onnxarchive.recover,
    "export": lambda it: onnxarchive.export(it, "out.onnx", **ONCE),
    "export to": lambda it: onnxarchive.export("m.onnxa", it),
    "extract": lambda it: onnxarchive.extract(it, "out", **ONCE),
    "extract to": lambda it: onnxarchive.extract("m.onnxa", it),
    "link": lambda it: onnxarchive.link(it, "out.onnx", **ONCE),
    "link to": lambda it: onnxarchive.link("m.onnxa", it),
    "an asset of save": lambda it: onnxarchive.save(
        weight_model(seed=1), "out.onnxa", assets={"new": it}
    ),
    "an asset of convert": lambda it: onnxarchive.convert(
        "m.onnxa", "out.onnxa", assets={"new": it}
    ),
    "an asset of convert_many": lambda it: onnxarchive.convert_many(
        ["m.onnxa"], "out", assets={"new": it}
    ),
    "an asset of edit": lambda it: assign("assets", it),
    "a model of edit": lambda it: assign("models", it),
    "Writer.add_from": add_from,
    "follow_links": lambda it: onnxarchive.convert("m.onnx", "out.onnxa", follow_links=it),
    "infer_shapes": onnxarchive.infer_shapes,
    "transform": lambda it: onnxarchive.transform(it, "out.onnxa", lambda model: model),
}
OPTIONS = ["--storage-option", "max_retries=0", "--storage-option", "timeout=2s"]
COMMANDS = [
    ["{}"],
    ["ls", "{}", *OPTIONS],
    ["ls", "{}", "--debug", *OPTIONS],
    ["ls", "m.onnxa", "{}"],
    ["ls", "m.onnxa", "--{}"],
    ["ls", "m.onnxa", "--storage-option", "{}"],
    ["ls", "http://127.0.0.1:1/m.onnxa", "--cache-dir", "{}", *OPTIONS],
    ["check", "{}", "--json", *OPTIONS],
    ["convert", "{}", "out.onnxa", *OPTIONS],
    ["convert", "m.onnxa", "{}", *OPTIONS],
    ["convert", "m.onnxa", "--output-dir", "{}", *OPTIONS],
    ["convert", "m.onnxa", "out.onnxa", "--jobs", "{}"],
    ["diff", "{}", "m.onnxa", *OPTIONS],
    ["download", "{}", "out.onnxa", *OPTIONS],
    ["export", "{}", "out.onnx", *OPTIONS],
    ["export", "m.onnxa", "{}"],
    ["extract", "{}", "out", *OPTIONS],
    ["link", "{}", *OPTIONS],
    ["cat", "m.onnxa", "{}"],
    ["cache", "{}"],
    ["metadata", "set", "m.onnxa", "{}"],
    ["assets", "add", "m.onnxa", "{}"],
    ["models", "replace", "m.onnxa", "{}"],
    ["models", "add", "m.onnxa", "{}"],
    ["models", "add", "m.onnxa", "decoder={}"],
    ["help", "{}"],
    ["recover", "{}"],
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with an archive, in which no file gets a name with a password."""
    monkeypatch.chdir(tmp_path)
    onnxarchive.save(weight_model(seed=1), "m.onnxa")
    onnxarchive.export("m.onnxa", "m.onnx")
    yield tmp_path
    names = [name for _, folders, files in os.walk(tmp_path) for name in (*folders, *files)]
    assert not [name for name in names if "SECRET" in name or "http" in name]


def shown_of(error: BaseException | None) -> Iterator[str]:
    """All texts of an error, of its notes, and of the errors that led to it."""
    while error is not None:
        yield from (str(error), repr(error), *getattr(error, "__notes__", ()))
        yield str(getattr(error, "filename", None))
        error = error.__cause__ or error.__context__


@pytest.mark.sweep
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_shows_the_password_of_a_malformed_address(name: str) -> None:
    for address in ADDRESSES:
        # ImportError: a chained address needs aiohttp, which fsspec does not bring along.
        errors = (onnxarchive.ArchiveError, OSError, ValueError, ImportError)
        with pytest.raises(errors) as caught:
            FUNCTIONS[name](address)
        assert "SECRET" not in "\n".join(shown_of(caught.value)), address


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_the_password_of_a_malformed_address(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for address in ADDRESSES:
        main([argument.replace("{}", address) for argument in command])
        shown = capsys.readouterr()
        assert "SECRET" not in f"{shown.out}{shown.err}", address
