"""Where in a file an edit writes, as the system saw it: behind the weights, and nowhere else.

The calls are those that strace lists. A map that could be written through would be one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import pytest
from models import raw_tensor, text_model
from processes import completed

import onnxarchive
from onnxarchive.files import undo
from onnxarchive.files.clones_and_sync import clone
from onnxarchive.files.local_file import MappedFile

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="strace is Linux's")

WEIGHTS = 3
ELEMENTS = 50_000

# What changes a file that is open or named, and what makes a map of it.
CALLS = (
    "write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,sendfile,splice,"
    "copy_file_range,ioctl,mmap,fsync,fdatasync"
)

# Each change is made to an archive of its own, which has its name.
CHANGES = """
    import sys
    import onnxarchive
    from edits import EDITS, added, document

    def metadata(path):
        with onnxarchive.edit(path) as edit:
            edit.metadata["author"] = "Ada"

    def new_tensor(path):
        with onnxarchive.edit(path) as edit:
            added("wz", 20_000)(edit.model)

    def taken_back(path):
        def fail(done, total):
            raise ZeroDivisionError

        try:
            document(path, "x" * 100_000, progress=fail)
        except ZeroDivisionError:
            pass

    directory = sys.argv[1]
    document(f"{directory}/larger", "x" * 100_000)
    document(f"{directory}/smaller", "")
    EDITS["assets"](f"{directory}/asset")
    for change in (metadata, new_tensor, taken_back):
        change(f"{directory}/{change.__name__}")
"""
# The changes whose weights all stay.
BEHIND = ("larger", "smaller", "metadata", "asset", "new_tensor", "taken_back")


Call: TypeAlias = tuple[str, str]  # its name, and its arguments as strace shows them
Calls: TypeAlias = Mapping[str, list[Call]]  # by the name of the file


def parse(trace: str, directory: Path) -> Calls:
    """The calls on files in a directory; whether they succeeded is not asked."""
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for line in trace.splitlines():
        if f"{directory}/" not in line:
            continue
        match = re.match(r"\d+ +(\w+)\((.*)", line)
        names = set(re.findall(rf'[<"]{re.escape(str(directory))}/([^>"/]+)[>"]', line))
        assert match is not None, line
        assert names, line
        for name in names:
            found[name].append((match[1], match[2]))
    return found


# The arguments of a write, with size and offset, and of a truncation, with the new size.
WRITE = re.compile(r'\d+<[^>]*>, ""\.\.\., (\d+), (\d+)(?:\)| <unf).*')
TRUNCATION = re.compile(r"\d+<[^>]*>, (\d+)(?:\)| <unf).*")


def span(name: str, arguments: str) -> range | None:
    """The bytes of the file that a call wrote; None if they cannot be told."""
    if name == "pwrite64" and (match := WRITE.fullmatch(arguments)):
        size, offset = map(int, match.groups())
        return range(offset, offset + size)
    if name == "ftruncate" and (match := TRUNCATION.fullmatch(arguments)):
        return range(int(match[1]), 1 << 63)  # all that was behind the new end is gone
    return None


def written(calls: list[Call]) -> list[tuple[str, range]]:
    """What the calls on one file wrote of it, each with its name.

    Reading maps and syncs write nothing, blocks that are set aside keep their bytes, and ioctl was
    asked for a clone, which would be another file.
    """
    spans = []
    for name, arguments in calls:
        if name in ("ioctl", "fsync") or "FALLOC_FL_KEEP_SIZE" in arguments:
            continue
        if name == "mmap" and "PROT_WRITE" not in arguments:
            continue
        found = span(name, arguments)
        assert found is not None, (name, arguments)
        spans.append((name, found))
    return spans


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive as it was before all changes."""
    path = tmp_path_factory.mktemp("original") / "model.onnxa"
    tensors = (raw_tensor(f"w{i}", dims=(ELEMENTS,), seed=i) for i in range(WEIGHTS))
    model = text_model("g (float[1] x) => (float[1] y) { y = Identity(x) }", *tensors)
    model.doc_string = "old" * 1000
    onnxarchive.save(model, path)
    return path


