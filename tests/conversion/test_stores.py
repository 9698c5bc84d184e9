"""Archives in a bucket of a server of S3."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import MEASURE_MEMORY, entry_of, model_of, run_python
from object_servers import S3Server, nginx
from onnx import TensorProto, numpy_helper
from processes import started, wait_until
from remote_archives import ASSETS, a_model, arrays_of, many_tensors, require_equal

import onnxarchive
from onnxarchive import ChecksumError

pytestmark = [pytest.mark.tool, pytest.mark.skipif(os.name == "nt", reason="POSIX's signals")]

TARGET = "s3://bucket/a folder/m.onnxa"
MIB = 1 << 20


def keys(s3: S3Server) -> int:
    return s3.request("GET", "/bucket?list-type=2").count("<Key>")


def zeros(nbytes: int, name: str = "w") -> TensorProto:
    return numpy_helper.from_array(np.zeros(nbytes, np.uint8), name)


def random_model(nbytes: int = 40 * MIB) -> onnx.ModelProto:
    """A model of tensors of 10 MiB."""
    random = np.random.default_rng(1)
    return model_of(
        *(
            numpy_helper.from_array(random.integers(0, 256, 10 * MIB, np.uint8), f"w{it}")
            for it in range(nbytes // (10 * MIB))
        )
    )


def test_an_archive_in_a_bucket_has_the_same_bytes_as_in_a_file(
    s3: S3Server, tmp_path: Path
) -> None:
    access: dict[str, Any] = {"storage_options": s3.options}
    model = random_model()
    onnxarchive.save(model, tmp_path / "l.onnxa", assets=ASSETS)
    onnxarchive.save(model, TARGET, assets=ASSETS, **access)
    onnxarchive.convert(tmp_path / "l.onnxa", "s3://bucket/converted", **access)
    onnxarchive.convert(TARGET, "s3://bucket/again", **access)
    data = (tmp_path / "l.onnxa").read_bytes()
    for number, source in enumerate((TARGET, "s3://bucket/converted", "s3://bucket/again")):
        target = tmp_path / f"d{number}"
        assert onnxarchive.download(source, target, **access) == str(target)
        assert target.read_bytes() == data
        with onnxarchive.open(source, cache=tmp_path / "cache", **access) as archive:
            require_equal(archive.fetch(["w1"]), {"w1": arrays_of(model)["w1"]})
    assert s3.uploads() == 0
    assert keys(s3) == 3


def test_a_model_in_a_bucket_is_converted_within_it(s3: S3Server, tmp_path: Path) -> None:
    from obstore.store import S3Store

    access: dict[str, Any] = {"storage_options": s3.options}
    onnx.save(
        many_tensors(), tmp_path / "m.onnx", save_as_external_data=True, location="my wéights.data"
    )
    config: Any = s3.options
    store = S3Store("bucket", config=config)
    for file in tmp_path.iterdir():
        store.put(f"in/{file.name}", file)
    onnxarchive.convert("s3://bucket/in/m.onnx", TARGET, **access)
    onnxarchive.convert(tmp_path / "m.onnx", tmp_path / "m.onnxa")
    onnxarchive.download(TARGET, tmp_path / "d.onnxa", **access)
    assert (tmp_path / "d.onnxa").read_bytes() == (tmp_path / "m.onnxa").read_bytes()


def test_a_failure_leaves_nothing_in_the_bucket(s3: S3Server, tmp_path: Path) -> None:
    path = tmp_path / "l.onnxa"
    onnxarchive.save(random_model(), path)
    last = entry_of(path, "w3").data_offset
    with open(path, "r+b") as file:
        file.seek(last + 5 * MIB)
        file.write(b"\0\1\2")
    with pytest.raises(ChecksumError):
        onnxarchive.convert(path, TARGET, storage_options=s3.options)
    assert (keys(s3), s3.uploads()) == (0, 0)
    wrong = {**s3.options, "endpoint": "http://127.0.0.1:9", "max_retries": 0}
    with pytest.raises(OSError, match=r"a folder/m\.onnxa") as caught:
        onnxarchive.save(a_model(), TARGET, storage_options=wrong)
    assert "SECRET" not in str(caught.value)


SLOWLY = """
import sys, time
import onnxarchive
from onnxarchive.cli import main
from onnxarchive.remote import uploads
write = uploads._StoreWriter.write
def slowly(self, data):
    time.sleep(0.2)
    return write(self, data)
uploads._StoreWriter.write = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_nothing_in_the_bucket(
    s3: S3Server, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "l.onnxa"
    onnxarchive.save(random_model(100 * MIB), path)
    options = [f"--storage-option={key}={value}" for key, value in s3.options.items()]
    command = [sys.executable, "-c", SLOWLY, "convert", path, TARGET, *options]
    with started(command) as process:
        wait_until(lambda: s3.uploads() > 0, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=280)
    assert "SECRET" not in out + err
    assert "Traceback" not in err
    assert keys(s3) == 0
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert s3.uploads() == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc says what is allocated")
def test_reading_large_tensors_from_a_server_takes_bounded_memory(tmp_path: Path) -> None:
    """Tensors of 450 MiB, one of them larger than the bound, read in parts from nginx."""
    for name in ("root", "nginx"):
        (tmp_path / name).mkdir()
    onnxarchive.save(model_of(zeros(400 * MIB), zeros(50 * MIB, "v")), tmp_path / "root/m.onnxa")
    code = (
        MEASURE_MEMORY
        + """
import onnx, onnxarchive
from pathlib import Path
url, folder = sys.argv[1], Path(sys.argv[2])
def verify():
    with onnxarchive.open(url) as archive:
        archive.verify()
for name, call in {
    "open": lambda: onnxarchive.open(url).close(),
    "verify": verify,
    "check": lambda: onnxarchive.check(url, full=True),
    "convert": lambda: onnxarchive.convert(url, folder / "c"),
    "extract": lambda: onnxarchive.extract(url, folder / "x"),
    "export": lambda: onnxarchive.export(url, folder / "e", external_data="d"),
    "single": lambda: onnxarchive.export(url, folder / "s"),
    "download": lambda: onnxarchive.download(url, folder / "l")
}.items():
    print(name, growth(call) >> 20)
"""
    )
    with nginx(tmp_path / "root", tmp_path / "nginx") as server:
        printed = run_python(code, f"{server}/m.onnxa", tmp_path)
    found = {name: int(grown) for name, grown in map(str.split, printed.splitlines())}
    assert len(found) == 8
    assert max(found.values()) < 320, found
