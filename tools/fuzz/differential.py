"""Compares the entries found by other zip readers with the entries found by this library.

Every installed reader of `tools/zip_readers` lists and extracts each archive that the library
accepts, except the archives beyond the known limits of the reader. Names, sizes, order, extracted
bytes and CRC-32s (if the reader lists any) must be the same as the library's. The archives are the
accepted vectors of the conformance suite, and archives that `make_archives` makes (the same bytes
in every run). tests/format/test_differential.py makes the comparison.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto

import onnxarchive
from tools.zip_readers.readers import Extracted, Reader, ReaderError

VECTORS: Final = Path(__file__).resolve().parents[2] / "conformance" / "vectors"
SEEDS: Final = range(8)
DIFFERENCES_SHOWN: Final = 20
# Permissions: each of the 9 bits alone, none, all, and a common one.
PERMISSIONS: Final = (0, *(1 << bit for bit in range(9)), 0o777, 0o644)
# The signatures that zip readers search for, in an order that no archive has.
SIGNATURES: Final = b"PK\5\6PK\6\6PK\6\7PK\3\4"
# Times and dates: each of the 16 bits alone, none, all.
TIMES: Final = (0, *(1 << bit for bit in range(16)), 0xFFFF)

# Bits of an element by data type. Types of less than a byte are packed.
BIT_WIDTHS: Final[Mapping[int, int]] = {
    TensorProto.FLOAT: 32,
    TensorProto.FLOAT16: 16,
    TensorProto.INT64: 64,
    TensorProto.UINT8: 8,
    TensorProto.COMPLEX128: 128,
    TensorProto.FLOAT8E4M3FN: 8,
    TensorProto.INT4: 4,
    TensorProto.UINT2: 2,
}
# Names of assets: plain names, long names, and names that a tool could take for something else,
# such as an option, a pattern or an escape.
NAMES: Final = (
    "tokenizer.json",
    "größe/日本.txt",
    "brain 🧠",
    "a = b",
    " blank ",
    ".hidden",
    "-rf",
    "@list",
    "~",
    "%41%2f",
    "[x]*?.txt",
    "quotes'\"`$HOME",
    "con",
    "dot.",
    "line\u2028separator",
    "right to left \u202e",
    "private \ue000",
    "x" * 255,
    "/".join(["y" * 200] * 5),
)


# The archives


def random_bytes(random_: random.Random, data_type: int, count: int) -> bytes:
    """Random elements of a type, packed as in an archive; unused bits of the last byte are 0."""
    nbits = BIT_WIDTHS[data_type] * count
    data = bytearray(random_.randbytes(-(-nbits // 8)))
    if nbits % 8:
        data[-1] &= (1 << nbits % 8) - 1
    return bytes(data)


def model_of(tensors: Sequence[TensorProto], doc_string: str = "") -> onnx.ModelProto:
    """A model of these initializers."""
    graph = onnx.GraphProto(name="graph", initializer=tensors, doc_string=doc_string)
    opset = onnx.OperatorSetIdProto(version=21)
    return onnx.ModelProto(ir_version=10, opset_import=[opset], graph=graph)


def write_random(path: Path, seed: int) -> None:
    """Writes an archive of random tensors and random assets; some tensors and assets are empty."""
    random_ = random.Random(seed)
    tensors = []
    for index in range(random_.randrange(1, 40)):
        data_type = random_.choice(list(BIT_WIDTHS))
        count = random_.choice([0, 1, 3, 7, 64, 1000, random_.randrange(20_000)])
        raw_data = random_bytes(random_, data_type, count)
        name = f"layer.{index}/weight"
        tensors.append(TensorProto(name=name, data_type=data_type, dims=[count], raw_data=raw_data))
    names = random_.sample(NAMES, random_.randrange(len(NAMES)))
    onnxarchive.save(
        model_of(tensors),
        path,
        size_threshold=random_.choice([0, 1024]),
        alignment=1 << random_.randrange(6, 16),
        assets={name: random_.randbytes(random_.choice([0, 1, 5000])) for name in names},
    )


def write_zips(path: Path) -> None:
    """Writes an archive with a zip in a tensor and in an asset, and with many signatures.

    Zip readers search for end records in about the last 64 KiB of a file. Both zips end before
    this part.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as inner:
        inner.writestr(zipfile.ZipInfo("inner"), b"data of an inner zip")
    zipped = buffer.getvalue()
    tensor = TensorProto(
        name="zip", data_type=TensorProto.UINT8, dims=[len(zipped)], raw_data=zipped
    )
    model = model_of([tensor])
    # The last entry, the model, ends with the signatures, so the directory follows them directly.
    model.metadata_props.add(key="signatures", value="PK\5\6PK\6\6PK\6\7PK\3\4PK\1\2" * 5)
    assets = {"inner.zip": zipped, "last": SIGNATURES * 4096}
    onnxarchive.save(model, path, size_threshold=0, assets=assets)


