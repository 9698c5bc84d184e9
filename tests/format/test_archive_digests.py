"""No byte of an archive changes: each has the size and the SHA-256 of `archive_digests.txt`.

`archive_digests.py` defines the archives, and says how to write the list.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from archive_digests import CASES, Case, digests, read_list

LIST = read_list()


def _marked(case: Case) -> object:
    marks = [getattr(pytest.mark, case.marker)] if case.marker else []
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_an_archive_has_the_bytes_of_the_list(case: Case, tmp_path: Path) -> None:
    if case.missing:
        pytest.skip(case.missing)
    made = digests(case, tmp_path)
    assert made == dict.fromkeys(made, LIST.get(case.name))


def test_the_list_has_exactly_the_cases_in_order() -> None:
    assert list(LIST) == sorted(case.name for case in CASES)
