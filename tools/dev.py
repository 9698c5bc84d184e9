#!/usr/bin/env python3
"""Makes a virtual environment and runs commands in it; needs only Python 3.11 or newer.

python3 tools/dev.py demo    build a model of 100 MB, convert it, list it, map it, export it
python3 tools/dev.py test    check formatting, lint, types and rooms, run the quick tests; --all
                             runs every test; other arguments go to pytest
python3 tools/dev.py docs    write the site as HTML to build/site; in an environment of its own
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
PROGRAM = "Scripts/python.exe" if os.name == "nt" else "bin/python"
PYTHON = ENVIRONMENT / PROGRAM
# The digest of pyproject.toml and the version of Python, written after the environment is made.
STAMP = ENVIRONMENT / "made-from"
# The site is built without the library's requirements.
DOCS_ENVIRONMENT = ROOT / "build" / "docs-environment"
DOCS_REQUIREMENTS = ROOT / "tools" / "docs" / "requirements.txt"
OLDEST_PYTHON = (3, 11)
# import-linter can't be run as a module.
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run(['--no-cache'])"
INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")


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
        if arguments.command == "docs":
            set_up_docs()
            run("-m", "tools.docs.build_site", *rest, python=DOCS_ENVIRONMENT / PROGRAM)
            return 0
        set_up()
        if arguments.command == "demo":
            run("tools/demo.py", *rest)
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
    made_from = digest(ROOT / "pyproject.toml")
    if STAMP.exists() and STAMP.read_text() == made_from:
        return
    if ENVIRONMENT.is_symlink():  # a shared environment: setting up would empty it
        sys.exit(f"expected a directory at {ENVIRONMENT}, found a link; remove the link")
    print(f"setting up {ENVIRONMENT} (once, some minutes)", file=sys.stderr)
    make_environment(ENVIRONMENT)
    run(*INSTALL, "--editable", f"{ROOT}[all,dev]")
    try:
        run(*INSTALL, "--editable", f"{ROOT}[deflate64]", stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        print(
            "the extra deflate64 is not installed, since pip failed (is there a C compiler?): its "
            "tests are skipped",
            file=sys.stderr,
        )
    STAMP.write_text(made_from)


def set_up_docs() -> None:
    """Makes the environment of the site, unless the present one has the required versions."""
    made_from = digest(DOCS_REQUIREMENTS)
    stamp = DOCS_ENVIRONMENT / "made-from"
    if stamp.exists() and stamp.read_text() == made_from:
        return
    make_environment(DOCS_ENVIRONMENT)
    python = DOCS_ENVIRONMENT / PROGRAM
    run(*INSTALL, "--requirement", str(DOCS_REQUIREMENTS), python=python)
    stamp.write_text(made_from)


def digest(file: Path) -> str:
    """What an environment is made from: the SHA-256 of a file, and the version of Python."""
    return hashlib.sha256(file.read_bytes()).hexdigest() + " " + sys.version


def make_environment(directory: Path) -> None:
    """Makes a virtual environment with pip."""
    try:
        venv.create(directory, clear=True, with_pip=True)
    except subprocess.CalledProcessError:
        sys.exit(
            "this Python cannot make virtual environments with pip; on Debian and Ubuntu run "
            "'apt-get install python3-venv'"
        )


def run(*arguments: str, python: Path = PYTHON, stderr: int | None = None) -> None:
    """Runs an environment's Python in the project's directory.

    Lets Python cache compiled modules on disk, since tests start hundreds of processes.
    """
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([python, *arguments], cwd=ROOT, env=environment, stderr=stderr, check=True)


if __name__ == "__main__":
    sys.exit(main())
