from __future__ import annotations

import pickle

import pytest

from onnxarchive.errors import (
    CHECKSUM_RULES,
    MENDED_RULES,
    ArchiveFormatError,
    ChecksumError,
    Report,
    TensorNotFoundError,
    naming,
)
from onnxarchive.rules import rules


def test_a_report_raises_with_rule_entry_and_message() -> None:
    with pytest.raises(ArchiveFormatError) as caught:
        Report().broken("ZIP-1", "expected this, found that", entry="w")
    assert (caught.value.rule, caught.value.entry) == ("ZIP-1", "w")
    assert str(caught.value) == "entry 'w': expected this, found that [ZIP-1]"


@pytest.mark.parametrize("rule", sorted(CHECKSUM_RULES))
def test_rules_about_checksums_raise_checksum_errors(rule: str) -> None:
    assert rule in rules()
    with pytest.raises(ChecksumError):
        Report().broken(rule, "expected this, found that")


def test_the_innermost_file_is_named() -> None:
    raised = pytest.raises(ArchiveFormatError, match=r"^inner: message$")
    with raised as caught, naming("outer"), naming("inner"):
        raise ArchiveFormatError("message")
    assert caught.value.path == "inner"


def test_what_convert_can_mend_names_the_command() -> None:
    assert {id for id, rule in rules().items() if rule.mended} == MENDED_RULES
    with pytest.raises(ArchiveFormatError) as caught, naming("a zip.onnxa"):
        Report().broken("ALIGN-1", "expected this, found that")
    assert "'onnxarchive convert 'a zip.onnxa' NEW.onnxa'" in str(caught.value)
    with pytest.raises(ArchiveFormatError) as caught, naming("a zip.onnxa"):
        Report().broken("ZIP-7", "expected this, found that")
    assert "convert" not in str(caught.value)


def test_a_name_that_is_not_found_reads_without_quotes_around_it() -> None:
    assert str(TensorNotFoundError("expected a name")) == "expected a name"


def test_errors_survive_pickling_whole() -> None:
    error = ArchiveFormatError("message", rule="ZIP-1", entry="w")
    error.path = "file"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rule, copy.entry, copy.path) == (str(error), "ZIP-1", "w", "file")
