"""The whole package on Windows, simulated: see tests/helpers/windows.py."""

from __future__ import annotations

import errno
import os
import stat
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnx
import pytest
from commands import run
from fsspec.implementations.memory import MemoryFileSystem
from models import model_of, runnable_model
from obstore.store import LocalStore, MemoryStore
from public_calls import CALLS, make_files
from windows import Windows, simulate
from written import contents, saved, write_model

import onnxarchive
from onnxarchive.cli import main
from onnxarchive.conversion.convert_many import find_models
from onnxarchive.errors import UnsupportedFeatureError
from onnxarchive.files import local_file

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_files(tmp_path / "folder")
    return tmp_path / "folder"


@pytest.fixture
def windows(folder: Path, no_clones: None, monkeypatch: pytest.MonkeyPatch) -> Windows:
    return simulate(monkeypatch)


# Calls


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_call_gives_the_same_files_on_windows(
    folder: Path, no_clones: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = folder.with_name("other")
    make_files(other)
    expected = CALLS[name](other)
    simulate(monkeypatch)
    found = CALLS[name](folder)
    cached = [path.suffix for path in (folder / "cache").rglob("*")]
    if not cached:
        assert contents(folder) == contents(other)
    assert sorted(cached) == [path.suffix for path in sorted((other / "cache").rglob("*"))]
    if isinstance(found, bool | bytes | tuple | onnx.ModelProto):
        assert found == expected


WRITES: dict[str, Callable[[Path], object]] = {
    "save": lambda it: onnxarchive.save(runnable_model(), it / "old"),
    "convert": lambda it: onnxarchive.convert(it / "m.onnx", it / "old"),
    "export": lambda it: onnxarchive.export(it / "m.onnxa", it / "old"),
    "export external data": lambda it: onnxarchive.export(
        it / "m.onnxa", it / "new.onnx", external_data="old"
    ),
    "link": lambda it: onnxarchive.link(it / "m.onnxa", it / "old"),
    "download": lambda it: onnxarchive.download(
        "m.onnxa", it / "old", store=LocalStore(it.resolve())
    ),
}
OTHERS = "another process, or a session of this one, .*; close it there first.*it is unchanged"


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_another_process_has_open_stays_and_the_message_says_so(
    folder: Path, windows: Windows, name: str
) -> None:
    before = contents(folder)
    with (
        windows.held_by_another_process(folder / "old"),
        pytest.raises(PermissionError, match=OTHERS) as caught,
    ):
        WRITES[name](folder)
    assert caught.value.filename == str(folder / "old")
    assert contents(folder) == before
    WRITES[name](folder)
    assert contents(folder).keys() - before.keys() <= {"new.onnx"}


@pytest.mark.parametrize("name", WRITES)
def test_a_read_only_file_is_refused_before_anything_is_written(
    folder: Path, windows: Windows, name: str
) -> None:
    (folder / "old").chmod(stat.S_IREAD)
    before = contents(folder)
    with pytest.raises(PermissionError, match=r"read-only.*clear this attribute") as caught:
        WRITES[name](folder)
    assert caught.value.filename == str(folder / "old")
    assert contents(folder) == before


@pytest.mark.parametrize("is_new", [False, True])
def test_a_scanner_that_has_a_file_open_for_a_moment_is_waited_for(
    folder: Path, windows: Windows, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, tries = windows.replace, []

    def scanned(source: str, target: str) -> None:
        tries.append(source)
        if len(tries) == 3:
            replace(source, target)
        held = Path(source) if is_new else folder / "old"
        with windows.held_by_another_process(held):
            replace(source, target)

    monkeypatch.setattr(windows, "replace", scanned)
    monkeypatch.setattr(local_file, "PATIENCE", 30)
    with pytest.raises(FileNotFoundError):  # of the last try, once the file has its name
        onnxarchive.save(runnable_model(), folder / "old")
    assert len(set(tries)) == 1
    assert len(tries) == 3
    assert (folder / "old").read_bytes() == saved(runnable_model())


# Names

REFUSED = (
    "aux",
    "CON.txt",
    "nul.tar.gz",
    "Com1.json",
    "lpt\u00b2",
    "conin$",
    "ends with a dot.",
    "ends with a space ",
    "aux .txt",
    "what?",
    'a"b',
    "folder./file",
    "NUL/file",
)
ALLOWED = ("auxiliary", "com10", "console.txt", ".hidden", "a.b.c", "x con", "com", "lpt/1")


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_windows_does_not_give_to_files_are_refused_before_anything_is_written(
    folder: Path, windows: Windows, name: str
) -> None:
    assets = {"first": b"1", name: b"2"}
    onnxarchive.save(runnable_model(), folder / "named.onnxa", assets=assets)
    assert onnxarchive.check(folder / "named.onnxa", full=True) == []
    before = contents(folder)
    with pytest.raises(UnsupportedFeatureError, match="Windows cannot give the name") as caught:
        onnxarchive.extract(folder / "named.onnxa", folder / "new")
    assert f"'assets/{name}'" in str(caught.value).replace('\\"', '"')
    assert caught.value.path == str(folder / "named.onnxa")
    assert contents(folder) == before


def test_names_that_windows_allows_are_extracted(folder: Path, windows: Windows) -> None:
    assets = {name: name.encode() for name in ALLOWED}
    onnxarchive.save(runnable_model(), folder / "named.onnxa", assets=assets)
    onnxarchive.extract(folder / "named.onnxa", folder / "new")
    found = contents(folder / "new")
    assert {name: found[f"assets/{name}"] for name in ALLOWED} == assets


@pytest.mark.parametrize("name", REFUSED)
def test_only_windows_refuses_names_that_it_does_not_give_to_files(
    tmp_path: Path, name: str
) -> None:
    if os.name == "nt":
        pytest.skip("Windows refuses them")
    onnxarchive.save(model_of(), tmp_path / "m.onnxa", assets={name: b"1"})
    onnxarchive.extract(tmp_path / "m.onnxa", tmp_path / "new")
    assert contents(tmp_path / "new")[f"assets/{name}"] == b"1"


def test_a_key_and_a_model_with_the_name_of_a_device_are_refused(
    folder: Path, windows: Windows
) -> None:
    named = folder / "named.onnxa"
    with onnxarchive.Writer(folder / "named.onnxa") as writer:
        writer.finish(runnable_model(), {"aux": runnable_model()})
    (folder / "links").mkdir()
    with pytest.raises(UnsupportedFeatureError, match=r"'aux\.onnx'"):
        onnxarchive.link(named, folder / "links", model="aux")
    assert contents(folder / "links") == {}


def test_a_download_does_not_get_the_name_of_a_device(folder: Path, windows: Windows) -> None:
    store = MemoryStore()
    onnxarchive.save(runnable_model(), "models/aux.onnxa", store=store)
    with pytest.raises(UnsupportedFeatureError, match=r"'aux\.onnxa'"):
        onnxarchive.download("models/aux.onnxa", folder / "empty", store=store)
    assert contents(folder / "empty") == {}


def test_only_models_with_the_name_of_a_device_are_not_converted(
    folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects: dict[str, Any] = {}
    monkeypatch.setattr(MemoryFileSystem, "store", objects)
    for name in ("a", "aux", "z"):
        data = runnable_model().SerializeToString()
        MemoryFileSystem().pipe_file(f"/windows/{name}.onnx", data)
    done = onnxarchive.convert_many(["memory://windows"], folder / "many")
    errors = {os.path.basename(it.source): it.error for it in done}
    assert "'aux.onnx'" in str(errors.pop("aux.onnx"))
    assert errors == {"a.onnx": None, "z.onnx": None}
    assert contents(folder / "many").keys() == {"a.onnxa", "z.onnxa"}


# Paths with two separators


@pytest.mark.parametrize("pattern", ["llm\\*.json", "llm\\sub/*.json", "llm\\**", "llm\\sub"])
def test_patterns_may_have_both_separators(
    folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "llm" / "sub").mkdir(parents=True)
    for name in ("llm/a.json", "llm/sub/b.json"):
        (folder / name).write_bytes(b"{}")
    assert run("assets", "add", folder / "m.onnxa", f"x={pattern}") == 0
    expected = {
        "llm\\*.json": {"x/a.json"},
        "llm\\**": {"x/a.json", "x/sub/b.json"},
    }.get(pattern, {"x/b.json"})
    with onnxarchive.open(folder / "m.onnxa") as archive:
        assert set(archive.assets) == {"labels", *expected}


def test_the_paths_of_models_in_a_tree_have_slashes(
    folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NativePath(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(os.path, name)

        def relpath(self, path: str, start: str) -> str:
            return os.path.relpath(path, start).replace("/", "\\")

    (folder / "tree" / "deep" / "er").mkdir(parents=True)
    write_model(folder / "tree" / "deep" / "er" / "m.onnx", runnable_model())
    monkeypatch.setattr(windows, "path", NativePath("path"), raising=False)
    monkeypatch.setattr(windows, "sep", "\\", raising=False)
    assert [path for _, path in find_models(folder / "tree")] == ["deep/er/m.onnx"]


# A reader that has ended


class Ended:
    """Standard output of which the reader has ended."""

    def __init__(self) -> None:
        self.buffer = Mock()
        self.write = self.flush = self.buffer.write = self._fail

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 1

    def _fail(self, *_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_output_to_a_program_that_has_ended_is_a_broken_pipe(
    folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = Mock()
    monkeypatch.setattr("onnxarchive.cli.output.drop", dropped)
    monkeypatch.setattr(sys, "stdout", Ended())
    with pytest.raises(BrokenPipeError):
        main(["cat", str(folder / "m.onnxa"), "labels"])
    dropped.assert_not_called()
    with pytest.raises(BrokenPipeError):  # of the last flush, which `drop` lets pass
        main(["ls", str(folder / "m.onnxa")])
    dropped.assert_called_once()


def test_output_to_an_ended_program_with_the_error_of_windows_is_an_error_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.name == "nt":
        pytest.skip("Windows has no other error for a broken pipe")
    monkeypatch.setattr(sys, "stdout", Ended())
    assert main(["cat", str(folder / "m.onnxa"), "labels"]) == 2
