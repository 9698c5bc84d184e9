"""Large tensors are cloned where the file system shares blocks: the same archive, without copies.

XFS and Btrfs are made in sparse files and mounted, which root may do.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
from models import external, model_of
from onnx import TensorProto

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files import clones_and_sync
from onnxarchive.files.local_file import MappedFile

MIB = 1 << 20
COUNT = 8
NBYTES = 4 * MIB + 300  # not a multiple of the block size
STEP = 4 * MIB + 4096

pytestmark = [
    pytest.mark.tool,
    pytest.mark.skipif(sys.platform != "linux", reason="clones are Linux's"),
]


def write_source(folder: Path, data_type: int = TensorProto.UINT8, most: int = 255) -> Path:
    """A model whose data file aligns its tensors to pages."""
    folder.mkdir(exist_ok=True)
    tensors = []
    with open(folder / "w.data", "wb") as file:
        for number in range(COUNT):
            data = np.random.default_rng(number).integers(0, most, NBYTES, np.uint8, endpoint=True)
            file.seek(number * STEP)
            file.write(data.tobytes())
            tensor = TensorProto(name=f"w{number}", data_type=data_type, dims=[NBYTES])
            offset = {"offset": number * STEP, "length": NBYTES}
            tensors.append(external(tensor, "w.data", **offset))
    source = folder / "m.onnx"
    onnx.save(model_of(*tensors), source)
    return source


def used_nbytes(disk: Path) -> int:
    os.sync()
    return shutil.disk_usage(disk).used


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_clone_has_the_bytes_of_a_copy_and_takes_no_space(
    disk: Path, tmp_path: Path, jobs: int
) -> None:
    source = write_source(disk / "source")
    onnxarchive.convert(source, tmp_path / "copy.onnxa", alignment=4096)
    before = used_nbytes(disk)
    calls: list[tuple[int, int]] = []
    onnxarchive.convert(
        source,
        disk / "clone.onnxa",
        alignment=4096,
        jobs=jobs,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert used_nbytes(disk) - before < 2 * MIB
    assert (disk / "clone.onnxa").read_bytes() == (tmp_path / "copy.onnxa").read_bytes()
    assert calls[-1][0] == calls[-1][1]
    assert onnxarchive.check(disk / "clone.onnxa", full=True) == []


def test_a_clone_does_not_change_with_its_source(disk: Path) -> None:
    source = write_source(disk / "changed")
    onnxarchive.convert(source, disk / "clone.onnxa", alignment=4096)
    expected = (disk / "clone.onnxa").read_bytes()
    with open(source.parent / "w.data", "r+b") as file:
        file.write(bytes(MIB))
    assert (disk / "clone.onnxa").read_bytes() == expected


def test_the_elements_of_a_cloned_tensor_are_checked(disk: Path) -> None:
    source = write_source(disk / "bool", TensorProto.BOOL, most=2)
    with pytest.raises(ArchiveFormatError, match="'w0'"):
        onnxarchive.convert(source, disk / "bool.onnxa", alignment=4096)
    assert not (disk / "bool.onnxa").exists()


@pytest.mark.parametrize("alignment", [64, 2048])
def test_data_at_other_offsets_than_in_the_source_is_not_cloned(disk: Path, alignment: int) -> None:
    source = write_source(disk / "source")
    with patch.object(clones_and_sync, "clone_range", side_effect=AssertionError("it is cloned")):
        onnxarchive.convert(source, disk / "copy.onnxa", alignment=alignment)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_refused_clone_is_a_copy_and_is_not_asked_for_again(
    tmp_path: Path, disk: Path, jobs: int
) -> None:
    source = write_source(tmp_path / "source")  # on another file system
    onnxarchive.convert(source, tmp_path / "copy.onnxa", alignment=4096)
    with patch.object(clones_and_sync, "clone_range", return_value=False) as clone_range:
        onnxarchive.convert(source, disk / "copy.onnxa", alignment=4096, jobs=jobs)
        assert clone_range.call_count == 0
        onnxarchive.convert(
            write_source(disk / "source"), disk / "other.onnxa", alignment=4096, jobs=jobs
        )
        assert clone_range.call_count == 1
    expected = (tmp_path / "copy.onnxa").read_bytes()
    assert (disk / "copy.onnxa").read_bytes() == (disk / "other.onnxa").read_bytes() == expected


def test_a_source_that_becomes_shorter_after_its_blocks_were_cloned_gives_no_archive(
    disk: Path,
) -> None:
    source = write_source(disk / "cut")
    clone_range = clones_and_sync.clone_range
    last = (COUNT - 1) * STEP  # offset of the last tensor

    def cut_after(file: MappedFile, offset: int, *arguments: Any) -> bool:
        is_cloned = clone_range(file, offset, *arguments)
        if offset == last:
            os.truncate(source.parent / "w.data", last + 4 * MIB)
        return is_cloned

    with (
        patch.object(clones_and_sync, "clone_range", cut_after),
        pytest.raises(ArchiveFormatError, match=f"truncated to {last + 4 * MIB} bytes"),
    ):
        onnxarchive.convert(source, disk / "cut.onnxa", alignment=4096)
    assert not (disk / "cut.onnxa").exists()
    shutil.rmtree(source.parent)  # for the space


def test_data_on_another_file_system_does_not_prevent_clones_of_other_data(
    disk: Path, tmp_path: Path
) -> None:
    elsewhere = write_source(tmp_path / "elsewhere")
    beside = write_source(disk / "beside", TensorProto.BOOL, most=1)
    with patch.object(
        clones_and_sync, "clone_range", wraps=clones_and_sync.clone_range
    ) as clone_range:
        onnxarchive.convert(
            elsewhere, disk / "both.onnxa", models={"beside": beside}, alignment=4096
        )
    assert clone_range.call_count == COUNT
    assert onnxarchive.check(disk / "both.onnxa", full=True) == []
    (disk / "both.onnxa").unlink()  # for the space
    shutil.rmtree(beside.parent)


def test_space_is_needed_for_data_on_another_file_system(disk: Path, tmp_path: Path) -> None:
    nbytes = 512 * MIB  # more than the disk has
    with open(tmp_path / "w.data", "wb") as file:
        file.truncate(nbytes)
    tensor = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[nbytes])
    onnx.save(model_of(external(tensor, "w.data")), tmp_path / "m.onnx")
    done: list[int] = []
    with pytest.raises(OSError, match="bytes are needed"):
        onnxarchive.convert(
            tmp_path / "m.onnx",
            disk / "large.onnxa",
            alignment=4096,
            progress=lambda nbytes, total: done.append(nbytes),
        )
    assert done == []


def test_a_source_that_becomes_shorter_gives_no_archive(disk: Path) -> None:
    source = write_source(disk / "short")

    def truncate(done: int, total: int) -> None:
        os.truncate(source.parent / "w.data", 2 * STEP)

    with pytest.raises(ArchiveFormatError, match="truncated"):
        onnxarchive.convert(source, disk / "short.onnxa", alignment=4096, progress=truncate)
    assert not (disk / "short.onnxa").exists()
