"""A locale whose encoding is not UTF-8: locations and names have the bytes of the files' names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from models import runnable_model
from onnx.numpy_helper import to_array
from processes import completed
from written import write_model

import onnxarchive

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the names of files have no encoding of the locale"
)


@pytest.fixture(scope="module", params=["ASCII", "ISO-8859-1"])
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The environment of a process in such a locale."""
    folder = tmp_path_factory.mktemp("locales")
    name = "C"
    if request.param != "ASCII":
        name = f"fr_FR.{request.param}"
        if shutil.which("localedef") is None:
            pytest.skip("this system cannot make locales")
        command = ["localedef", "-i", "fr_FR", "-f", request.param, folder / name]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this system has no definition of the locale")
    environment = {**os.environ, "LC_ALL": name, "LOCPATH": str(folder)}
    environment |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return environment | {"PYTHONIOENCODING": ":backslashreplace"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with an archive, whose names are not ASCII."""
    folder = tmp_path / "modèles"
    folder.mkdir()
    onnxarchive.save(runnable_model(), folder / "modèle.onnxa", assets={"é/è.txt": b"text"})
    return folder


# Calls the commands in the arguments, each of which ends with the status in the first argument.
COMMANDS = """
import sys
from onnxarchive.cli import main
assert sys.getfilesystemencoding() != "utf-8"
status, *commands = sys.argv[1:]
for command in commands:
    assert main(command.split(" ")) == int(status), command
"""


def call(
    folder: Path, environment: dict[str, str], *commands: str, status: int = 0
) -> tuple[str, str]:
    """Calls commands in the locale; returns their output and their errors."""
    options = {"cwd": folder, "env": environment, "errors": "backslashreplace"}
    done = completed([sys.executable, "-c", COMMANDS, status, *commands], status=0, **options)
    return done.stdout, done.stderr


def _weights(path: Path) -> dict[str, bytes]:
    """The weights that onnx reads."""
    return {it.name: to_array(it).tobytes() for it in onnx.load(path).graph.initializer}


WEIGHTS = {it.name: to_array(it).tobytes() for it in runnable_model().graph.initializer}


def test_a_link_names_the_file_and_fits(folder: Path, environment: dict[str, str]) -> None:
    output, _ = call(
        folder,
        environment,
        "link modèle.onnxa lien.onnx",
        "link modèle.onnxa ../lien.onnx",
        "check --link lien.onnx",
        "check --link ../lien.onnx modèle.onnxa",
    )
    assert output.count("fits the archive") == 2
    for link in (folder / "lien.onnx", folder.parent / "lien.onnx"):
        assert onnxarchive.check_link(link) == []
        assert _weights(link) == WEIGHTS


def test_external_data_is_exported_and_converted(folder: Path, environment: dict[str, str]) -> None:
    export = "export modèle.onnxa é.onnx --external-data données.bin"
    call(folder, environment, export, "convert é.onnx ê.onnxa")
    assert _weights(folder / "é.onnx") == WEIGHTS
    assert onnxarchive.load(folder / "ê.onnxa") == runnable_model()


def test_assets_keep_their_names(folder: Path, environment: dict[str, str]) -> None:
    (folder / "dépôt" / "ô").mkdir(parents=True)
    (folder / "dépôt" / "ô" / "à.json").touch()
    write_model(folder / "dépôt" / "model.onnx", runnable_model())
    write_model(folder / "dépôt" / "ô" / "other.onnx", runnable_model())
    call(
        folder,
        environment,
        "extract modèle.onnxa décompressé",
        "convert décompressé new.onnxa",
        "convert dépôt all.onnxa --assets --all-models --asset dépôt/ô/à.json",
        "assets add new.onnxa dépôt/ô",
    )
    assert (folder / "décompressé" / "assets" / "é" / "è.txt").read_bytes() == b"text"
    assert _assets(folder / "new.onnxa") == {"é/è.txt", "ô/à.json", "ô/other.onnx"}
    assert _assets(folder / "all.onnxa") == {"ô/à.json", "à.json"}


def _assets(path: Path) -> set[str]:
    with onnxarchive.open(path) as archive:
        return set(archive.assets)


def test_onnx_runtime_finds_the_files(folder: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("onnxruntime")
    write_model(folder / "é.onnx", runnable_model())
    output, _ = call(folder, environment, "run modèle.onnxa", "run é.onnx")
    assert output.count("provider") == 2


def test_a_name_that_is_not_utf_8_is_refused(folder: Path, environment: dict[str, str]) -> None:
    latin = os.fsdecode(b"mod\xe8le.onnxa")
    (folder / "modèle.onnxa").rename(folder / latin)
    export = f"export {latin} m.onnx --external-data {latin}.bin"
    _, errors = call(folder, environment, f"link {latin} lien.onnx", export, status=2)
    assert errors.count("onnxarchive: expected a path in UTF-8, found") == 2
    assert errors.count("; the locale's encoding is ") == errors.count("; rename it\n") == 2
    assert [path.name for path in folder.iterdir()] == [latin]
