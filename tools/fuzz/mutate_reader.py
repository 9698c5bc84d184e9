#!/usr/bin/env python3
"""Changes one condition of the Python reader at a time; lists the changes that no vector notices.

    python3 tools/dev.py python tools/fuzz/mutate_reader.py
    python3 tools/dev.py python tools/fuzz/mutate_reader.py --large DIR

Each change disables an `if` that refuses, removes an operand of an `and` or `or`, removes a call of
`_expect` or one pair of its compared values, or moves a bound or a limit by one. Each changed
reader reads the small vectors, in this process, up to the first vector with a wrong output. With
`--large`, a change that no small vector notices and that is not in `EQUIVALENT` is also tried on
the large vectors in DIR (made by `python3 -m conformance.make --large DIR`). An unnoticed change
needs a new vector or an entry in `EQUIVALENT`.

Takes half a minute, or ten minutes with large vectors. Exit status: 0 if the unnoticed changes are
exactly those in `EQUIVALENT` (without `--large`: those in `EQUIVALENT` and `NOTICED_BY_LARGE`);
otherwise 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias, TypeGuard

from conformance import run as runner

if sys.platform != "win32":
    import resource

ROOT: Final = Path(__file__).resolve().parents[2]
SUITE: Final = ROOT / "conformance"
READER: Final = SUITE / "readers" / "python" / "onnxa_reader.py"

SECONDS: Final = 5  # time limit for a small vector
SECONDS_OF_LARGE: Final = 300
MEMORY: Final = 4 << 30  # limit of the address space: allocating an unchecked size then fails
Vector: TypeAlias = dict[str, Any]  # an entry of manifest.json
REFUSING: Final = ("_refuse", "_corrupt")

NOTICED_BY_LARGE: Final[frozenset[str]] = frozenset(
    {
        "module: _MAX_ENTRIES: -1",
        "module: _MAX_ENTRIES: +1",
        "module: _MAX_MESSAGES: -1",
        "module: _MAX_MESSAGES: +1",
        "_read_directory: directory.count > _MAX_ENTRIES: dropped",
        "_read_directory: directory.count > _MAX_ENTRIES: bound moved",
        "_read_end: 'ZIP64-1' 'values of the end record': removed",
        "_read_end64: 'ZIP-3' 'disk and number of disks in the Zip64 locator': removed",
        "_read_end64: 'ZIP-3' 'disk and number of disks in the Zip64 locator': without `disk`",
        "_read_end64: 'ZIP-3' 'disk and number of disks in the Zip64 locator': without `disks`",
        "_read_end64: 'ZIP64-3' 'offset in the Zip64 locator': removed",
        "_read_end64: 'ZIP64-3' 'signature of the Zip64 end record': removed",
        "_read_end64: 'ZIP64-2' 'size and version of the Zip64 end record': removed",
        "_read_end64: 'ZIP64-2' 'size and version of the Zip64 end record': without `rest`",
        "_read_end64: 'ZIP64-2' 'size and version of the Zip64 end record': without `needed`",
        "_read_end64: 'ZIP-3' 'disks in the Zip64 end record': removed",
        "_read_end64: 'ZIP-3' 'disks in the Zip64 end record': without `disk`",
        "_read_end64: 'ZIP-3' 'disks in the Zip64 end record': without `directory_disk`",
        "_read_end64: values[1] < _FULL16: bound moved",
        "_read_end64: max(values[2:]) < _FULL32: bound moved",
        "_parse_record: 'ZIP-10' 'version needed with a Zip64 field': removed",
        "_parse_record: 'ZIP-8' 'compressed size in the Zip64 field': removed",
        "_parse_zip64: value < _FULL32: bound moved",
        "_check_false_ends: any((signature in data for signature in _SIGNATURES_OF_END)): dropped",
        "_unpadded: entry.nbytes < _FULL32: bound moved",
        "_check_header: entry.nbytes >= _FULL32: bound moved",
        "_check_header: 'ZIP-14' 'id of the first extra field': removed",
        "_check_header: 'ZIP64-5' 'Zip64 field of the local header': removed",
        "_check_models: entry.is_model and entry.nbytes > _MAX_MODEL: dropped",
        "_parse_messages: messages > _MAX_MESSAGES: dropped",
        "_parse_messages: messages > _MAX_MESSAGES: bound moved",
    }
)
"""Changes that only large vectors (more than 1 MiB) notice."""
EQUIVALENT: Final[dict[str, str]] = {
    "check_path: os.path.exists(path) and (not os.path.isfile(path)): dropped": (
        "only a socket meets the condition (on Windows also a directory): the suite has no socket"
    ),
    "_json_number: value < 1 << 53: bound moved": (
        "the suite accepts 2^53 as a JSON number and as a string"
    ),
    "_read_end: before[-_LOCATOR.size:].startswith(b'PK\\x06\\x07'): dropped": (
        "ZIP-5 is broken, too: the directory does not end where the end record begins"
    ),
    "_parse_record: end > len(data): dropped": (
        "a later check refuses the file: the record does not end where the directory ends"
    ),
    "_check_false_ends: offset < _FULL32: bound moved": (
        "0xFFFFFFFF in 4 or 8 bytes contains no signature"
    ),
    "_check_header: 'ALIGN-2' 'data offset modulo alignment': removed": (
        "ALIGN-3 is broken, too: the shortest padding ends at a multiple of the alignment"
    ),
    "_check_models: entry.nbytes > _MAX_MODEL: bound moved": (
        "needs a model of 2 GiB - 1 bytes: too much memory for a suite"
    ),
    "child: len(self.pairs) < 5: bound moved": (
        "five pairs are already wrong: there are four keys"
    ),
}
"""Changes that no vector notices, each with the reason."""


@dataclass(frozen=True)
class Change:
    """A change of the reader.

    Attributes:
        name: Function, condition and kind of change.
        line: The line of the condition.
        rules: All strings in the changed statement or expression. The rule id is among them if the
            statement is an `if` that refuses or a call of `_expect`.
        tree: The program with the change.
    """

    name: str
    line: int
    rules: frozenset[str]
    tree: ast.Module

    def sorted(self, vectors: Sequence[Vector]) -> list[Vector]:
        """Sorts vectors: those of `rules` first; within both groups, refused before accepted."""
        return sorted(vectors, key=lambda it: (self.rules.isdisjoint(it["rules"]), it["accepted"]))


class TooSlow(Exception):  # noqa: N818 - not an error of the program
    """A changed reader exceeded the time limit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Tries all changes and prints the unnoticed ones; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PART", help="changes with PART in the name")
    parser.add_argument("--large", type=Path, metavar="DIR", help="directory of the large vectors")
    arguments = parser.parse_args(argv)
    begin = time.monotonic()
    text = READER.read_text(encoding="utf-8")
    vectors: list[Vector] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
    small = [vector for vector in vectors if not vector.get("large")]
    large = [vector for vector in vectors if vector.get("large")]
    checks = runner.Check([], SUITE, SECONDS, only_open=False, is_partial=False)
    if (name := first_noticing(ast.parse(text), small, checks)) is not None:
        raise SystemExit(f"the unchanged reader fails: {name}")
    chosen = [*changes(text, arguments.only)]
    unnoticed = [it for it in chosen if first_noticing(it.tree, it.sorted(small), checks) is None]
    if arguments.large is not None:
        checks = runner.Check([], arguments.large, SECONDS_OF_LARGE, False, is_partial=False)
        listed = [*EQUIVALENT]
        unnoticed = [
            it
            for it in unnoticed
            if it.name in EQUIVALENT or first_noticing(it.tree, it.sorted(large), checks) is None
        ]
    else:
        listed = [*EQUIVALENT, *NOTICED_BY_LARGE]
    listed = [name for name in listed if arguments.only in name]
    surviving = {change.name for change in unnoticed}
    for change in unnoticed:
        if change.name not in listed:
            print(f"{READER.name}:{change.line}: {change.name}")
    for name in sorted({*listed} - surviving):
        print(f"listed as unnoticed, but a vector notices it, or no such change exists: {name}")
    print(
        f"{len(chosen)} changes, {len(chosen) - len(surviving)} noticed, "
        f"{len(surviving.intersection(listed))} unnoticed and listed, "
        f"{len(surviving.difference(listed))} unnoticed and not listed; "
        f"{time.monotonic() - begin:.0f} s"
    )
    return 1 if surviving != {*listed} else 0


