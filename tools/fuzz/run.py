"""Fuzzes the readers of untrusted bytes with atheris (`pip install atheris`), driven by libFuzzer.

A target is a function that reads bytes. The function catches the `ArchiveError` of a refusal. A
finding is an input for which the target raises any error, takes 10 seconds, or takes 2 GiB of
memory.

    python3 tools/dev.py python tools/fuzz/run.py archive --seconds 60
    python3 tools/dev.py python tools/fuzz/run.py archive --reproduce FILE

Prints the number of inputs, and the file of each finding. Exit status: 0; 1 if there is a finding;
2 if atheris is missing.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto

import onnxarchive
from onnxarchive.errors import ArchiveError, Report, Strict, UnfinishedEditError
from onnxarchive.model import weights, wire
from onnxarchive.model.keys import ASSET_PREFIX, is_model
from onnxarchive.model.weights import decode
from onnxarchive.reading.check import rules
from onnxarchive.zipformat import directory
from onnxarchive.zipformat.directory import Entry
from onnxarchive.zipformat.end_records import TAIL_SIZE, locate
from onnxarchive.zipformat.local_header import check_local_header
from tools.fuzz import seeds

ROOT: Final = Path(__file__).resolve().parents[2]
# Rules about tensor data that this tool checks with code of its own, too.
DATA_RULES: Final = frozenset({"DATA-6", "TENSOR-4", "TENSOR-5"})
SIX_BIT_TYPES: Final = (TensorProto.FLOAT6E2M3, TensorProto.FLOAT6E3M2)
BITS: Final[dict[int, int]] = {
    **{TensorProto.DataType.Value(name): 2 for name in ("UINT2", "INT2")},
    **{TensorProto.DataType.Value(name): 4 for name in ("UINT4", "INT4", "FLOAT4E2M1")},
    **dict.fromkeys(SIX_BIT_TYPES, 6),
}
# Nothing may import the library before atheris instruments it.
CHILD: Final = """
import sys
import atheris
with atheris.instrument_imports(include=["onnxarchive"]):
    from tools.fuzz import run as fuzz
target = fuzz.TARGETS[sys.argv.pop(1)]
atheris.Setup(sys.argv, target.run)
atheris.Fuzz()
"""


class DisagreementError(Exception):
    """Two ways of reading the same bytes give different results."""


@dataclass(frozen=True)
class Target:
    """A function to fuzz.

    Attributes:
        run: Reads bytes; any error that the function raises is a finding.
        seeds: Makes the first inputs.
    """

    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


def require(holds: bool, otherwise: str) -> None:
    """Raises `DisagreementError` unless `holds`."""
    if not holds:
        raise DisagreementError(otherwise)


class Collected(Report):
    """Collects the ids of broken rules."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        """Adds a broken rule."""
        require(rule in rules(), f"{rule} is no rule")
        require(bool(message), f"{rule} is reported without a message")
        self.rules.append(rule)


# Directory


def run_directory(data: bytes) -> bool:
    """Returns True if end records, directory and local headers break no rule.

    The verdict must be the same whether reading stops at the first broken rule or continues. The
    entries of an accepted file must leave no gaps, and Python's zipfile must find the same entries.
    """
    collected = Collected()
    _read_directory(data, collected)
    try:
        entries = _read_directory(data, Strict())
    except ArchiveError as error:
        require(error.rule in collected.rules, f"raised {error}, collected {collected.rules}")
        return False
    require(not collected.rules, f"accepted, but collected {collected.rules}")
    position = 0
    for entry in entries:
        require(entry.header_offset == position, f"a gap before {entry}")
        require(entry.data_offset % 64 == 0, f"{entry} is not aligned")
        position = entry.data_offset + entry.nbytes
    require(data[position : position + 4] in (b"PK\1\2", b"PK\5\6"), "a gap before the directory")
    if all(entry.name.isprintable() for entry in entries):  # this target does not check names
        with zipfile.ZipFile(io.BytesIO(data)) as by_zipfile:
            _require_same(by_zipfile, entries)
    return True


def _read_directory(data: bytes, report: Report) -> tuple[Entry, ...]:
    bounds = locate(data[-TAIL_SIZE:], len(data), report)
    if bounds is None:
        return ()
    listed = directory.read_directory(
        data[bounds.offset : bounds.offset + bounds.size], bounds, report
    )
    for entry, record in zip(listed.entries, listed.records, strict=True):
        header = data[entry.header_offset : entry.data_offset]
        check_local_header(header, entry, record, report)
    return tuple(listed.entries)


def _require_same(by_zipfile: zipfile.ZipFile, entries: Iterable[Entry]) -> None:
    """Requires Python's zipfile to find the same entries."""
    found = [
        (it.orig_filename, it.header_offset, it.compress_size, it.file_size, it.CRC)
        for it in by_zipfile.infolist()
    ]
    expected = [(it.name, it.header_offset, it.nbytes, it.nbytes, it.crc32) for it in entries]
    require(found == expected, f"expected {expected}, found {found} by zipfile")


