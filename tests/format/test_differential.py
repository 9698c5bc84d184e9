"""Other zip readers find the same in an archive as the library, by tools/fuzz/differential.py.

tests/reading/test_over_4_gib.py compares an archive of more than 4 GiB.
"""

from __future__ import annotations

import dataclasses
import io
import struct
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import onnx
import pytest
from processes import completed

import onnxarchive
from onnxarchive.zipformat import layout
from tools.fuzz import differential
from tools.fuzz.differential import Accepted, compare, differences, make_archives, read_by_library
from tools.zip_readers.readers import READERS, Extracted, Reader, ReaderError, output_of

pytestmark = pytest.mark.tool

Record = Callable[[str, object], None]

# They read entries as they come, and so read neither the directory nor the bytes after it.
STREAMING = ("bsdtar-pipe", "java-stream")
# Two that seek find entries by the directory, and take their names from the local headers.
NAMING_BY_LOCAL_HEADERS = (*STREAMING, "bsdtar", "jszip")


def installed(name: str) -> Reader:
    reader = READERS[name]
    missing = reader.missing()
    if missing is not None:
        pytest.skip(missing)
    return reader


def accepted(path: Path) -> Accepted:
    archive = read_by_library(path)
    assert archive is not None
    return archive


def saved(path: Path, assets: dict[str, bytes]) -> Accepted:
    model = onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="graph"))
    onnxarchive.save(model, path, assets=assets)
    return accepted(path)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[Accepted]:
    made = make_archives(tmp_path_factory.mktemp("archives"))
    return [*map(accepted, made), *differential.accepted_vectors()]


def test_a_reader_finds_what_the_library_finds(
    archives: list[Accepted], zip_reader: Reader, tmp_path: Path, record_property: Record
) -> None:
    found = compare(zip_reader, archives, tmp_path)
    assert found.differences == []
    assert found.archives + len(found.skipped) == len(archives)
    assert found.archives > 10
    assert list(tmp_path.iterdir()) == []
    record_property("readers compared", 1)
    record_property("archives read by other tools", found.archives)


def test_the_archives_to_compare_are_the_same_every_time(tmp_path: Path) -> None:
    folders = [tmp_path / "once", tmp_path / "again"]
    for folder in folders:
        folder.mkdir()
    once, again = (
        {path.name: path.read_bytes() for path in make_archives(folder)} for folder in folders
    )
    assert once == again


def test_the_archives_to_compare_have_empty_and_unusual_entries(tmp_path: Path) -> None:
    made = [accepted(path) for path in make_archives(tmp_path)]
    assert min(len(archive.entries) for archive in made) == 1
    entries = [entry for archive in made for entry in archive.entries]
    assert any(entry.nbytes == 0 and "/" not in entry.name for entry in entries)
    assert any(entry.nbytes == 0 and "/" in entry.name for entry in entries)
    assert not all(entry.name.isascii() for entry in entries)
    assert b"PK\5\6" in (tmp_path / "zips.onnxa").read_bytes()[:-22]


# Free fields


def test_the_free_fields_tried_are_all_of_their_bits(tmp_path: Path) -> None:
    differential.write_free_fields(tmp_path / "free.onnxa")
    with zipfile.ZipFile(tmp_path / "free.onnxa") as file:
        infos = file.infolist()
    assert {info.create_version for info in infos} == set(range(256))
    assert {info.create_system for info in infos} == {3}
    attributes = {info.external_attr for info in infos}
    assert {bits & 0xFFFF for bits in attributes} == {it for it in range(0x28) if it & 0x18 == 0}
    assert {bits >> 28 for bits in attributes} == {0, 8}
    assert {1 << bit for bit in range(9)} | {0, 0o777} <= {it >> 16 & 0xFFF for it in attributes}


@pytest.fixture(scope="module")
def zip64_end(tmp_path_factory: pytest.TempPathFactory) -> Accepted:
    """An archive with a Zip64 end record whose `version made by` no program writes."""
    path = tmp_path_factory.mktemp("archives") / "zip64.onnxa"
    differential.write_zip64_made_by(path, 0xFFFF)
    assert path.read_bytes()[-98:][:14] == struct.pack("<4sQH", b"PK\6\6", 44, 0xFFFF)
    with onnxarchive.open(path) as archive:
        entries = [
            Extracted(name, entry.nbytes, entry.crc32, sha256(archive.read(name)).hexdigest())
            for name, entry in archive.entries.items()
        ]
    return Accepted(path, entries)


