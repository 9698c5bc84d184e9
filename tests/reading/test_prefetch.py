from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import edits
import numpy as np
import onnx
import pytest
from models import open_below
from pages import needs_smaps, require_slice_to_read_its_pages_alone

import onnxarchive
from onnxarchive.files import local_file

NBYTES = 16 << 20
HOW: tuple[local_file.Prefetch | None, ...] = (None, "willneed", "populate")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An archive with a large tensor of other bytes in each page."""
    written = tmp_path / "model.onnxa"
    with onnxarchive.Writer(written) as writer:
        writer.add("w", np.arange(NBYTES // 8, dtype=np.int64))
        writer.finish(onnx.ModelProto(ir_version=10, graph=onnx.GraphProto(name="g")))
    return written


def _resident_file_pages() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) << 10
    raise AssertionError("expected a line RssFile")


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.mark.parametrize("prefetch", HOW)
def test_prefetching_changes_no_tensor(path: Path, prefetch: local_file.Prefetch | None) -> None:
    with onnxarchive.open(path, prefetch=prefetch) as archive:
        array = archive.tensors["w"]
        assert np.array_equal(array, np.arange(NBYTES // 8))
        assert not array.flags.writeable
        archive.verify()
    assert array[-1] == NBYTES // 8 - 1


@on_linux
@pytest.mark.parametrize("has_flag", [True, False], ids=["MAP_POPULATE", "page by page"])
def test_a_populated_archive_is_resident_as_a_whole_when_it_is_opened(
    path: Path, has_flag: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_flag:
        monkeypatch.setattr(local_file, "POPULATED", None)
    before = _resident_file_pages()
    with onnxarchive.open(path) as archive:
        archive.read("w")
        assert _resident_file_pages() - before < NBYTES / 4
    with onnxarchive.open(path, prefetch="populate") as archive:
        populated = _resident_file_pages() - before
        archive.read("w")
        assert populated > NBYTES * 0.9


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the system takes no advice")
def test_the_system_is_advised_that_the_file_will_be_needed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, ...]] = []

    class Recording(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            told.append(advice)
            super().madvise(*advice)

    monkeypatch.setattr(mmap, "mmap", Recording)
    with onnxarchive.open(path) as archive:
        archive.read("w")
        assert told == []
    with onnxarchive.open(path, prefetch="willneed"):
        assert told == [(mmap.MADV_WILLNEED,)]


def test_a_system_that_takes_no_advice_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(mmap, "MADV_WILLNEED", raising=False)
    with onnxarchive.open(path, prefetch="willneed") as archive:
        assert archive.tensors["w"][1] == 1


def test_an_unknown_value_of_prefetch_is_refused_and_leaves_nothing_open(path: Path) -> None:
    word: Any = "all"
    with pytest.raises(ValueError, match="expected prefetch 'willneed' or 'populate', found 'all'"):
        onnxarchive.open(path, prefetch=word)
    assert open_below(path.parent) == []


def test_a_file_that_cannot_be_mapped_does_not_stay_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(OSError, match="cannot be mapped"):
        onnxarchive.open(path, prefetch="populate")
    assert open_below(path.parent) == []


@pytest.mark.parametrize("how", ["willneed", "populate"])
def test_an_archive_in_memory_is_opened_with_prefetch(path: Path, how: local_file.Prefetch) -> None:
    with onnxarchive.open(path.read_bytes(), prefetch=how) as archive:
        assert np.array_equal(archive.tensors["w"], np.arange(NBYTES // 8))


def test_a_prefetched_archive_that_is_edited_is_read_as_before(path: Path) -> None:
    with onnxarchive.open(path, prefetch="populate") as archive:
        edits.document(path)
        assert np.array_equal(archive.tensors["w"], np.arange(NBYTES // 8))


@needs_smaps
def test_a_slice_of_a_large_tensor_reads_its_pages_alone(tmp_path: Path) -> None:
    require_slice_to_read_its_pages_alone(tmp_path, np.float32, 'tensor = archive.tensors["w"]')
