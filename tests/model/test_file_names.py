from __future__ import annotations

import pytest

from onnxarchive.model.keys import is_plain_path


@pytest.mark.parametrize(
    "path", ["a", "a/b", "...", "..a", "ab:c", "1:/a", "a b", "größe", ";", "~"]
)
def test_plain_paths_are_relative_and_mean_the_same_everywhere(path: str) -> None:
    assert is_plain_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/a", "a/", "a//b", ".", "./a", "a/.", "..", "../a", "a/..", "a/../b"),
        *("a\\b", "\\a", "C:", "c:a", "C:/a", "a\0", "a\nb", "\x1f", "\x7f", "\x9f"),
    ],
)
def test_other_paths_are_not_plain(path: str) -> None:
    assert not is_plain_path(path)
