"""Changes of the readers in C and JavaScript, and the list of those that no vector notices."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tools.fuzz import mutate_text

PROGRAM = {
    "c": """
/* if (a comment) return 0; */
static int check(int size, int kind) {
    if (size > 3 || kind) return onnxa__refuse("A-1", "if (x) return 0;");
    for (kind = 0; kind < 3; kind++) size <<= 1;
    if (size == 2) size = 1;
    return size >= 1 && kind;
}
""",
    "javascript": """
// if (a comment) refuse();
function check(size, kind) {
  if (size > 3 || kind) refuse('A-1', `if (x) ${size && kind}`);
  for (let i = 0; i < 3; i++) size <<= 1;
  if (size === 2) size = 1;
  return /a&&b/.test(size) && [size].map((it) => it >= 1);
}
""",
}


def changed_lines(reader: str, folder: Path) -> dict[str, str]:
    """The changed line of each change of a program."""
    (folder / "program").write_text(PROGRAM[reader])
    changes = mutate_text.changes(
        replace(mutate_text.READERS[reader], folder=folder, files=("program",))
    )
    before = PROGRAM[reader].splitlines()
    lines = {}
    for change in changes:
        after = change.text.splitlines()
        ((line, changed),) = (
            (number, other)
            for number, (one, other) in enumerate(zip(before, after, strict=True), 1)
            if one != other
        )
        assert change.line == line
        assert line != 4 or change.rules == {"A-1"}
        lines[change.name] = changed.strip()
    return lines


def test_each_condition_in_c_is_changed_once_and_no_comment_text_or_loop(tmp_path: Path) -> None:
    refused = 'return onnxa__refuse("A-1", "if (x) return 0;");'
    assert changed_lines("c", tmp_path) == {
        "check: size > 3 || kind: dropped": f"if (0) {refused}",
        "check: size > 3: left out": f"if (0 || kind) {refused}",
        "check: kind: left out": f"if (size > 3 || 0) {refused}",
        "check: size > 3: bound moved": f"if (size >= 3 || kind) {refused}",
        "check: size >= 1: left out": "return 1 && kind;",
        "check: size >= 1: bound moved": "return size > 1 && kind;",
        "check: kind: left out (2)": "return size >= 1 && 1;",
    }


def test_each_condition_in_javascript_is_changed_once_and_no_text(tmp_path: Path) -> None:
    refused = "refuse('A-1', `if (x) ${size && kind}`);"
    assert changed_lines("javascript", tmp_path) == {
        "check: size > 3 || kind: dropped": f"if (false) {refused}",
        "check: size > 3: left out": f"if (false || kind) {refused}",
        "check: kind: left out": f"if (size > 3 || false) {refused}",
        "check: size > 3: bound moved": f"if (size >= 3 || kind) {refused}",
        "check: /a&&b/.test(size): left out": "return true && [size].map((it) => it >= 1);",
        "check: [size].map((it) => it >= 1): left out": "return /a&&b/.test(size) && true;",
        "check: it >= 1: bound moved": "return /a&&b/.test(size) && [size].map((it) => it > 1);",
    }


NEEDED = {"c": "cc", "javascript": "node"}


@pytest.mark.tool
@pytest.mark.parametrize(
    ("reader", "part"), [("c", "onnxa__header_size"), ("javascript", "layOut")]
)
def test_vectors_notice_every_change_but_the_listed_ones(
    reader: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(NEEDED[reader]) is None:
        pytest.skip(f"{NEEDED[reader]} is not installed")
    assert mutate_text.main([reader, "--only", part]) == 0
    printed = capsys.readouterr().out
    assert " 0 unnoticed and not listed; " in printed
    assert not printed.startswith("0 changes")


@pytest.mark.parametrize("reader", mutate_text.READERS)
def test_listed_changes_exist_and_have_reasons(reader: str) -> None:
    reasons = mutate_text.reasons(reader)
    assert {*reasons} <= {
        change.name for change in mutate_text.changes(mutate_text.READERS[reader])
    }
    assert all(reasons.values())


def test_an_unnoticed_change_and_a_wrong_entry_of_the_list_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_text, "first_noticing", lambda *_: None)
    monkeypatch.setattr(mutate_text, "reasons", lambda _: {"layOut: gone": "a reason"})
    assert mutate_text.main(["javascript", "--only", "layOut"]) == 1
    *unnoticed, wrong, summary = capsys.readouterr().out.splitlines()
    assert unnoticed
    assert all(it.startswith("onnxa.mjs:") for it in unnoticed)
    assert wrong == (
        "listed as unnoticed, but a vector notices it, or no such change exists: layOut: gone"
    )
    assert f" {len(unnoticed)} unnoticed and not listed; " in summary
