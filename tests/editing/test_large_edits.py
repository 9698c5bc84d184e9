"""The cost of a new model for an archive of 64 GiB does not depend on the weights.

The weights are holes and must stay holes: none is written.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from edits import replace_model
from models import MEASURE_MEMORY, entry_of, external, model_of, run_python
from onnx import TensorProto
from sparse_files import GIB
from zip_entries import add_bytes
from zip_image import directory_of

import onnxarchive
from onnxarchive.files.data import crc32
from onnxarchive.files.local_file import MappedFile, PositionalWriter
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.zipformat.layout import EntryLayout
from onnxarchive.zipformat.writer import ZipWriter

MIB = 1 << 20
COUNT = 64
SMALL = np.arange(300, dtype=np.float32)
NODES = 2000
NODE_SIZE = 4096  # bytes of text in a node
MODEL_SIZE = NODES * NODE_SIZE

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(sys.platform == "win32", reason="files are sparse elsewhere"),
]


@cache
def zeros_crc32(nbytes: int) -> int:
    """The CRC-32 of so many zeros."""
    zeros = memoryview(bytes(16 * MIB))
    crc = 0
    for start in range(0, nbytes, len(zeros)):
        crc = crc32(zeros[: nbytes - start], crc)
    return crc


def weights_of(sizes: dict[str, int]) -> onnx.ModelProto:
    """A model of weights that are in the archive, under their names."""
    return model_of(
        *(
            external(TensorProto(name=it, data_type=TensorProto.INT8, dims=[n]), it)
            for it, n in sizes.items()
        )
    )


def with_small(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the last tensor of the archive."""
    small = TensorProto(name="small", data_type=TensorProto.FLOAT, dims=SMALL.shape)
    model.graph.initializer.append(external(small, "small"))
    return model


def with_nodes(model: onnx.ModelProto, text: str) -> onnx.ModelProto:
    """The model with nodes that take `MODEL_SIZE` bytes."""
    doc_string = (text * NODE_SIZE)[:NODE_SIZE]
    for index in range(NODES):
        ports = {"input": [f"v{index}"], "output": [f"v{index + 1}"]}
        model.graph.node.add(op_type="Identity", doc_string=doc_string, **ports)
    return model


def new_model(sizes: dict[str, int], text: str) -> onnx.ModelProto:
    return with_small(with_nodes(weights_of(sizes), text))


def write_sparsely(path: Path, sizes: dict[str, int], model: onnx.ModelProto) -> None:
    """An archive of weights that are zeros and holes, and of `SMALL` behind them."""
    placements = []
    offset = 0
    with open(path, "xb") as file:
        for name, nbytes in sizes.items():
            placement = EntryLayout(name.encode(), nbytes, zeros_crc32(nbytes), offset)
            file.seek(offset)
            file.write(placement.pack()[0])
            placements.append(placement)
            offset = placement.end
    with MappedFile(path, is_writable=True) as written:
        target = PositionalWriter(written, offset)
        writer = ZipWriter(target, existing=directory_of(placements), offset=offset)
        add_bytes(writer, "small", SMALL.tobytes())
        add_bytes(writer, MODEL_PROTO, with_small(model).SerializeToString(deterministic=True))
        writer.finish()


def nbytes_on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


SIZES = {f"layer_{index:02}": GIB for index in range(COUNT)}
SMALL_SIZES = {f"layer_{index:02}": MIB for index in range(COUNT)}


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Path]:
    """An archive of 64 GiB that takes some MiB of the disk."""
    path = tmp_path / "large.onnxa"
    try:
        write_sparsely(path, SIZES, with_nodes(weights_of(SIZES), "old "))
    except OSError as error:
        if error.errno not in (errno.EFBIG, errno.ENOSPC):
            raise
        pytest.skip(f"no file of 64 GiB can be made: {error}")
    if nbytes_on_disk(path) > 32 * MIB:
        path.unlink()
        pytest.skip("files are not sparse here")
    yield path
    path.unlink()


def end_of(path: Path) -> bytes:
    """The bytes from the model to the end of the file."""
    offset = entry_of(path, MODEL_PROTO).header_offset
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read()


