"""Open archives whose file another program changes, as the README describes it.

Each case is a process of its own: one of them is killed by the system, and none may wait for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from models import model_of, raw_tensor, run_python
from onnx import TensorProto

import onnxarchive

linux = pytest.mark.skipif(sys.platform != "linux", reason="a signal as Linux sends it")
posix = pytest.mark.skipif(os.name != "posix", reason="Windows keeps mapped files as they are")

LARGE = 1 << 20  # bytes of the tensor `w`: many pages
TIMEOUT = 20  # seconds


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


def _run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a Python program that may end in any way, but has to end."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )


# Truncation


@linux
@pytest.mark.parametrize("give", ["archive.tensors['w']", "archive.read('w')"])
def test_truncation_below_a_view_ends_the_process_that_reads_it_with_sigbus(
    path: Path, give: str
) -> None:
    code = f"""
import os, sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
view = {give}
assert view[-1] == 1
os.truncate(sys.argv[1], 100)
print("still here", flush=True)
view[-1]
print("read")
"""
    done = _run(code, path)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "still here\n")


@posix
def test_a_copy_outlives_truncation(path: Path) -> None:
    code = """
import os, sys, onnxarchive
with onnxarchive.open(sys.argv[1]) as archive:
    copy = archive.tensors["w"].copy()
os.truncate(sys.argv[1], 100)
print(copy.sum())
"""
    assert int(run_python(code, path)) == LARGE


@posix
def test_what_is_read_by_position_outlives_truncation_below_a_map(path: Path) -> None:
    # A local header that is gone, and data that is gone, are errors and no signals.
    code = """
import os, sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
view = archive.read("w")  # maps
os.truncate(sys.argv[1], 5000)
for call in (lambda: archive.read("v"), lambda: archive.tensors["v"], archive.verify):
    try:
        call()
    except onnxarchive.ArchiveFormatError as error:
        print(error.rule)
print({finding.rule for finding in onnxarchive.check(sys.argv[1], full=True)})
print(archive.model.graph.initializer[0].name, view[:3].tobytes())
"""
    lines = run_python(code, path).splitlines()
    assert lines == ["ZIP-7", "ZIP-7", "ZIP-15", "{'ZIP-2'}", r"w b'\x01\x01\x01'"]


@posix
def test_what_is_truncated_before_it_is_mapped_is_refused(path: Path) -> None:
    code = """
import os, sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
size = os.path.getsize(sys.argv[1])
entry = archive.entries["assets/a"]
os.truncate(sys.argv[1], entry.data_offset + entry.nbytes - 1)
print(archive.tensors["w"].sum())
for call, expected in [
    (lambda: archive.read("assets/a"), size), (lambda: archive.assets["a"], entry.nbytes)
]:
    try:
        call()
    except onnxarchive.ArchiveError as error:
        print(f"expected {expected} bytes" in str(error), error.path == sys.argv[1])
try:
    archive.read("__MODEL_PROTO")
except onnxarchive.ArchiveError as error:
    print("open it again" in str(error))
"""
    lines = run_python(code, path).splitlines()
    assert lines == [str(LARGE), "True True", "True True", "True"]


@posix
def test_a_file_that_is_emptied_before_it_is_mapped_is_refused(path: Path) -> None:
    code = """
import sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
open(sys.argv[1], "w").close()
try:
    archive.read("w")
except onnxarchive.ArchiveError as error:
    print(error)
"""
    assert "found 0" in run_python(code, path)


# Replacement


REPLACE = """
import gc, os, sys, onnxarchive
path, other = sys.argv[1:]
archive = onnxarchive.open(path)
"""


@posix
def test_a_view_outlives_its_archive_and_the_replacement_of_its_file(
    path: Path, tmp_path: Path
) -> None:
    other = _write(tmp_path / "other", 2)
    code = f"""{REPLACE}
array, view, asset = archive.tensors["w"], archive.read("v"), archive.read("assets/a")
archive.close()
del archive
os.replace(other, path)
gc.collect()
print(set(array.tolist()), set(view), set(asset))
with onnxarchive.open(path) as archive:
    print(set(archive.tensors["w"].tolist()))
