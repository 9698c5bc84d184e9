"""protobuf's Python parser, which pip installs where there is no compiled one."""

from __future__ import annotations

import pytest
from models import run_python

# `parse` prints how protobuf's Python parser, and how the library reads a serialized model.
PROGRAM = """
import itertools
import sys
import onnx
import onnxarchive
from google.protobuf.internal import api_implementation
from onnxarchive.errors import Strict
from onnxarchive.model import model_proto, wire

assert api_implementation.Type() == "python"
GRAPH = b"\\x3a"
VALID = b"\\x08\\x0a" + GRAPH + b"\\x00"

def nested(depth):
    # A graph with a node with an attribute with a graph, and so on: `depth` messages.
    below_graph = itertools.cycle([b"\\x0a", b"\\x2a", b"\\x32"])
    data = b""
    for tag in reversed([GRAPH, *itertools.islice(below_graph, depth - 1)]):
        data = tag + wire.varint(len(data)) + data
    return b"\\x08\\x0a" + data

def read(data):
    try:
        return model_proto.parse(data, Strict())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

data = eval(sys.argv[1])
if "low" in sys.argv:
    sys.setrecursionlimit(60)
result = read(data)
sys.setrecursionlimit(1000)
print(result if isinstance(result, str) else result.ir_version)
"""


def result(data: str, *arguments: str) -> str:
    environment = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    return run_python(PROGRAM, data, *arguments, **environment)


@pytest.mark.parametrize("data", ["VALID", "nested(100)"])
def test_the_python_parser_reads_a_valid_model(data: str) -> None:
    assert result(data) == "10\n"


@pytest.mark.parametrize(
    ("data", "arguments", "reason"),
    [
        (r'VALID + b"\x12\x01\xff"', (), "a text is not UTF-8"),
        (r'VALID + b"\x92\x00\x01a"', (), "a number of a field has more bytes than it needs"),
        ("nested(90)", ("low",), "its messages are nested too deep"),
        (r'VALID + b"\xa3\x06" * 100 + b"\xa4\x06" * 100', (), "too many levels of nesting"),
    ],
)
def test_a_model_that_the_python_parser_cannot_read_is_not_supported_and_breaks_no_rule(
    data: str, arguments: tuple[str, ...], reason: str
) -> None:
    text = result(data, *arguments)
    assert text.startswith("UnsupportedFeatureError: protobuf's Python parser cannot read")
    assert reason in text
    assert "MODEL-3" not in text


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (r'VALID + b"\x12\x05a"', "a field that ends at byte"),
        (r'VALID + b"\x08" + b"\xff" * 10 + b"\x01"', "a varint of at most 10 bytes"),
        (r'VALID + b"\x0c"', "no end of a group"),
        (r'VALID + b"\x12\x01\xff" + b"\x12\x05a"', "a field that ends at byte"),
        ("nested(101)", "at most 100 nested messages"),
    ],
)
def test_a_malformed_model_breaks_the_rule_as_with_every_parser(data: str, fault: str) -> None:
    text = result(data)
    assert text.startswith("ArchiveFormatError: ")
    assert fault in text
    assert text.endswith("[MODEL-3]\n")