@pytest.fixture(scope="module")
def changed(original: Path) -> Path:
    """A directory of copies of the archive, one to be changed in each way."""
    directory = original.parent / "changed"
    directory.mkdir()
    with MappedFile(original) as file, open(directory / "clone", "xb") as target:
        if clone(file, target.fileno()):
            pytest.skip("a change writes to a clone on this file system")
    (directory / "clone").unlink()
    for name in BEHIND:
        shutil.copyfile(original, directory / name)
    return directory


@pytest.fixture(scope="module")
def calls(original: Path, changed: Path) -> Calls:
    """The calls of all changes."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    trace = original.with_name("trace")
    strace = ["strace", "-f", "-y", "-s", "0", "-o", str(trace), "-e"]
    probe = completed([*strace, "trace=none", "true"])
    if probe.returncode:
        pytest.skip(f"nothing can be traced: {probe.stderr.strip()}")
    program = [sys.executable, "-c", textwrap.dedent(CHANGES), str(changed)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    completed([*strace, f"trace={CALLS}", *program], status=0, env=variables)
    return parse(trace.read_text(), changed)


@pytest.fixture(scope="module")
def weights_end(original: Path) -> int:
    """Where the model begins, which is the last entry."""
    with onnxarchive.open(original) as archive:
        *weights, last = archive.entries.values()
        assert len(weights) == WEIGHTS
        assert last.header_offset > WEIGHTS * ELEMENTS * 4
        return last.header_offset


@pytest.mark.parametrize("change", BEHIND)
def test_an_edit_writes_nothing_where_weights_are(
    original: Path, changed: Path, calls: Calls, weights_end: int, change: str
) -> None:
    before, after = original.read_bytes(), (changed / change).read_bytes()
    assert after[:weights_end] == before[:weights_end]
    assert (after == before) == (change == "taken_back")
    spans = [span for _, span in written(calls[change])]
    assert min(span.start for span in spans) == weights_end
    # And all that is new is among what was seen.
    is_seen = bytearray(len(after))
    for span in spans:
        is_seen[span.start : span.stop] = b"\1" * (min(span.stop, len(after)) - span.start)
    assert all(is_seen[weights_end:])
    assert spans[-1] == range(len(after), 1 << 63)


@pytest.mark.parametrize("change", BEHIND)
def test_an_edit_logs_the_old_end_before_it_writes_the_new_one_and_nothing_else(
    original: Path, changed: Path, calls: Calls, weights_end: int, change: str
) -> None:
    """The log lies behind both ends, and is synced; so is the new end before the log goes."""
    old_size, new_size = original.stat().st_size, (changed / change).stat().st_size
    if change == "taken_back":
        new_size = (changed / "larger").stat().st_size
    log_offset = max(old_size, new_size)
    logged_size = log_offset + old_size - weights_end + undo.TRAILER_SIZE
    steps = [name for name, _ in calls[change] if name in ("fsync", "pwrite64", "ftruncate")]
    log, end = ["ftruncate", "pwrite64", "fsync"], ["pwrite64", "fsync", "ftruncate", "fsync"]
    assert [name for name, _ in groupby(steps)] == [*log, *end]
    sizes = [span for name, span in written(calls[change]) if name == "ftruncate"]
    assert [span.start for span in sizes] == [logged_size, len((changed / change).read_bytes())]
    writes = [span for name, span in written(calls[change]) if name == "pwrite64"]
    logged = [span for span in writes if span.start >= log_offset]
    assert writes[: len(logged)] == logged
    assert (logged[0].start, logged[-1].stop) == (log_offset, logged_size)
    assert sum(map(len, logged)) == logged_size - log_offset
    ends = writes[len(logged) :]
    if change != "taken_back":  # which writes some of the new end, and the old one over it
        assert (ends[0].start, ends[-1].stop) == (weights_end, new_size)
        assert sum(map(len, ends)) == new_size - weights_end


def test_an_edit_in_place_writes_no_other_file(calls: Calls) -> None:
    for name in calls.keys() - set(BEHIND):  # what might have become a clone
        assert written(calls[name]) == []
