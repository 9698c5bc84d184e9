#!/usr/bin/env python3
"""Changes one condition of the reader in C or in JavaScript at a time, like `mutate_reader.py`.

    python3 tools/dev.py python tools/fuzz/mutate_text.py c
    python3 tools/dev.py python tools/fuzz/mutate_text.py javascript --large DIR

Both readers are changed as text: an `if` that refuses is disabled, an operand of `&&` or `||` is
left out, or a bound is moved by one. A changed reader reads the small vectors, up to the first
vector with a wrong output. With `--large`, a change that no small vector notices also reads the
large vectors in DIR (made by `python3 -m conformance.make --large DIR`).

`unnoticed.csv`, beside this file, lists the changes that no vector notices, each with the reason,
and those that only a large vector notices. Exit status: 0 if the unnoticed changes are exactly the
listed ones; otherwise 1. Takes some minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from conformance import run as runner
from tools.fuzz.mutate_reader import passes

ROOT: Final = Path(__file__).resolve().parents[2]
SUITE: Final = ROOT / "conformance"
UNNOTICED: Final = Path(__file__).with_name("unnoticed.csv")
ONLY_LARGE: Final = "noticed by a large vector"  # the reason in `UNNOTICED`
SECONDS: Final = 10  # time limit for a small vector
SECONDS_OF_LARGE: Final = 300
END_OF_OUTPUT: Final = "\x1e"  # a line after the output for each vector
RULE: Final = re.compile(r"\b(?:[A-Z]+|ZIP64)-\d+\b")
Vector: TypeAlias = dict[str, Any]  # an entry of manifest.json

# Reads lines of the form "open PATH" or "full PATH", and gives each to the program as arguments.
C_DRIVER: Final = """
#define main read_main
#include "read.c"
#undef main
int main(void) {
    static char line[65536], *words[3] = {"read", NULL, NULL};
    while (fgets(line, sizeof line, stdin)) {
        int is_open = !strncmp(line, "open ", 5);
        line[strcspn(line, "\\n")] = 0;
        words[1] = is_open ? "--open" : line + 5;
        words[2] = line + 5;
        if (read_main(is_open ? 3 : 2, words)) puts("failed");
        puts("\\x1e");
        fflush(stdout);
    }
    return 0;
}
"""
JAVASCRIPT_DRIVER: Final = """
import { createInterface } from 'node:readline';
let number = 0;
for await (const line of createInterface({ input: process.stdin })) {
  const [mode, path] = [line.slice(0, 4), line.slice(5)];
  process.argv = ['node', 'read.mjs', ...(mode === 'open' ? ['--open'] : []), path];
  await import(`./read.mjs?${number++}`);
  process.stdout.write('\\n\\x1e\\n');
}
"""


@dataclass(frozen=True)
class Reader:
    """A reader, and how its text is changed.

    Attributes:
        folder: Its directory.
        files: The files to change.
        driver: Name and text of a program that reads one vector after the other.
        build: The command that compiles the driver in the directory, or checks the syntax.
        run: The command that runs the driver.
        refuses: Matches a statement that refuses.
        functions: Matches the first line of a function; the group is its name.
        truth: True and false in the language.
        left_out: Functions without conditions of the format.
    """

    folder: Path
    files: tuple[str, ...]
    driver: tuple[str, str]
    build: tuple[str, ...]
    run: tuple[str, ...]
    refuses: re.Pattern[str]
    functions: re.Pattern[str]
    truth: tuple[str, str]
    left_out: frozenset[str]


READERS: Final = {
    "c": Reader(
        folder=SUITE / "readers" / "c",
        files=("onnxa.h", "nfc.h"),
        driver=("driver.c", C_DRIVER),
        build=("cc", "-std=c99", "-g0", "-O0", "-w", "-fsanitize=address", "driver.c", "-o", "run"),
        run=("./run",),
        refuses=re.compile(r"onnxa__refuse|return 0;"),
        functions=re.compile(r"^\w[^;=()]*?\b(\w+)\([^;]*\{$", re.MULTILINE | re.DOTALL),
        truth=("1", "0"),
        left_out=frozenset(
            f"onnxa_{name}"
            for name in (
                *("_show", "_write", "_no_memory", "_allocate", "_allocate_dims"),
                *("_next_block_size", "_sort", "_sha1", "_sha1_block"),
                *("type_name", "get_entry", "get_model", "find_tensor"),
            )
        ),
    ),
    "javascript": Reader(
        folder=SUITE / "readers" / "javascript",
        files=("onnxa.mjs",),
        driver=("driver.mjs", JAVASCRIPT_DRIVER),
        build=("node", "--check", "onnxa.mjs"),
        run=("node", "driver.mjs"),
        refuses=re.compile(r"\brefuse\(|#fail\(|\bthrow "),
        functions=re.compile(
            r"^(?:export |  (?! ))*(?:async |static |function\*? ?|const |\*)*"
            r"(?!if\b|for\b|while\b|switch\b|return\b)(#?\w+)(?: = (?:async )?)?\(.*\{$",
            re.MULTILINE,
        ),
        truth=("true", "false"),
        left_out=frozenset(
            ("refuse", "httpSource", "abandon", "readExactly", "#holds", "update", "#compress")
        )
        | {"constructor", "read"},
    ),
}


@dataclass(frozen=True)
class Change:
    """A change of a file of a reader.

    Attributes:
        name: Function, condition and kind of change.
        file: Name of the file.
        line: The line of the change.
        rules: The rules that the changed statement names.
        text: The file with the change.
    """

    name: str
    file: str
    line: int
    rules: frozenset[str]
    text: str

    def sorted(self, vectors: Sequence[Vector]) -> list[Vector]:
        """Sorts vectors: those of `rules` first; within both groups, refused before accepted."""
        return sorted(vectors, key=lambda it: (self.rules.isdisjoint(it["rules"]), it["accepted"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Tries all changes and prints the unnoticed ones; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--only", default="", metavar="PART", help="changes with PART in the name")
    parser.add_argument("--large", type=Path, metavar="DIR", help="directory of the large vectors")
    arguments = parser.parse_args(argv)
    begin = time.monotonic()
    reader = READERS[arguments.reader]
    vectors: list[Vector] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
    small = [vector for vector in vectors if not vector.get("large")]
    large = [vector for vector in vectors if vector.get("large")]
    if (name := first_noticing(reader, None, small, SUITE)) is not None:
        raise SystemExit(f"the unchanged reader fails: {name}")
    chosen = [it for it in changes(reader) if arguments.only in it.name]

    def is_unnoticed(change: Change) -> bool:
        if first_noticing(reader, change, change.sorted(small), SUITE) is not None:
            return False
        if arguments.large is None or listed.get(change.name, ONLY_LARGE) != ONLY_LARGE:
            return True
        return first_noticing(reader, change, change.sorted(large), arguments.large) is None

    listed = reasons(arguments.reader)
    with ThreadPoolExecutor(2) as executor:
        unnoticed = [
            change
            for change, survives in zip(chosen, executor.map(is_unnoticed, chosen), strict=True)
            if survives
        ]
    expected = {
        name
        for name, reason in listed.items()
        if arguments.only in name and (arguments.large is None or reason != ONLY_LARGE)
    }
    surviving = {change.name for change in unnoticed}
    for change in unnoticed:
        if change.name not in expected:
            print(f"{change.file}:{change.line}: {change.name}")
    for name in sorted(expected - surviving):
        print(f"listed as unnoticed, but a vector notices it, or no such change exists: {name}")
    print(
        f"{len(chosen)} changes, {len(chosen) - len(surviving)} noticed, "
        f"{len(surviving & expected)} unnoticed and listed, "
        f"{len(surviving - expected)} unnoticed and not listed; {time.monotonic() - begin:.0f} s"
    )
    return 1 if surviving != expected else 0


def reasons(reader: str) -> dict[str, str]:
    """The reasons in `UNNOTICED` for the changes of a reader, by name."""
    with UNNOTICED.open(newline="", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    return {row["change"]: row["why"] for row in rows if row["reader"] == reader}


# The changes


def changes(reader: Reader) -> list[Change]:
    """All changes of a reader, in the order of its lines; their names are unique."""
    listed: list[Change] = []
    names: dict[str, int] = {}
    for file in reader.files:
        text = (reader.folder / file).read_text(encoding="utf-8")
        code = masked(text)
        functions = [(it.start(), it[1]) for it in reader.functions.finditer(code)]
        for edit in sorted(edits(reader, code)):
            start = edit.start
            function = next((it for at, it in reversed(functions) if at <= start), "file")
            if function in reader.left_out:
                continue
            shown = " ".join(text[start : edit.end].split())
            name = f"{function}: {shown}: {edit.what}"
            names[name] = names.get(name, 0) + 1
            if names[name] > 1:
                name = f"{name} ({names[name]})"
            rules = RULE.findall(text[start : start + 600])[:1]
            line = text.count("\n", 0, start) + 1
            changed = text[: edit.span[0]] + edit.new + text[edit.span[1] :]
            listed.append(Change(name, file, line, frozenset(rules), changed))
    return listed


@dataclass(frozen=True, order=True)
class Edit:
    """A replacement in a text.

    Attributes:
        start: Where the shown part of the text begins.
        end: Where the shown part of the text ends.
        what: What the edit does.
        new: The new text.
        span: What the new text replaces.
    """

    start: int
    end: int
    what: str
    new: str
    span: tuple[int, int]


def edits(reader: Reader, code: str) -> set[Edit]:
    """The edits of a masked text."""
    true, false = reader.truth
    found: set[Edit] = set()
    for match in re.finditer(r"\bif \(", code):
        start, end = match.end(), closing(code, match.end() - 1)
        if reader.refuses.search(code[end + 1 : end_of_statement(code, end + 1)]):
            found.add(Edit(start, end, "dropped", false, (start, end)))
    for match in re.finditer(r"&&|\|\|", code):
        identity = true if match[0] == "&&" else false
        left = before(code, match.start(), match[0])
        right = after(code, match.end(), match[0])
        found.update(Edit(*span, "left out", identity, span) for span in (left, right))
    headers = [
        range(match.end(), closing(code, match.end() - 1))
        for match in re.finditer(r"\bfor (?:await )?\(", code)
    ]
    for match in re.finditer(r"(?<![<>=-])(<=|>=|<|>)(?![<>=])", code):
        if not any(match.start() in header for header in headers):
            start = before(code, match.start(), match[0])[0]
            end = after(code, match.end(), match[0])[1]
            found.add(Edit(start, end, "bound moved", MOVED[match[0]], match.span()))
    return found


MOVED: Final = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
TEXTS: Final = re.compile(
    r"/\*.*?\*/|//[^\n]*"  # comments
    r"|`(?:\\.|[^`\\])*`|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"  # strings and characters
    r"|^#(?:[^\n\\]|\\.|\\\n)*"  # directives of C
    r"|(?:(?<=[(!])|(?<=[(,=:!&|?] )|(?<=return ))/(?![/*])(?:\\.|\[[^\]\n]*\]|[^/\\\n\[])+/\w*",
    re.DOTALL | re.MULTILINE,
)
"""Parts of a program that hold no condition; the last one is a regular expression."""


def masked(text: str) -> str:
    """The text with blanks in place of comments, and with NUL in place of other texts."""

    def mask(match: re.Match[str]) -> str:
        is_comment = match[0].startswith(("/*", "//", "#"))
        return re.sub(r"[^\n]", " " if is_comment else "\0", match[0])

    return TEXTS.sub(mask, text)


def closing(code: str, opening: int) -> int:
    """The position of the bracket that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(code)):
        depth += (code[position] in "([{") - (code[position] in ")]}")
        if depth == 0:
            return position
    raise ValueError(f"expected a closing bracket for the one at {opening}, found none")


