"""Archives converted to archives: written anew, with other options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models import entry_of, external, flip_byte, mixed_model, model_of, raw_tensor
from written import converted

import onnxarchive
from onnxarchive import ArchiveFormatError, ChecksumError, LockedError
from onnxarchive.errors import Report
from onnxarchive.files.data import Stored, crc32
from onnxarchive.reading.contents import Contents
from onnxarchive.zipformat.writer import ZipWriter

ASSETS = {"labels.txt": b"cat\n", "größe/日本.json": b"{}" * 1000, "empty": b""}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    onnxarchive.save(mixed_model(), tmp_path / "m.onnxa", assets=ASSETS)
    return tmp_path / "m.onnxa"


def _saved(directory: Path, **options: Any) -> bytes:
    onnxarchive.save(mixed_model(), directory / "saved.onnxa", **{"assets": ASSETS, **options})
    return (directory / "saved.onnxa").read_bytes()


def test_converting_with_the_same_options_gives_the_same_bytes(archive: Path) -> None:
    assert converted(archive) == archive.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"alignment": 4096},
        {"alignment": 32768},
        {"size_threshold": 0},
        {"size_threshold": 2002},
        {"size_threshold": 1 << 30},
        {"convert_attribute": True},
        {"alignment": 256, "size_threshold": 12, "convert_attribute": True},
    ],
    ids=str,
)
def test_other_options_give_what_they_give_of_the_model(
    archive: Path, options: dict[str, Any]
) -> None:
    expected = _saved(archive.parent, **options)
    assert expected != archive.read_bytes()
    assert converted(archive, **options) == expected


def test_the_way_there_and_back_leaves_nothing_changed(archive: Path) -> None:
    other = archive.parent / "other.onnxa"
    onnxarchive.convert(archive, other, alignment=4096, size_threshold=0, convert_attribute=True)
    assert converted(other) == archive.read_bytes()


def test_assets_are_kept_and_given_ones_take_their_place(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "new labels").write_bytes(b"dog\n")
    given: dict[str, Any] = {"labels.txt": tmp_path / "new labels", "new": b"new"}
    expected = _saved(tmp_path, assets={**ASSETS, **given})
    assert converted(archive, assets=given) == expected


def test_an_asset_may_be_a_model_itself(tmp_path: Path) -> None:
    onnxarchive.save(mixed_model(), tmp_path / "m.onnxa", assets={"decoder.onnx": b"another model"})
    assert converted(tmp_path / "m.onnxa") == (tmp_path / "m.onnxa").read_bytes()


def test_an_archive_is_not_written_over_itself(archive: Path) -> None:
    before = archive.read_bytes()
    link = archive.parent / "link.onnxa"
    link.symlink_to(archive.name)
    for path in (archive, link):
        with pytest.raises(ValueError, match="input"):
            onnxarchive.convert(archive, path)
    assert archive.read_bytes() == before


def test_the_suffix_of_an_archive_says_nothing(archive: Path) -> None:
    before = archive.read_bytes()
    assert converted(archive.rename(archive.with_suffix(".onnx"))) == before


@pytest.mark.parametrize("name", ["a_w", "assets/labels.txt", "__MODEL_PROTO"])
def test_damaged_bytes_are_not_passed_on(archive: Path, name: str) -> None:
    entry = entry_of(archive, name)
    flip_byte(archive, entry.data_offset + entry.nbytes // 2)
    with pytest.raises(ChecksumError, match=name) as caught:
        onnxarchive.convert(archive, archive.parent / "new.onnxa")
    assert str(caught.value).startswith(f"{archive}: ")
    assert list(archive.parent.iterdir()) == [archive]


# Sound zips that break a rule of archives, which converting mends


def _write(path: Path, entries: Sequence[tuple[str, bytes]]) -> Path:
    with open(path, "wb") as file:
        writer = ZipWriter(file, alignment=64)
        for name, content in entries:
            data = Stored(memoryview(content))
            writer.add_stream(name, len(content), crc32(content), data)
        writer.finish()
    return path


def test_an_entry_that_no_tensor_names_is_left_out_with_a_warning(tmp_path: Path) -> None:
    tensor = raw_tensor("w", dims=(600,))
    model = model_of(external(tensor, "w")).SerializeToString()
    entries = [("w", tensor.raw_data), ("orphan", b"data"), ("__MODEL_PROTO", model)]
    path = _write(tmp_path / "m.onnxa", entries)
    assert onnxarchive.check(path) != []
    onnxarchive.save(model_of(tensor), tmp_path / "saved.onnxa")
    with pytest.warns(UserWarning, match="orphan"):
        found = converted(path)
    assert found == (tmp_path / "saved.onnxa").read_bytes()


def test_tensors_that_share_an_entry_get_entries_of_their_own(tmp_path: Path) -> None:
    one, two = raw_tensor("one", dims=(600,)), raw_tensor("two", dims=(600,))
    assert one.raw_data == two.raw_data
    model = model_of(external(one, "one"), external(two, "one")).SerializeToString()
    path = _write(tmp_path / "m.onnxa", [("one", one.raw_data), ("__MODEL_PROTO", model)])
    assert onnxarchive.check(path) != []
    onnxarchive.save(model_of(one, two), tmp_path / "saved.onnxa")
    assert converted(path) == (tmp_path / "saved.onnxa").read_bytes()


def test_a_model_that_is_not_last_is_put_last(tmp_path: Path) -> None:
    tensor = raw_tensor("w", dims=(600,))
    model = model_of(external(tensor, "w")).SerializeToString()
    path = _write(tmp_path / "m.onnxa", [("__MODEL_PROTO", model), ("w", tensor.raw_data)])
    assert onnxarchive.check(path) != []
    onnxarchive.save(model_of(tensor), tmp_path / "saved.onnxa")
    assert converted(path) == (tmp_path / "saved.onnxa").read_bytes()


def test_an_archive_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    tensor = raw_tensor("w", dims=(600,))
    model = model_of(tensor, external(raw_tensor("v", dims=(600,)), "v")).SerializeToString()
    path = _write(tmp_path / "m.onnxa", [("__MODEL_PROTO", model)])
    with pytest.raises(ArchiveFormatError, match="'v'"):
        onnxarchive.convert(path, tmp_path / "new.onnxa")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("count", [2000, 300_000], ids=["small", "large"])
def test_a_damaged_tensor_does_not_go_into_the_model(tmp_path: Path, count: int) -> None:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(model_of(raw_tensor("w", dims=(count,), seed=1)), path)
    flip_byte(path, entry_of(path, "w").data_offset + count)
    with pytest.raises(ChecksumError, match=r"'w'.*source is damaged"):
        onnxarchive.convert(path, tmp_path / "other.onnxa", size_threshold=1 << 30)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["m.onnxa"]


def test_nobody_edits_an_archive_while_it_is_looked_at_whether_it_is_one(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Contents.check_header
    tried: list[int] = []

    def check_locked(archived: Contents, number: int, report: Report) -> int | None:
        with pytest.raises(LockedError), onnxarchive.edit(archive, timeout=0):
            pass
        tried.append(number)
        return check(archived, number, report)

    monkeypatch.setattr(Contents, "check_header", check_locked)
    onnxarchive.convert(archive, tmp_path / "converted.onnxa")
    assert 0 in tried
