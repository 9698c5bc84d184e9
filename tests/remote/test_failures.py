"""Messages of failed requests."""

from __future__ import annotations

import pytest

from onnxarchive.remote.failures import failure


class InvalidPathError(Exception):
    """Stands for obstore's."""


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('Path "a//b" contained empty path segment', "'a//b'"),
        ('Path "a\x01" b": Encountered illegal character', "'a\\x01\" b'"),
        ("something else", "of an object"),
        ('Path "' * 100_000, "of an object"),  # takes linear time
    ],
)
def test_a_key_that_obstore_cannot_list_is_named(text: str, key: str) -> None:
    error = failure(InvalidPathError(text), "s3://bucket/folder")
    assert f"because of the key {key}: the key has control" in str(error)
