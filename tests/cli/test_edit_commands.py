from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import lock_calls
import onnx
import pytest
from commands import error_of, output_of, result_of, run
from models import entry_of, flip_byte, run_python, runnable_model
from written import saved, write_model

import onnxarchive

Captured = pytest.CaptureFixture[str]


def model_with(**words: str) -> onnx.ModelProto:
    model = runnable_model()
    for field, value in words.items():
        setattr(model, field, value)
    return model


def model_in(archive: Path) -> onnx.ModelProto:
    with onnxarchive.open(archive) as opened:
        return opened.model


def require(archive: Path, expected: bytes) -> None:
    assert archive.read_bytes() == expected
    assert onnxarchive.check(archive, full=True) == []


# models replace


def test_models_replace_takes_a_link_that_was_changed(
    archive: Path, link: Path, capsys: Captured
) -> None:
    model = onnx.load(link, load_external_data=False)
    model.doc_string = "new"
    onnx.save(model, link)
    with onnxarchive.open(archive) as opened:
        before = opened.entries["__MODEL_PROTO"].header_offset
    assert run("models", "replace", archive, link) == 0
    require(archive, saved(model_with(doc_string="new")))
    nbytes = archive.stat().st_size
    written = nbytes - before
    assert capsys.readouterr() == (
        f"{archive}: {nbytes:,} bytes ({nbytes / 1024:.1f} KiB); {written:,} bytes written\n",
        "",
    )