# The changes


def changes(text: str, only: str = "") -> Iterator[Change]:
    """Yields the changes whose names contain `only`, in the order of the program's lines."""
    tree = ast.parse(text)
    functions = function_names(tree)
    nodes = [*ast.walk(tree)]
    found = [
        (getattr(node, "lineno", 0), index, number, what)
        for index, node in enumerate(nodes)
        for number, (what, _) in enumerate(edits(node))
    ]
    for line, index, number, what in sorted(found):
        node = nodes[index]
        name = f"{functions.get(node, 'module')}: {quoted(node)}: {what}"
        if only not in name:
            continue
        strings = (it.value for it in ast.walk(node) if isinstance(it, ast.Constant))
        rules = frozenset(it for it in strings if isinstance(it, str))
        changed = ast.parse(text)
        target = next(islice(ast.walk(changed), index, None))  # the node in the copy
        _, edit = [*edits(target)][number]
        edit()
        yield Change(name, line, rules, ast.fix_missing_locations(changed))


def quoted(node: ast.AST) -> str:
    """A condition as text.

    Returns:
        For a limit, its name; for a call of `_expect`, the rule and the description; otherwise the
        source code of the condition.
    """
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.Expr) and is_call(node.value, "_expect"):
        return " ".join(map(ast.unparse, node.value.args[:2]))
    return ast.unparse(node.test if isinstance(node, ast.If) else node)


