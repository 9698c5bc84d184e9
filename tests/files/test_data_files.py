"""Data files: each is opened once and checked then, and the file that was checked is read."""

from __future__ import annotations

import gc
import os
import re
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import onnx
import pytest
from limits import limited
from models import model_of, raw_tensor
from written import write_parts

import onnxarchive
from onnxarchive import ArchiveFormatError
from onnxarchive.files.data import Bytes, Data, Range, read_together
from onnxarchive.files.data_files import DataFiles
from onnxarchive.files.paths import OutsideError, Root


def contents(data: Data) -> bytes:
    return b"".join(data.pieces())


@pytest.fixture
def opens() -> Iterator[Counter[str]]:
    """Counts how often each file is opened, by its name."""
    count: Counter[str] = Counter()
    os_open = os.open

    def counted(path: object, *args: object, **options: object) -> int:
        count[os.path.basename(os.fsdecode(path))] += 1  # type: ignore[arg-type]
        return os_open(path, *args, **options)  # type: ignore[arg-type]

    with patch.object(os, "open", counted):
        yield count


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("as_directory", [False, True])
def test_a_data_file_of_many_tensors_is_opened_once(
    tmp_path: Path, opens: Counter[str], jobs: int, as_directory: bool
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    source, data = write_parts(folder, 100_000, 60)
    onnxarchive.convert(folder if as_directory else source, tmp_path / "m.onnxa", jobs=jobs)
    assert opens[data.name] == 1


def test_many_data_files_are_opened_at_most_twice_and_few_at_a_time(
    tmp_path: Path, opens: Counter[str]
) -> None:
    tensors = [raw_tensor(f"w{number}", dims=(30_000,), seed=number) for number in range(80)]
    expected = onnxarchive_bytes(tmp_path / "direct.onnxa", tensors)
    onnx.save(
        model_of(*tensors),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=False,
        size_threshold=0,
    )
    most = 0

    def count(done: int, total: int) -> None:
        nonlocal most
        files = (os.path.realpath(f"/proc/self/fd/{it}") for it in os.listdir("/proc/self/fd"))
        names = {os.path.basename(path) for path in files}
        most = max(most, len(names & {tensor.name for tensor in tensors}))

    opens.clear()
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa", progress=count)
    assert {opens[tensor.name] for tensor in tensors} <= {1, 2}
    assert 1 <= most <= 32
    assert (tmp_path / "m.onnxa").read_bytes() == expected


def onnxarchive_bytes(path: Path, tensors: list[onnx.TensorProto]) -> bytes:
    onnxarchive.save(model_of(*tensors), path)
    return path.read_bytes()


def write_with_asset(path: Path, asset: Path) -> None:
    with onnxarchive.Writer(path) as writer:
        writer.add_asset("labels", asset)
        writer.finish(model_of())


WRITING_ASSETS: dict[str, Callable[[Path, Path], object]] = {
    "save": lambda path, asset: onnxarchive.save(model_of(), path, assets={"labels": asset}),
    "convert": lambda path, asset: onnxarchive.convert(
        write_parts(path.parent, 2000, 3)[0], path, assets={"labels": asset}
    ),
    "Writer": write_with_asset,
}


@pytest.mark.parametrize("write", WRITING_ASSETS.values(), ids=WRITING_ASSETS.keys())
def test_the_file_of_an_asset_is_closed_when_it_was_written(
    tmp_path: Path, write: Callable[[Path, Path], object]
) -> None:
    asset = tmp_path / "labels.txt"
    asset.write_bytes(b"cat")
    gc.disable()  # nothing may wait for it
    try:
        write(tmp_path / "m.onnxa", asset)
        files = {os.path.realpath(f"/proc/self/fd/{it}") for it in os.listdir("/proc/self/fd")}
        assert os.path.realpath(asset) not in files
    finally:
        gc.enable()


def test_an_open_data_file_is_read_even_if_another_file_gets_its_path(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"judged")
    with DataFiles() as files:
        file = files.open("data", Root(os.fspath(tmp_path)))
        (tmp_path / "data").unlink()
        (tmp_path / "data").symlink_to("/etc/passwd")
        assert contents(Range.whole(file)) == b"judged"


def test_a_file_that_was_closed_is_opened_again(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"judged")
    with DataFiles() as files:
        file = files.open("data", Root(os.fspath(tmp_path)))
        files.close()
        assert contents(Range.whole(file)) == b"judged"


@pytest.mark.parametrize("kind", ["a link out", "a link inside", "another file", "other bytes"])
def test_a_data_file_that_is_opened_again_must_be_the_same_file(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path, other = folder / "data", folder / "other"
    path.write_bytes(b"judged")
    other.write_bytes(b"judged")
    with DataFiles() as files:
        file = files.open("data", Root(os.fspath(folder)))
        files.close()
        if kind == "a link out":
            path.rename(tmp_path / "moved")  # where it is the same file still
            path.symlink_to(tmp_path / "moved")
        elif kind == "a link inside":
            path.unlink()
            path.symlink_to(other)
        elif kind == "another file":
            other.replace(path)
        else:
            path.write_bytes(b"forged")
            os.utime(path, ns=(1, 1))
        expected = OutsideError if kind == "a link out" else ArchiveFormatError
        with pytest.raises(expected, match=r"a link to|after it was opened"):
            contents(Range.whole(file))


def test_threads_read_files_that_are_closed_to_make_room_for_others(tmp_path: Path) -> None:
    names = [f"data{number}" for number in range(70)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 1000)
    wrong: list[str] = []
    with DataFiles() as files:
        opened = [files.open(tmp_path / name) for name in names]

        def read() -> None:
            for _ in range(5):
                for name, file in zip(names, opened, strict=True):
                    if file.read(0, file.size) != name.encode() * 1000:
                        wrong.append(name)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_files_are_closed_to_make_room_if_the_process_may_open_no_more(tmp_path: Path) -> None:
    names = [f"data{number}" for number in range(10)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    with DataFiles() as files:  # which would keep all of them open
        used = len(os.listdir("/proc/self/fd"))
        with limited(resource.RLIMIT_NOFILE, used + 3):
            opened = [files.open(tmp_path / name) for name in names]
        assert [file.read(0, 10).decode() for file in opened] == names


def test_ranges_of_files_are_read_together_and_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(bytes(range(200)))
    second.write_bytes(bytes(range(100)) + bytes(1 << 20) + b"end")
    with DataFiles() as files:
        whole = files.open(first), files.open(second)
        parts: list[Data] = [
            *(Range(whole[0], start, 10) for start in (50, 0, 100, 60)),
            Bytes(b"in memory"),
            *(Range(whole[1], start, 3) for start in (1 << 20, 0, (1 << 20) + 100)),
            Range(whole[0], 7, 0),
        ]
        read = read_together(parts)
        assert [*map(contents, read)] == [*map(contents, parts)]
        assert all(part.is_constant for part in read)


def test_a_range_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(100))
    with DataFiles() as files:
        parts = [Range(files.open(path), start, 10) for start in (0, 50, 90)]
        os.truncate(path, 95)
        expected = f"{re.escape(str(path))}: expected 10 bytes at offset 90, found a file .* to 95"
        with pytest.raises(ArchiveFormatError, match=expected):
            read_together(parts)
