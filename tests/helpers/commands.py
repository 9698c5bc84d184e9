"""Calls of the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxarchive.cli import main


def run(*arguments: str | Path) -> int:
    """Runs a command; returns its exit status."""
    return main([str(argument) for argument in arguments])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    """What a command that fails prints: nothing on standard output, and no traceback."""
    assert run(*arguments) == status
    output, error = capsys.readouterr()
    assert output == ""
    assert "Traceback" not in error
    return error
