#!/usr/bin/env python3
"""Runs a reader of ONNX archives over the conformance suite; needs only Python 3.11 or newer.

python3 conformance/run.py --reader "CMD {archive}"

README.md in the same directory describes the output of a reader.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SUITE = Path(__file__).resolve().parent
MAKERS = SUITE / "make"
# Name of a file in the directory of the large vectors. The file is written after all large vectors,
# and holds `digest_of_makers()`.
MADE_FROM = "made-from"
ENTRY_FIELDS = ("name", "header_offset", "data_offset", "nbytes", "crc32")
TENSOR_FIELDS = ("model", "key", "name", "data_type", "dims", "sha256")
TENSOR_FIELDS_ONCE_OPEN = TENSOR_FIELDS[:-1]  # the data is not read


@dataclass(frozen=True)
class Result:
    """The result of one vector.

    Attributes:
        vector: The name of the vector.
        outcome: "passed", "failed", or "passed over".
        reason: Why the vector did not pass; empty if it passed.
    """

    vector: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Check:
    """The settings of a run.

    Attributes:
        command: The words of the command, with {archive} for the path.
        built: The directory of the large vectors.
        timeout: The time limit for one vector, in seconds.
        only_open: True if the command only opens the archive.
        is_partial: True if the output may lack `entries` and `tensors`.
    """

    command: Sequence[str]
    built: Path
    timeout: float
    only_open: bool
    is_partial: bool


class ReaderError(Exception):
    """The command of the reader does not start, or the run was interrupted."""


class LargeVectorError(Exception):
    """The large vectors cannot be made."""


class Processes:
    """Runs commands; `end` ends all running commands.

    Ending a command also ends its child processes, except on Windows.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def run(self, words: Sequence[str], timeout: float) -> tuple[int, bytes, bytes]:
        """Runs one command; returns its exit status, standard output and standard error.

        Raises:
            OSError: The command does not start.
            ReaderError: The run was interrupted.
            subprocess.TimeoutExpired: The command exceeded the time limit, and was ended.
        """
        with self._lock:
            if self._is_over:
                raise ReaderError("interrupted")
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            with process:
                try:
                    output, errors = process.communicate(timeout=timeout)
                except BaseException:
                    _end(process)
                    raise
            return process.returncode, output, errors
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """Ends all running commands, and prevents new ones."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # it has ended by itself
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the suite; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # readers print anything
    try:
        return run_suite(argv)
    except LargeVectorError as error:
        print(f"the large vectors cannot be made: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run_suite(argv: Sequence[str] | None) -> int:
    """Runs the suite; returns 0 if no vector failed, otherwise 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reader", required=True, help="the command, with {archive} for the path")
    parser.add_argument(
        "--only", default="", metavar="PART", help="only vectors with PART in their name"
    )
    parser.add_argument(
        "--rules",
        type=lambda text: set(text.split(",")),
        metavar="ID,ID",
        help="only vectors of these rules, for an unfinished reader: its output may lack "
        "entries and tensors",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--no-large", action="store_true", help="no vectors of more than 1 MiB")
    size.add_argument("--large-only", action="store_true", help="only vectors of more than 1 MiB")
    parser.add_argument(
        "--open",
        action="store_true",
        help="the command only opens the archive, and accepts faults of later stages",
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="readers to run at once"
    )
    parser.add_argument("--timeout", type=float, default=120, help="time limit for one vector")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--built",
        type=Path,
        metavar="DIR",
        help="keep large vectors in DIR (default: a temporary directory)",
    )
    arguments = parser.parse_args(argv)
    try:
        command = words_of(arguments.reader)
    except ValueError as error:
        parser.error(f"--reader: cannot be split into words: {error}")
    if not any("{archive}" in word for word in command):
        parser.error("--reader: expected {archive} in place of the path, found none")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json: expected a file in an existing directory, found {arguments.json}")
    vectors: list[dict[str, Any]] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
    for rule in sorted(arguments.rules or ()):
        if not any(is_of({rule}, vector) for vector in vectors):
            parser.error(f"--rules: no vector tests the rule {rule!r}")
    chosen = [
        vector
        for vector in vectors
        if arguments.only in vector["name"]
        and (arguments.rules is None or is_of(arguments.rules, vector))
        and not (arguments.no_large and vector.get("large"))
        and not (arguments.large_only and not vector.get("large"))
    ]
    if not chosen:
        parser.error("no vector matches all options")
    try:
        with folder_of_large(arguments.built) as built:
            if any(vector.get("large") for vector in chosen):
                make_large(vectors, built)
            is_partial = arguments.rules is not None
            check = Check(command, built, arguments.timeout, arguments.open, is_partial)
            results = run_all(check, chosen, arguments.jobs)
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
        try:
            arguments.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            parser.error(f"--json: {error}")
    return 1 if counts["failed"] else 0


