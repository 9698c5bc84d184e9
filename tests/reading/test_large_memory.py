"""An archive takes memory for the data that is read, and no more."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
from models import model_of, raw_tensor
from onnx import TensorProto
from processes import completed
from sparse_files import convert_sparsely, external, write_data, write_model

import onnxarchive

MIB = 1 << 20
COUNT = 1024

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/status"),
        reason="/proc/self/status says how much is resident",
    ),
]


@pytest.fixture(scope="module")
def source(large_folder: Path) -> Path:
    """A model of 1 GiB in 1024 tensors, all of them zero."""
    write_data(large_folder / "data", COUNT * MIB, {})
    tensors = [
        external(f"layer.{index}/weight", TensorProto.FLOAT, [512, 512], "data", index * MIB)
        for index in range(COUNT)
    ]
    write_model(large_folder / "model.onnx", tensors)
    return large_folder / "model.onnx"


@pytest.fixture(scope="module")
def archive(source: Path) -> Path:
    path = source.with_suffix(".onnxa")
    convert_sparsely(source, path)
    assert path.stat().st_size > COUNT * MIB
    return path


# Everything that is imported late has been, once a small archive was opened.
BEGINNING = """
    import json, sys
    import numpy as np, onnx, onnxarchive
    from onnx import helper, numpy_helper

    def resident(field="VmRSS"):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(field + ":"))
        return int(line.split()[1]) << 10

    path, *others = sys.argv[1:]
    tensor = numpy_helper.from_array(np.ones(1000, np.float32), "w")
    onnxarchive.save(
        helper.make_model(helper.make_graph([], "graph", [], [], [tensor])), path + ".small"
    )
    with onnxarchive.open(path + ".small") as small:
        assert small.tensors["w"].sum() == 1000
        small.verify()
    before = resident()
"""


def measure(program: str, *arguments: Path) -> dict[str, int]:
    """Runs a program in a process; returns its figures in MiB."""
    code = textwrap.dedent(BEGINNING) + textwrap.dedent(program)
    done = completed([sys.executable, "-c", code, *map(str, arguments)], status=0)
    found = {name: round(size / MIB) for name, size in json.loads(done.stdout).items()}
    print(found)  # noqa: T201
    return found


def test_opening_1_gib_and_viewing_every_tensor_takes_less_than_20_mib(archive: Path) -> None:
    found = measure(
        """
        archive = onnxarchive.open(path)
        opened = resident()
        arrays = [archive.tensors[name] for name in archive.tensors]
        viewed = resident()
        assert len(arrays) == 1024 and all(array.shape == (512, 512) for array in arrays)
        assert sum(array.sum() for array in arrays) == 0
        read = resident()
        sizes = {"opened": opened, "viewed": viewed, "read": read}
        print(json.dumps({name: size - before for name, size in sizes.items()}))
        """,
        archive,
    )
    assert found["opened"] < 20
    assert found["viewed"] < 20
    # What is looked at is resident, as long as the system likes: so this measures what it should.
    assert found["read"] > 900


def test_verifying_1_gib_takes_less_than_40_mib(archive: Path) -> None:
    found = measure(
        """
        largest = 0

        def progress(done, total):
            global largest
            largest = max(largest, resident())

        with onnxarchive.open(path) as archive:
            archive.verify(progress)
        assert onnxarchive.check(path, full=True, progress=progress) == []
        print(json.dumps({"largest": largest - before}))
        """,
        archive,
    )
    assert found["largest"] < 40


def test_converting_1_gib_loads_no_tensor(source: Path) -> None:
    # Pages of the source's map are the system's to take back; what is allocated is not.
    found = measure(
        """
        class Nowhere:
            size = 0

            def write(self, data):
                self.size += len(data)
                return len(data)

        before = resident("RssAnon")
        largest = 0

        def progress(done, total):
            global largest
            largest = max(largest, resident("RssAnon"))

        target = Nowhere()
        onnxarchive.convert(path, target, progress=progress)
        assert target.size > 1 << 30
        print(json.dumps({"largest": largest - before}))
        """,
        source,
    )
    assert found["largest"] < 40


def test_60_000_tensors_take_at_most_80_mib(large_folder: Path) -> None:
    path = large_folder / "many.onnxa"
    tensors = (raw_tensor(f"layer.{index}.weight", dims=(16,)) for index in range(60_000))
    onnxarchive.save(model_of(*tensors), path, size_threshold=0)
    found = measure(
        """
        before = resident("RssAnon")
        archive = onnxarchive.open(path)
        for name in archive.tensors:
            assert archive.tensors[name].shape == (16,)
        print(json.dumps({"viewed": resident("RssAnon") - before}))
        """,
        path,
    )
    assert found["viewed"] <= 80