@dataclass(frozen=True, slots=True)
class FreeFields:
    """Values of an entry's header fields that the rules leave free, wholly or in part.

    Attributes:
        made_by: The lower byte of "version made by".
        external: The external attributes.
        time: The modification time, in the local header and in the directory record.
        date: The modification date, in the local header and in the directory record.
    """

    made_by: int = 45
    external: int = 0o100644 << 16
    time: int = 0
    date: int = 33


def free_fields() -> list[FreeFields]:
    """Permitted values to test, most of them with one field changed."""
    ms_dos = [bits for bits in range(0x28) if bits & ~0x27 == 0]
    return [
        *(FreeFields(made_by=version) for version in range(256)),
        *(
            FreeFields(external=(type_ | permissions) << 16 | bits)
            for type_ in (0, 0o100000)
            for permissions in PERMISSIONS
            for bits in ms_dos
        ),
        *(FreeFields(time=time) for time in TIMES),
        *(FreeFields(date=date) for date in TIMES),
        FreeFields(0xFF, 0o100777 << 16 | 0x27, 0xFFFF, 0xFFFF),
        FreeFields(0, 0, 0, 0),
    ]


def write_free_fields(path: Path) -> None:
    """Writes an archive with an entry for each of `free_fields`."""
    fields = free_fields()
    assets = {f"free/{index:04}": b"%d" % index for index in range(len(fields) - 1)}
    onnxarchive.save(model_of([]), path, assets=assets)
    data = bytearray(path.read_bytes())
    position: int
    (position,) = struct.unpack_from("<I", data, len(data) - 6)
    for values in fields:
        data[position + 4] = values.made_by
        struct.pack_into("<I", data, position + 38, values.external)
        (header_offset,) = struct.unpack_from("<I", data, position + 42)
        for times in (position + 12, header_offset + 10):
            struct.pack_into("<HH", data, times, values.time, values.date)
        position += 46 + sum(struct.unpack_from("<3H", data, position + 28))
    path.write_bytes(data)


def write_zip64_made_by(path: Path, made_by: int) -> None:
    """Writes an archive of 65,535 entries; its Zip64 end record has this "version made by"."""
    assets = {f"a{index}": b"x" for index in range(0xFFFE)}
    onnxarchive.save(model_of([]), path, assets=assets)
    with open(path, "r+b") as file:
        file.seek(-98 + 12, os.SEEK_END)
        file.write(struct.pack("<H", made_by))


def make_archives(directory: Path) -> list[Path]:
    """Makes archives in a directory."""
    model_alone, zips = directory / "model_alone.onnxa", directory / "zips.onnxa"
    onnxarchive.save(model_of([]), model_alone)
    write_zips(zips)
    every_name = directory / "every_name.onnxa"
    onnxarchive.save(model_of([]), every_name, assets={name: name.encode() for name in NAMES})
    made = [model_alone, zips, every_name, directory / "free_fields.onnxa"]
    write_free_fields(made[-1])
    for seed in SEEDS:
        made.append(directory / f"random_{seed}.onnxa")
        write_random(made[-1], seed)
    return made