print(set(array.tolist()))
"""
    assert run_python(code, path, other).splitlines() == ["{1} {1} {1}", "{2}", "{1}"]


@posix
def test_a_file_that_is_replaced_before_it_is_mapped_is_read_as_it_was(
    path: Path, tmp_path: Path
) -> None:
    # Same names, sizes and offsets: reading the path again would not be noticed otherwise.
    other = _write(tmp_path / "other", 2)
    assert other.stat().st_size == path.stat().st_size
    code = f"""{REPLACE}
os.replace(other, path)
print(set(archive.tensors["w"].tolist()), set(archive.read("v")), set(archive.assets["a"]))
archive.verify()
print(set(archive.tensor_by_key("v").tolist()))
"""
    assert run_python(code, path, other).splitlines() == ["{1} {1} {1}", "{1}"]


@posix
def test_a_link_that_leads_elsewhere_by_then_changes_nothing(path: Path, tmp_path: Path) -> None:
    other = _write(tmp_path / "other", 2)
    link = tmp_path / "link"
    link.symlink_to(path)
    code = f"""{REPLACE}
os.unlink(path)
os.symlink(other, path)
print(set(archive.tensors["w"].tolist()))
"""
    assert run_python(code, link, other) == "{1}\n"


@posix
def test_a_file_that_is_overwritten_in_place_changes_views_and_is_found_by_verifying(
    path: Path, tmp_path: Path
) -> None:
    # As the README says; the bytes that were looked at on opening stay what they were.
    other = _write(tmp_path / "other", 2)
    code = f"""{REPLACE}
array = archive.tensors["w"]
with open(path, "r+b") as file:
    file.write(open(other, "rb").read())
print(set(array.tolist()))
try:
    archive.verify()
except onnxarchive.ArchiveError as error:
    print(error.rule)
"""
    assert run_python(code, path, other).splitlines() == ["{2}", "ZIP-7"]


# Other than regular files


@posix
@pytest.mark.parametrize("kind", ["a pipe", "a pipe that is written to", "/dev/null", "/dev/zero"])
def test_what_is_no_regular_file_is_refused_at_once_by_whatever_reads_archives(
    tmp_path: Path, kind: str
) -> None:
    path = Path(kind) if kind.startswith("/") else tmp_path / "pipe"
    writer = None
    if not kind.startswith("/"):
        os.mkfifo(path)
        if kind.endswith("to"):
            writer = os.open(path, os.O_RDWR)
            os.write(writer, b"PK\3\4")
    code = """
import sys, onnxarchive
for call in (onnxarchive.open, onnxarchive.load):
    try:
        call(sys.argv[1])
    except onnxarchive.ArchiveError as error:
        print(error.rule)
for full in (False, True):
    print(*(finding.rule for finding in onnxarchive.check(sys.argv[1], full=full)))
"""
    try:
        done = _run(code, path)
    finally:
        if writer is not None:
            os.close(writer)
    assert (done.stdout, done.stderr) == ("FILE-1\n" * 4, "")


@posix
def test_a_pipe_in_the_place_of_an_open_archive_is_not_looked_at(path: Path) -> None:
    code = """
import os, sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
os.unlink(sys.argv[1])
os.mkfifo(sys.argv[1])
archive.verify()
print(archive.tensors["w"].sum())
"""
    done = _run(code, path)
    assert (done.stdout, done.stderr) == (f"{LARGE}\n", "")


# Beyond the file


@linux
def test_a_view_ends_with_its_entry_and_not_with_its_page(tmp_path: Path) -> None:
    # The map ends in the middle of a page, whose rest nobody may be given.
    path = tmp_path / "m.onnxa"
    tensor = raw_tensor("w", TensorProto.UINT8, (5,))
    onnxarchive.save(model_of(tensor), path, size_threshold=0)
    code = """
import sys, onnxarchive
archive = onnxarchive.open(sys.argv[1])
view = archive.read("w")
print(len(view), view.nbytes, len(view[:100]), view.readonly, archive.tensors["w"].nbytes)
"""
    assert run_python(code, path) == "5 5 5 True 5\n"
