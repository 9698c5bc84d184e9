"""A first evening with archives: forty commands in order, and what a new user reads after each.

The files are made before the evening begins. What the messages recommend is what the next steps do.
"""

from __future__ import annotations

import functools
import http.server
import shlex
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from commands import run
from models import entry_of, runnable_model
from onnx import numpy_helper

import onnxarchive

MODEL = "model.onnxa"
WEIGHT = "layer.0/weight"
ALL = "convert hub NEW.onnxa --all-models --default decoder.onnx --assets"
CUT = "recover --cut appended.onnxa"
MEND = "convert zipped.onnxa"


@dataclass
class Step:
    """A command and what it prints.

    Attributes:
        command: The words of the command line; `URL` is a server without range requests.
        status: The exit status.
        texts: What standard output and standard error contain.
        absent: What neither of them contains.
        missing: A library that is not installed during this step.
    """

    command: str
    status: int
    texts: list[str]
    absent: str = "Traceback"
    missing: str | None = None


EVENING = [
    # Commands and their help
    Step("", 2, ["a command is missing; it is one of: convert, info, ls"]),
    Step("--help", 0, ["Make an archive:", "Look at it:", "Change it:", "Run it:", "Share it:"]),
    Step("conver model.onnx", 2, ["there is no command 'conver'; did you mean 'convert'?"]),
    Step("help url", 2, ["there is no command 'url'; did you mean 'urls'?"]),
    Step("help urls", 0, ["--storage-option KEY=VALUE", "what follows '?' or '#'"]),
    Step("help ls", 0, ["Example: onnxarchive ls model.onnxa", "'onnxarchive help urls'"], "s3://"),
    # A model, without a target
    Step("info model.onnx", 3, ["'onnxarchive convert model.onnx NEW.onnxa' makes an archive"]),
    Step("convert model.onnx", 0, ["model.onnxa: 1 tensor, 0 assets, 66,085 bytes"]),
    Step("convert model.onnx", 2, ["exists; to replace it, name it as TARGET and give --force"]),
    Step("diff model.onnxa model.onnx", 0, ["the same model and tensors"]),
    Step(
        "diff model.onnxa changed.onnx --values",
        1,
        ["tensors: 1 changed", "1 of 16,384 elements differ, by at most 0.5, relatively "],
    ),
    # A directory with several models
    Step(
        "convert hub",
        2,
        ["found 2 ", "65,793  decoder.onnx", "65,793  encoder.onnx", f"'onnxarchive {ALL}'"],
    ),
    Step(ALL.replace("NEW", "hub"), 0, ["hub.onnxa: 2 tensors, 1 asset", "took      config.json"]),
    Step("models list hub.onnxa", 0, ["(default)", "encoder"]),
    Step(
        "info hub.onnxa --model encodr",
        2,
        ["the id 'encodr', only '', 'encoder'; did you mean 'encoder'?"],
    ),
    Step("models remove hub.onnxa encoder", 0, ["hub.onnxa: 66,213 ", "; 66,213 bytes "]),
    # Git and scripts
    Step("info model.onnxa", 0, ["[2, 1024]", "tensors       SHA-256 "], absent=MODEL),
    Step("ls model.onnxa", 0, ["CRC-32", "FLOAT      [1024, 16]  65,536      64  9ab389fc"]),
    Step("ls model.onnxa --json", 0, ['"crc32": 2595457532', '"name": "layer.0/weight"']),
    Step("info none.onnxa --json", 2, ['{"error": {"type": "FileNotFoundError"', '"status": 2}}']),
    Step("cat model.onnxa layer.0/weigth", 2, [f"did you mean '{WEIGHT}'?"]),
    # Changes
    Step("metadata set model.onnxa author=Ada", 0, [" bytes written"]),
    Step("metadata remove model.onnxa autor", 2, ["no metadata 'autor'", "you mean 'author'?"]),
    Step("assets add model.onnxa labels.txt", 0, [" bytes written"]),
    Step("assets extract model.onnxa -", 2, ["files are written to a directory"]),
    # Back to other tools, and from a server
    Step("export model.onnxa new/back.onnx", 2, ["'new' does not exist; create it first"]),
    Step("export model.onnxa .", 2, [".: is a directory; give the path of a file in it"]),
    Step("export model.onnxa back.onnx", 0, ["back.onnx: 65,808 bytes"]),
    Step("info URL/model.onnxa", 2, ["does not answer requests for ranges", "download'"]),
    Step("download URL/model.onnxa copy.onnxa", 0, ["cannot be resumed", "verified"]),
    Step("ls s3://bucket/m.onnxa", 2, [": pip install obstore fsspec "], missing="obstore"),
    # Files that other tools and accidents have changed
    Step("info unfinished.onnxa", 3, ["'onnxarchive recover unfinished.onnxa' rolls the edit"]),
    Step("info appended.onnxa", 3, ["5 bytes follow it: b'hello'", f"'onnxarchive {CUT}'"]),
    Step(CUT, 0, ["5 bytes after the archive cut off"]),
    Step(
        "info zipped.onnxa", 3, ["another tool wrote 'note.txt'", f"'onnxarchive {MEND} NEW.onnxa'"]
    ),
    Step(f"{MEND} mended.onnxa", 0, ["left out, ", ": note.txt"]),
    Step("diff mended.onnxa model.onnx", 0, ["the same model and tensors"]),
    Step("convert flipped.onnxa new.onnxa", 3, ["entry 'layer_0_weight'", "download it again"]),
    Step("info truncated.onnxa", 3, ["lacks the last 100 of", "copy or download it again"]),
    Step("info 'a page.html'", 3, ["a page.html: ", "found an HTML page; its address is not that"]),
]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which sends whole files; it is silent."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a server of the working directory."""
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def make_files() -> None:
    """Makes the files of the evening in the working directory."""
    model = runnable_model()
    onnx.save(model, "model.onnx")
    changed = runnable_model()
    (weight,) = (each for each in changed.graph.initializer if each.name == WEIGHT)
    array = numpy_helper.to_array(weight).copy()
    array[3, 4] += 0.5
    weight.CopyFrom(numpy_helper.from_array(array, WEIGHT))
    onnx.save(changed, "changed.onnx")
    Path("hub").mkdir()
    shutil.copy("model.onnx", "hub/decoder.onnx")
    shutil.copy("changed.onnx", "hub/encoder.onnx")
    Path("hub/config.json").write_text("{}")
    Path("labels.txt").write_text("cat\ndog\n")
    onnxarchive.convert("model.onnx", "whole.onnxa")
    whole = Path("whole.onnxa").read_bytes()
    Path("appended.onnxa").write_bytes(whole + b"hello")
    Path("unfinished.onnxa").write_bytes(whole + bytes(1 << 16))
    Path("truncated.onnxa").write_bytes(whole[:-100])
    flipped = bytearray(whole)
    flipped[entry_of(whole, "layer_0_weight").data_offset] ^= 1
    Path("flipped.onnxa").write_bytes(flipped)
    Path("zipped.onnxa").write_bytes(whole)
    with zipfile.ZipFile("zipped.onnxa", "a") as archive:
        archive.writestr("note.txt", "A note.\n")
    Path("a page.html").write_text("<!DOCTYPE html><html>Sign in</html>")


def test_commands_of_a_first_evening_say_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files()
    assert len(EVENING) == 40
    for step in EVENING:
        with monkeypatch.context() as context:
            if step.missing is not None:
                context.setitem(sys.modules, step.missing, None)
            status = run(*shlex.split(step.command.replace("URL", url)))
        captured = capsys.readouterr()
        printed = captured.out + captured.err
        assert (step.command, status) == (step.command, step.status), printed
        assert [text for text in step.texts if text not in printed] == [], printed
        assert step.absent not in printed
    for whole, copy in ((MODEL, "copy.onnxa"), ("whole.onnxa", "mended.onnxa")):
        assert Path(copy).read_bytes() == Path(whole).read_bytes()
    assert Path("appended.onnxa").read_bytes() == Path("whole.onnxa").read_bytes()
