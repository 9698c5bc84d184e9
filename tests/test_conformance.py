"""The conformance suite: recipes, vectors, manifest, specification and readers agree."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vectors as recipe

import onnxarchive
from onnxarchive import Archive, ArchiveError
from onnxarchive.rules import rules

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "conformance"
RUNNER = SUITE / "run.py"
VECTORS: list[dict[str, Any]] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
STAGES = ("open", "header", "data")

SMALL = [vector for vector in VECTORS if "file" in vector and not vector.get("large")]
LARGE = [vector for vector in VECTORS if vector.get("large")]


# Vectors, rules and text


def test_recipes_give_the_vectors_and_the_manifest_byte_for_byte(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    recipe.write_small(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == (SUITE / "manifest.json").read_bytes()
    made = {path.name: path.read_bytes() for path in (tmp_path / "vectors").iterdir()}
    stored = {path.name: path.read_bytes() for path in (SUITE / "vectors").iterdir()}
    assert made == stored
    record_property("vectors", len(VECTORS))


def test_manifest_lists_exactly_the_stored_files_and_their_checksums() -> None:
    listed = {Path(vector["file"]).name: vector for vector in SMALL}
    assert set(listed) == {path.name for path in (SUITE / "vectors").iterdir()}
    for name, vector in listed.items():
        data = (SUITE / "vectors" / name).read_bytes()
        assert len(data) == vector["size"] <= 1 << 20
        assert hashlib.sha256(data).hexdigest() == vector["sha256"]


def test_every_rule_has_a_vector_that_obeys_it_and_one_that_breaks_it(
    record_property: Callable[[str, object], None],
) -> None:
    obeyed = {rule for vector in VECTORS if vector["accepted"] for rule in vector["rules"]}
    broken = {vector["rules"][0] for vector in VECTORS if not vector["accepted"]}
    named = {rule for vector in VECTORS for rule in vector["rules"]}
    assert obeyed == broken == named == set(rules())
    record_property("rules", len(rules()))


def test_readme_shows_what_a_reader_prints_of_the_example() -> None:
    text = (SUITE / "README.md").read_text(encoding="utf-8")
    shown, _ = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (example,) = [vector for vector in VECTORS if vector["name"] == "example"]
    fields = ("accepted", "entries", "tensors")
    assert json.loads(shown) == {field: example[field] for field in fields}


def test_every_class_of_attack_in_the_readme_has_a_vector() -> None:
    text = (SUITE / "README.md").read_text(encoding="utf-8")
    table = text.split("## Classes of attack")[1]
    listed = [
        name
        for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    assert sorted(listed) == sorted({it["class"] for it in VECTORS if "class" in it})


# The library on every vector


def read_everything(archive: Archive) -> None:
    for name in archive.entries:
        archive.read(name)


def refused_at(path: Path) -> tuple[str, str | None]:
    """The stage at which opening and reading refuse a file, and the rule."""
    try:
        archive = onnxarchive.open(path)
    except ArchiveError as error:
        return "open", error.rule
    with archive:
        try:
            read_everything(archive)
        except ArchiveError as error:
            return "header", error.rule
    return "data", None


def assert_refused(vector: dict[str, Any], path: Path, *, full: bool) -> None:
    stage, rule = refused_at(path)
    findings = onnxarchive.check(path, full=full)
    assert stage == vector["stage"]
    if stage != "data":
        assert rule in vector["rules"]
    found = {finding.rule for finding in findings}
    assert found & set(vector["rules"])
    assert all(finding.rule in rules() and finding.message for finding in findings)


def assert_accepted(expected: dict[str, Any], path: Path) -> None:
    with onnxarchive.open(path) as archive:
        entries = [
            {
                "name": entry.name,
                "header_offset": entry.header_offset,
                "data_offset": entry.data_offset,
                "nbytes": entry.nbytes,
                "crc32": entry.crc32,
            }
            for entry in archive.entries.values()
        ]
        assert entries == expected["entries"]
        tensors = [
            {
                "key": key,
                "name": site.name,
                "data_type": site.tensor.data_type,
                "dims": list(site.tensor.dims),
                "sha256": hashlib.sha256(archive.read(key)).hexdigest(),
            }
            for key, site in archive.sites.items()
        ]
        wanted = {tensor["key"]: tensor for tensor in expected["tensors"]}
        assert {tensor["key"]: tensor for tensor in tensors} == wanted
        archive.verify()


@pytest.mark.parametrize("vector", SMALL, ids=[vector["name"] for vector in SMALL])
def test_library_gives_the_verdict_of_the_manifest(vector: dict[str, Any]) -> None:
    path = SUITE / vector["file"]
    if vector["accepted"]:
        assert onnxarchive.check(path, full=True) == []
        assert_accepted(vector, path)
    else:
        assert_refused(vector, path, full=True)


def test_library_gives_the_verdict_of_the_manifest_on_large_vectors(large: Path) -> None:
    for vector in LARGE:
        path = large / vector["file"]
        if vector["accepted"]:
            assert onnxarchive.check(path) == [], vector["name"]
            assert_accepted(json.loads((large / f"{vector['name']}.json").read_bytes()), path)
        else:
            assert_refused(vector, path, full=False)


@pytest.fixture(scope="session")
def large() -> Iterator[Path]:
    """The folder of the large vectors."""
    with tempfile.TemporaryDirectory() as folder:
        recipe.write_large(Path(folder))
        yield Path(folder)


# The runner


def run_suite(reader: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RUNNER, "--reader", reader, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


READERS = {
    "python": f"{sys.executable} {SUITE}/readers/python/onnxa_reader.py {{archive}}",
    "javascript": f"node {SUITE}/readers/javascript/read.mjs {{archive}}",
}


SIZES = {"small": "--no-large", "large": "--large-only"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("part", SIZES)
def test_independent_reader_passes_the_suite(
    reader: str,
    part: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    command = READERS[reader]
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    built = request.getfixturevalue("large") if part == "large" else tmp_path
    done = run_suite(command, "--built", str(built), SIZES[part])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    count, passed = re.findall(
        r"^(\d+) vectors: (\d+) passed, 0 failed, 0 passed over", done.stdout
    )[0]
    assert (
        int(count) == int(passed) == (len(LARGE) if part == "large" else len(VECTORS) - len(LARGE))
    )
    record_property("vectors given to independent readers", int(passed))


def scripted(tmp_path: Path, program: str) -> str:
    path = tmp_path / "a reader.py"
    path.write_text("import json, sys, time\npath = sys.argv[1]\n" + program)
    return f"{sys.executable} '{path}' {{archive}}"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(json.dumps({'accepted': True, 'entries': [], 'tensors': []}))", "expected to be"),
        ("print(json.dumps({'accepted': False, 'rule': 'FILE-1'}))", "found FILE-1"),
        ("print(json.dumps({'accepted': None, 'message': 'no'}))", "expected to be"),
        ("print('no JSON')", "expected one JSON object"),
        ("print('[]')", "expected one JSON object"),
        ("sys.exit('broken')", "exit status 1; standard error: broken"),
        ("time.sleep(60)", "took more than"),
    ],
)
def test_runner_fails_a_reader_that_is_wrong(program: str, reason: str, tmp_path: Path) -> None:
    arguments = ["--only", "comment-is", "--timeout", "3"]
    done = run_suite(scripted(tmp_path, program), *arguments)
    assert done.returncode == 1
    assert reason.lower() in done.stdout.lower()
    assert re.search(r"vectors: 0 passed, [1-9]\d* failed", done.stdout)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("printed['entries'][0]['data_offset'] += 64", "entries: expected"),
        ("printed['entries'].reverse()", "entries: expected"),
        ("printed['tensors'][0]['dims'] = ['2', '4']", "tensors: expected"),
        ("printed['tensors'][0]['sha256'] = '0'", "tensors: expected"),
        ("printed['tensors'].append(printed['tensors'][0])", "tensors: expected"),
        ("del printed['tensors'][0]['name']", "expected entries and tensors in the form"),
        ("printed['entries'] = 1", "expected entries and tensors in the form"),
    ],
)
def test_runner_compares_what_an_accepting_reader_found(
    change: str, difference: str, tmp_path: Path
) -> None:
    plain = next(vector for vector in VECTORS if vector["name"] == "plain")
    printed = {"accepted": True, "entries": plain["entries"], "tensors": plain["tensors"]}
    right = f"printed = {printed!r}\n"
    program = "print(json.dumps(printed))\n"
    done = run_suite(scripted(tmp_path, right + program), "--only", "file-link")
    assert done.returncode == 0, done.stdout
    done = run_suite(scripted(tmp_path, right + change + "\n" + program), "--only", "file-link")
    assert done.returncode == 1
    assert difference in done.stdout


def test_runner_writes_the_results_down(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    reader = scripted(tmp_path, "print(json.dumps({'accepted': False, 'rule': None}))")
    done = run_suite(reader, "--only", "comment", "--json", str(results))
    assert done.returncode == 0
    names = {it["name"] for it in VECTORS if "comment" in it["name"]}
    outcomes = {it["vector"]: it["outcome"] for it in json.loads(results.read_bytes())}
    assert outcomes == dict.fromkeys(names, "passed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reader", "cat"], "expected {archive}"),
        (["--reader", "cat {archive}", "--only", "no such vector"], "no vector"),
        (["--reader", os.path.join("no", "such", "command") + " {archive}"], "does not start"),
    ],
)
def test_runner_called_wrongly_says_so(arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, RUNNER, "--no-large", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
