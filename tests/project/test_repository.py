"""CONTRIBUTING names what exists, and what workflows and packages download is pinned."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

import onnxarchive

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROOMS = sorted(path.parent.name for path in ROOT.glob("onnxarchive/*/__init__.py"))
NAMES = sorted(set(re.findall(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`", CONTRIBUTING)))


@pytest.mark.parametrize("name", NAMES)
def test_each_dotted_name_in_contributing_is_in_the_package(name: str) -> None:
    room, module, *attributes = name.split(".")
    found = importlib.import_module(f"onnxarchive.{room}.{module}")
    for attribute in attributes:
        found = getattr(found, attribute)


def test_the_walks_in_contributing_name_the_rooms_that_they_pass() -> None:
    rooms = {name.partition(".")[0] for name in NAMES}
    assert rooms >= {"model", "reading", "writing", "zipformat"}


def test_the_table_in_contributing_has_each_room() -> None:
    rooms = CONTRIBUTING.partition("| beside the package |")[0]
    assert sorted(re.findall(r"^\| `(\w+)/` \|", rooms, re.MULTILINE)) == ROOMS


def test_no_two_classes_or_names_of_types_in_the_package_are_alike() -> None:
    trees = [ast.parse(it.read_text()) for it in (ROOT / "onnxarchive").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    names += [
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and ast.unparse(node.annotation) == "TypeAlias"
    ]
    public = [name.removeprefix("_") for name in names]
    assert {name for name in public if public.count(name) > 1} == set()


def test_no_room_has_more_than_14_modules_and_no_module_more_than_600_lines() -> None:
    modules = [it for it in (ROOT / "onnxarchive").rglob("*.py") if it.name != "__init__.py"]
    rooms = [it.parent for it in modules]
    assert {str(room) for room in rooms if rooms.count(room) > 14} == set()
    assert {str(it) for it in modules if len(it.read_text().splitlines()) > 600} == set()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([a-z_]+/[\w/.]*)`", CONTRIBUTING))))
def test_each_path_in_contributing_exists(path: str) -> None:
    assert any((ROOT / above / path).exists() for above in ("", "onnxarchive", "tests"))


# Workflows and packages

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_the_same_everywhere(path: Path) -> None:
    found = re.findall(r"uses: (\S+)@(.*)", path.read_text(encoding="utf-8"))
    everywhere = dict(
        pair
        for workflow in WORKFLOWS
        for pair in re.findall(r"uses: (\S+)@(.*)", workflow.read_text(encoding="utf-8"))
    )
    assert found
    for action, version in found:
        assert re.fullmatch(r"[0-9a-f]{40}  # v\d+\.\d+\.\d+", version), action
        assert everywhere[action] == version


def test_build_tools_of_a_release_have_versions() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    (packages,) = re.findall(r"pip install (.*)", text)
    assert all(re.fullmatch(r"\w+==[\d.]+", it) for it in packages.split())


def test_packages_that_build_the_site_have_versions() -> None:
    text = (ROOT / "tools" / "docs" / "requirements.txt").read_text(encoding="utf-8")
    _, *packages = text.splitlines()
    assert {it.partition("==")[0] for it in packages} >= {"Sphinx", "furo", "griffelib"}
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", it) for it in packages)


def test_pythons_of_classifiers_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (tested,) = re.findall(r"python: (\[.*\])", text)
    assert named == json.loads(tested)
    assert project["requires-python"] == f">={named[0]}"


def test_classifiers_and_limits_are_those_of_the_table_of_machines() -> None:
    guide = (ROOT / "tools" / "docs" / "guide.md").read_text(encoding="utf-8")
    kinds = "runs in CI|run by hand|simulated|written for, never run"
    machines = dict(re.findall(rf"^\| (.+?) \| ({kinds}) \|", guide, re.MULTILINE))
    assert set(machines.values()) == set(kinds.split("|"))
    run = [it for it, kind in machines.items() if kind in ("runs in CI", "run by hand")]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = project["classifiers"]
    systems = {"Linux": "POSIX :: Linux", "macOS": "MacOS", "Windows": "Microsoft :: Windows"}
    for system, classifier in systems.items():
        is_run = any(system in it for it in run)
        assert (f"Operating System :: {classifier}" in classifiers) is is_run, system
    pythons = [it for it in run if it.startswith("Python ")]
    for version in re.findall(r"Python :: (3\.\d+)", "\n".join(classifiers)):
        assert any(version in it for it in pythons), version

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (limit,) = re.findall(
        r"^- Continuous integration.*?(?=\n\n|\n- )", readme, re.DOTALL | re.MULTILINE
    )
    simulated = [it for it, kind in machines.items() if kind == "simulated"]
    assert " and ".join(simulated) + " are only simulated" in " ".join(limit.split())


def test_the_changelog_begins_with_this_version() -> None:
    changes = (ROOT / ".github" / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)", changes, re.MULTILINE)
    assert versions[0] == onnxarchive.__version__
    cited = (ROOT / "tools" / "docs" / "citing.md").read_text(encoding="utf-8")
    assert f"version = {{{onnxarchive.__version__}}}," in cited


@pytest.mark.parametrize(
    "path",
    [it for it in sorted(ROOT.glob("tools/**/package.json")) if "node_modules" not in it.parts],
    ids=lambda path: path.parent.name,
)
def test_packages_of_npm_are_locked(path: Path) -> None:
    asked = json.loads(path.read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads(path.with_name("package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert locked[""]["dependencies"] == asked
    for name, version in asked.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert all(it["integrity"] for name, it in locked.items() if name and not it.get("link"))
