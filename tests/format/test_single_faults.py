"""Every file that is one fault away from an archive: refused by a rule, or read as before.

The faults are a file cut at any length, a flipped bit, a byte left out and a byte that stands
twice. All of them are tried, on archives that have every record between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import fault_seeds
import pytest
from fault_seeds import Pieces
from models import keys_of

import onnxarchive
from onnxarchive import ArchiveError
from onnxarchive.reading.check import rules

pytestmark = pytest.mark.sweep

ARCHIVES: dict[str, Callable[[], Pieces]] = {
    "plain": fault_seeds.plain,
    "Zip64": fault_seeds.zip64,
    "odd types": fault_seeds.odd_types,
}
LONGEST_READ = 1 << 16  # bytes; what is larger is a hole

sparse_files = pytest.mark.skipif(os.name == "nt", reason="files of Windows have no holes")
each_archive = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[sparse_files] * (name == "Zip64")) for name in ARCHIVES]
)


@cache
def _sound(name: str) -> Pieces:
    return ARCHIVES[name]()


@dataclass(frozen=True)
class Read:
    """All that an archive gives; of an entry that is a hole its size alone."""

    entries: list[tuple[str, int]]
    model: bytes
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]
    assets: dict[str, bytes]


def _read(path: Path) -> Read:
    with onnxarchive.open(path) as archive:
        entries = [(entry.name, len(archive.read(name))) for name, entry in archive.entries.items()]
        if all(size < LONGEST_READ for _, size in entries):
            archive.verify()
        arrays = {key: archive.tensor_by_key(key) for key in keys_of(archive)}
        return Read(
            entries,
            archive.model.SerializeToString(deterministic=True),
            {
                key: (str(array.dtype), array.shape, array[:LONGEST_READ].tobytes())
                for key, array in arrays.items()
            },
            {name: bytes(asset) for name, asset in archive.assets.items()},
        )


def _require_refused_or_same(path: Path, expected: Read) -> bool:
    """Whether the file is accepted; then it must give what is expected, else break a rule."""
    is_small = all(size < LONGEST_READ for _, size in expected.entries)
    found = {finding.rule for finding in onnxarchive.check(path, full=is_small)}
    try:
        read = _read(path)
    except ArchiveError as error:
        assert error.rule in rules()
        assert error.rule in found
        return False
    assert read == expected
    assert not found
    return True


@each_archive
def test_an_archive_to_be_damaged_is_sound(tmp_path: Path, name: str) -> None:
    _sound(name).write(tmp_path / "m")
    assert _require_refused_or_same(tmp_path / "m", _read(tmp_path / "m"))
    size = os.stat(tmp_path / "m").st_size
    assert size == _sound(name).size
    if name == "Zip64":
        with onnxarchive.open(tmp_path / "m") as archive:
            large, behind, _ = archive.entries.values()
        assert large.nbytes > 1 << 32
        assert behind.header_offset > 1 << 32


Faults = Iterator[tuple[object, Pieces]]


def _cut(sound: Pieces) -> Faults:
    sizes = {offset for offset, _ in sound.each_byte()}
    for (start, data), (end, _) in pairwise(sound.parts):
        sizes |= {start + len(data), (start + end) // 2, end - 1}  # in the hole
    return ((size, sound.cut(size)) for size in sorted(sizes))


def _flipped(sound: Pieces, bits: range) -> Faults:
    for at, byte in sound.each_byte():
        for bit in bits:
            yield (at, bit), sound.replaced(at, bytes([byte ^ 1 << bit]), instead_of=1)


def _repeated(sound: Pieces, times: int) -> Faults:
    for at, byte in sound.each_byte():
        yield at, sound.replaced(at, bytes([byte] * times), instead_of=1)


FAULTS: dict[str, Callable[[Pieces], Faults]] = {
    "cut at any length": _cut,
    "low bits": partial(_flipped, bits=range(4)),
    "high bits": partial(_flipped, bits=range(4, 8)),
    "a byte left out": partial(_repeated, times=0),
    "a byte doubled": partial(_repeated, times=2),
}


@each_archive
@pytest.mark.parametrize("kind", FAULTS)
def test_an_archive_with_a_fault_is_refused_unless_the_specification_calls_the_bit_free(
    tmp_path: Path, name: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    sound, path = _sound(name), tmp_path / "m"
    sound.write(path)
    expected = _read(path)
    tried, accepted = set(), set()
    for fault, damaged in FAULTS[kind](sound):
        damaged.write(path)
        tried.add(fault)
        if _require_refused_or_same(path, expected):
            accepted.add(fault)
    path.unlink()  # pytest keeps what is left
    free = tried & fault_seeds.free_bits(sound)
    record_property("accepted that should be refused", len(accepted - free))
    assert accepted == free
    assert len(tried) >= sound.stored * (4 if "bits" in kind else 1)
    record_property("mutated files", len(tried))