# Wire


def run_wire(data: bytes) -> bool:
    """Returns True if protobuf parses the bytes as a model.

    The wire reader must accept all bytes that protobuf parses, except a model with a reserved
    location. Stripping and refilling the weights of a parsed model must give the same model.
    Protobuf must parse the stripped bytes if and only if protobuf parses the given bytes.
    """
    model = _parsed(data)
    try:
        graphs: int | None = wire.count_graphs(data)
    except ArchiveError as error:
        graphs = None
        _require_refused(model, error)
    if model is not None and graphs is not None:
        require(bool(graphs) == model.HasField("graph"), f"{graphs} graphs")
        is_model = model.HasField("graph") and model.HasField("ir_version")
        require(wire.is_model(data) == is_model, f"expected is_model to be {is_model}")
    for size_threshold in (0, 24):
        _run_strip_weights(data, model, size_threshold)
    try:
        filled = b"".join(weights.fill(data, lambda location: b"filled" if location else None))
    except ArchiveError:
        pass
    else:
        require((_parsed(filled) is None) == (model is None), "parsing differs after filling")
    return model is not None


def _parsed(data: bytes) -> onnx.ModelProto | None:
    try:
        return onnx.ModelProto.FromString(data)
    except DecodeError:
        return None


def _require_refused(model: onnx.ModelProto | None, error: ArchiveError) -> None:
    """Requires protobuf to refuse the bytes, too, unless the error is about a reserved location."""
    require(
        model is None or "reserved location" in error.message,
        f"protobuf parses the bytes, but the library refuses them: {error}",
    )


def _run_strip_weights(data: bytes, model: onnx.ModelProto | None, size_threshold: int) -> None:
    try:
        found = weights.strip_weights(data, size_threshold=size_threshold)
        held = [b"".join(decode(data, span)) for span in found.spans]
    except ArchiveError as error:
        _require_refused(model, error)
        return
    stripped = _parsed(found.model)
    require((stripped is None) == (model is None), "parsing differs after stripping")
    if model is None or stripped is None:
        return
    locations = {f"{weights.SPAN_LOCATION}{index}": index for index in range(len(held))}

    def of_location(name: str) -> bytes | None:
        return held[locations[name]] if name in locations else None

    try:
        filled = _parsed(b"".join(weights.fill(found.model, of_location)))
    except ArchiveError as error:
        # `fill` refuses a location that is not UTF-8. Such a location is never a key.
        require(
            "a location in UTF-8" in error.message, f"a stripped model cannot be filled: {error}"
        )
        return
    require(filled is not None, "a filled model cannot be parsed")
    assert filled is not None
    for tensor, left, again in zip(*map(tensors_of, (model, stripped, filled)), strict=True):
        index = locations.get(_location(left))
        if index is None:
            continue
        _require_raw(tensor, held[index])
        require(again.raw_data == held[index], f"filled {again.raw_data!r}, held {held[index]!r}")
        left.CopyFrom(tensor)
        again.CopyFrom(tensor)
    require(stripped == model, "the stripped model differs from the original model")
    require(filled == model, "the filled model differs from the original model")


