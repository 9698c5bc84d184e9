#!/usr/bin/env python3
"""Builds the packages, and tries the wheel on each Python of this machine.

python3 tools/dev.py python tools/check_packages.py                  all that follows
python3 tools/dev.py python tools/check_packages.py --oldest         only the oldest versions
python3 tools/dev.py python tools/check_packages.py --tracked SDIST  only the files of an sdist

Git must track every file of the sdist. For each of `VERSIONS` on PATH or below `~/.pyenv`, installs
the wheel into a new environment: first without extras, then with all extras, without a compiler,
and runs the README's snippets. On the newest that is not this Python, runs the quick tests of
`TESTS`, with the newest versions of all libraries; on the oldest, those of `TESTS_OF_OLDEST`, with
exactly the oldest versions that pyproject.toml promises. Reports missing versions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
# Rooms in which Pythons differ most: maps, threads, the event loop, when objects are freed.
TESTS = ("files", "remote", "conversion")
# Rooms that call libraries most: types of arrays, sessions, onnx_ir, stores.
TESTS_OF_OLDEST = ("model", "writing", "interop", "remote")
# fsspec reads the web with aiohttp; a test calls pip, as a message of the package says.
TEST_PACKAGES = ("aiohttp", "hypothesis", "pip", "pytest", "pytest-timeout", "pytest-xdist")
README = str(ROOT / "tools" / "docs" / "readme.py")


def main() -> int:
    """Builds and checks; returns the exit status."""
    if sys.argv[1:2] == ["--tracked"]:
        check_tracked(Path(sys.argv[2]))
        return 0
    if sys.argv[1:] == ["--oldest"]:
        with tempfile.TemporaryDirectory() as directory:
            check_oldest(sys.executable, ROOT, Path(directory, "oldest"))
        return 0
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(os.cpu_count()) as threads:
        packages = Path(directory, "packages")
        run(sys.executable, "-m", "build", "--outdir", str(packages), str(ROOT))
        wheel, sdist = sorted(packages.iterdir(), key=lambda path: path.suffix != ".whl")
        check_tracked(sdist)
        run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        pythons = {version: find_python(version) for version in VERSIONS}
        checks = {
            version: threads.submit(check, python, wheel, Path(directory, version))
            for version, python in pythons.items()
            if python is not None
        }
        for version in VERSIONS:
            if version not in checks:
                print(f"Python {version}: not on this machine, not checked")
                continue
            checks[version].result()
            print(f"Python {version}: installed without a compiler, the README's snippets run")
        others = [version for version in checks if pythons[version] != sys.executable]
        if others:
            result = test(Path(directory, others[-1]), TESTS)
            print(f"Python {others[-1]}: tests of {', '.join(TESTS)}: {result}")
        oldest = pythons[VERSIONS[0]]
        if oldest is not None:
            check_oldest(oldest, wheel, Path(directory, "oldest"))
    return 0 if checks else 1


def check_tracked(sdist: Path) -> None:
    """Exits with the names of the files of the sdist that git does not track."""
    with tarfile.open(sdist) as archive:
        paths = {it.partition("/")[2] for it in archive.getnames()}
    git = ("git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT))  # also as another user
    tracked = run(*git, "ls-files", "-z").split("\0")
    others = paths - {*tracked, "PKG-INFO"}  # PKG-INFO is made by the build
    if others:
        sys.exit(f"{sdist}: expected files that git tracks, found {', '.join(sorted(others))}")


def find_python(version: str) -> str | None:
    """The path of a Python interpreter of this version, or None if missing."""
    for candidate in _candidates(version):
        code = "import sys; print('{}.{}'.format(*sys.version_info))"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:  # pyenv's shims fail if the version is not selected
            return candidate
    return None


def _candidates(version: str) -> Iterator[str]:
    yield sys.executable
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield on_path
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, root.glob(f"versions/{version}.*/bin/python"))


def check(python: str, wheel: Path, directory: Path) -> None:
    """Installs the wheel into a new environment, and runs the README's snippets there."""
    run(python, "-m", "venv", "--without-pip", str(directory))
    installed = python_in(directory)
    compilerless = os.environ | {"PATH": str(directory / "bin"), "CC": "false", "CXX": "false"}
    for extras, snippets in (("", ["2"]), ("[all]", [])):
        run(*install_into(directory), f"{wheel}{extras}", environment=compilerless)
        # -I ignores PYTHONPATH, so the snippets import the installed package.
        run(installed, "-I", README, *snippets, environment=compilerless)


def check_oldest(python: str, package: Path, directory: Path) -> None:
    """Runs the tests of `TESTS_OF_OLDEST` with the oldest version of each library."""
    run(python, "-m", "venv", "--without-pip", str(directory))
    run(*install_into(directory), str(package), *oldest_versions())
    result = test(directory, TESTS_OF_OLDEST)
    print(f"oldest versions: tests of {', '.join(TESTS_OF_OLDEST)}: {result}")


def oldest_versions() -> list[str]:
    """The requirements of pyproject.toml and of its extras, each at the lowest version."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    names = re.fullmatch(r"onnxarchive\[(.+)\]", extras["all"][0])
    assert names is not None
    requirements: list[str] = project["dependencies"]
    for name in names[1].split(","):
        requirements += extras[name]
    return [it.replace(">=", "==", 1) for it in requirements]


def test(directory: Path, rooms: Sequence[str]) -> str:
    """Runs the quick tests of some rooms in an environment; returns pytest's last line."""
    run(*install_into(directory), *TEST_PACKAGES)
    tests = [str(ROOT / "tests" / room) for room in rooms]
    options = ("-m", "not (sweep or large or tool)", "--numprocesses", "auto", "--quiet")
    return run(python_in(directory), "-m", "pytest", *options, *tests).splitlines()[-1]


def python_in(directory: Path) -> str:
    """The path of an environment's Python."""
    return str(directory / "bin" / "python")


def install_into(directory: Path) -> tuple[str, ...]:
    """The command that installs packages into an environment without pip.

    Python compiles the modules that are imported, a small part of them.
    """
    pip = (sys.executable, "-m", "pip", "--python", python_in(directory))
    return (*pip, "install", "--quiet", "--no-compile")


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output; exits with the output if the command fails."""
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {' '.join(command)}")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