def end_of_statement(code: str, start: int) -> int:
    """The end of the statement at `start`: a block, or all up to a semicolon."""
    first = re.compile(r"\s*").match(code, start)
    assert first is not None
    if code[first.end()] == "{":
        return closing(code, first.end()) + 1
    position = start
    while code[position] != ";":
        position = closing(code, position) if code[position] in "([{" else position
        position += 1
    return position + 1


# What ends an operand of each operator, at its own depth of brackets.
_WEAKER: Final = r"[,;?:{}]|(?<![=!<>])=(?![=>])|=>|\breturn\b|\|\|"
ENDS: Final = {
    "||": re.compile(_WEAKER),
    "&&": re.compile(_WEAKER + r"|&&"),
    **dict.fromkeys(("<", "<=", ">", ">="), re.compile(_WEAKER + r"|&&|[=!]=")),
}


def after(code: str, start: int, operator: str) -> tuple[int, int]:
    """The right operand of an operator that ends at `start`."""
    position = start
    while position < len(code) and code[position] not in ")]}":
        if code[position] in "([{":
            position = closing(code, position) + 1
            continue
        if ENDS[operator].match(code, position):
            break
        position += 1
    return trimmed(code, start, position)


def before(code: str, end: int, operator: str) -> tuple[int, int]:
    """The left operand of an operator that begins at `end`."""
    position = end
    depth = 0
    while position > 0:
        previous = code[position - 1]
        if previous in ")]":
            depth += 1
        elif previous in "([{}":
            if depth == 0:
                break
            depth -= 1
        elif depth == 0:
            if previous in ",;?:" or code[position - 2 : position] == "||":
                break
            if code[position - 2 : position] == "&&":
                break
            is_assigned = re.search(r"(?<![=!<>])=$", code[position - 2 : position])
            if is_assigned and code[position] != "=":
                break
            if re.search(r"=>$|\breturn $", code[max(0, position - 8) : position]):
                break
            if operator[0] in "<>" and code[position - 2 : position] in ("==", "!="):
                break
        position -= 1
    return trimmed(code, position, end)


