"""Ways in which archives are damaged: the message, the command that helps, and what it saves.

The command in a message is run as it is. What it makes is the archive before the damage, byte for
byte, or nothing is made.
"""

from __future__ import annotations

import gzip
import io
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import run
from models import entry_of, model_of, raw_tensor
from written import saved

from onnxarchive.model.keys import MODEL_PROTO

FILE = "damaged.onnxa"
NEW = "NEW.onnxa"
AGAIN = "copy or download it again"
NOTE = b"A note.\n"
CUT = f"'onnxarchive recover --cut {FILE}'"
CONVERT = f"'onnxarchive convert {FILE} {NEW}'"
WHOLE = saved(
    model_of(*[raw_tensor(name, dims=(64, 64), seed=seed) for seed, name in enumerate("abc")]),
    assets={"labels.txt": b"cat\ndog\n"},
)
Damage = Callable[[bytes], bytes]


@dataclass
class Row:
    """A way to damage an archive.

    Attributes:
        damage: Damages the bytes of the archive.
        message: Words of the message.
        help: What helps, as the message says it: a command in quotes is run.
        saves: Path of the file that this command makes of the damaged one, or None for nothing.
        call: The command that gives the message.
    """

    damage: Damage
    message: str
    help: str
    saves: str | None = None
    call: str = f"info {FILE}"


def appended(data: bytes) -> Damage:
    return lambda whole: whole + data


def with_files(method: int = zipfile.ZIP_STORED, *, folders: bool = False) -> Damage:
    """Packs the files of the archive anew; with `folders`, their folder has an entry."""

    def rewrite(whole: bytes) -> bytes:
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(made, "w", method) as new:
            if folders:
                new.writestr("assets/", b"")
            for name in old.namelist():
                new.writestr(name, old.read(name))
        return made.getvalue()

    return rewrite


def changed_by_zipfile(whole: bytes, comment: bytes = b"", note: str = "") -> bytes:
    made = io.BytesIO(whole)
    with zipfile.ZipFile(made, "a") as archive:
        archive.comment = comment
        if note:
            archive.writestr(note, NOTE)
    return made.getvalue()


def changed_by_zip(*arguments: str) -> Damage:
    """Changes the archive by Info-ZIP, in the working directory."""

    def change(whole: bytes) -> bytes:
        Path(FILE).write_bytes(whole)
        Path("note.txt").write_bytes(NOTE)
        subprocess.run(["zip", *arguments], check=True, capture_output=True)
        return Path(FILE).read_bytes()

    return change


def flipped(*names: str, offset: int = 5, header: bool = False) -> Damage:
    def flip(whole: bytes) -> bytes:
        data = bytearray(whole)
        for name in names:
            entry = entry_of(whole, name)
            data[(entry.header_offset if header else entry.data_offset) + offset] ^= 1
        return bytes(data)

    return flip


def zeroed(whole: bytes) -> bytes:
    offset = entry_of(whole, "b").data_offset
    return whole[:offset] + bytes(4096) + whole[offset + 4096 :]


def flipped_directory(whole: bytes) -> bytes:
    last = entry_of(whole, MODEL_PROTO)
    data = bytearray(whole)
    data[last.data_offset + last.nbytes + 20] ^= 1  # of a size
    return bytes(data)


