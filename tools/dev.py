#!/usr/bin/env python3
"""Makes a virtual environment and runs commands in it; needs only Python 3.11 or newer.

python3 tools/dev.py demo    build a model of 100 MB, convert it, list it, map it, export it
python3 tools/dev.py test    check formatting, lint, types and rooms, run the quick tests; --all
                             runs every test; other arguments go to pytest
python3 tools/dev.py docs    write the reference as HTML to build/reference
python3 tools/dev.py python  run the environment's Python with the arguments that follow
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
# The digest of pyproject.toml and the version of Python, written after the environment is made.
STAMP = ENVIRONMENT / "made-from"
OLDEST_PYTHON = (3, 11)
# import-linter can't be run as a module.
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--editable")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["demo", "test", "docs", "python"])
    parser.add_argument("--all", action="store_true", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args(argv)
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"expected Python 3.11 or newer, found {sys.version.split()[0]}")
    try:
        set_up()
        if arguments.command == "demo":
            run("tools/demo.py", *rest)
        elif arguments.command == "docs":
            run("tools/docs/reference.py", *rest)
        elif arguments.command == "python":
            run(*rest)
        else:
            run("-m", "ruff", "format", "--check")
            run("-m", "ruff", "check")
            run("-m", "mypy")
            run("-c", LINT_IMPORTS)
            chosen = () if arguments.all else ("-m", "not (sweep or large or tool)")
            # One more than there are cores, since some tests wait for disks and servers.
            workers = str((os.cpu_count() or 1) + 1)
            run("-m", "pytest", "--numprocesses", workers, "--dist", "worksteal", *chosen, *rest)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def set_up() -> None:
    """Makes the environment, unless the present one matches pyproject.toml and this Python."""
    made_from = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    made_from += " " + sys.version
    if STAMP.exists() and STAMP.read_text() == made_from:
        return
    if ENVIRONMENT.is_symlink():  # a shared environment: setting up would empty it
        sys.exit(f"expected a directory at {ENVIRONMENT}, found a link; remove the link")
    print(f"setting up {ENVIRONMENT} (once, some minutes)", file=sys.stderr)
    try:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(
            "this Python cannot make virtual environments with pip; on Debian and Ubuntu run "
            "'apt-get install python3-venv'"
        )
    run(*INSTALL, f"{ROOT}[all,dev]")
    try:
        run(*INSTALL, f"{ROOT}[deflate64]", stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        print(
            "the extra deflate64 is not installed, since pip failed (is there a C compiler?): its "
            "tests are skipped",
            file=sys.stderr,
        )
    STAMP.write_text(made_from)


def run(*arguments: str, stderr: int | None = None) -> None:
    """Runs the environment's Python in the project's directory.

    Lets Python cache compiled modules on disk, since tests start hundreds of processes.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([PYTHON, *arguments], cwd=ROOT, env=environment, stderr=stderr, check=True)


if __name__ == "__main__":
    sys.exit(main())
