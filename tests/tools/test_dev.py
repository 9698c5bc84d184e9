"""tools/dev.py sets up its environment, also where nothing can be compiled."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

import pytest

from tools import dev


@pytest.mark.parametrize("has_compiler", [True, False])
def test_an_environment_is_set_up_with_or_without_a_compiler(
    has_compiler: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    installed = []

    def install(*arguments: str, **_: object) -> None:
        if "deflate64" in arguments[-1] and not has_compiler:
            raise subprocess.CalledProcessError(1, arguments)
        installed.append(arguments[-1].removeprefix(str(dev.ROOT)))

    monkeypatch.setattr(dev, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(dev, "STAMP", tmp_path / "made-from")
    monkeypatch.setattr(venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(dev, "run", install)
    dev.set_up()
    assert installed == ["[all,dev]", "[deflate64]"][: 2 if has_compiler else 1]
    assert (tmp_path / "made-from").exists()
    printed = capsys.readouterr().err
    assert ("the extra deflate64 is not installed" in printed) is not has_compiler


def test_a_link_to_the_environment_of_others_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    (tmp_path / ".venv").symlink_to("others", target_is_directory=True)
    monkeypatch.setattr(dev, "ENVIRONMENT", tmp_path / ".venv")
    monkeypatch.setattr(dev, "STAMP", tmp_path / ".venv" / "made-from")
    with pytest.raises(SystemExit, match="found a link"):
        dev.set_up()
    assert (tmp_path / "others" / "file").exists()