def is_of(rules: set[str], vector: dict[str, Any]) -> bool:
    """True if the vector was made to break one of the rules, or shows what one of them permits."""
    return not rules.isdisjoint(vector["rules"] if vector["accepted"] else vector["rules"][:1])


@contextmanager
def folder_of_large(kept: Path | None) -> Iterator[Path]:
    """Gives the directory of the large vectors: `kept`, or a temporary directory."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def words_of(command: str) -> list[str]:
    """Splits a command into words; a word in quotation marks may contain spaces.

    Raises:
        ValueError: A quotation mark is not closed, or a backslash at the end escapes nothing.
    """
    if os.name != "nt":
        return shlex.split(command)
    # On Windows a backslash is a plain character, and shlex keeps the quotation marks.
    return [
        word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word
        for word in shlex.split(command, posix=False)
    ]


def make_large(vectors: list[dict[str, Any]], built: Path) -> None:
    """Makes the large vectors, unless the same programs have made them before.

    Raises:
        LargeVectorError: `conformance.make` failed, or a file could not be written.
    """
    wanted = [
        vector[field]
        for vector in vectors
        if vector.get("large")
        for field in ("file", "expected")
        if field in vector
    ]
    marker, made_from = built / MADE_FROM, digest_of_makers()
    is_marked = marker.is_file() and marker.read_bytes() == made_from.encode()
    if is_marked and all((built / file).exists() for file in wanted):
        return
    print("making the large vectors, which takes a minute", file=sys.stderr)
    try:
        marker.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "conformance.make", "--large", built.absolute()],
            cwd=SUITE.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode != 0:
            said = done.stderr.decode(errors="backslashreplace").strip().splitlines()
            raise LargeVectorError("; ".join([f"exit status {done.returncode}", *said[-1:]]))
        marker.write_text(made_from, encoding="ascii")
    except OSError as error:
        raise LargeVectorError(str(error)) from error


def digest_of_makers() -> str:
    """The SHA-256 of the manifest and the programs that make vectors, in hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (SUITE / "manifest.json", *sorted(MAKERS.glob("*.py"))):
        data = path.read_bytes()
        digest.update(b"%d %s %d\n" % (len(path.name), path.name.encode(), len(data)))
        digest.update(data)
    return digest.hexdigest()


def run_all(check: Check, chosen: Sequence[dict[str, Any]], jobs: int) -> list[Result]:
    """Runs the reader on the vectors, `jobs` at once; ends all commands if interrupted."""
    processes = Processes()
    task = partial(run, processes, check)
    with ThreadPoolExecutor(max(1, jobs)) as executor:
        try:
            return list(executor.map(task, chosen))
        except BaseException:
            processes.end()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def run(processes: Processes, check: Check, vector: dict[str, Any]) -> Result:
    """Runs the reader on one vector and compares the output."""
    with at_path(vector, check.built) as path:
        if path is None:
            return Result(vector["name"], "passed over", "this system cannot make such a file")
        words = [word.replace("{archive}", str(path)) for word in check.command]
        try:
            status, output, errors = processes.run(words, check.timeout)
        except subprocess.TimeoutExpired:
            return Result(vector["name"], "failed", f"took more than {check.timeout:g} seconds")
        except OSError as error:
            raise ReaderError(f"the reader does not start: {error}") from error
    if status != 0:
        outcome, reason = "failed", f"exit status {status}"
    else:
        try:
            outcome, reason = judge(check, vector, output)
        except RecursionError:
            outcome, reason = "failed", "expected one JSON object, found one nested too deep"
    said = errors.decode(errors="backslashreplace").strip()
    if outcome == "failed" and said:
        reason += f"; standard error: {said[-2000:]}"
    return Result(vector["name"], outcome, reason)


def judge(check: Check, vector: dict[str, Any], output: bytes) -> tuple[str, str]:
    """The outcome for the output of a reader, and the reason if the vector did not pass."""
    try:
        printed = json.loads(output.decode("utf-8"))
    except ValueError as error:  # no UTF-8, no JSON, or a number of too many digits
        return "failed", f"expected one JSON object: {error}"
    if not isinstance(printed, dict):
        return "failed", "expected one JSON object, found another value"
    if printed.get("accepted") is None and vector.get("large"):
        return "passed over", str(printed.get("message"))
    reason = difference(check, vector, printed)
    return ("failed", reason) if reason else ("passed", "")