BY_ZIP = "a note by zip"
REMOVED_BY_ZIP = "a tensor and an asset removed by zip"
REPEATED = f"convert {FILE} {NEW}"
ROWS: dict[str, Row] = {
    "bytes after the end": Row(
        appended(b"hello"),
        "the archive ends at {:,} bytes, and 5 bytes follow it: b'hello'",
        CUT,
        FILE,
    ),
    "a newline after the end": Row(appended(b"\n"), "and 1 byte follows it: b'\\n'", CUT, FILE),
    "much after the end": Row(
        appended(b"0123456789abcdef" * 99), "which begin with b'0123456789abcdef'", CUT, FILE
    ),
    "twice": Row(lambda whole: whole * 2, "bytes follow it, which begin with b'PK", CUT, FILE),
    "zeros after the end": Row(
        appended(bytes(1 << 16)),
        "the last edit of the archive was interrupted",
        f"'onnxarchive recover {FILE}'",
        FILE,
    ),
    BY_ZIP: Row(changed_by_zip(FILE, "note.txt"), "another tool wrote 'note.txt'", CONVERT, NEW),
    "a note by zipfile": Row(
        lambda whole: changed_by_zipfile(whole, note="note.txt"),
        "another tool wrote 'note.txt' to the archive",
        CONVERT,
        NEW,
    ),
    "an asset by zipfile": Row(
        lambda whole: changed_by_zipfile(whole, note="LICENSE"),
        "another tool wrote 'LICENSE' to the archive",
        CONVERT,
        NEW,
    ),
    "a comment": Row(
        lambda whole: changed_by_zipfile(whole, b"A comment."),
        "another tool changed the records of the archive",
        CONVERT,
        NEW,
    ),
    REMOVED_BY_ZIP: Row(
        changed_by_zip("-d", FILE, "b", "assets/labels.txt"),
        "another tool changed the records of the archive",
        "is sound, if no tensor was removed",
    ),
    "stored again": Row(with_files(), "another tool made this zip of the files", CONVERT, NEW),
    "stored again with folders": Row(
        with_files(folders=True), "another tool made this zip of the files", CONVERT, NEW
    ),
    "compressed": Row(
        with_files(method=zipfile.ZIP_DEFLATED), "another tool made this zip", CONVERT, NEW
    ),
    "truncated": Row(
        lambda whole: whole[:-100],
        "lacks the last 100 of the {:,} bytes of the archive; its download or copy may have",
        AGAIN,
    ),
    "half": Row(
        lambda whole: whole[: len(whole) // 2],
        "only 24,928 bytes of an archive of 32,896 bytes or more; its download or copy may",
        AGAIN,
    ),
    "cut in a header": Row(
        lambda whole: whole[: entry_of(whole, "b").header_offset + 9],
        "the file has only the first 16,457 bytes of an archive",
        AGAIN,
    ),
    "a flipped tensor": Row(
        flipped("b"), "entry 'b': expected 16384 bytes with CRC-32", AGAIN, call=REPEATED
    ),
    "two flipped tensors": Row(
        flipped("a", "c"), "2 entries are damaged: 'a', 'c' [ZIP-15]", AGAIN, call=REPEATED
    ),
    "zeros in a tensor": Row(zeroed, "entry 'b': expected 16384 bytes", AGAIN, call=REPEATED),
    "a flipped model": Row(flipped(MODEL_PROTO), f"entry '{MODEL_PROTO}': expected", AGAIN),
    "a flipped local header": Row(
        flipped("a", offset=6, header=True), "entry 'a': expected flags 0", AGAIN, call=REPEATED
    ),
    "a flipped directory": Row(flipped_directory, "entry 'a': expected equal compressed", AGAIN),
    "bytes missing within": Row(
        lambda whole: whole[:9000] + whole[9100:], "expected the directory to end at", AGAIN
    ),
    "copied as text": Row(
        lambda whole: whole.replace(b"\n", b"\r\n"), "was copied as text", f"{AGAIN}, as a binary"
    ),
    "after other bytes": Row(
        lambda whole: b"#!/bin/sh\n" + whole, "found a zip after 10 other bytes", "unzip it"
    ),
    "a web page": Row(
        lambda _: b"<!DOCTYPE html><html>Sign in</html>", "found an HTML page", "its address"
    ),
    "a pointer of Git LFS": Row(
        lambda _: b"version https://git-lfs.github.com/spec/v1\n",
        "a Git LFS pointer",
        "'git lfs pull'",
    ),
    "nothing": Row(lambda _: b"", "found an empty file", "may have been interrupted"),
    "compressed by gzip": Row(gzip.compress, "found a gzip file", "with gunzip"),
}
WITH_ZIP = pytest.mark.skipif(shutil.which("zip") is None, reason="zip is not installed")


def parameters() -> list[object]:
    marks = {name: [pytest.mark.tool, WITH_ZIP] for name in (BY_ZIP, REMOVED_BY_ZIP)}
    return [pytest.param(row, marks=marks.get(name, []), id=name) for name, row in ROWS.items()]


@pytest.mark.parametrize("row", parameters())
def test_a_damaged_file_is_explained_and_the_command_saves_what_it_says(
    row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    damaged = row.damage(WHOLE)
    Path(FILE).write_bytes(damaged)
    assert run(*row.call.split()) == 3
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"onnxarchive: {FILE}: ")
    assert len(error.splitlines()) == 1
    assert row.message.format(len(WHOLE)) in error
    assert row.help in error
    command = row.help.strip("'")
    if row.saves is None:
        assert run("convert", FILE, NEW) == 3
        run("recover", "--cut", FILE)
        assert Path(FILE).read_bytes() == damaged
        assert not Path(NEW).exists()
        return
    program, *arguments = shlex.split(command)
    assert program == "onnxarchive"
    assert run(*arguments) == 0
    assert Path(row.saves).read_bytes() == WHOLE