def tensors_of(message: Message) -> Iterator[TensorProto]:
    """Yields every TensorProto in a message. The caller may change each yielded tensor."""
    if isinstance(message, TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in [value] if isinstance(value, Message) else value:
                yield from tensors_of(child)


def _location(tensor: TensorProto) -> Any:
    pairs = {pair.key: pair.value for pair in tensor.external_data}
    return pairs.get("location") if tensor.data_location == TensorProto.EXTERNAL else None


def _require_raw(tensor: TensorProto, data: bytes) -> None:
    """Requires `data` to hold the elements of a tensor, in the form of `raw_data`."""
    if tensor.HasField("raw_data"):
        expected: bytes = tensor.raw_data
    elif tensor.float_data or tensor.double_data:
        dtype, values = (
            ("<f4", tensor.float_data) if tensor.float_data else ("<f8", tensor.double_data)
        )
        same = np.array_equal(np.frombuffer(data, dtype), np.array(values, dtype), equal_nan=True)
        require(same, f"{tensor}: decoded as {data!r}")
        return
    else:
        codes = [*tensor.int32_data, *tensor.int64_data, *tensor.uint64_data]
        if tensor.data_type in SIX_BIT_TYPES:
            stream = sum((code & 63) << 6 * index for index, code in enumerate(codes))
            expected = stream.to_bytes(-(-6 * len(codes) // 8), "little")
        else:
            width = 1
            if tensor.data_type not in BITS:
                width = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            expected = b"".join(
                (code % (1 << 8 * width)).to_bytes(width, "little") for code in codes
            )
    require(data == expected, f"{tensor}: expected {expected!r}, decoded {data!r}")


# Archive


def run_archive(data: bytes) -> bool:
    """Returns True if these bytes are an archive, as given or with correct CRC-32s.

    A fuzzer does not find correct CRC-32s by itself, and wrong CRC-32s stop the reader early.
    """
    path = _scratch() / "fuzzed.onnxa"
    path.write_bytes(data)
    if is_archive(path):
        return True
    mended = _with_crc32s(data)
    if mended == data:
        return False
    path.write_bytes(mended)
    return is_archive(path)


def _with_crc32s(data: bytes) -> bytes:
    """Corrects the CRC-32s in a file; returns `data` if the directory cannot be read."""
    report = Collected()
    bounds = locate(data[-TAIL_SIZE:], len(data), report)
    if bounds is None:
        return data
    listed = directory.read_directory(
        data[bounds.offset : bounds.offset + bounds.size], bounds, report
    )
    if len(listed.entries) != bounds.entry_count:
        return data
    mended = bytearray(data)
    position = bounds.offset
    for entry, record in zip(listed.entries, listed.records, strict=True):
        crc32 = zlib.crc32(data[entry.data_offset : entry.data_offset + entry.nbytes])
        for field in (entry.header_offset + 14, position + 16):
            mended[field : field + 4] = crc32.to_bytes(4, "little")
        position += len(record)
    return bytes(mended)


@cache
def _scratch() -> Path:
    # `atexit` does not run if libFuzzer ends this process. Then the parent process removes the
    # directory: TMPDIR is a temporary directory of the parent process.
    folder = tempfile.mkdtemp(prefix="onnxarchive-fuzz-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def is_archive(path: Path) -> bool:
    """Returns True if a file breaks no rule.

    A full check must find a broken rule if and only if opening, reading or verifying fails. If
    the check finds broken `DATA_RULES` and no others, this tool must find the same rules. Python's
    zipfile must read the same entries from an accepted file. Checking and opening must agree on
    interrupted edits. After a recovery, `check` without `full` must find no broken rule. A failed
    recovery must change nothing.
    """
    broken: set[str] | None = None
    try:
        found = [finding.rule for finding in onnxarchive.check(path, full=True)]
    except UnfinishedEditError:
        _require_unfinished(path)
        return False
    require(set(found) <= set(rules()), f"expected findings with ids of rules.toml, found {found}")
    try:
        with onnxarchive.open(path) as archive:
            data = {name: bytes(archive.read(name)) for name in archive.entries}
            broken = {rule for it in archive.models.values() for rule in _broken_by_data(it, data)}
            archive.verify()
            entries = list(archive.entries.values())
            models = list(archive.models)
        found_keys = {key for model in models for key in _look_at(path, model)}
        keys = {name for name in data if not (is_model(name) or name.startswith(ASSET_PREFIX))}
        require(found_keys == keys, f"found the tensors {found_keys}, expected {keys}")
    except ArchiveError as error:
        require(error.rule in found, f"raised {error}, but the check found {found}")
        if broken is not None and DATA_RULES.issuperset(found):
            require(set(found) == broken, f"found {found}, expected {broken}")
        require(
            error.rule not in DATA_RULES or error.rule in (broken or ()),
            f"raised {error}, but this tool found {broken}",
        )
        return False
    require(
        not found and not broken,
        f"verified, but the check found {found}, and this tool found {broken}",
    )
    loaded = {
        tensor.raw_data
        for model in models
        for tensor in tensors_of(onnxarchive.load(path, model=model))
    }
    require(all(data[key] in loaded for key in keys), "a tensor is not loaded")
    with zipfile.ZipFile(path) as by_zipfile:
        _require_same(by_zipfile, entries)
        for name, content in data.items():
            require(by_zipfile.read(name) == content, f"zipfile reads other bytes of {name}")
    return True


def _look_at(path: Path, model: str) -> list[str]:
    """Makes a view of each tensor of a model; returns the keys."""
    with onnxarchive.open(path, model=model) as archive:
        named = [
            _location(it)
            for it in tensors_of(archive.model)
            if it.data_location == TensorProto.EXTERNAL
        ]
        for key in named:
            archive.tensor_by_key(key)
        for name in archive.tensors:
            with contextlib.suppress(ArchiveError):  # data inside the model may be wrong
                _ = archive.tensors[name]
    return named


def _require_unfinished(path: Path) -> None:
    with contextlib.suppress(UnfinishedEditError), onnxarchive.open(path):
        require(False, "opened despite an unfinished edit")
    before = path.read_bytes()
    try:
        onnxarchive.recover(path)
    except ArchiveError:
        require(path.read_bytes() == before, "a failed recovery changed the file")
        return
    broken = onnxarchive.check(path)
    require(not broken, f"the recovered file breaks {broken}")


def _broken_by_data(model: onnx.ModelProto, data: dict[str, bytes]) -> set[str]:
    broken = set()
    for tensor in tensors_of(model):
        content = data.get(_location(tensor))
        if content is None:
            continue
        for pair in tensor.external_data:
            sha1 = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            if pair.key == "checksum" and pair.value != sha1:
                broken.add("DATA-6")
        if tensor.data_type == TensorProto.BOOL and content.strip(b"\0\1"):
            broken.add("TENSOR-5")
        count = 1
        for dim in tensor.dims:
            count *= dim
        if int.from_bytes(content, "little") >> count * BITS.get(tensor.data_type, 8 * 16):
            broken.add("TENSOR-4")
    return broken


# Source


def run_source(data: bytes) -> bool:
    """Returns True if these bytes can be converted. The new archive must break no rule."""
    path, target = (_scratch() / name for name in ("fuzzed", "converted.onnxa"))
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            onnxarchive.convert(path, target, jobs=1, size_threshold=0, convert_attribute=True)
        except ArchiveError:
            return False
    found = onnxarchive.check(target, full=True)
    require(not found, f"the converted archive breaks {found}")
    return True


TARGETS: Final = {
    "directory": Target(run_directory, seeds.archives),
    "wire": Target(run_wire, seeds.serialized_models),
    "archive": Target(run_archive, seeds.archives),
    "source": Target(run_source, seeds.sources),
}


# The command


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzzes one target and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="duration (default: 60)")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="directory")
    parser.add_argument("--reproduce", type=Path, help="run the target on this file only")
    arguments = parser.parse_args(argv)
    target = TARGETS[arguments.target]
    if arguments.reproduce:
        print("accepted" if target.run(arguments.reproduce.read_bytes()) else "refused")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("atheris is missing: pip install atheris", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as work:
        return _fuzz(arguments.target, arguments, Path(work))


def _fuzz(name: str, arguments: argparse.Namespace, work: Path) -> int:
    corpus = work / "corpus"
    corpus.mkdir()
    for index, data in enumerate(TARGETS[name].seeds()):
        (corpus / str(index)).write_bytes(data)
    arguments.findings.mkdir(parents=True, exist_ok=True)
    before = set(arguments.findings.iterdir())
    command = [sys.executable, "-c", CHILD, name, str(corpus)]
    command += [f"-max_total_time={arguments.seconds}", "-timeout=10", "-rss_limit_mb=2048"]
    command += ["-max_len=4096", "-print_final_stats=1", "-verbosity=1"]
    command += [f"-artifact_prefix={arguments.findings.resolve()}/{name}-"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"TMPDIR": str(work), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    executions = re.search(r"number_of_executed_units: *(\d+)", done.stdout)
    print(f"{name}: {executions[1] if executions else 'unknown'} executions")
    found = sorted(set(arguments.findings.iterdir()) - before)
    for path in found:
        print(f"finding: {path}")
    if not any(arguments.findings.iterdir()):
        arguments.findings.rmdir()
    if found or done.returncode:
        print("\n".join(done.stdout.splitlines()[-40:]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
