"""tools/fuzz/mutate_reader.py on a small program, and on a function of the reader."""

from __future__ import annotations

import ast

import pytest

from tools.fuzz import mutate_reader

PROGRAM = """
_MAX_SIZE = 3
LIMIT = 3

def check(size, kind):
    if size > _MAX_SIZE or kind:
        _refuse('A-1', 'size', size)
    if size == 2:
        size = 1
    _expect('A-2', 'both', (0, 1), (size, kind))
    _expect('A-3', 'one', 0, size)
"""


def lines(tree: ast.Module) -> list[str]:
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def test_each_condition_and_limit_is_changed_once_and_nothing_else_with_it() -> None:
    before = lines(ast.parse(PROGRAM))
    changed = {}
    for change in mutate_reader.changes(PROGRAM):
        after = lines(change.tree)
        assert len(after) == len(before)
        (pair,) = ((one, other) for one, other in zip(before, after, strict=True) if one != other)
        changed[change.name] = pair[1]
    assert changed == {
        "module: _MAX_SIZE: -1": "_MAX_SIZE = 2",
        "module: _MAX_SIZE: +1": "_MAX_SIZE = 4",
        "check: size > _MAX_SIZE or kind: dropped": "if False:",
        "check: size > _MAX_SIZE or kind: without `size > _MAX_SIZE`": "if kind:",
        "check: size > _MAX_SIZE or kind: without `kind`": "if size > _MAX_SIZE:",
        "check: size > _MAX_SIZE: bound moved": "if size >= _MAX_SIZE or kind:",
        "check: 'A-2' 'both': removed": "None",
        "check: 'A-2' 'both': without `size`": ("_expect('A-2', 'both', (1,), (kind,))"),
        "check: 'A-2' 'both': without `kind`": ("_expect('A-2', 'both', (0,), (size,))"),
        "check: 'A-3' 'one': removed": "None",
    }


def test_vectors_notice_every_change_of_the_check_of_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mutate_reader.main(["--only", "_check_key"]) == 0
    printed = capsys.readouterr().out
    assert " 0 unnoticed and not listed; " in printed
    assert not printed.startswith("0 changes")


def test_unnoticed_change_and_a_wrong_entry_of_the_list_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_reader, "passes", lambda *_: True)
    monkeypatch.setattr(mutate_reader, "EQUIVALENT", {"_check_key: gone": "a reason"})
    assert mutate_reader.main(["--only", "_check_key"]) == 1
    *unnoticed, wrong, summary = capsys.readouterr().out.splitlines()
    assert unnoticed
    assert all(it.startswith("onnxa_reader.py:") for it in unnoticed)
    assert wrong == (
        "listed as unnoticed, but a vector notices it, or no such change exists: _check_key: gone"
    )
    assert f" {len(unnoticed)} unnoticed and not listed; " in summary
