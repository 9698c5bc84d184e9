#!/usr/bin/env python3
"""Runs tests of the package on another machine: one of 32 bits, or an emulated big-endian one.

python3 tools/emulate.py i386     32 bits; x86-64 runs its programs, so it takes some minutes
python3 tools/emulate.py s390x    big-endian; QEMU runs its programs, ten times slower
python3 tools/emulate.py s390x tests/model -k dtypes    only these tests; the words go to pytest

Unpacks packages of Debian into build/roots (some 170 MB each, once; remove the directory to have
newer ones). Python runs there without zlib-ng, and with protobuf's Python parser. Compares archives
with tests/format/archive_digests.txt, runs the conformance vectors and the quick tests of `TESTS`,
gives the vectors to the independent reader in Python, and prints counts and the failed tests. Tests
that end with the message of a library that is not there, such as obstore, are counted apart.

Needs Linux on x86-64, root, pip, and apt with a mirror of Debian; for s390x also
`apt-get install qemu-user-static binfmt-support`, with which Linux starts such programs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ROOT / "build" / "roots"
ARCHITECTURES = {"i386": "i386-linux-gnu", "s390x": "s390x-linux-gnu"}
# The oldest suite with an onnx that the package takes.
SUITE = "forky"
PACKAGES = (
    *("coreutils", "dash", "python3"),
    *("python3-ml-dtypes", "python3-numpy", "python3-onnx", "python3-protobuf", "python3-tqdm"),
    *("python3-fsspec", "python3-platformdirs"),
    *("python3-hypothesis", "python3-pytest", "python3-pytest-timeout", "python3-pytest-xdist"),
)
TESTS = (
    "tests/format/test_archive_digests.py",
    "tests/format/test_conformance.py::test_library_gives_the_verdict_of_the_manifest",
    *("tests/zipformat", "tests/model", "tests/files", "tests/writing", "tests/reading"),
)
PYTEST = (
    *("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"),
    *("--numprocesses", "2", "--dist", "worksteal", "--timeout", "1200"),
    "--continue-on-collection-errors",
    *("-m", "not (sweep or large or tool)", "--junitxml", "/tmp/report.xml"),
)
READER = (
    *("python3", "conformance/run.py", "--no-large", "--reader"),
    "python3 -S conformance/readers/python/onnxa_reader.py {archive}",
)
OUTCOMES = ("passed", "failed", "skipped", "without")
# How errors about a library begin that is not installed: the package's, and fsspec's; of a test or
# of its fixtures.
NO_LIBRARY = re.compile(r'(failed on setup with ")?ImportError: [\w ]+ (is needed to|requires) ')
# What is mounted is gone with the process. The checkout can't be changed from the root.
ENTER = """
mount --bind "$0" "$0"
mount --bind /dev "$0/dev"
mount -t proc proc "$0/proc"
mount --bind "$1" "$0/checkout"
mount -o remount,ro,bind "$0/checkout"
cd "$0"
libraries=$2
shift 2
exec chroot "$0" /usr/bin/env -i -C /checkout PATH=/usr/bin LANG=C.UTF-8 HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/checkout LD_LIBRARY_PATH="$libraries" "$@"
"""


def main(argv: Sequence[str]) -> int:
    """Runs the tests, or those of the arguments; returns 1 if one fails."""
    architecture, *chosen = argv or [""]
    if architecture not in ARCHITECTURES:
        sys.exit(f"expected one of {', '.join(ARCHITECTURES)}, found {architecture!r}")
    if architecture == "s390x":
        let_linux_start_s390x()
    root = ROOTS / architecture
    if not root.exists():
        unpack(architecture, root)
    start = time.monotonic()
    report = root / "tmp" / "report.xml"
    report.unlink(missing_ok=True)
    enter(architecture, root, [*PYTEST, *(chosen or TESTS)])
    reader = 0 if chosen else enter(architecture, root, READER)
    if not report.exists():  # pytest has said why
        return 1
    text, is_passed = summary(report.read_text("utf-8"))
    print(f"\n{architecture}, {(time.monotonic() - start) / 60:.1f} minutes\n{text}")
    return 0 if is_passed and reader == 0 else 1


def let_linux_start_s390x() -> None:
    """Registers QEMU for the programs of s390x, unless it is."""
    binfmt = Path("/proc/sys/fs/binfmt_misc")
    if (binfmt / "qemu-s390x").exists():
        return
    if shutil.which("qemu-s390x-static") is None or shutil.which("update-binfmts") is None:
        sys.exit("QEMU is missing: apt-get install qemu-user-static binfmt-support")
    if not (binfmt / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", binfmt], check=True)
    subprocess.run(["update-binfmts", "--enable", "qemu-s390x"], check=True)


def unpack(architecture: str, root: Path) -> None:
    """Makes a root by unpacking packages. None is configured: Python runs without."""
    making = root.with_name(f"{root.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    for name in ("apt/lists/partial", "apt/archives/partial", "dev", "proc", "checkout", "etc"):
        (making / name).mkdir(parents=True)
    (making / "tmp").mkdir()
    (making / "tmp").chmod(0o1777)
    for name in ("bin", "sbin", "lib", "lib64"):
        (making / "usr" / name).mkdir(parents=True)
        (making / name).symlink_to(f"usr/{name}")
    users = "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n"
    (making / "etc" / "passwd").write_text(users)

    apt = making / "apt"
    (apt / "list").write_text(f"deb {mirror()} {SUITE} main\n")
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures::": architecture,
        "APT::Sandbox::User": "root",
        "Dir::Cache::archives": apt / "archives",
        "Dir::Etc::sourcelist": apt / "list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": "/dev/null",  # nothing is installed in the root
        "Debug::NoLocking": "1",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    download = ("install", "--yes", "--download-only", "--no-install-recommends")
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, *download, *PACKAGES], check=True)
    for package in sorted((apt / "archives").glob("*.deb")):
        # Unlike dpkg-deb --extract, keeps the links of lib and others.
        content = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE, check=True
        ).stdout
        tar = ("tar", "--extract", "--keep-directory-symlink", "--directory", making)
        subprocess.run(tar, input=content, check=True)
    shutil.rmtree(apt)
    replace_protobuf(making)
    making.rename(root)


def replace_protobuf(root: Path) -> None:
    """Puts the newest protobuf, without a compiled parser, in the place of Debian's.

    Debian's is older than what onnx requires, and warns with a new Python.
    """
    packages = root / "usr" / "lib" / "python3" / "dist-packages"
    shutil.rmtree(packages / "google" / "protobuf")
    with tempfile.TemporaryDirectory() as folder:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder)
        only = ("--only-binary", ":all:", "--platform", "any")
        subprocess.run([*pip, *only, "protobuf"], check=True)
        for wheel in Path(folder).iterdir():
            shutil.unpack_archive(wheel, packages, "zip")


def mirror() -> str:
    """The mirror of Debian from which this machine installs packages."""
    targets = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    found = subprocess.run(targets, stdout=subprocess.PIPE, text=True, check=True).stdout
    for uri in found.splitlines():
        if uri.endswith("/debian/"):
            return uri
    sys.exit("apt has no mirror of Debian")


def enter(architecture: str, root: Path, command: Sequence[str]) -> int:
    """Runs a command in the checkout, as the root sees it; returns the exit status."""
    folder = f"/usr/lib/{ARCHITECTURES[architecture]}"
    # Where the packages of BLAS and LAPACK lie until they are configured.
    libraries = f"{folder}/blas:{folder}/lapack"
    unshare = ("nice", "-n", "5", "unshare", "--mount", "--propagation", "private")
    words = [*unshare, "sh", "-ec", ENTER, str(root), str(ROOT), libraries, *command]
    return subprocess.run(words, check=False).returncode


def summary(report: str) -> tuple[str, bool]:
    """Counts the results of pytest by room, and lists failed tests.

    Args:
        report: The XML of `--junitxml`.

    Returns:
        A text, and whether tests ran and none failed.
    """
    counts: dict[str, Counter[str]] = {}
    failed: list[str] = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        # A module that cannot be imported has no class name; an error of pytest has no module.
        parts = (case.get("classname") or case.get("name") or "").split(".")
        room = parts[1] if len(parts) > 1 else "pytest"
        if room == "format":
            room = parts[2].removeprefix("test_")
        outcome = "passed"
        if case.find("skipped") is not None:
            outcome = "skipped"
        failures = [*case.findall("failure"), *case.findall("error")]
        if failures:
            lacks = all(NO_LIBRARY.match(it.get("message", "")) for it in failures)
            outcome = "without" if lacks else "failed"
        if outcome == "failed":
            failed.append(f"{room}: {case.get('name')}")
        counts.setdefault(room, Counter())[outcome] += 1
    lines = [f"{'':16} {' '.join(f'{outcome:>7}' for outcome in OUTCOMES)}  (a library)"]
    for room, of_room in counts.items():
        numbers = (f"{of_room[outcome]:>7}" for outcome in OUTCOMES)
        lines.append(f"{room:16} {' '.join(numbers)}")
    lines += ["failed:", *sorted(failed)] if failed else []
    return "\n".join(lines), bool(counts) and not failed


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
