"""Messages that protobuf cannot parse or serialize: at fault, too large, or short of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import onnx
import pytest
from google.protobuf.message import DecodeError, EncodeError
from models import full_model, model_of, raw_tensor
from processes import completed
from versions import needs_compiled_parser

import onnxarchive
from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import serialization, wire

# Calls a function with two arguments in forks with room for so many MiB more; prints the errors.
LIMITED = """
import os, resource, sys
import onnxarchive

function = getattr(onnxarchive, sys.argv[1])
for room in range(4, 100, 8):
    process = os.fork()
    if process:
        os.waitpid(process, 0)
        continue
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20),) * 2)
    try:
        function(*sys.argv[2:])
    except BaseException as error:
        os.write(1, f"{type(error).__name__}: {error}\\n".encode())
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit this memory")
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("load m.onnxa", "protobuf cannot parse a message of 16777"),
        ("link m.onnxa l.onnx", "protobuf cannot serialize the model"),
    ],
)
@needs_compiled_parser
def test_a_lack_of_memory_is_no_fault_of_a_model(call: str, expected: str, tmp_path: Path) -> None:
    weights = [raw_tensor(f"w{number}", dims=(1 << 18,)) for number in range(16)]
    onnxarchive.save(model_of(*weights), tmp_path / "m.onnxa", size_threshold=1 << 30)
    command = [sys.executable, "-c", LIMITED, *call.split()]
    errors = completed(command, status=0, cwd=tmp_path).stdout.splitlines()
    assert any(expected in error for error in errors), errors
    # A map that has no room is an error of the system.
    assert {error.partition(":")[0] for error in errors} <= {"MemoryError", "OSError"}, errors


@needs_compiled_parser
def test_a_message_that_is_well_formed_lacked_memory_if_protobuf_refuses_it() -> None:
    data = full_model().SerializeToString()
    refuse = patch.object(onnx.ModelProto, "FromString", side_effect=DecodeError("refused"))
    with refuse, pytest.raises(MemoryError, match=f"parse a message of {len(data)} bytes"):
        serialization.parse(onnx.ModelProto, data)
    with refuse, pytest.raises(DecodeError, match="refused"):
        serialization.parse(onnx.ModelProto, data[:-1])


def test_a_model_is_too_large_only_if_its_size_is_over_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(raw_tensor("w", dims=(1000,)))
    refuse = patch.object(onnx.ModelProto, "SerializeToString", side_effect=EncodeError("refused"))
    with refuse, pytest.raises(MemoryError, match="protobuf cannot serialize the model"):
        serialization.serialize(model)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 4000)
    with (
        refuse,
        pytest.raises(
            ArchiveFormatError,
            match=r"cannot serialize the model, which must be less than 2 GiB.*: refused",
        ),
    ):
        serialization.serialize(model)


def test_the_size_of_a_model_is_never_underestimated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = full_model()
    model.graph.initializer.add(int64_data=[-1] * 9, float_data=[1] * 9, double_data=[1] * 9)
    model.graph.node.add(doc_string="\N{GRINNING FACE}" * 9)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", model.ByteSize() - 1)
    refuse = patch.object(onnx.ModelProto, "SerializeToString", side_effect=EncodeError("refused"))
    with refuse, pytest.raises(ArchiveFormatError, match="refused"):
        serialization.serialize(model)
