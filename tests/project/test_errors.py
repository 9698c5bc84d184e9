from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onnxarchive
from onnxarchive.errors import (
    CHECKSUM_RULES,
    MENDED_RULES,
    ArchiveFormatError,
    ChecksumError,
    Strict,
    TensorNotFoundError,
    quoted,
    quoted_names,
    with_path,
)
from onnxarchive.reading.check import rules

# "expected X, found Y" of what is no comparison: Y is no value.
NO_COMPARISON = re.compile(
    r"\bfound (it|them|both|neither|none|nothing|more|several|another|again|elsewhere|no)\b"
    r"|\bfound one( whose|;|$)"
)


def _texts(module: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of a module that are no docstrings, with "{}" for what is put into them."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    parts = {
        id(part) for it in ast.walk(tree) if isinstance(it, ast.JoinedStr) for part in it.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            parts.add(id(node.value))
        if id(node) in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        if isinstance(node, ast.JoinedStr):
            texts = [it.value if isinstance(it, ast.Constant) else "{}" for it in node.values]
            yield node.lineno, "".join(map(str, texts))


def test_a_message_states_the_fault_where_nothing_is_compared() -> None:
    package = Path(onnxarchive.__file__).parent
    modules = sorted(package.rglob("*.py"))
    assert len(modules) > 100
    texts = [(it, line, text) for it in modules for line, text in _texts(it)]
    assert sum("found {}" in text for *_, text in texts) > 100  # comparisons
    assert [it for it in texts if NO_COMPARISON.search(it[2])] == []


def test_a_strict_report_raises_an_error_with_rule_entry_and_message() -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        Strict().broken("ZIP-1", "expected this, found that", entry="w")
    assert (caught.value.rule, caught.value.entry) == ("ZIP-1", "w")
    assert str(caught.value) == "entry 'w': expected this, found that [ZIP-1]"


@pytest.mark.parametrize("rule", sorted(CHECKSUM_RULES))
def test_rules_about_checksums_raise_checksum_errors(rule: str) -> None:
    assert rule in rules()
    with pytest.raises(ChecksumError):
        Strict().broken(rule, "expected this, found that")


def test_the_innermost_file_is_named() -> None:
    raised = pytest.raises(ArchiveFormatError, match=r"^inner: message$")
    with raised as caught, with_path("outer"), with_path("inner"):
        raise ArchiveFormatError("message")
    assert caught.value.path == "inner"


def test_an_error_that_convert_can_mend_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a zip.onnxa").touch()
    assert {id for id, rule in rules().items() if rule.mended} == MENDED_RULES
    with pytest.raises(ArchiveFormatError) as caught, with_path("a zip.onnxa"):
        Strict().broken("ALIGN-1", "expected this, found that")
    assert "'onnxarchive convert 'a zip.onnxa' NEW.onnxa'" in str(caught.value)
    with pytest.raises(ArchiveFormatError) as caught, with_path("a zip.onnxa"):
        Strict().broken("ZIP-7", "expected this, found that")
    assert "convert" not in str(caught.value)


@pytest.mark.parametrize("path", ["archive in memory", "file object BytesIO", "key/in/a/store"])
def test_a_command_is_named_for_files_and_urls_only(path: str) -> None:
    with pytest.raises(ArchiveFormatError) as caught, with_path("https://host/a.onnxa"):
        Strict().broken("ALIGN-1", "expected this, found that")
    assert "'onnxarchive convert https://host/a.onnxa NEW.onnxa'" in str(caught.value)
    with pytest.raises(ArchiveFormatError) as caught, with_path(path):
        Strict().broken("ALIGN-1", "expected this, found that")
    assert str(caught.value) == f"{path}: expected this, found that [ALIGN-1]"


def test_a_name_that_is_not_found_reads_without_quotes_around_it() -> None:
    assert str(TensorNotFoundError("expected a name")) == "expected a name"


def test_errors_survive_pickling_whole() -> None:
    error = ArchiveFormatError("message", rule="ZIP-1", entry="w")
    error.path = "file"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rule, copy.entry, copy.path) == (str(error), "ZIP-1", "w", "file")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("w", "'w'"),
        ("a'b\n", repr("a'b\n")),
        (b"\xff", "b'\\xff'"),
        ("x" * 100, repr("x" * 100)),
        ("x" * 1_000_000, repr("x" * 100) + "... (1000000 characters)"),
        (b"x" * 101, repr(b"x" * 100) + "... (101 bytes)"),
        ("\U000e0001" * 100, repr("\U000e0001" * 12) + "... (100 characters)"),
        ([], "[]"),
        ((1, -2), "[1, -2]"),
        ([7] * 1_000_000, "[" + "7, " * 35 + "...]"),
        ([(1 << 63) - 1] * 64, "[" + "9223372036854775807, " * 5 + "...]"),
    ],
    ids=lambda it: str(it)[:20],
)
def test_a_value_of_a_file_is_shown_up_to_some_hundred_characters(value: Any, text: str) -> None:
    assert quoted(value) == text


def test_the_first_names_of_many_are_shown() -> None:
    names = map(str, range(1_000_000))
    assert quoted_names(names) == f"{', '.join(repr(str(it)) for it in range(16))}, ..."
    assert next(names) == "17"
    assert [quoted_names(it) for it in ([], ["a"], ["a", "b"])] == ["none", "'a'", "'a', 'b'"]


def test_letters_can_be_shown_by_their_numbers() -> None:
    assert quoted("e\u0301", in_ascii=True) == "'e\\u0301'"
    assert quoted("e\u0301") == repr("e\u0301")


def test_a_long_entry_is_named_by_its_beginning() -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        Strict().broken("ZIP-1", "expected this, found that", entry="x" * 60_000)
    assert caught.value.entry == "x" * 60_000
    assert len(str(caught.value)) < 200
