"""Where a source or a target is: what its name shows, and what it imports."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import run_python, weight_model

import onnxarchive
from onnxarchive import UnsupportedFeatureError
from onnxarchive.cli import main
from onnxarchive.remote.location import Location

URL = "https://user:SECRET@example.com/a/m.onnxa?sig=SECRET"


@pytest.mark.parametrize(
    ("source", "options", "name"),
    [
        ("a/m.onnxa", {}, "a/m.onnxa"),
        (Path("a", "m.onnxa"), {}, os.path.join("a", "m.onnxa")),
        ("x y://m?n", {}, "x y://m?n"),  # a path, since a scheme has no space
        (URL, {}, "https://example.com/a/m.onnxa"),
        ("a/m.onnxa?n", {"store": object()}, "a/m.onnxa?n"),
        (b"PK", {}, "-"),
        (io.BytesIO(), {}, "-"),
    ],
)
def test_a_name_has_no_secrets(source: Any, options: Any, name: str) -> None:
    location = Location.of(source, **options)
    assert (location.name, repr(location)) == (name, f"Location.of({name!r})")


def test_a_location_is_sent_to_workers_with_its_options() -> None:
    location = pickle.loads(pickle.dumps(Location.of(URL, storage_options={"token": "SECRET"})))
    other = location.at("s3://bucket/m.onnxa")
    assert (location.url, other.url) == (URL, "s3://bucket/m.onnxa")
    assert other.access == {"storage_options": {"token": "SECRET"}}


@pytest.mark.parametrize("source", [URL, b"PK", io.BytesIO()])
def test_only_a_local_path_is_local(source: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="expected a local file") as caught:
        Location.of(source).require_local()
    assert "SECRET" not in str(caught.value)
    assert Location.of("m.onnxa").require_local() == "m.onnxa"


NO_FILE = "https://example.invalid/m.onnxa"
WRITERS: dict[str, Callable[[Path, str], Any]] = {
    "export": onnxarchive.export,
    "extract": onnxarchive.extract,
    "link": onnxarchive.link,
    "infer_shapes": onnxarchive.infer_shapes,
    "transform": lambda path, target: onnxarchive.transform(path, target, lambda model: model),
    "download": lambda _, target: onnxarchive.download(NO_FILE, target),
    "export command": lambda path, target: main(["export", str(path), target]),
    "link command": lambda path, target: main(["link", str(path), target]),
    "extract command": lambda path, target: main(["extract", str(path), target]),
    "download command": lambda _, target: main(["download", NO_FILE, target]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_url_is_refused_before_any_work_if_only_local_files_are_written(
    writer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "m.onnxa"
    onnxarchive.save(weight_model(seed=1), archive)
    try:
        status = WRITERS[writer](archive, "s3://key:SECRET@bucket/m.onnx")
        message = capsys.readouterr().err
    except UnsupportedFeatureError as error:
        status, message = 2, str(error)
    assert status == 2
    assert "s3://bucket/m.onnx: expected a local path to write to, found a URL" in message
    assert os.listdir(tmp_path) == ["m.onnxa"]


def test_an_object_that_is_neither_a_path_nor_a_url_is_refused(tmp_path: Path) -> None:
    onnxarchive.save(weight_model(seed=1), tmp_path / "m.onnxa")
    convert_many: Any = onnxarchive.convert_many
    for sources, target in (([b"PK"], tmp_path / "out"), ([tmp_path / "m.onnxa"], b"out")):
        with pytest.raises(TypeError, match="expected a path or a URL, found bytes"):
            convert_many(sources, target)


def test_local_files_need_no_modules_for_stores(tmp_path: Path) -> None:
    onnxarchive.save(weight_model(seed=1), tmp_path / "m.onnxa")
    code = """
import sys, onnxarchive
path = sys.argv[1]
onnxarchive.convert(path, path + "2")
onnxarchive.export(path, path + ".onnx")
onnxarchive.convert_many([path + ".onnx"], path + ".d", cache=True, storage_options={"key": "k"})
onnxarchive.save(onnxarchive.load(path), path)
assert onnxarchive.check(path) == [] and onnxarchive.diff(path, path + "2").is_same
print(sorted(it for it in sys.modules if it.startswith("onnxarchive.remote.")))
"""
    printed = run_python(code, tmp_path / "m.onnxa")
    assert printed == "['onnxarchive.remote.location', 'onnxarchive.remote.urls']\n"