def test_a_zip64_end_record_made_by_anything_is_listed(
    zip64_end: Accepted, zip_reader: Reader
) -> None:
    found = zip_reader.read(zip64_end.path, None)
    assert list(differences(zip_reader, zip64_end.entries, found)) == []


# Reported differences


@pytest.fixture
def some(tmp_path: Path) -> Accepted:
    """An archive with an asset."""
    return saved(tmp_path / "model.onnxa", {"file": b"some data"})


def test_a_damaged_byte_is_reported(some: Accepted, zip_reader: Reader, tmp_path: Path) -> None:
    some.path.write_bytes(some.path.read_bytes().replace(b"some data", b"some dada"))
    assert read_by_library(some.path) is None
    assert compare(zip_reader, [some], tmp_path).differences != []


def test_another_name_in_a_header_is_reported_for_readers_of_that_header(
    some: Accepted, zip_reader: Reader, tmp_path: Path
) -> None:
    header, directory, rest = some.path.read_bytes().split(b"assets/file")
    is_local = zip_reader.name in NAMING_BY_LOCAL_HEADERS
    some.path.write_bytes(b"".join([header, b"assets/file", directory, b"assets/FILE", rest]))
    assert read_by_library(some.path) is None
    assert (compare(zip_reader, [some], tmp_path).differences == []) is is_local
    some.path.write_bytes(b"".join([header, b"assets/FILE", directory, b"assets/file", rest]))
    found = compare(zip_reader, [some], tmp_path)
    assert not is_local or any("'assets/FILE'" in line for line in found.differences)


def test_a_zip_with_two_readings_is_reported(some: Accepted, tmp_path: Path) -> None:
    # The directory of the zip in its comment is the last one of the file.
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as hidden:
        hidden.writestr("hidden", b"what only some see")
    comment = buffer.getvalue()
    size = len(comment).to_bytes(2, "little")
    some.path.write_bytes(some.path.read_bytes()[:-2] + size + comment)
    assert read_by_library(some.path) is None
    reader = READERS["zipfile"]
    assert compare(reader, [some], tmp_path).differences != []
    # Both see a whole zip, and not the same one.
    assert [entry.name for entry in reader.read(some.path, None)] == ["hidden"]
    for name in STREAMING:
        if READERS[name].is_installed():
            assert compare(READERS[name], [some], tmp_path).differences == []


def test_a_reader_that_fails_on_one_archive_reads_the_others(
    zip_reader: Reader, tmp_path: Path
) -> None:
    first, broken, last = (saved(tmp_path / f"{name}.onnxa", {"file": b"data"}) for name in "abc")
    broken.path.write_bytes(b"no zip")
    found = compare(zip_reader, [first, broken, last], tmp_path)
    assert found.archives == 3
    assert found.differences != []
    assert all(line.startswith(f"{zip_reader.name}: b.onnxa: ") for line in found.differences)


ENTRY = Extracted("assets/file", 9, 1, "ab")


@pytest.mark.parametrize(
    ("found", "reported"),
    [
        ([], "expected 1 entries, found 0"),
        ([ENTRY, ENTRY], "expected 1 entries, found 2"),
        ([dataclasses.replace(ENTRY, name="x")], "entry 0: expected the name"),
        ([dataclasses.replace(ENTRY, nbytes=8)], "expected 9 bytes, found 8"),
        ([dataclasses.replace(ENTRY, crc32=2)], "expected the CRC-32 1, found 2"),
        ([dataclasses.replace(ENTRY, crc32=None)], "expected the CRC-32 1, found None"),
        ([dataclasses.replace(ENTRY, sha256="cd")], "the extracted bytes are wrong"),
    ],
)
def test_every_kind_of_difference_is_reported(found: list[Extracted], reported: str) -> None:
    (line,) = differences(READERS["zipfile"], [ENTRY], found)
    assert reported in line


def test_another_order_of_entries_is_reported() -> None:
    other = dataclasses.replace(ENTRY, name="other")
    assert list(differences(READERS["zipfile"], [ENTRY, other], [other, ENTRY])) != []


# Stated limits of readers


