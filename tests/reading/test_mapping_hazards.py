"""Open archives whose file another program changes, as the README describes it.

Each case is a process of its own: one of them is killed by the system, and none may wait for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from models import model_of
from processes import completed

import onnxarchive

LARGE = 1 << 20  # bytes of the tensor `w`: many pages
BEGINNING = """
import gc, os, sys, onnxarchive

path, other = sys.argv[1:]
archive = onnxarchive.open(path)

def refusal(call):
    try:
        call()
    except onnxarchive.ArchiveError as error:
        return error

def values(*views):
    return [set(memoryview(view).cast("B")) for view in views]
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows keeps mapped files as they are")


def _write(path: Path, value: int) -> Path:
    """An archive with the tensors `w` and `v`, and an asset, all of this value."""
    with onnxarchive.Writer(path) as writer:
        writer.add("w", np.full(LARGE, value, np.uint8))
        writer.add("v", np.full(5000, value, np.uint8))
        writer.add_asset("a", bytes([value]) * 100)
        writer.finish(model_of())
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _write(tmp_path / "m.onnxa", 1)


@pytest.fixture
def other(tmp_path: Path, path: Path) -> Path:
    """An archive with the same names, sizes and offsets, and other values."""
    written = _write(tmp_path / "other", 2)
    assert written.stat().st_size == path.stat().st_size
    return written


def _run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a Python program that may end in any way, but has to end."""
    return completed([sys.executable, "-W", "error", "-c", code, *arguments])


@pytest.mark.skipif(sys.platform != "linux", reason="a signal as Linux sends it")
@pytest.mark.parametrize("give", ["archive.tensors['w']", "archive.read('w')"])
def test_truncation_below_a_view_ends_the_process_that_reads_it_with_sigbus(
    path: Path, give: str
) -> None:
    code = f"""{BEGINNING}
view = {give}
assert view[-1] == 1
os.truncate(path, 100)
print("still here", flush=True)
view[-1]
print("read")
"""
    done = _run(code, path, path)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "still here\n")


CASES = {
    "a copy outlives truncation": (
        """
        copy = archive.tensors["w"].copy()
        os.truncate(path, 100)
        print(copy.sum())
        """,
        [f"{LARGE}"],
    ),
    # A local header that is gone, and data that is gone, are errors and no signals.
    "what is read by position outlives truncation below a map": (
        """
        view = archive.read("w")  # maps
        os.truncate(path, 5000)
        for call in (lambda: archive.read("v"), lambda: archive.tensors["v"], archive.verify):
            print(refusal(call).rule)
        print({finding.rule for finding in onnxarchive.check(path, full=True)})
        print(archive.model.graph.initializer[0].name, view[:3].tobytes())
        """,
        ["ZIP-7", "ZIP-7", "ZIP-15", "{'ZIP-2'}", r"w b'\x01\x01\x01'"],
    ),
    "what is truncated before it is mapped is refused": (
        """
        size = os.path.getsize(path)
        entry = archive.entries["assets/a"]
        os.truncate(path, entry.data_offset + entry.nbytes - 1)
        print(archive.tensors["w"].sum())
        for call, expected in [
            (lambda: archive.read("assets/a"), size), (lambda: archive.assets["a"], entry.nbytes)
        ]:
            error = refusal(call)
            print(f"expected {expected} bytes" in str(error), error.path == path)
        print("open it again" in str(refusal(lambda: archive.read("__MODEL_PROTO"))))
        """,
        [f"{LARGE}", "True True", "True True", "True"],
    ),
    "a file that is emptied before it is mapped is refused": (
        """
        open(path, "w").close()
        print("found 0" in str(refusal(lambda: archive.read("w"))))
        """,
        ["True"],
    ),
    "a view outlives its archive and the replacement of its file": (
        """
        views = archive.tensors["w"], archive.read("v"), archive.read("assets/a")
        archive.close()
        del archive
        os.replace(other, path)
        gc.collect()
        print(values(*views))
        with onnxarchive.open(path) as archive:
            print(values(archive.tensors["w"]))
        print(values(*views))
        """,
        ["[{1}, {1}, {1}]", "[{2}]", "[{1}, {1}, {1}]"],
    ),
    "a file that is replaced before it is mapped is read as it was": (
        """
        os.replace(other, path)
        print(values(archive.tensors["w"], archive.read("v"), archive.assets["a"]))
        archive.verify()
        print(values(archive.tensor_by_key("v")))
        """,
        ["[{1}, {1}, {1}]", "[{1}]"],
    ),
    "a link that leads elsewhere by then changes nothing": (
        """
        os.symlink(path, path + ".link")
        archive = onnxarchive.open(path + ".link")
        os.unlink(path + ".link")
        os.symlink(other, path + ".link")
        print(values(archive.tensors["w"]))
        """,
        ["[{1}]"],
    ),
    # As the README says; the bytes that were looked at on opening stay what they were.
    "a file that is overwritten in place changes views and is found by verifying": (
        """
        array = archive.tensors["w"]
        with open(path, "r+b") as file, open(other, "rb") as source:
            file.write(source.read())
        print(values(array), refusal(archive.verify).rule)
        """,
        ["[{2}] ZIP-7"],
    ),
    "a pipe in the place of an open archive is not looked at": (
        """
        os.unlink(path)
        os.mkfifo(path)
        archive.verify()
        print(archive.tensors["w"].sum())
        """,
        [f"{LARGE}"],
    ),
    # The map ends in the middle of a page, whose rest nobody may be given.
    "a view ends with its entry and not with its page": (
        """
        view = archive.read("assets/a")
        print(len(view), view.nbytes, len(view[:200]), view.readonly)
        """,
        ["100 100 100 True"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_open_archive_whose_file_changes_behaves_as_documented(
    path: Path, other: Path, case: str
) -> None:
    code, expected = CASES[case]
    done = _run(BEGINNING + dedent(code), path, other)
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


@pytest.mark.parametrize(
    ("name", "kind", "is_written"),
    [
        ("", "a directory", False),
        ("pipe", "a pipe", False),
        ("pipe", "a pipe", True),
        ("/dev/null", "a device", False),
        ("/dev/zero", "a device", False),
    ],
)
def test_every_function_refuses_a_file_that_is_not_regular_at_once(
    tmp_path: Path, name: str, kind: str, is_written: bool
) -> None:
    path = tmp_path / name
    writer = None
    if name == "pipe":
        os.mkfifo(path)
        if is_written:
            writer = os.open(path, os.O_RDWR)
            os.write(writer, b"PK\3\4")
    code = """
import sys, onnxarchive
for call in (onnxarchive.open, onnxarchive.load):
    try:
        call(sys.argv[1])
    except onnxarchive.ArchiveError as error:
        print(error.rule, error.path, f"found {sys.argv[2]}" in str(error))
for full in (False, True):
    for finding in onnxarchive.check(sys.argv[1], full=full):
        print(finding.rule, finding.message)
"""
    try:
        done = _run(code, path, kind)
    finally:
        if writer is not None:
            os.close(writer)
    found = f"FILE-1 expected a regular file, found {kind}\n"
    if kind == "a directory":  # which `recognised` describes
        found = (
            "FILE-1 expected an ONNX archive, found a directory without a model (__MODEL_PROTO or "
            f"*.onnx); 'onnxarchive convert {path} NEW.onnxa' searches the folders below it, too\n"
        )
    assert (done.stdout, done.stderr) == (f"FILE-1 {path} True\n" * 2 + found * 2, "")
