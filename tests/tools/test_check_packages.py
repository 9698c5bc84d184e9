"""tools/check_packages.py; CI runs the whole of it."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from tools import check_packages

THIS = "{}.{}".format(*sys.version_info)


def test_an_interpreter_is_found_by_the_version_that_it_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python3.99"  # as pyenv's of a version that is not chosen
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert check_packages.find_python(THIS) == sys.executable
    assert check_packages.find_python("3.99") is None
    python = tmp_path / "versions" / "3.99.1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 3.99\n")
    python.chmod(0o755)
    assert check_packages.find_python("3.99") == str(python)


def test_the_oldest_versions_are_those_that_pyproject_promises() -> None:
    oldest = check_packages.oldest_versions()
    assert "onnxruntime==1.21" in oldest
    assert any(it.startswith("zlib-ng==0.5; platform_machine") for it in oldest)
    assert not any(">=" in it for it in oldest)
    assert not any(it.startswith(("zipfile-deflate64", "pytest")) for it in oldest)


def test_a_failed_command_ends_the_check_with_its_output() -> None:
    with pytest.raises(SystemExit, match="why\n\nfailed: "):
        check_packages.run(sys.executable, "-c", "import sys; print('why'); sys.exit(1)")
    assert check_packages.run(sys.executable, "-c", "print(1)") == "1"


def test_a_file_of_an_sdist_that_git_does_not_track_is_named(tmp_path: Path) -> None:
    def packed(*names: str) -> Path:
        path = tmp_path / "sdist.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in ("PKG-INFO", *names):
                archive.addfile(tarfile.TarInfo(f"onnxarchive-1/{name}"))
        return path

    if not (check_packages.ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    check_packages.check_tracked(packed("README.md", "tools/dev.py"))
    with pytest.raises(SystemExit, match=r"tools/secret\.txt"):
        check_packages.check_tracked(packed("README.md", "tools/secret.txt"))