def test_a_reader_that_is_said_to_show_no_crc32_shows_none(
    zip_reader: Reader, tmp_path: Path
) -> None:
    archive = saved(tmp_path / "model.onnxa", {"file": b"some data", "nothing": b""})
    found = {entry.crc32 for entry in zip_reader.read(archive.path, tmp_path)}
    if zip_reader.hides_crc32 is None:
        assert found == {entry.crc32 for entry in archive.entries}
    else:
        assert found == {None}


def write_holes(path: Path, nbytes: int) -> list[Extracted]:
    """Writes a sparse zip of a large entry and a small one, and gives what is in it."""
    large = layout.EntryLayout(b"assets/large", nbytes, 0, 0, 64)
    small = layout.EntryLayout(b"__MODEL_PROTO", 9, 0, large.data_offset + nbytes, 64)
    directory = b"".join(entry.pack()[1] for entry in (large, small))
    offset = small.data_offset + small.nbytes
    with open(path, "wb") as file:
        for entry in (large, small):
            file.seek(entry.header_offset)
            file.write(entry.pack()[0])
        file.seek(offset)
        file.write(directory + layout.end_of_archive(2, len(directory), offset))
    return [Extracted(entry.name.decode(), entry.nbytes, 0, None) for entry in (large, small)]


@pytest.mark.parametrize(
    ("nbytes", "is_misread"), [(0xFFFFFFFE, False), (0xFFFFFFFF, True), (0x100000000, False)]
)
def test_unzip_misreads_the_entry_after_one_of_0xffffffff_bytes(
    nbytes: int, is_misread: bool, tmp_path: Path
) -> None:
    reader = installed("unzip")
    path = tmp_path / "holes.zip"
    there = write_holes(path, nbytes)
    (limit,) = reader.limits
    assert limit.applies(there) is is_misread
    done = completed(["unzip", "-v", path])
    assert ("extra field (type: 0x0001) corrupt" in done.stderr) is is_misread


@pytest.mark.parametrize(("nbytes", "is_misread"), [(1 << 31, False), (1 << 32, True)])
def test_minizip_misreads_an_entry_of_4_gib(nbytes: int, is_misread: bool, tmp_path: Path) -> None:
    reader = installed("minizip")
    there = write_holes(tmp_path / "holes.zip", nbytes)
    (limit,) = reader.limits
    assert limit.applies(there) is is_misread
    found = reader.read(tmp_path / "holes.zip", None)
    assert (found != there) is is_misread


@pytest.mark.parametrize("name", ["adm-zip", "fflate", "jszip"])
def test_readers_in_memory_read_no_file_of_2_gib(name: str, tmp_path: Path) -> None:
    reader = installed(name)
    path = tmp_path / "holes.zip"
    with open(path, "wb") as file:
        file.truncate(1 << 31)
    (limit,) = reader.limits
    assert [limit.applies([Extracted("a", n, 0, None)]) for n in (1 << 31, (1 << 31) - 1)] == [
        True,
        False,
    ]
    with pytest.raises(ReaderError, match="2 GiB"):
        reader.read(path, None)


def test_dashes_are_no_end_of_a_header_of_7z(tmp_path: Path) -> None:
    # 7-Zip shows the path of the archive above a line of dashes, and after it such attributes.
    reader = installed("7z")
    archive = saved(tmp_path / "----------", {"file": b"some data", "other": b"more"})
    data = bytearray(archive.path.read_bytes())
    (position,) = struct.unpack_from("<I", data, len(data) - 6)
    struct.pack_into("<I", data, position + 38, 0o100000 << 16)
    archive.path.write_bytes(data)
    assert "\nAttributes =  ----------\n" in output_of("7z", "l", "-slt", archive.path)
    assert reader.read(archive.path, tmp_path) == accepted(archive.path).entries


# Readers that are missing or wrong


def test_a_program_library_or_module_that_is_not_installed_is_reported() -> None:
    absent = "absent is not installed"
    assert dataclasses.replace(installed("zipfile"), program="absent").missing() == absent
    assert dataclasses.replace(installed("minizip"), library="absent").missing() == absent
    assert dataclasses.replace(installed("perl"), module="absent").missing() == absent


def test_a_listing_that_is_not_what_was_extracted_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "twice.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("../outside", b"")
    with pytest.raises(ReaderError, match="only extracted"):
        READERS["zipfile"].read(path, tmp_path)
