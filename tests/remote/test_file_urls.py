"""File URLs: local paths for every function, decoded once; and what is no URL of a local file."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import model_of, runnable_model
from written import contents

import onnxarchive
from onnxarchive import UnsupportedFeatureError
from onnxarchive.cli import main
from onnxarchive.remote.location import Location, require_local_target
from onnxarchive.remote.urls import is_url, local_path

NAMES = [
    "m.onnxa",
    "a b.onnxa",
    "100%41.onnxa",
    "ü.onnxa",
    "q?x#y.onnxa",
    "a=b&c;d.onnxa",
    "~",
    "a::b",
]
# A URL of the same file as that of pathlib (file:///p), as other programs write it.
FORMS: dict[str, Callable[[str], str]] = {
    "pathlib": lambda uri: uri,
    "localhost": lambda uri: uri.replace("file://", "file://localhost"),
    "capitals": lambda uri: uri.replace("file://", "FILE://LocalHost"),
    "one slash": lambda uri: uri.replace("file://", "File:"),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@forms
@pytest.mark.parametrize("name", NAMES)
def test_a_file_url_is_the_path_that_pathlib_has_encoded(
    tmp_path: Path, name: str, form: Callable[[str], str]
) -> None:
    path, url = tmp_path / name, form((tmp_path / name).as_uri())
    assert local_path(url) == require_local_target(url) == str(path)
    location = Location.of(url, cache=True)
    assert (location.path, location.url, location.name) == (str(path), None, str(path))
    assert location.require_local() == str(path)
    assert not is_url(url)


@pytest.mark.skipif(os.name != "posix", reason="names of other systems are text")
def test_a_name_that_is_not_utf_8_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xe4 %41")
    assert local_path(path.as_uri()) == str(path)


def test_characters_that_were_not_escaped_stay() -> None:
    assert local_path("file:///a b/ü/100%.onnxa") == "/a b/ü/100%.onnxa"
    assert local_path("file:////a") == "//a"


@pytest.mark.parametrize(
    "source",
    ["file:m.onnxa", "file", "files:/m.onnxa", "./file:/m.onnxa", Path("file:/m.onnxa"), "a%20b"],
)
def test_a_path_that_is_no_file_url_is_unchanged(source: Any) -> None:
    assert local_path(source) == Location.of(source).path == os.fspath(source)


def test_a_chain_of_fsspec_is_no_local_path() -> None:
    assert is_url("simplecache::file:///a%20b")
    assert Location.of("zip://m.onnx::file:///a.zip").path is None
    assert Location.of("file:///a", store=object()).path is None  # a key


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///C:/a%20b/m.onnxa", "C:/a b/m.onnxa"),
        ("file://localhost/c|/m.onnxa", "c:/m.onnxa"),
        ("file:/D:/m.onnxa", "D:/m.onnxa"),
        ("file:///models/m.onnxa", "/models/m.onnxa"),
    ],
)
def test_on_windows_the_drive_begins_the_path(
    url: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "name", "nt")
    found = local_path(url)
    monkeypatch.undo()
    assert found == path


@pytest.mark.parametrize(
    "url",
    [
        "file://host/m.onnxa",
        "file://user:SECRET@host/m.onnxa",
        "file://user:SECRET@localhost/m.onnxa",
        "file://localhost:80/m.onnxa",
        "file://127.0.0.1/m.onnxa",
        "file://./m.onnxa",
        "file:///m.onnxa?SECRET",
        "file:///m.onnxa#SECRET",
        "file:///m%00",
        "file://",
        "file://localhost",
    ],
)
def test_a_file_url_with_another_host_a_query_or_a_fragment_is_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = r"^file:\S* expected a file of this machine, as file:///"
    for act in (
        onnxarchive.open,
        lambda url: onnxarchive.save(runnable_model(), url),
        onnxarchive.Writer,
        onnxarchive.recover,
        require_local_target,
        lambda url: onnxarchive.download("https://example.invalid/m.onnxa", url),
        onnxarchive.download,
    ):
        with pytest.raises(UnsupportedFeatureError, match=message) as caught:
            act(url)
        assert "SECRET" not in str(caught.value)
    assert main(["ls", url]) == main(["extract", "m.onnxa", url]) == 2
    printed = capsys.readouterr().err
    assert printed.count("expected a file of this machine") == 2
    assert "SECRET" not in printed
    assert os.listdir(tmp_path) == []


# Every function does with a URL what it does with the path

Names = Callable[[str], str]


def _write(at: Names) -> None:
    with onnxarchive.Writer(at("new.onnxa")) as writer:
        writer.add_from(at("w.safetensors"))
        writer.add_asset("labels.txt", at("labels.txt"))
        writer.finish(model_of())


def _edit(at: Names) -> None:
    with onnxarchive.edit(at("m.onnxa")) as edit:
        edit.assets["new"] = at("labels.txt")
        edit.models["decoder"] = at("m.onnx")
        edit.models["again"] = at("m.onnxa 2")


def _read(at: Names) -> None:
    with onnxarchive.open(at("m.onnxa"), cache=at("cache")) as archive:
        assert archive.path == local_path(at("m.onnxa"))
    assert onnxarchive.load(at("m.onnxa")) == runnable_model()
    assert onnxarchive.check(at("m.onnxa"), full=True) == []
    assert onnxarchive.diff(at("m.onnxa"), at("m.onnxa 2")).is_same
    assert onnxarchive.check_model(at("m.onnxa")) == []
    onnxarchive.recover(at("m.onnxa"))


def _convert(at: Names) -> None:
    onnxarchive.convert(
        at("m.onnx"),
        at("new.onnxa"),
        models={"decoder": at("m.onnxa")},
        assets={"labels": at("labels.txt")},
        follow_links=at("linked"),
    )


def _convert_all(at: Names) -> None:
    onnxarchive.convert(at("repository"), at("new.onnxa"), models="all")


def _convert_many(at: Names) -> None:
    outcomes = onnxarchive.convert_many(
        [at("m.onnx"), at("repository")],
        at("out"),
        assets={"labels": at("labels.txt")},
        follow_links=at("linked"),
    )
    assert [outcome.error for outcome in outcomes] == [None, None]


def _link(at: Names) -> None:
    onnxarchive.link(at("m.onnxa"), at("link.onnx"))
    assert onnxarchive.check_link(at("link.onnx"), at("m.onnxa")) == []
    assert main(["check", "--link", at("link.onnx")]) == 0


def _save(at: Names) -> None:
    onnxarchive.save(runnable_model(), at("new.onnxa"), assets={"labels": at("labels.txt")})
    with pytest.raises(ValueError, match="the target is also the input"):
        onnxarchive.save(runnable_model(), at("m.onnxa"), assets={"m": at("m.onnxa")})


def _transform(at: Names) -> None:
    onnxarchive.infer_shapes(at("m.onnxa"), at("inferred.onnxa"))
    onnxarchive.transform(at("m.onnxa"), at("new.onnxa"), lambda model: model, weights="external")


def _load_and_save_with_onnx_ir(at: Names) -> None:
    pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
    import onnxarchive.ir

    model = onnxarchive.ir.load(at("m.onnxa"))
    model.doc_string = "new"
    onnxarchive.save(model, at("m.onnxa"))


def _command(*words: str) -> Callable[[Names], None]:
    """A command; in its words, @ stands before a name."""

    def call(at: Names) -> None:
        def argument(word: str) -> str:
            before, _, name = word.partition("@")
            return before + at(name) if name else word

        assert main([argument(word) for word in words]) == 0

    return call


CALLS: dict[str, Callable[[Names], object]] = {
    "reading": _read,
    "Writer": _write,
    "edit": _edit,
    "convert": _convert,
    "convert all": _convert_all,
    "convert_many": _convert_many,
    "link": _link,
    "save": _save,
    "transform": _transform,
    "onnx_ir": _load_and_save_with_onnx_ir,
    "export": lambda at: onnxarchive.export(
        at("m.onnxa"), at("new.onnx"), external_data="new.data"
    ),
    "extract": lambda at: onnxarchive.extract(at("m.onnxa"), at("new folder")),
    "download": lambda at: onnxarchive.download(at("m.onnxa"), at("new.onnxa")),
    "download to a folder": lambda at: onnxarchive.download(at("m.onnxa"), at("repository")),
    "convert command": _command(
        *("convert", "@m.onnx", "@new.onnxa", "--model", "decoder=@m.onnxa"),
        *(
            "--asset",
            "@labels.txt",
            "labels=@labels.txt",
            "@repository",
            "--follow-links",
            "@linked",
        ),
    ),
    "convert many command": _command("convert", "@repository", "--output-dir", "@out"),
    "export command": _command("export", "@m.onnxa", "@new.onnx", "--external-data", "new.data"),
    "extract command": _command("extract", "@m.onnxa", "@new folder"),
    "link command": _command("link", "@m.onnxa", "@link.onnx"),
    "link to a folder": _command("link", "@m.onnxa", "@.", "--force"),
    "download command": _command("download", "@m.onnxa", "@new.onnxa"),
    "cache command": _command("cache", "list", "--cache-dir", "@cache"),
    "ls command": _command("ls", "@m.onnxa", "--cache-dir", "@cache"),
    "models replace command": _command("models", "replace", "@m.onnxa", "@m.onnx"),
    "assets command": _command("assets", "add", "@m.onnxa", "@labels.txt", "text=@labels.txt"),
    "recover command": _command("recover", "@m.onnxa"),
    "diff command": _command("diff", "@m.onnxa", "@m.onnxa 2"),
}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for folder in ("repository", "linked", "cache"):
        (path / folder).mkdir(0o700)
    for name in ("m.onnx", "repository/model.onnx"):
        (path / name).write_bytes(runnable_model().SerializeToString())
    for name in ("m.onnxa", "m.onnxa 2"):
        onnxarchive.save(runnable_model(), path / name)
    (path / "labels.txt").write_text("cat")
    header = b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    (path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    return path


@forms
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_function_does_with_a_url_what_it_does_with_the_path(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Names], object],
    form: Callable[[str], str],
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    path = _folder(tmp_path / "paths" / "a b %41")
    url = _folder(tmp_path / "URLs" / "a b %41")
    call(lambda name: str(path / name))
    call(lambda name: form((url / name).as_uri()))
    assert contents(url) == contents(path)
    assert list(work.iterdir()) == []


@forms
def test_a_session_is_made_and_run_by_url(
    tmp_path: Path, form: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    folder = _folder(tmp_path / "a b")
    np.save(folder / "x.npy", np.ones((2, 1024), np.float32))
    url, x, out = (form((folder / name).as_uri()) for name in ("m.onnxa", "x.npy", "out"))
    onnxarchive.session(url, providers=["CPUExecutionProvider"])
    assert main(["run", url, "--input", f"x={x}", "--output", out]) == 0
    assert (folder / "out" / "y.npy").exists()
