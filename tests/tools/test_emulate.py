"""tools/emulate.py sums up what pytest reports of another machine."""

from __future__ import annotations

import pytest

from tools import emulate

PASSED = '<testcase classname="tests.files.test_undo" name="passed" />'
DIGEST = (
    '<testcase classname="tests.format.test_archive_digests" name="a digest[save: 1]">{}</testcase>'
)


def report(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_a_summary_counts_tests_by_room_and_names_those_that_failed() -> None:
    text, is_passed = emulate.summary(
        report(PASSED, PASSED, *map(DIGEST.format, ("<failure />", "<error />", "<skipped />", "")))
    )
    assert not is_passed
    assert [line.split() for line in text.splitlines()[1:3]] == [
        ["files", "2", "0", "0", "0"],
        ["archive_digests", "1", "2", "1", "0"],
    ]
    assert text.splitlines()[3:] == ["failed:", *["archive_digests: a digest[save: 1]"] * 2]


def test_a_module_that_cannot_be_imported_has_failed() -> None:
    case = '<testcase classname="" name="tests.files.test_mounts"><error /></testcase>'
    text, is_passed = emulate.summary(report(case))
    assert not is_passed
    assert text.splitlines()[1:] == [
        "files                  0       1       0       0",
        "failed:",
        "files: tests.files.test_mounts",
    ]


def test_a_test_that_ends_with_the_message_of_a_missing_library_has_not_failed() -> None:
    case = '<testcase classname="tests.reading.test_slices" name="a">{}</testcase>'
    failure = case.format('<failure message="{}" />')
    missing = "ImportError: ONNX Runtime is needed to run a model, but cannot be imported"
    fsspec = "ImportError: HTTPFileSystem requires &quot;requests&quot; and &quot;aiohttp&quot;"
    setup = f"failed on setup with &quot;{missing}"
    text, is_passed = emulate.summary(report(*map(failure.format, (missing, fsspec, setup))))
    assert is_passed
    assert text.splitlines()[1].split() == ["reading", "0", "0", "0", "3"]
    for message in ("assert 'ImportError: ORT is needed to' == ''", "ImportError: no ORT", ""):
        assert not emulate.summary(report(PASSED, failure.format(message)))[1]


@pytest.mark.parametrize(("cases", "is_passed"), [((), False), ((PASSED,), True)])
def test_a_run_without_tests_has_not_passed(cases: tuple[str, ...], is_passed: bool) -> None:
    assert emulate.summary(report(*cases))[1] is is_passed


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(SystemExit, match="expected one of i386, s390x, found 'armhf'"):
        emulate.main(["armhf"])
