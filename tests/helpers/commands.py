"""Calls of the command line in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxarchive.cli import main


def run(*arguments: str | Path) -> int:
    """Runs a command; returns its exit status."""
    return main([str(argument) for argument in arguments])


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> str:
    """What a command prints; nothing on standard error."""
    capsys.readouterr()
    assert run(*arguments) == status
    output, error = capsys.readouterr()
    assert error == ""
    return output


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> Any:
    """What a command prints with `--json`."""
    return json.loads(output_of(capsys, *arguments, "--json", status=status))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 2) -> str:
    """What a command that fails prints: nothing on standard output, and no traceback."""
    capsys.readouterr()
    assert run(*arguments) == status
    output, error = capsys.readouterr()
    assert output == ""
    assert "Traceback" not in error
    return error
