"""Calls of the command line in this process."""

from __future__ import annotations

from pathlib import Path

from onnxarchive.cli import main


def run(*arguments: str | Path) -> int:
    """Runs a command; returns its exit status."""
    return main([str(argument) for argument in arguments])