def test_models_replace_takes_the_archives_own_model_from_another_file(
    archive: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert run("extract", archive, tmp_path / "extracted") == 0
    elsewhere = tmp_path / "__MODEL_PROTO"
    model = onnx.load(tmp_path / "extracted" / "__MODEL_PROTO", load_external_data=False)
    model.doc_string = "new"
    elsewhere.write_bytes(model.SerializeToString())
    result = result_of(capsys, "models", "replace", archive, elsewhere)
    require(archive, saved(model_with(doc_string="new")))
    written = result.pop("nbytes_written")
    assert result == {"path": str(archive), "nbytes": archive.stat().st_size}
    assert 0 < written < 2000
    # The extracted directory has the data beside the model.
    shutil.copy(elsewhere, tmp_path / "extracted" / "__MODEL_PROTO")
    before = archive.read_bytes()
    assert run("models", "replace", archive, tmp_path / "extracted") == 0
    require(archive, before)


def test_models_replace_removes_nothing_without_compact(archive: Path, capsys: Captured) -> None:
    before = archive.read_bytes()
    smaller = model_in(archive)
    del smaller.graph.initializer[0]
    file = write_model(archive.with_name("smaller.onnx"), smaller)
    assert error_of(capsys, "models", "replace", archive, file) == (
        f"onnxarchive: {archive}: no model would use 'layer_0_weight'; --compact rewrites the "
        "whole archive without them\n"
    )
    require(archive, before)
    assert run("models", "replace", archive, file, "--compact") == 0
    require(archive, saved(smaller))
    assert archive.stat().st_size < 2000


def test_models_replace_takes_a_size_threshold(archive: Path, capsys: Captured) -> None:
    file = write_model(archive.with_name("full.onnx"), runnable_model())
    command = ("models", "replace", archive, file, "--size-threshold")
    assert "--compact" in error_of(capsys, *command, "70000")
    assert run(*command, "70000", "--compact") == 0
    require(archive, saved(runnable_model(), size_threshold=70_000))
    assert run(*command, "64") == 0
    require(archive, saved(runnable_model(), size_threshold=64))


# metadata


def test_metadata_is_set_and_removed(archive: Path, capsys: Captured) -> None:
    expected = runnable_model()
    onnx.helper.set_model_props(expected, {"author": "Ada", "note": "a=b\nc", "größe": ""})
    assert run("metadata", "set", archive, "author=Ada", "note=a=b\nc", "größe=") == 0
    require(archive, saved(expected))
    assert capsys.readouterr().out.startswith(f"{archive}: ")
    assert run("metadata", "set", archive, "größe=7", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(archive)
    assert run("metadata", "remove", archive, "author") == 0
    with onnxarchive.open(archive) as opened:
        assert opened.metadata == {"note": "a=b\nc", "größe": "7"}
    assert run("metadata", "remove", archive, "note", "größe") == 0
    require(archive, saved(runnable_model()))


@pytest.mark.parametrize("word", ["doc-string", "producer-name", "producer-version", "domain"])
def test_metadata_set_sets_and_removes_words(archive: Path, word: str, capsys: Captured) -> None:
    field = word.replace("-", "_")
    assert run("metadata", "set", archive, f"--{word}", "größer\nas before") == 0
    require(archive, saved(model_with(**{field: "größer\nas before"})))
    assert run("metadata", "set", archive, f"--{word}", "") == 0
    expected = runnable_model()
    expected.ClearField(field)
    require(archive, saved(expected))
    assert not model_in(archive).HasField(field)


def test_metadata_set_changes_several_fields_and_leaves_all_others(archive: Path) -> None:
    model = runnable_model()
    for value in ("first", "last"):
        model.metadata_props.add(key="twice", value=value)
    onnxarchive.save(model, archive)
    assert run("metadata", "set", archive, "--doc-string", "new") == 0
    model.doc_string = "new"
    require(archive, saved(model))
    onnxarchive.save(runnable_model(), archive)
    words = ["--doc-string", "new", "--domain", "ai.test"]
    assert run("metadata", "set", archive, "a=1", "b=2", *words) == 0
    expected = model_with(doc_string="new", domain="ai.test")
    onnx.helper.set_model_props(expected, {"a": "1", "b": "2"})
    require(archive, saved(expected))


def test_metadata_set_with_nothing_to_set_changes_nothing(archive: Path, capsys: Captured) -> None:
    before, inode = archive.read_bytes(), archive.stat().st_ino
    assert run("metadata", "set", archive) == 0
    assert run("metadata", "set", archive, "--producer-name", "test") == 0  # which it is
    require(archive, before)
    assert archive.stat().st_ino == inode


def test_metadata_is_printed_as_it_is_set(archive: Path, capsys: Captured) -> None:
    model = model_with(domain="ai.test", doc_string="two\nlines")
    onnx.helper.set_model_props(model, {"author": "Ada", "note": "a=b"})
    onnxarchive.save(model, archive)
    assert output_of(capsys, "metadata", "get", archive) == (
        "author=Ada\nnote=a=b\n--doc-string=two\\nlines\n--producer-name=test\n--domain=ai.test\n"
    )
    assert output_of(capsys, "metadata", "get", archive, "note") == "a=b\n"
    assert result_of(capsys, "metadata", "get", archive) == {
        "path": str(archive),
        "model": "",
        "metadata": {"author": "Ada", "note": "a=b"},
        "doc_string": "two\nlines",
        "producer_name": "test",
        "producer_version": None,
        "domain": "ai.test",
    }
    assert result_of(capsys, "metadata", "get", archive, "author")["value"] == "Ada"


def test_a_misspelled_key_of_metadata_is_answered_with_the_nearest_key(
    archive: Path, capsys: Captured
) -> None:
    assert run("metadata", "set", archive, "author=Ada") == 0
    for verb in ("get", "remove"):
        assert error_of(capsys, "metadata", verb, archive, "auther") == (
            f"onnxarchive: {archive}: no metadata 'auther'; there is 'author'; did you mean "
            "'author'?\n"
        )


# All commands that change an archive


CHANGES = ["models replace", "metadata set", "metadata remove"]
Call = Callable[..., list[str | Path]]


@pytest.fixture
def call(archive: Path) -> Call:
    """The arguments of a command that changes an archive."""
    model = write_model(archive.with_name("new model.onnx"), model_with(doc_string="new"))
    arguments: dict[str, list[str | Path]]
    with onnxarchive.edit(archive) as edit:
        edit.metadata["note"] = "old"
    arguments = {
        "models replace": [model],
        "metadata set": ["author=Ada"],
        "metadata remove": ["note"],
        "recover": [],
    }
    return lambda command, path: [*command.split(), path, *arguments[command]]


@pytest.mark.skipif(os.name == "nt", reason="the locks are POSIX's")
@pytest.mark.parametrize("command", [*CHANGES, "recover"])
@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_a_locked_archive_is_waited_for_as_long_as_the_option_says(
    archive: Path, command: str, kind: lock_calls.Kind, call: Call, capsys: Captured
) -> None:
    before = archive.read_bytes()
    with lock_calls.locked(archive, kind):
        for timeout in ("0", "0.02"):
            assert error_of(capsys, *call(command, archive), "--timeout", timeout) == (
                f"onnxarchive: {archive}: the file is locked by a process that edits or opens it; "
                "try again, or with a longer timeout\n"
            )
        assert archive.read_bytes() == before
    assert run(*call(command, archive), "--timeout", "0") == 0


@pytest.mark.skipif(os.name == "nt", reason="links are POSIX's")
@pytest.mark.parametrize("command", CHANGES)
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_file_with_further_names_is_changed_only_with_copy(
    archive: Path, command: str, link: Callable[[Path, Path], None], call: Call, capsys: Captured
) -> None:
    before = archive.read_bytes()
    name = archive.with_name("another name.onnxa")
    link(archive, name)
    message = error_of(capsys, *call(command, name))
    assert message.startswith(f"onnxarchive: {name}: this is a ")
    assert message.endswith("; --copy writes a new file at this path instead\n")
    assert archive.read_bytes() == before
    result = result_of(capsys, *call(command, name), "--copy")
    nbytes = name.lstat().st_size
    assert result == {"path": str(name), "nbytes": nbytes, "nbytes_written": nbytes}
    assert not name.is_symlink()
    assert archive.read_bytes() == before
    assert model_in(name) != model_in(archive)
    assert onnxarchive.check(name, full=True) == []


@pytest.mark.parametrize("command", CHANGES)
def test_a_path_that_a_terminal_cannot_show_is_shown_in_one_line(
    archive: Path, command: str, call: Call, capsys: Captured
) -> None:
    odd = archive.with_name("a\nb\x1b[31m.onnxa")
    archive.rename(odd)
    (line,) = output_of(capsys, *call(command, odd)).splitlines()
    assert "\x1b" not in line


@pytest.mark.parametrize("command", CHANGES)
def test_damage_is_reported_and_nothing_is_changed(
    archive: Path, command: str, call: Call, capsys: Captured
) -> None:
    flip_byte(archive, entry_of(archive, "__MODEL_PROTO").data_offset + 3)
    before = archive.read_bytes()
    assert "[ZIP-15]" in error_of(capsys, *call(command, archive), status=3)
    assert archive.read_bytes() == before


# recover


def cut_off(archive: Path) -> None:
    """Has a process killed while it changes an archive in its place."""
    code = """
import os, signal, sys
import onnxarchive
from onnxarchive.files import clones_and_sync

def kill(done, total):
    os.kill(os.getpid(), signal.SIGKILL)

clones_and_sync.clone = lambda source, target: False
if os.fork() == 0:
    with onnxarchive.edit(sys.argv[1], progress=kill) as edit:
        edit.model.doc_string = "never" * 5000
assert os.WIFSIGNALED(os.wait()[1])
"""
    run_python(code, archive)


posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="a fork is killed")


@posix
@pytest.mark.parametrize("put", [None, shutil.copy, os.rename, os.link])
def test_recover_rolls_an_interrupted_edit_back_wherever_the_file_was_put(
    archive: Path, put: Callable[[Path, Path], object] | None, capsys: Captured
) -> None:
    before = archive.read_bytes()
    cut_off(archive)
    assert archive.read_bytes() != before
    assert os.listdir(archive.parent) == [archive.name]
    path = archive
    if put is not None:
        path = archive.with_name("moved.onnxa")
        put(archive, path)
    assert error_of(capsys, "info", path, status=3) == (
        f"onnxarchive: {path}: the last edit of the archive was interrupted; 'onnxarchive "
        f"recover {shlex.quote(str(path))}' rolls the edit back, and so does the next edit\n"
    )
    assert run("recover", path) == 0
    require(path, before)
    assert capsys.readouterr() == (f"{path}: an interrupted edit was rolled back\n", "")


@posix
def test_recover_says_what_it_did(archive: Path, capsys: Captured) -> None:
    assert output_of(capsys, "recover", archive) == f"{archive}: nothing to recover\n"
    half = archive.read_bytes()[:700]
    left = archive.with_name(f".{archive.name}.onnxarchive-1.tmp")
    left.write_bytes(half)
    assert output_of(capsys, "recover", archive) == f"removed   {left.resolve()}\n"
    assert os.listdir(archive.parent) == [archive.name]
    for is_edited in (False, True):
        left.write_bytes(half)
        if is_edited:
            cut_off(archive)
        assert result_of(capsys, "recover", archive) == {
            "path": str(archive),
            "is_rolled_back": is_edited,
            "removed": [str(left.resolve())],
            "downloads": [],
            "export": None,
            "cut_nbytes": 0,
        }


def test_recover_names_a_partial_download_and_removes_it_if_asked(
    archive: Path, capsys: Captured
) -> None:
    partial = archive.with_name(f".{archive.name}.download").resolve()
    partial.write_bytes(b"arrived")
    assert output_of(capsys, "recover", archive) == (
        f"kept      {partial}, a partial download; --downloads removes it\n"
    )
    assert result_of(capsys, "recover", archive)["downloads"] == [str(partial)]
    assert output_of(capsys, "recover", archive, "--downloads") == f"removed   {partial}\n"
    assert os.listdir(archive.parent) == [archive.name]


@posix
def test_recover_says_that_an_export_was_completed(archive: Path, capsys: Captured) -> None:
    code = """
import os, signal, sys
import onnxarchive

rename = os.replace

def replace(source, target):
    rename(source, target)
    if target.endswith("m.onnx"):
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
if os.fork() == 0:
    onnxarchive.export(sys.argv[1], sys.argv[2], external_data="m.data")
assert os.WIFSIGNALED(os.wait()[1])
"""
    target = archive.parent / "m.onnx"
    run_python(code, archive, target)
    lines = output_of(capsys, "recover", target).splitlines()
    assert lines[-1] == f"{target}: an interrupted export was completed"
    assert sorted(os.listdir(archive.parent)) == sorted([archive.name, "m.data", "m.onnx"])