def test_a_new_model_is_written_after_64_gib_of_weights_in_the_same_file(archive: Path) -> None:
    before = end_of(archive)
    blocks = nbytes_on_disk(archive)
    new = new_model(SIZES, "newer ")
    new.doc_string = "new"
    replace_model(archive, new)
    assert list(onnxarchive.check(archive)) == []
    with onnxarchive.open(archive) as opened:
        assert opened.model == new
        assert opened.entries["layer_63"].header_offset > 63 * GIB
        assert opened.tensors["layer_00"][-1] == 0
        assert opened.tensors["layer_63"][-1] == 0
        assert (opened.tensors["small"] == SMALL).all()
    replace_model(archive, new_model(SIZES, "old "))
    assert end_of(archive) == before
    assert nbytes_on_disk(archive) <= blocks + MIB
    assert os.listdir(archive.parent) == [archive.name]


def test_a_tensor_is_added_after_64_gib_of_weights(archive: Path) -> None:
    added = np.random.default_rng(0).random(MIB, np.float32)
    new = new_model(SIZES, "new ")
    new.graph.initializer.append(onnx.numpy_helper.from_array(added, "zz"))
    replace_model(archive, new)
    assert list(onnxarchive.check(archive)) == []
    with onnxarchive.open(archive) as opened:
        assert (opened.tensors["zz"] == added).all()
        assert (opened.tensors["small"] == SMALL).all()
        assert opened.entries["zz"].header_offset > COUNT * GIB
    assert nbytes_on_disk(archive) < 32 * MIB


ZIP64 = b"PK\6\6"


@pytest.mark.parametrize("below", [0, 1, MIB])
def test_a_new_model_can_move_the_directory_over_4_gib_and_back(tmp_path: Path, below: int) -> None:
    """Where the directory begins decides: at 2**32 - 1 it takes Zip64."""
    path = tmp_path / "model.onnxa"
    limit = (1 << 32) - 1
    size = {"w": limit - 10 * MIB}

    def model(padding: int) -> onnx.ModelProto:
        made = with_small(weights_of(size))
        made.doc_string = "x" * padding
        return made

    write_sparsely(path, size, weights_of(size))
    data_offset = entry_of(path, MODEL_PROTO).data_offset
    padding = limit - data_offset - below - len(model(4 * MIB).SerializeToString()) + 4 * MIB
    replace_model(path, model(0))
    original = end_of(path)
    assert ZIP64 not in original
    replace_model(path, model(padding))
    with onnxarchive.open(path) as archive:
        entry = archive.entries[MODEL_PROTO]
        assert entry.data_offset + entry.nbytes == limit - below
    assert (ZIP64 in end_of(path)[-200:]) == (below == 0)
    assert list(onnxarchive.check(path)) == []
    replace_model(path, model(padding + 2 * MIB))
    assert ZIP64 in end_of(path)[-200:]
    assert path.stat().st_size > 1 << 32
    assert list(onnxarchive.check(path)) == []
    replace_model(path, model(0))
    assert end_of(path) == original
    assert list(onnxarchive.check(path)) == []
    assert nbytes_on_disk(path) < 16 * MIB


# Memory

MEASURED = f"""{MEASURE_MEMORY}
import onnx, onnxarchive
from edits import new_model, replace_model, weights

path, model_path = sys.argv[1:]

def high_water():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

# Everything that is imported late has been, once a small archive was changed.
onnxarchive.save(weights(2), path + ".small")
replace_model(path + ".small", new_model())
model = onnx.load(model_path, load_external_data=False)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM begins anew
resident = high_water()
anonymous = growth(lambda: replace_model(path, model, progress=sample))
print(anonymous, high_water() - resident)
"""


def measure(path: Path, model: onnx.ModelProto) -> tuple[int, int]:
    """The growth of anonymous and of all memory for a new model, in a process of its own."""
    model_path = path.with_suffix(".model")
    model_path.write_bytes(model.SerializeToString())
    anonymous, resident = map(int, run_python(MEASURED, path, model_path).split())
    return anonymous, resident


@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="Linux says how much was resident"
)
def test_a_new_model_takes_memory_for_the_model_and_not_for_64_gib_of_weights(
    archive: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.onnxa"
    write_sparsely(other, SMALL_SIZES, with_nodes(weights_of(SMALL_SIZES), "old "))
    small = measure(other, new_model(SMALL_SIZES, "new "))
    large = measure(archive, new_model(SIZES, "new "))
    assert list(onnxarchive.check(archive)) == []
    for anonymous, resident in (small, large):
        assert anonymous < 6 * MODEL_SIZE
        # The model is in memory: the measurement works.
        assert MODEL_SIZE < resident < 6 * MODEL_SIZE
    assert large[1] < small[1] + MODEL_SIZE
    assert nbytes_on_disk(archive) < 32 * MIB