def trimmed(code: str, start: int, end: int) -> tuple[int, int]:
    """The span without blanks at both ends."""
    while start < end and code[start] in " \n":
        start += 1
    while end > start and code[end - 1] in " \n":
        end -= 1
    return start, end


# The vectors


def first_noticing(
    reader: Reader, change: Change | None, vectors: Sequence[Vector], built: Path
) -> str | None:
    """Name of the first vector for which a reader's output is wrong, or None if there is none.

    Raises:
        ValueError: The reader cannot be compiled.
    """
    is_large = built != SUITE
    check = runner.Check([], built, SECONDS_OF_LARGE if is_large else SECONDS, False, False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "reader"
        shutil.copytree(reader.folder, folder)
        (folder / reader.driver[0]).write_text(reader.driver[1], encoding="utf-8")
        if change is not None:
            (folder / change.file).write_text(change.text, encoding="utf-8")
        build = [word for word in reader.build if not (is_large and "sanitize" in word)]
        if subprocess.run(build, cwd=folder, capture_output=True).returncode != 0:
            raise ValueError(f"the reader cannot be compiled: {change and change.name}")
        with session(reader, folder) as process:
            for vector in vectors:
                if not passes(vector, check, partial(_printed, process, check.timeout)):
                    return str(vector["name"])
    return None


@contextmanager
def session(reader: Reader, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs the driver during the block."""
    with subprocess.Popen(
        reader.run,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _printed(
    process: subprocess.Popen[str], timeout: float, path: Path | None, is_full: bool
) -> Any:
    """What the driver prints for a file; None if that is no JSON."""
    try:
        return json.loads(output(process, f"{'full' if is_full else 'open'} {path}", timeout))
    except ValueError:
        return None


def output(process: subprocess.Popen[str], line: str, seconds: float) -> str:
    """What the driver prints for a line; ends the driver if this takes too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        printed = iter(process.stdout.readline, "")
        lines: list[str] = []
        for text in printed:
            if text.strip("\n") == END_OF_OUTPUT:
                return "".join(lines)
            lines.append(text)
    except OSError:  # the driver has ended
        pass
    finally:
        timer.cancel()
    return ""


if __name__ == "__main__":
    sys.exit(main())
