from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import model_of, raw_tensor, weight_model
from written import zipped

import onnxarchive


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnxa"
    onnxarchive.save(weight_model(seed=1), path, assets={"a.txt": b"a"})
    return path


def test_an_archive_is_recognised_as_path_bytes_and_file_object(archive: Path) -> None:
    data = archive.read_bytes()
    assert onnxarchive.is_archive(archive)
    assert onnxarchive.is_archive(str(archive))
    assert onnxarchive.is_archive(data)
    with archive.open("rb") as file:
        assert onnxarchive.is_archive(file)
    assert onnxarchive.is_archive(io.BytesIO(data))


def test_an_archive_without_tensors_outside_the_model_is_recognised(path: Path) -> None:
    onnxarchive.save(model_of(raw_tensor("w")), path, size_threshold=1 << 20)
    assert onnxarchive.is_archive(path)


def _zip(path: Path) -> None:
    zipped(path, {"model.onnx": b""})


def _model_in_the_middle(path: Path) -> None:
    zipped(path, {"__MODEL_PROTO": model_of().SerializeToString(), "other": b""})


OTHERS: dict[str, Callable[[Path], object]] = {
    "a model": lambda path: path.write_bytes(model_of().SerializeToString()),
    "a text": lambda path: path.write_text("not an archive\n"),
    "an empty file": lambda path: path.touch(),
    "a zip": _zip,
    "an empty zip": lambda path: zipfile.ZipFile(path, "w").close(),
    "a zip with a model in the middle": _model_in_the_middle,
    "a directory": lambda path: path.mkdir(),
    "a missing file": lambda path: None,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_file_is_not_recognised_and_raises_no_error(path: Path, kind: str) -> None:
    OTHERS[kind](path)
    assert not onnxarchive.is_archive(path)
    if path.is_file():
        assert not onnxarchive.is_archive(io.BytesIO(path.read_bytes()))


def test_a_truncated_archive_is_not_recognised(archive: Path) -> None:
    assert not onnxarchive.is_archive(archive.read_bytes()[:-1])


def test_a_file_object_keeps_its_position(archive: Path) -> None:
    for data, expected in ((archive.read_bytes(), True), (b"something else", False)):
        file = io.BytesIO(data)
        file.seek(7)
        assert onnxarchive.is_archive(file) == expected
        assert file.tell() == 7
        assert not file.closed


def test_is_archive_reads_no_model_and_no_weight(path: Path) -> None:
    class Reads(io.BytesIO):
        offsets: list[int]

        def read(self, size: int | None = -1) -> bytes:
            if size:
                self.offsets.append(self.tell())
            return super().read(size)

    onnxarchive.save(weight_model(seed=1, count=100_000), path)
    with zipfile.ZipFile(path) as file:
        directory = file.start_dir
    reads = Reads(path.read_bytes())
    reads.offsets = []
    assert onnxarchive.is_archive(reads)
    assert reads.offsets
    assert min(reads.offsets) > directory // 2


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("https://example.com/m.onnxa", ValueError),
        (io.StringIO("text"), ValueError),
        (3, TypeError),
    ],
    ids=["a URL", "a text file", "a number"],
)
def test_an_object_that_is_no_file_is_refused(source: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"expected|open for text"):
        onnxarchive.is_archive(source)


def test_is_archive_waits_for_an_edit_of_the_file(archive: Path) -> None:
    with onnxarchive.edit(archive), pytest.raises(onnxarchive.LockedError):
        onnxarchive.is_archive(archive)
    assert onnxarchive.is_archive(archive)


def test_is_archive_selects_the_archives_of_a_directory(archive: Path) -> None:
    (archive.parent / "b.txt").write_text("b")
    names = sorted(os.listdir(archive.parent))
    chosen = [name for name in names if onnxarchive.is_archive(archive.parent / name)]
    assert chosen == ["m.onnxa"]