# The comparison


@dataclass(frozen=True)
class Accepted:
    """An archive that the library accepts, with its entries."""

    path: Path
    entries: list[Extracted]


def read_by_library(path: Path) -> Accepted | None:
    """The archive as the library reads it; None if the file breaks a rule."""
    if onnxarchive.check(path, full=True):
        return None
    with onnxarchive.open(path) as archive:
        entries = [
            Extracted(
                entry.name,
                entry.nbytes,
                entry.crc32,
                hashlib.sha256(archive.read(entry.name)).hexdigest(),
            )
            for entry in archive.entries.values()
        ]
    return Accepted(path, entries)


def accepted_vectors() -> list[Accepted]:
    """The vectors of the conformance suite that the library accepts."""
    found = (read_by_library(path) for path in sorted(VECTORS.glob("*.onnxa")))
    return [archive for archive in found if archive is not None]


def differences(
    reader: Reader, expected: Sequence[Extracted], found: Sequence[Extracted]
) -> Iterator[str]:
    """Describes the differences between a reader and the library, one per line.

    Args:
        reader: The reader. If `hides_crc32` is set, a missing CRC-32 is no difference.
        expected: The entries that the library finds.
        found: The entries that the reader finds.
    """
    if len(expected) != len(found):
        yield f"expected {len(expected)} entries, found {len(found)}"
    for index, (there, seen) in enumerate(zip(expected, found, strict=False)):
        if there.name != seen.name:
            yield f"entry {index}: expected the name {there.name!r}, found {seen.name!r}"
        if there.nbytes != seen.nbytes:
            yield f"{there.name!r}: expected {there.nbytes} bytes, found {seen.nbytes}"
        is_hidden = reader.hides_crc32 is not None and seen.crc32 is None
        if there.crc32 != seen.crc32 and not is_hidden:
            yield f"{there.name!r}: expected the CRC-32 {there.crc32}, found {seen.crc32}"
        if seen.sha256 is not None and there.sha256 != seen.sha256:
            yield f"{there.name!r}: the extracted bytes are wrong"


@dataclass
class Comparison:
    """Results of one reader.

    Attributes:
        archives: Number of archives read.
        entries: Number of entries in all archives read.
        skipped: The archives that the reader cannot read, each with the reason.
        differences: The differences, one per line: at most `DIFFERENCES_SHOWN` for an archive, then
            the number of the others.
    """

    archives: int = 0
    entries: int = 0
    skipped: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def compare(reader: Reader, archives: Sequence[Accepted], scratch: Path) -> Comparison:
    """Compares the entries found by a reader with the entries found by the library.

    Args:
        reader: The reader, which must be installed.
        archives: The archives.
        scratch: An existing directory to extract to; the extracted files are removed afterwards.
    """
    result = Comparison()
    readable = []
    for archive in archives:
        reasons = [limit.reason for limit in reader.limits if limit.applies(archive.entries)]
        if reasons:
            result.skipped.append(f"{archive.path.name}: {'; '.join(reasons)}")
        else:
            readable.append(archive)
    outcomes = reader.read_all([archive.path for archive in readable], scratch)
    for archive, outcome in zip(readable, outcomes, strict=True):
        result.archives += 1
        result.entries += len(archive.entries)
        if isinstance(outcome, ReaderError):
            lines = [str(outcome)]
        else:
            lines = list(differences(reader, archive.entries, outcome))
        result.differences += [
            f"{reader.name}: {archive.path.name}: {line}" for line in lines[:DIFFERENCES_SHOWN]
        ]
        if len(lines) > DIFFERENCES_SHOWN:
            result.differences.append(f"... and {len(lines) - DIFFERENCES_SHOWN} more")
    return result
