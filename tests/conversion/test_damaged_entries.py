"""What writes other files from an archive names all of its entries that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from models import entry_of, flip_byte, model_of, raw_tensor
from written import saved

import onnxarchive
from onnxarchive import ChecksumError

NAMES = [f"w{index}" for index in range(40)]
WRITE: dict[str, Callable[[Path, Path], Any]] = {
    "convert": onnxarchive.convert,
    "convert in one thread": partial(onnxarchive.convert, jobs=1),
    "export": onnxarchive.export,
    "export with external data": partial(onnxarchive.export, external_data="data"),
    "extract": onnxarchive.extract,
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.onnxa"
    path.write_bytes(saved(model_of(*[raw_tensor(name, dims=(300,)) for name in NAMES])))
    return path


def damage(archive: Path, *names: str) -> None:
    offsets = [entry_of(archive, name).data_offset for name in names]
    for offset in offsets:
        flip_byte(archive, offset)


@pytest.mark.parametrize("write", WRITE.values(), ids=WRITE.keys())
@pytest.mark.parametrize("names", [["w3", "w7", "w39"], NAMES])
def test_all_damaged_tensors_are_named(
    archive: Path, write: Callable[[Path, Path], Any], names: list[str]
) -> None:
    damage(archive, *names)
    with pytest.raises(ChecksumError) as caught:
        write(archive, archive.with_name("new"))
    named = ", ".join(map(repr, names))
    assert str(caught.value) == (
        f"{archive}: {len(names)} entries are damaged: {named} [ZIP-15]; "
        "the file is damaged: copy or download it again"
    )
    assert caught.value.entry in names
    assert [*archive.parent.iterdir()] == [archive]


def test_a_damaged_local_header_is_named_together_with_damaged_data(archive: Path) -> None:
    damage(archive, "w3")
    flip_byte(archive, entry_of(archive, "w30").header_offset)
    with pytest.raises(ChecksumError, match="2 entries are damaged: 'w3', 'w30'"):
        onnxarchive.extract(archive, archive.with_name("new"))


@pytest.mark.parametrize("write", WRITE.values(), ids=WRITE.keys())
def test_both_checksums_of_a_single_damaged_tensor_are_reported(
    archive: Path, write: Callable[[Path, Path], Any]
) -> None:
    damage(archive, "w5")
    with pytest.raises(ChecksumError, match="entry 'w5': expected 1200 bytes with CRC-32 0x"):
        write(archive, archive.with_name("new"))


def test_the_damaged_entries_are_named_with_the_archive_that_has_them(archive: Path) -> None:
    sound, new = archive.with_name("sound.onnxa"), archive.with_name("new.onnxa")
    sound.write_bytes(archive.read_bytes())
    damage(archive, "w1", "w2")
    with pytest.raises(ChecksumError) as caught:
        onnxarchive.convert(sound, new, models={"other": archive})
    assert str(caught.value).startswith(f"{archive}: 2 entries are damaged: 'w1', 'w2' ")