def function_names(tree: ast.Module) -> dict[ast.AST, str]:
    """The name of the innermost function or class around each node."""
    names: dict[ast.AST, str] = {}
    for outer in ast.walk(tree):  # outer functions come first
        if isinstance(outer, ast.FunctionDef | ast.ClassDef):
            names.update((inner, outer.name) for inner in ast.walk(outer))
    return names


def edits(node: ast.AST) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields the changes of a node: a description, and a function that makes the change."""
    if isinstance(node, ast.If) and refuses(node.body):
        yield "dropped", partial(setattr, node, "test", ast.Constant(False))
    if isinstance(node, ast.BoolOp):
        for index, value in enumerate(node.values):
            yield f"without `{ast.unparse(value)}`", partial(node.values.pop, index)
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if type(operator) in MOVED:
                words = f"bound {index + 1} moved" if len(node.ops) > 1 else "bound moved"
                yield words, partial(node.ops.__setitem__, index, MOVED[type(operator)]())
    if isinstance(node, ast.Expr) and is_call(node.value, "_expect"):
        yield "removed", partial(setattr, node, "value", ast.Constant(None))
        expected, found = node.value.args[2:4]
        if isinstance(expected, ast.Tuple) and isinstance(found, ast.Tuple):
            for index, value in enumerate(found.elts):
                yield f"without `{ast.unparse(value)}`", partial(leave_out, node.value, index)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        limit = node.value.value
        if ast.unparse(node.targets[0]).startswith("_MAX_") and isinstance(limit, int):
            for step in (-1, 1):
                yield f"{step:+}", partial(setattr, node.value, "value", limit + step)


MOVED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


def leave_out(call: ast.Call, index: int) -> None:
    """Leaves out one pair of the values that a call of `_expect` compares."""
    for argument in call.args[2:4]:
        assert isinstance(argument, ast.Tuple)
        argument.elts.pop(index)


def refuses(body: Sequence[ast.stmt]) -> bool:
    """True if statements end in a refusal."""
    last = body[-1]
    if isinstance(last, ast.If):
        return refuses(last.body)
    return isinstance(last, ast.Raise) or (
        isinstance(last, ast.Expr) and any(is_call(last.value, name) for name in REFUSING)
    )


def is_call(node: ast.expr, name: str) -> TypeGuard[ast.Call]:
    """True if the expression calls the function `name`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


# The vectors


def first_noticing(tree: ast.Module, vectors: Sequence[Vector], check: runner.Check) -> str | None:
    """Name of the first vector for which a reader's output is wrong, or None if there is none.

    If the reader cannot be imported, returns a message instead of a name.
    """
    reader = ModuleType("changed_reader")
    sys.modules[reader.__name__] = reader  # where dataclasses look for their module
    try:
        exec(compile(tree, READER.name, "exec"), reader.__dict__)
    except Exception:
        return "the reader cannot be imported"
    for vector in vectors:
        if not passes(vector, check, partial(_printed, reader, check.timeout)):
            return str(vector["name"])
    return None


def _printed(reader: ModuleType, timeout: float, path: Path | None, is_full: bool) -> Any:
    """What a reader prints for a file; None if it fails."""
    with time_limit(timeout):
        try:
            return reader.describe(reader.check_path(path, is_full=is_full))
        except reader.Refused as error:
            return reader.refusal(error)
        except Exception:
            return None


def passes(
    vector: Vector, check: runner.Check, printed_for: Callable[[Path | None, bool], Any]
) -> bool:
    """True if a reader's output for a vector is right, both for opening and for the full check.

    `printed_for` gives the output for a path, of the full check or of opening alone; None if the
    reader fails.
    """
    for only_open in (True, False):
        with runner.at_path(vector, check.built) as path:
            printed = printed_for(path, not only_open)
        if printed is None:
            return False
        if runner.difference(replace(check, only_open=only_open), vector, printed):
            return False
        if not printed["accepted"]:  # a full check refuses the vector, too
            return True
    return True


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TooSlow` in a block that takes too long."""

    def stop(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.exit(main())
