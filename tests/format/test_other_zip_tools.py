"""Archives in the hands of others: what zip tools make of them.

Each tool that is not installed is passed over with a word about it.
"""

from __future__ import annotations

import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
from models import model_of, raw_tensor
from onnx import TensorProto

import onnxarchive
from tools.zip_readers.readers import ReaderError, output_of

pytestmark = pytest.mark.tool


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


# What the archives hold


MODEL = model_of(
    raw_tensor("layer.0/weight", dims=(32, 16)),
    raw_tensor("half", TensorProto.FLOAT16, (16, 16)),
    raw_tensor("empty", dims=(0, 32)),
    raw_tensor("quantized/scale 8", TensorProto.INT4, (16,)),
    raw_tensor("step", dims=()),
    raw_tensor("index", TensorProto.INT64, (4,)),
)
ASSETS = {
    "größe/日本.txt": "größe".encode(),
    "empty": b"",
    "tokenizer.json": b"{}" * 5000,
    "PK\N{SNOWMAN}": b"PK\5\6\1" + bytes(17) + b"PK\1\2PK\3\4",
}


@dataclass(frozen=True)
class Saved:
    """An archive and what is in it."""

    path: Path
    alignment: int
    contents: dict[str, bytes]


@pytest.fixture(scope="module", params=[64, 4096])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("archive") / "model.onnxa"
    onnxarchive.save(MODEL, path, size_threshold=0, alignment=request.param, assets=ASSETS)
    with onnxarchive.open(path) as opened:
        contents = {name: bytes(opened.read(name)) for name in opened.entries}
    return Saved(path, request.param, contents)


# What the tools say


def test_the_archives_to_unzip_have_empty_and_unusual_entries(archive: Saved) -> None:
    names = list(archive.contents)
    assert names[0] == "layer_0_weight"
    assert names[-1] == "__MODEL_PROTO"
    assert archive.contents["empty"] == archive.contents["assets/empty"] == b""
    assert archive.contents["assets/größe/日本.txt"] == "größe".encode()
    assert len(archive.contents) == 6 + len(ASSETS) + 1
    assert onnxarchive.check(archive.path, full=True) == []


def test_unzipped_files_are_regular_files_that_others_may_read(
    archive: Saved, tmp_path: Path
) -> None:
    output_of(tool("unzip"), "-q", archive.path, "-d", tmp_path)
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if not path.is_dir()}
    assert modes == {stat.S_IFREG | 0o644}


def test_zipalign_finds_every_entry_aligned(archive: Saved) -> None:
    zipalign = tool("zipalign")
    listed = output_of(zipalign, "-c", "-v", str(archive.alignment), archive.path)
    assert "Verification successful" in listed
    with onnxarchive.open(archive.path) as opened:
        expected = [(str(entry.data_offset), entry.name) for entry in opened.entries.values()]
    assert re.findall(r"^ *(\d+) (.+) \(OK\)$", listed, re.MULTILINE) == expected
    with pytest.raises(ReaderError, match="BAD"):
        output_of(zipalign, "-c", "-v", str(2 * archive.alignment), archive.path)
