"""Systems that lack calls of Linux, as Windows does: archives are the same bytes without them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import edits
import onnx
import pytest
from byte_locks import lock_bytes_alone
from interruptions import Interrupted, interrupt
from models import model_of, raw_tensor, weight_model
from written import converted

import onnxarchive
from onnxarchive.files import clones_and_sync, local_file


def replaced(path: Path) -> None:
    with onnxarchive.open(path) as archive:
        model = archive.model
    model.doc_string = "changed " * 100
    edits.replace_model(path, model)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """An archive before and while its model is replaced in place."""
    path = tmp_path_factory.mktemp("usual") / "model.onnxa"
    onnxarchive.save(weight_model(0), path)
    return interrupt(path, replaced)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A model with external data, and the archive that it is converted to."""
    path = tmp_path_factory.mktemp("source") / "source.onnx"
    model = model_of(*(raw_tensor(f"w{index}", dims=(768,), seed=index) for index in range(3)))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, converted(path)


Missing = Callable[[pytest.MonkeyPatch], object]


def without(*names: str) -> Missing:
    """Takes names out of `os`."""

    def take_away(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in names:
            monkeypatch.delattr(os, name, raising=False)

    return take_away


def without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes `os.pread` and `os.pwrite` away, and writes few bytes at a time."""
    without("pread", "pwrite")(monkeypatch)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))


def without_fcntl(monkeypatch: pytest.MonkeyPatch) -> None:
    lock_bytes_alone(monkeypatch)
    monkeypatch.setattr(clones_and_sync, "fcntl", None)


def without_all(monkeypatch: pytest.MonkeyPatch) -> None:
    without_positions(monkeypatch)
    without_fcntl(monkeypatch)
    without("SEEK_DATA", "SEEK_HOLE", "fchown", "listxattr", "sched_getaffinity")(monkeypatch)
    monkeypatch.setattr(local_file, "POPULATED", None)


MISSING: dict[str, Missing] = {
    "pread": without("pread"),
    "pwrite": without("pwrite"),
    "pread and pwrite": without_positions,
    "fcntl": without_fcntl,
    "SEEK_DATA": without("SEEK_DATA", "SEEK_HOLE"),
    "fchown": without("fchown"),
    "listxattr": without("listxattr"),
    "all of them": without_all,
}


@pytest.fixture(params=MISSING)
def missing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, no_clones: None
) -> None:
    """Takes calls away; an archive is edited in place also where blocks could be shared."""
    MISSING[request.param](monkeypatch)


def test_without_some_system_calls_a_model_is_saved_and_replaced_as_the_same_bytes(
    archive: Interrupted, missing: None, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnxa"
    onnxarchive.save(weight_model(0), path)
    assert path.read_bytes() == archive.old
    replaced(path)
    assert path.read_bytes() == archive.new
    onnxarchive.save(weight_model(0), path)
    assert path.read_bytes() == archive.old
    with onnxarchive.open(path, prefetch="populate") as opened:
        opened.verify()


@pytest.mark.parametrize("phase", ["log begun", "log complete", "new end begun"])
def test_without_some_system_calls_an_interrupted_edit_is_rolled_back(
    archive: Interrupted, phase: str, missing: None, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnxa"
    path.write_bytes(archive.states[phase])
    assert onnxarchive.recover(path).is_rolled_back
    assert path.read_bytes() == archive.old


def test_without_some_system_calls_a_failed_replacement_is_rolled_back(
    archive: Interrupted, missing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnxa"
    path.write_bytes(archive.old)
    truncate = os.ftruncate

    def fail(descriptor: int, size: int) -> None:
        if size == len(archive.new):
            raise OSError(errno.EIO, "the disk failed")
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError, match="the disk failed"):
        replaced(path)
    assert path.read_bytes() == archive.old


def test_without_some_system_calls_external_data_is_converted_to_the_same_bytes(
    source: tuple[Path, bytes], missing: None, tmp_path: Path
) -> None:
    path, expected = source
    for target in (tmp_path / "model.onnxa", tmp_path / "again.onnxa"):
        onnxarchive.convert(path, target)
        assert target.read_bytes() == expected
        path = target
