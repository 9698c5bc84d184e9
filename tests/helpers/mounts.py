"""Mounts file systems for tests; skips the tests of other users than root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
# File systems whose files share blocks: the size of the image, and what makes the file system. Each
# image is as large as it must be.
SHARING = {
    "xfs": (320 * MIB, ["mkfs.xfs", "-q"]),
    "btrfs": (256 * MIB, ["mkfs.btrfs", "-q", "--mixed"]),
}


def attempt(command: list[str]) -> str | None:
    """Runs a system command; returns the reason of its failure, or None if it succeeds."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    program = shutil.which(command[0], path=path)
    if program is None:
        return f"{command[0]} is not installed"
    done = subprocess.run(
        [program, *command[1:]], capture_output=True, text=True, check=False, timeout=60
    )
    return (done.stderr.strip() or f"{command[0]} failed") if done.returncode else None


@contextlib.contextmanager
def mounted(source: Path | str, target: Path, options: str, *kind: str) -> Iterator[None]:
    """Mounts `source` at `target` while the block runs.

    Args:
        source: Device or directory.
        target: Mount point.
        options: Value of `mount -o`.
        kind: Further arguments of `mount`, such as `-t tmpfs`."""
    if not hasattr(os, "geteuid") or os.geteuid():
        pytest.skip("only root may mount")
    problem = attempt(["mount", *kind, "-o", options, str(source), str(target)])
    if problem is not None:
        pytest.skip(f"nothing can be mounted: {problem}")
    try:
        yield
    finally:
        if attempt(["umount", str(target)]) is not None:  # a failed test left a file open
            assert attempt(["umount", "--lazy", str(target)]) is None


@contextlib.contextmanager
def new_disk(kind: str, folder: Path) -> Iterator[Path]:
    """A directory on a new file system that shares blocks."""
    if os.geteuid():
        pytest.skip("only root may mount a file system")
    size, make = SHARING[kind]
    image, directory = folder / "image", folder / "disk"
    directory.mkdir()
    with open(image, "wb") as file:
        file.truncate(size)
    try:
        problem = attempt([*make, str(image)])
        if problem is not None:
            pytest.skip(f"no {kind} can be made: {problem}")
        with mounted(image, directory, "loop"):
            yield directory
    finally:
        image.unlink()