@contextmanager
def at_path(vector: dict[str, Any], built: Path) -> Iterator[Path | None]:
    """The path of a vector during the block; None if this system cannot make the file."""
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


def difference(check: Check, vector: dict[str, Any], printed: dict[str, Any]) -> str:
    """The fault in the output of a reader; empty if the output is right."""
    accepted, rule = printed.get("accepted"), printed.get("rule")
    is_late = check.only_open and not vector["accepted"] and vector["stage"] != "open"
    if accepted is not (vector["accepted"] or is_late):
        wanted = f"refused ({', '.join(vector['rules'])})"
        if is_late:
            rules = ", ".join(vector["rules"])
            wanted = (
                f"accepted, since --open does not reach the stage {vector['stage']!r} ({rules})"
            )
        elif vector["accepted"]:
            wanted = "accepted"
        found = json.dumps(printed, ensure_ascii=False)[:400]
        return f"{vector['about']} Expected: {wanted}; found: {found}"
    if not accepted:
        if rule is None or rule in vector["rules"]:
            return ""
        message = printed.get("message")
        return f"{vector['about']} Expected {' or '.join(vector['rules'])}, found {rule}: {message}"
    if is_late:
        return ""  # the manifest has no `entries` for a file that breaks a rule
    expected = expectation(vector, check.built)
    if check.is_partial:
        printed = {field: expected[field] for field in ("entries", "tensors")} | printed
    tensor_fields = TENSOR_FIELDS_ONCE_OPEN if check.only_open else TENSOR_FIELDS
    try:
        entries = [ordered(entry, ENTRY_FIELDS) for entry in printed["entries"]]
        tensors = by_model_and_key(printed["tensors"], tensor_fields)
        count = len(printed["tensors"])
    except (KeyError, TypeError, ValueError) as error:
        return f"expected entries and tensors in the form of the README: {error!r}"
    wanted_entries = [ordered(entry, ENTRY_FIELDS) for entry in expected["entries"]]
    if entries != wanted_entries:
        return "entries: " + first_difference(wanted_entries, entries, len(entries))
    wanted_tensors = by_model_and_key(expected["tensors"], tensor_fields)
    if tensors != wanted_tensors or count != len(wanted_tensors):
        values = [*wanted_tensors.values()]
        return "tensors: " + first_difference(values, [*map(tensors.get, wanted_tensors)], count)
    return ""


def by_model_and_key(
    tensors: list[dict[str, Any]], fields: Sequence[str]
) -> dict[tuple[str, str], list[Any]]:
    """The fields of each tensor, in the order of `fields`, by model id and key."""
    return {(it["model"], it["key"]): ordered(it, fields) for it in tensors}


def expectation(vector: dict[str, Any], built: Path) -> dict[str, Any]:
    """The expected `entries` and `tensors` of a vector."""
    if vector.get("kind") == "symlink":
        vectors = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
        vector = next(it for it in vectors if it["name"] == vector["target"])
    if "expected" in vector:
        expected: dict[str, Any] = json.loads((built / vector["expected"]).read_bytes())
        return expected
    return vector


def ordered(given: dict[str, Any], fields: Sequence[str]) -> list[Any]:
    """The values of an entry or tensor in the order of `fields`, with numbers as int.

    Raises:
        ValueError: A value is not a number, or dims is not a list.
    """
    values = []
    for field in fields:
        value = given[field]
        if field == "dims":
            if not isinstance(value, list):
                raise ValueError(f"expected dims in a list, found {value!r}")
            value = [number(dim) for dim in value]
        elif field not in ("model", "name", "key", "sha256"):
            value = number(value)
        values.append(value)
    return values


def number(value: Any) -> int:
    """Converts a JSON number or a string of decimal digits to int."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch("[0-9]+", value):
        return int(value)
    raise ValueError(f"expected a number, found {value!r}")


def first_difference(expected: list[Any], found: list[Any], count: int) -> str:
    """Describes the first element that differs, or else the numbers of elements.

    Args:
        expected: The expected elements.
        found: The found elements in the same order; None for a missing one.
        count: The number of elements in the output of the reader.
    """
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"expected {one} at {index}, found {other}"
    return f"expected {len(expected)}, found {count}"


if __name__ == "__main__":
    sys.exit(main())
