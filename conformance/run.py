#!/usr/bin/env python3
"""Runs a reader of ONNX archives over the conformance suite; needs nothing but Python 3.10.

python3 conformance/run.py --reader "CMD {archive}"

README.md, beside this file, says what the reader prints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SUITE = Path(__file__).resolve().parent
ENTRY_FIELDS = ("name", "header_offset", "data_offset", "nbytes", "crc32")
TENSOR_FIELDS = ("key", "name", "data_type", "dims", "sha256")


@dataclass(frozen=True)
class Result:
    """What came of one vector.

    Attributes:
        vector: Its name.
        outcome: "passed", "failed", or "passed over".
        reason: Why it is not passed.
    """

    vector: str
    outcome: str
    reason: str = ""


class ReaderError(Exception):
    """There is no such command, or it cannot be run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; gives 0 when everything passed, 1 when something failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", required=True, help="the command, with {archive} for the path")
    parser.add_argument(
        "--only", default="", metavar="PART", help="vectors with this in their name"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--no-large", action="store_true", help="none of more than 1 MiB")
    size.add_argument("--large-only", action="store_true", help="those of more than 1 MiB")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="readers at once")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a vector may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results down")
    parser.add_argument(
        "--built", type=Path, metavar="DIR", help="where large vectors are kept (a temporary one)"
    )
    arguments = parser.parse_args(argv)
    command = shlex.split(arguments.reader)
    if not any("{archive}" in word for word in command):
        parser.error("--reader: expected {archive} where the path goes, found none")
    vectors: list[dict[str, Any]] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
    chosen = [
        vector
        for vector in vectors
        if arguments.only in vector["name"]
        and not (arguments.no_large and vector.get("large"))
        and not (arguments.large_only and not vector.get("large"))
    ]
    if not chosen:
        parser.error(f"--only: no vector has {arguments.only!r} in its name")
    try:
        with folder_of_large(arguments.built) as built:
            if any(vector.get("large") for vector in chosen):
                make_large(vectors, built)
            task = partial(run, command, arguments.timeout, built)
            with ThreadPoolExecutor(max(1, arguments.jobs)) as executor:
                results = list(executor.map(task, chosen))
    except ReaderError as error:
        parser.error(str(error))
    for result in results:
        if result.outcome != "passed":
            print(f"{result.outcome}: {result.vector}: {result.reason}")
    counts = Counter(result.outcome for result in results)
    print(
        f"{len(results)} vectors: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['passed over']} passed over"
    )
    if arguments.json is not None:
        text = json.dumps([asdict(result) for result in results], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if counts["failed"] else 0


@contextmanager
def folder_of_large(kept: Path | None) -> Iterator[Path]:
    """The folder of the large vectors: the one given, or a temporary one."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def make_large(vectors: list[dict[str, Any]], built: Path) -> None:
    """Makes the large vectors, unless they are there."""
    wanted = [
        vector[field]
        for vector in vectors
        if vector.get("large")
        for field in ("file", "expected")
        if field in vector
    ]
    if not all((built / file).exists() for file in wanted):
        print("making the large vectors, which takes a minute", file=sys.stderr)
        recipe = SUITE.parent / "tools" / "vectors.py"
        subprocess.run([sys.executable, recipe, "--large", built], check=True)


def run(command: Sequence[str], timeout: float, built: Path, vector: dict[str, Any]) -> Result:
    """Gives one vector to the reader and compares what it prints."""
    with at_path(vector, built) as path:
        if path is None:
            return Result(vector["name"], "passed over", "this system cannot make such a file")
        words = [word.replace("{archive}", str(path)) for word in command]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            return Result(vector["name"], "failed", f"took more than {timeout:g} seconds")
        except OSError as error:
            raise ReaderError(f"the reader does not start: {error}") from error
    said = done.stderr.decode(errors="replace").strip()
    said = f"; standard error: {said[-2000:]}" if said else ""
    if done.returncode != 0:
        return Result(vector["name"], "failed", f"exit status {done.returncode}{said}")
    try:
        printed = json.loads(done.stdout)
    except ValueError as error:
        return Result(vector["name"], "failed", f"expected one JSON object, {error}{said}")
    if not isinstance(printed, dict):
        return Result(vector["name"], "failed", f"expected one JSON object, found another{said}")
    if printed.get("accepted") is None and vector.get("large"):
        return Result(vector["name"], "passed over", str(printed.get("message")))
    reason = difference(vector, printed, built)
    return Result(vector["name"], "failed" if reason else "passed", reason + said if reason else "")


@contextmanager
def at_path(vector: dict[str, Any], built: Path) -> Iterator[Path | None]:
    """Where a vector is while the block runs; None where it cannot be made."""
    if "file" in vector:
        yield (built if vector.get("large") else SUITE) / vector["file"]
        return
    with tempfile.TemporaryDirectory() as folder:
        path: Path | None = Path(folder) / f"{vector['name']}.onnxa"
        assert path is not None
        try:
            if vector["kind"] == "directory":
                path.mkdir()
            elif vector["kind"] == "symlink":
                path.symlink_to(SUITE / "vectors" / f"{vector['target']}.onnxa")
            else:
                os.mkfifo(path)
        except (OSError, AttributeError):
            path = None
        yield path


def difference(vector: dict[str, Any], printed: dict[str, Any], built: Path) -> str:
    """What is wrong with what a reader printed; nothing where it is right."""
    accepted, rule = printed.get("accepted"), printed.get("rule")
    if accepted is not vector["accepted"]:
        wanted = "accepted" if vector["accepted"] else f"refused ({', '.join(vector['rules'])})"
        found = json.dumps(printed, ensure_ascii=False)[:400]
        return f"{vector['about']} Expected to be {wanted}, found {found}"
    if not accepted:
        if rule is None or rule in vector["rules"]:
            return ""
        message = printed.get("message")
        return f"{vector['about']} Expected {' or '.join(vector['rules'])}, found {rule}: {message}"
    expected = expectation(vector, built)
    try:
        entries = [ordered(entry, ENTRY_FIELDS) for entry in printed["entries"]]
        tensors = {it["key"]: ordered(it, TENSOR_FIELDS) for it in printed["tensors"]}
        count = len(printed["tensors"])
    except (KeyError, TypeError, ValueError) as error:
        return f"expected entries and tensors in the form of the README, {error!r}"
    wanted_entries = [ordered(entry, ENTRY_FIELDS) for entry in expected["entries"]]
    if entries != wanted_entries:
        return "entries: " + first_difference(wanted_entries, entries)
    wanted_tensors = {it["key"]: ordered(it, TENSOR_FIELDS) for it in expected["tensors"]}
    if tensors != wanted_tensors or count != len(wanted_tensors):
        return "tensors: " + first_difference(
            [*wanted_tensors.values()], [tensors[key] for key in wanted_tensors if key in tensors]
        )
    return ""


def expectation(vector: dict[str, Any], built: Path) -> dict[str, Any]:
    """The entries and tensors that a reader finds in a vector."""
    if vector.get("kind") == "symlink":
        vectors = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
        vector = next(it for it in vectors if it["name"] == vector["target"])
    if "expected" in vector:
        expected: dict[str, Any] = json.loads((built / vector["expected"]).read_bytes())
        return expected
    return vector


def ordered(given: dict[str, Any], fields: Sequence[str]) -> list[Any]:
    """The values of an entry or tensor; numbers may have been printed as strings."""
    values = []
    for field in fields:
        value = given[field]
        if field == "dims":
            value = [int(dim) for dim in value]
        elif field not in ("name", "key", "sha256"):
            value = int(value)
        values.append(value)
    return values


def first_difference(expected: list[Any], found: list[Any]) -> str:
    """The first element in which two lists differ, or their lengths."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"expected {one} at {index}, found {other}"
    return f"expected {len(expected)}, found {len(found)}"


if __name__ == "__main__":
    sys.exit(main())
