"""`recover` with `cut`: bytes after an archive are cut off, if nothing but them is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import error_of, output_of, result_of
from edits import replace_model, weights
from interruptions import interrupt
from models import entry_of
from written import saved

import onnxarchive
from onnxarchive import ArchiveError, ArchiveFormatError
from onnxarchive.editing.recover import Recovery, recover
from onnxarchive.model.keys import MODEL_PROTO

Captured = pytest.CaptureFixture[str]
WHOLE = saved(weights(1), assets={"a.txt": b"a"})


@pytest.mark.parametrize("rest", [b"\n", b"PK\5\6", bytes(9), WHOLE, WHOLE[500:]])
def test_recover_cuts_off_bytes_after_an_archive_if_asked_to(path: Path, rest: bytes) -> None:
    path.write_bytes(WHOLE + rest)
    with pytest.raises(ArchiveFormatError, match=f"and {len(rest):,} bytes? follows? it") as caught:
        recover(path)
    assert repr(rest[:16]) in str(caught.value)
    assert f"onnxarchive recover --cut {path}" in str(caught.value).replace("'", "")
    assert path.read_bytes() == WHOLE + rest
    assert recover(path, cut=True) == Recovery(False, (), cut_nbytes=len(rest))
    assert path.read_bytes() == WHOLE
    assert recover(path, cut=True) == Recovery(is_rolled_back=False, removed=())
    assert path.read_bytes() == WHOLE


def test_the_recover_command_says_how_many_bytes_it_cut_off(path: Path, capsys: Captured) -> None:
    path.write_bytes(WHOLE + b"hello")
    assert "--cut" in error_of(capsys, "recover", path, status=3)
    assert (
        output_of(capsys, "recover", "--cut", path)
        == f"{path}: 5 bytes after the archive cut off\n"
    )
    assert path.read_bytes() == WHOLE
    path.write_bytes(WHOLE + b"\n")
    assert result_of(capsys, "recover", "--cut", path)["cut_nbytes"] == 1


def flipped(name: str, *, in_header: bool) -> Callable[[bytearray], None]:
    def flip(data: bytearray) -> None:
        entry = entry_of(WHOLE, name)
        data[entry.header_offset + 6 if in_header else entry.data_offset + 9] ^= 1

    return flip


def flip_directory(data: bytearray) -> None:
    entry = entry_of(WHOLE, MODEL_PROTO)
    data[entry.data_offset + entry.nbytes + 20] ^= 1


def flip_end(data: bytearray) -> None:
    data[len(WHOLE) - 10] ^= 1


@pytest.mark.parametrize(
    "damage",
    [
        flipped("assets/a.txt", in_header=True),
        flipped(MODEL_PROTO, in_header=True),
        flipped(MODEL_PROTO, in_header=False),
        flip_directory,
        flip_end,
    ],
)
def test_nothing_is_cut_off_if_what_is_left_is_no_valid_archive(
    path: Path, damage: Callable[[bytearray], None]
) -> None:
    data = bytearray(WHOLE + b"hello")
    damage(data)
    path.write_bytes(data)
    with pytest.raises(ArchiveError):
        recover(path, cut=True)
    assert path.read_bytes() == data


def test_cutting_off_bytes_reads_no_tensor(path: Path) -> None:
    data = bytearray(WHOLE + b"hello")
    flipped(next(iter(onnxarchive.open(WHOLE).entries)), in_header=False)(data)
    path.write_bytes(data)
    assert recover(path, cut=True).cut_nbytes == 5
    assert path.read_bytes() == data[:-5]


@pytest.mark.parametrize("phase", ["log without its beginning", "log complete", "new end complete"])
def test_an_interrupted_edit_is_rolled_back_before_anything_is_cut_off(
    path: Path, phase: str
) -> None:
    path.write_bytes(WHOLE)
    states = interrupt(path, lambda path: replace_model(path, weights(2))).states
    path.write_bytes(states[phase])
    assert recover(path, cut=True) == Recovery(is_rolled_back=True, removed=())
    assert path.read_bytes() == WHOLE
