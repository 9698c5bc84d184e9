"""The conformance suite: recipes, vectors, manifest, specification and readers agree."""

from __future__ import annotations

import copy
import csv
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from findings import states_fault
from models import external_tensors
from processes import completed, is_running, started, wait_until
from versions import HAS_PYTHON_PARSER

import onnxarchive
from conformance import run as runner
from conformance.make import __main__ as recipe
from onnxarchive import ArchiveError, UnsupportedFeatureError
from onnxarchive.model.tensors import text
from onnxarchive.reading.check import rules

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "conformance"
RUNNER = SUITE / "run.py"
VECTORS: list[dict[str, Any]] = json.loads((SUITE / "manifest.json").read_bytes())["vectors"]
BY_NAME = {vector["name"]: vector for vector in VECTORS}
README = (SUITE / "README.md").read_text(encoding="utf-8")
Record = Callable[[str, object], None]
STAGES = ("open", "header", "data")

# Rules about the frame of the file; all others are about an entry.
RULES_WITHOUT_ENTRY = {"FILE-1", "ZIP-16", *(f"ZIP-{it}" for it in range(1, 6))} | {
    f"ZIP64-{it}" for it in range(1, 4)
}

SMALL = [vector for vector in VECTORS if "file" in vector and not vector.get("large")]
LARGE = [vector for vector in VECTORS if vector.get("large")]


# Vectors that protobuf's Python parser cannot read; the first six conform to the specification.
NOT_READ_IN_PYTHON = {
    *("model-groups-deepest", "model-odd-encoding", "model-unknown-fields"),
    *("tensor-name-cut", "tensor-name-surrogate", "tensor-name-too-large"),
    *(f"external-data-{key}-not-utf-8" for key in ("checksum", "length", "location")),
}


# Vectors, rules and text


def test_recipes_give_the_vectors_and_the_manifest_byte_for_byte(
    tmp_path: Path, record_property: Record
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
    record_property: Record,
) -> None:
    obeyed = {rule for vector in VECTORS if vector["accepted"] for rule in vector["rules"]}
    broken = {vector["rules"][0] for vector in VECTORS if not vector["accepted"]}
    named = {rule for vector in VECTORS for rule in vector["rules"]}
    assert obeyed == broken == named == set(rules())
    record_property("rules", len(rules()))


def output_for(vector: str) -> dict[str, Any]:
    """What a reader has to print of an archive that it accepts."""
    return {field: BY_NAME[vector][field] for field in ("accepted", "entries", "tensors")}


def test_readme_shows_what_a_reader_prints_of_the_example() -> None:
    shown, _ = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    assert json.loads(shown) == output_for("example")


def test_every_class_of_attack_in_the_readme_has_a_vector() -> None:
    table = README.split("## Classes of attack")[1]
    cells = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted({it["class"] for it in VECTORS if "class" in it})


def test_the_users_guide_lists_the_vectors_that_protobufs_python_parser_cannot_read() -> None:
    guide = (ROOT / "tools" / "docs" / "guide.md").read_text(encoding="utf-8")
    assert {name for name in BY_NAME if f"`{name}`" in guide} == NOT_READ_IN_PYTHON


def test_guide_has_every_rule_in_one_step() -> None:
    steps = re.findall(r"`try .*--rules (\S+)`", README)
    assert sorted(rule for step in steps for rule in step.split(",")) == sorted(rules())


# The clauses


CLAUSES = [*csv.DictReader((SUITE / "clauses.csv").read_text(encoding="utf-8").splitlines())]


def test_every_rule_has_clauses_in_the_order_of_the_specification() -> None:
    text = (ROOT / "spec" / "specification.md").read_text(encoding="utf-8")
    order = re.findall(r"^\*\*([A-Z0-9]+-[0-9]+)\*\*", text, re.MULTILINE)
    assert [*dict.fromkeys(clause["rule"] for clause in CLAUSES)] == order
    named = [(clause["rule"], clause["clause"]) for clause in CLAUSES]
    assert len({*named}) == len(named)


def test_every_clause_has_vectors_or_is_implied(record_property: Record) -> None:
    for clause in CLAUSES:
        assert bool(clause["vectors"]) != bool(clause["implied"]), clause
    record_property("clauses", len(CLAUSES))
    record_property("implied clauses", sum(bool(clause["implied"]) for clause in CLAUSES))


def test_every_vector_shows_a_clause_of_one_of_its_rules() -> None:
    shown = [(name, clause["rule"]) for clause in CLAUSES for name in clause["vectors"].split()]
    assert {name for name, _ in shown} == {*BY_NAME}
    assert [it for it in shown if it[1] not in BY_NAME[it[0]]["rules"]] == []


# The library on every vector


def refused_at(path: Path) -> tuple[str, ArchiveError | None]:
    """The first of opening, reading and verifying that refuses a file, by stage, and the error."""
    stage = "open"
    try:
        with onnxarchive.open(path) as archive:
            stage = "header"
            for name in archive.entries:
                archive.read(name)
            stage = "data"
            archive.verify()
    except ArchiveError as error:
        return stage, error
    return "none", None


def assert_tells(vector: dict[str, Any], rule: str, entry: str | None, message: str) -> None:
    """Requires what is wrong, and the entry, in an error or a finding."""
    assert states_fault(message), message
    has_entry = rule not in RULES_WITHOUT_ENTRY and vector["name"] != "no-entries"
    assert not has_entry or entry is not None, f"{rule}: {message}"


def assert_refused(
    vector: dict[str, Any], path: Path, record_property: Record, *, full: bool = True
) -> None:
    """Requires that a vector is refused, when and by what it should be.

    Args:
        full: Whether also the full check is tried, which reads every byte.
    """
    stage, error = refused_at(path)
    checks = {False: onnxarchive.check(path)}
    if full:
        checks[True] = onnxarchive.check(path, full=True)
    is_accepted = error is None or (full and not checks[True])
    record_property("accepted that should be refused", int(is_accepted))
    assert error is not None
    assert stage == vector["stage"]
    assert error.rule in vector["rules"]
    assert_tells(vector, str(error.rule), error.entry, error.message)
    for is_full, findings in checks.items():
        assert all(finding.rule in rules() and finding.message for finding in findings)
        named = [finding for finding in findings if finding.rule in vector["rules"]]
        if stage == "data" and not is_full:
            assert findings == []
        else:
            assert named != []
        for finding in named:
            assert_tells(vector, str(finding.rule), finding.entry, finding.message)


def assert_accepted(expected: dict[str, Any], path: Path) -> None:
    with onnxarchive.open(path) as archive:
        entries = [
            {field: getattr(entry, field) for field in runner.ENTRY_FIELDS}
            for entry in archive.entries.values()
        ]
        assert entries == expected["entries"]
        tensors = [
            {
                "model": identifier,
                "key": key,
                "name": text(tensor.name),
                "data_type": tensor.data_type,
                "dims": list(tensor.dims),
                "sha256": hashlib.sha256(archive.read(key)).hexdigest(),
            }
            for identifier, model in archive.models.items()
            for key, tensor in external_tensors(model).items()
        ]
        order = itemgetter("model", "key")
        assert sorted(tensors, key=order) == sorted(expected["tensors"], key=order)
        archive.verify()


def assert_not_supported(path: Path) -> None:
    """Requires that opening and checking say that protobuf's Python parser cannot read a file."""
    calls: list[Callable[[Path], object]] = [onnxarchive.open, onnxarchive.load, onnxarchive.check]
    for call in calls:
        with pytest.raises(UnsupportedFeatureError, match="protobuf's Python parser") as caught:
            call(path)
        assert (caught.value.path, caught.value.rule) == (str(path), None)


@pytest.mark.parametrize("vector", SMALL, ids=[vector["name"] for vector in SMALL])
def test_library_gives_the_verdict_of_the_manifest(
    vector: dict[str, Any], record_property: Record
) -> None:
    path = SUITE / vector["file"]
    if HAS_PYTHON_PARSER and vector["name"] in NOT_READ_IN_PYTHON:
        assert_not_supported(path)
    elif vector["accepted"]:
        assert onnxarchive.check(path, full=True) == []
        assert_accepted(vector, path)
    else:
        assert_refused(vector, path, record_property)


@pytest.mark.large
def test_library_gives_the_verdict_of_the_manifest_on_large_vectors(
    large: Path, record_property: Record
) -> None:
    for vector in LARGE:
        path = large / vector["file"]
        if vector["accepted"]:
            assert onnxarchive.check(path) == [], vector["name"]
            assert_accepted(json.loads((large / f"{vector['name']}.json").read_bytes()), path)
        else:
            assert vector["stage"] != "data"
            assert_refused(vector, path, record_property, full=False)


@pytest.fixture(scope="session")
def large() -> Iterator[Path]:
    """The folder of the large vectors."""
    with tempfile.TemporaryDirectory() as folder:
        runner.make_large(VECTORS, Path(folder))
        yield Path(folder)


# The runner


def run_suite(reader: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return completed([sys.executable, RUNNER, "--reader", reader, *arguments])


C_READER = SUITE / "readers" / "c"
SANITIZERS = ("-g", "-O2", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
READERS = {
    "c": f"cc {C_READER}/read.c {{archive}}",  # see `command_of`
    "python": f"{sys.executable} {SUITE}/readers/python/onnxa_reader.py {{archive}}",
    "javascript": f"node {SUITE}/readers/javascript/read.mjs {{archive}}",
}


def compiled(source: Path, program: Path, *options: str) -> None:
    """Compiles a file of C, which gives no warning."""
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion")
    done = completed(
        [*(options or ("cc", "-std=c99", *SANITIZERS)), *warnings, source, "-o", program]
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="session")
def c_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of the reader in C, which stop at what a sanitizer finds.

    `read-large` has none, since GiB would take minutes with them.
    """
    folder = tmp_path_factory.mktemp("c reader")
    for name in ("read", "fuzz"):
        compiled(C_READER / f"{name}.c", folder / name)
    compiled(C_READER / "read.c", folder / "read-large", "cc", "-std=c99", "-O2")
    return folder


def command_of(reader: str, request: pytest.FixtureRequest, part: str = "small") -> str:
    """The command of an independent reader."""
    command = READERS[reader]
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"{command.split()[0]} is not installed")
    if reader == "c":
        program = "read-large" if part == "large" else "read"
        return f"'{request.getfixturevalue('c_programs')}/{program}' {{archive}}"
    return command


SIZES = {"small": "--no-large", "large": "--large-only"}


@pytest.mark.tool
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("part", SIZES)
def test_independent_reader_passes_the_suite(
    reader: str,
    part: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Record,
) -> None:
    command = command_of(reader, request, part)
    built = request.getfixturevalue("large") if part == "large" else tmp_path
    done = run_suite(command, "--built", str(built), SIZES[part])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "making" not in done.stderr  # those of the fixture were taken
    count = len(LARGE) if part == "large" else len(VECTORS) - len(LARGE)
    assert f"{count} vectors: {count} passed, 0 failed, 0 passed over" in done.stdout.splitlines()
    record_property("vectors given to independent readers", count)


@pytest.mark.tool
def test_reader_in_javascript_names_the_tensor_of_a_wrong_crc32(archive: Path) -> None:
    with onnxarchive.open(archive) as opened:
        key = next(iter(opened.tensors.refs))
        name = next(name for name in opened.tensors if opened.tensors.key(name) == key)
        entry = opened.entries[key]
    data = bytearray(archive.read_bytes())
    data[entry.data_offset] ^= 1
    archive.write_bytes(data)
    modules = [(SUITE / "readers" / "javascript" / it).as_uri() for it in ("node.mjs", "onnxa.mjs")]
    code = """
const [node, onnxa, path, key] = process.argv.slice(1);
const { fileSource } = await import(node);
const { openArchive } = await import(onnxa);
const opened = await openArchive(await fileSource(path));
for (const call of [() => opened.read(key), () => opened.check()]) {
  await call().catch((error) => console.log(error.rule, error.message));
}
"""
    command = ["node", "--input-type=module", "--eval", code, *modules, str(archive), key]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = printed.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("ZIP-15 expected data of the entry ")
        assert f"(the tensor {json.dumps(name)}) with the CRC-32 0x" in line


@pytest.mark.tool
@pytest.mark.parametrize("reader", ["c"])  # each vector starts a process, fast in C
def test_independent_reader_finds_at_opening_what_the_stages_say(
    reader: str, request: pytest.FixtureRequest
) -> None:
    command = command_of(reader, request).replace("{archive}", "--open {archive}")
    done = run_suite(command, "--open", "--no-large")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# The reader in C


@pytest.mark.tool
@pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed")
def test_reader_in_c_holds_its_promises_on_damaged_archives(
    c_programs: Path, record_property: Record
) -> None:
    files = [SUITE / vector["file"] for vector in SMALL]
    done = completed([c_programs / "fuzz", "--runs", "40000", *files])
    assert (done.returncode, done.stderr) == (0, "")
    counts = re.fullmatch(
        r"(\d+) files: (\d+) accepted, (\d+) opened, (\d+) refused\n", done.stdout
    )
    assert counts is not None, done.stdout
    count, accepted, opened, refused = map(int, counts.groups())
    assert count == 40000
    assert accepted > 1000
    assert opened > 1000  # and refused by the full check
    assert refused > 10000
    record_property("damaged files given to the reader in C", count)


@pytest.mark.tool
@pytest.mark.parametrize("options", [("cc", "-std=c99"), ("c++", "-xc++", "-std=c++11")])
@pytest.mark.parametrize("source", ["read.c", "fuzz.c"])
def test_reader_in_c_compiles_without_warnings(
    source: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    if shutil.which(options[0]) is None:
        pytest.skip(f"{options[0]} is not installed")
    compiled(C_READER / source, tmp_path / "program", *options, "-O2")


def test_reader_in_c_knows_the_messages_of_the_table() -> None:
    rows = re.findall(
        r"ONNXA__FIELD\((\w+), (\d+)\): return ONNXA__(\w+);", (C_READER / "onnxa.h").read_text()
    )
    found = {(message, int(number)): content for message, number, content in rows}
    assert len(found) == len(rows) > 0
    packed = {"0": "VARINTS", "1": "FIXED64", "5": "FIXED32"}
    contents: dict[str, dict[int, str]] = {}  # what a field of wire type 2 holds, but for bytes
    with (ROOT / "spec" / "messages.csv").open(newline="") as file:
        fields = list(csv.DictReader(file))
    for field in fields:
        its = contents.setdefault(field["message"], {})
        if field["wire type"] != "2":
            if field["repeated"]:
                its[int(field["number"])] = packed[field["wire type"]]
        elif field["type"] not in ("string", "bytes"):
            its[int(field["number"])] = field["type"]
    names = {name: "PLAIN" for name in contents if not contents[name]}
    names |= {"ModelProto": "MODEL_PROTO"} | {name: name for name in packed.values()}
    todo = ["ModelProto"]
    for message in todo:
        for number, content in contents[message].items():
            it = found.pop((names[message], number))
            if content not in names:
                assert it not in names.values()
                names[content] = it
                todo.append(content)
            assert it == names[content]
    assert found == {}


def test_table_of_the_reader_in_c_is_what_its_script_makes() -> None:
    table = (C_READER / "nfc.h").read_text()
    if f"Unicode {unicodedata.unidata_version}." not in table:
        pytest.skip(f"this Python has Unicode {unicodedata.unidata_version}")
    done = completed([sys.executable, C_READER / "make_nfc.py"], status=0)
    assert done.stdout == table


def scripted(tmp_path: Path, program: str) -> str:
    path = tmp_path / "a reader.py"
    path.write_text("import json, sys, time\npath = sys.argv[1]\n" + program)
    return f"{sys.executable} '{path}' {{archive}}"


@pytest.mark.tool
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print(json.dumps({'accepted': True, 'entries': [], 'tensors': []}))", "expected: "),
        ("print(json.dumps({'accepted': False, 'rule': 'FILE-1'}))", "found FILE-1"),
        ("print(json.dumps({'accepted': None, 'message': 'no'}))", "expected: "),
        ("print('no JSON')", "expected one JSON object"),
        ("print('[]')", "expected one JSON object"),
        ("print('[' * 100_000)", "nested too deep"),
        ("print('{\"accepted\": ' + '[' * 900 + ']' * 900 + '}')", "expected: "),
        ('print(\'{"accepted": NaN, "rule": 1e400}\')', "expected: "),
        ("print('9' * 5000)", "expected one JSON object"),
        ("sys.stdout.buffer.write('{\"accepted\": false}'.encode('utf-16'))", "expected one JSON"),
        ('sys.stdout.buffer.write(b\'{"accepted": "\\xff"}\')', "expected one JSON object"),
        ('print(\'{"accepted": true, "message": "\\\\ud800 \\\\u00e9"}\')', r"\ud800 \xe9"),
        ("sys.exit('broken')", "exit status 1; standard error: broken"),
    ],
)
def test_runner_fails_a_reader_that_is_wrong(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_suite(scripted(tmp_path, program), "--only", "comment-is")
    assert done.returncode == 1, done.stderr
    assert reason.lower() in done.stdout.lower()
    assert done.stderr == ""
    assert re.search(r"vectors: 0 passed, [1-9]\d* failed", done.stdout)


def judged(
    printed: object, vector: str = "plain", *, only_open: bool = False, is_partial: bool = False
) -> tuple[str, str]:
    """The runner's verdict on an output, and the reason."""
    check = runner.Check([], SUITE, 1, only_open, is_partial)
    return runner.judge(check, BY_NAME[vector], json.dumps(printed).encode())


def right() -> dict[str, Any]:
    """What a reader has to print of the vector `plain`, to be changed."""
    return copy.deepcopy(output_for("plain"))


MALFORMED = "expected entries and tensors in the form"


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda it: it["entries"][0].update(data_offset=it["entries"][0]["data_offset"] + 64),
            "entries: expected",
        ),
        (lambda it: it["entries"].reverse(), "entries: expected"),
        (lambda it: it["tensors"][0].update(dims=["2", "4"]), "tensors: expected"),
        (lambda it: it["tensors"][0].update(sha256="0"), "tensors: expected"),
        (lambda it: it["tensors"].append(it["tensors"][0]), "tensors: expected 2, found 3"),
        (lambda it: it["tensors"].pop(0), "at 0, found None"),
        (lambda it: it["tensors"][0].pop("name"), MALFORMED),
        (lambda it: it.update(entries=1), MALFORMED),
        (lambda it: it["tensors"][0].update(key=[]), MALFORMED),
        (lambda it: it["entries"][0].update(crc32="9" * 5000), MALFORMED),
        (lambda it: it["tensors"][0].update(dims="23"), "expected dims in a list"),
    ],
)
def test_runner_compares_what_an_accepting_reader_found(
    change: Callable[[dict[str, Any]], object], difference: str
) -> None:
    printed = right()
    change(printed)
    outcome, reason = judged(printed)
    assert outcome == "failed"
    assert difference in reason


@pytest.mark.parametrize(
    "value",
    [
        *(64.5, 64.0, True, None, math.inf, [64]),
        *("64 ", "+64", "6_4", "64\n", "", "0x40", "\u0666\u0664"),
    ],
)
def test_runner_takes_whole_numbers_alone(value: object) -> None:
    with_offset, with_dim = right(), right()
    with_offset["entries"][0]["data_offset"] = value
    with_dim["tensors"][0]["dims"][0] = value
    for printed in (with_offset, with_dim):
        outcome, reason = judged(printed)
        assert outcome == "failed"
        assert "expected a number" in reason


@pytest.mark.parametrize(
    ("vector", "printed", "outcome"),
    [
        ("models-further-checksum", {"accepted": True}, "passed"),
        ("models-further-checksum", {"accepted": False, "rule": "DATA-6"}, "failed"),
        ("external-data-checksum-twice", {"accepted": False, "rule": "DATA-4"}, "passed"),
        ("external-data-checksum-twice", {"accepted": True}, "failed"),
    ],
)
def test_runner_knows_what_opening_finds(
    vector: str, printed: dict[str, object], outcome: str
) -> None:
    assert judged(printed, vector, only_open=True)[0] == outcome


def test_runner_asks_for_no_sha256_once_open() -> None:
    printed = right()
    for tensor in printed["tensors"]:
        del tensor["sha256"]
    assert judged(printed, only_open=True) == ("passed", "")
    assert judged(printed)[0] == "failed"


def test_runner_takes_numbers_also_as_strings_of_digits() -> None:
    printed = right()
    assert judged(printed) == ("passed", "")
    for entry in printed["entries"]:
        entry.update({key: str(it) for key, it in entry.items() if isinstance(it, int)})
    for tensor in printed["tensors"]:
        tensor["dims"] = [f"0{dim}" for dim in tensor["dims"]]
        tensor["data_type"] = str(tensor["data_type"])
    assert judged(printed) == ("passed", "")


def test_runner_writes_the_results_down_and_takes_the_vectors_of_rules(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    reader = scripted(tmp_path, "print(json.dumps({'accepted': True}))")
    arguments = ["--no-large", "--rules", "NAME-2,ZIP-12", "--json", str(results)]
    assert run_suite(reader, *arguments).returncode == 1
    outcomes = {it["vector"]: it["outcome"] for it in json.loads(results.read_bytes())}
    assert outcomes.pop("names-file-and-folder") == "failed"
    assert outcomes.pop("entry-comment") == "failed"
    assert outcomes["asset-names-folded"] == "passed"  # entries and tensors may be missing
    assert "models-twice" in outcomes  # breaks NAME-2 first, MODEL-4 then
    assert "name-model-in-small-letters" not in outcomes  # breaks VERSION-1 first, NAME-2 then


def test_runner_compares_entries_of_a_reader_that_is_not_finished() -> None:
    printed: dict[str, object] = {"accepted": True}
    assert judged(printed, "asset-names-folded", is_partial=True) == ("passed", "")
    printed["entries"] = []
    outcome, reason = judged(printed, "asset-names-folded", is_partial=True)
    assert (outcome, reason[:17]) == ("failed", "entries: expected")


@pytest.mark.parametrize(
    ("reader", "arguments", "message"),
    [
        ("cat", [], "expected {archive}"),
        ("cat {archive}", ["--rules", "NAME-2,NAME-9"], "the rule 'NAME-9'"),
        ("cat {archive}", ["--only", "no such vector"], "no vector"),
        (os.path.join("no", "such", "command") + " {archive}", [], "does not start"),
        ("cat '{archive}", [], "--reader: cannot be split into words"),
        ("cat {archive}", ["--json", os.path.join("no", "such", "file")], "--json: "),
    ],
)
def test_runner_says_when_it_is_called_wrongly(
    reader: str, arguments: list[str], message: str
) -> None:
    done = run_suite(reader, "--no-large", *arguments)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout) == (2, "")


def test_a_command_is_split_into_words_as_the_system_does_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["a", "b c", "d e", "{archive}"]
    assert runner.words_of("a 'b c' d\\ e {archive}") == words
    monkeypatch.setattr(os, "name", "nt")
    words = runner.words_of(r'"C:\a b\reader.exe" C:\new --check {archive} "{archive}"')
    assert words == [r"C:\a b\reader.exe", r"C:\new", "--check", "{archive}", "{archive}"]


# The runner and the large vectors


@pytest.fixture
def fake_recipe(tmp_path: Path) -> Path:
    """A suite of one large vector, with its runner and recipe, which says how often it was run."""
    folder = tmp_path / "suite"
    (folder / "conformance" / "make").mkdir(parents=True)
    for package in ("conformance", "conformance/make"):
        (folder / package / "__init__.py").touch()
    shutil.copy(RUNNER, folder / "conformance" / "run.py")
    vector = {"name": "big", "about": "", "file": "big.onnxa", "accepted": False, "large": True}
    text = json.dumps({"version": 1, "vectors": [{**vector, "rules": ["ZIP-1"], "stage": "open"}]})
    (folder / "conformance" / "manifest.json").write_text(text)
    write_recipe(folder, "(folder / 'big.onnxa').write_text('1')")
    return folder


def write_recipe(suite: Path, then: str) -> None:
    (suite / "conformance" / "make" / "__main__.py").write_text(
        "import pathlib, sys\nfolder = pathlib.Path(sys.argv[2])\n"
        f"folder.mkdir(exist_ok=True)\n{then}\n"
    )


def run_fake(suite: Path, built: Path) -> subprocess.CompletedProcess[str]:
    program = "print(json.dumps({'accepted': None, 'message': open(path).read()}))"
    return completed(
        [
            *(sys.executable, suite / "conformance" / "run.py", "--built", built),
            *("--reader", scripted(suite, program)),
        ],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )


def test_large_vectors_are_kept_until_their_recipes_change(
    fake_recipe: Path, tmp_path: Path
) -> None:
    built = tmp_path / "built"
    assert "passed over: big: 1\n" in run_fake(fake_recipe, built).stdout
    again = run_fake(fake_recipe, built)
    assert (again.returncode, again.stderr) == (0, "")
    write_recipe(fake_recipe, "(folder / 'big.onnxa').write_text('2')")
    assert "passed over: big: 2\n" in run_fake(fake_recipe, built).stdout
    (fake_recipe / "conformance" / "make" / "other.py").write_text("")
    assert "making" in run_fake(fake_recipe, built).stderr
    (built / "big.onnxa").unlink()
    assert "making" in run_fake(fake_recipe, built).stderr
    assert run_fake(fake_recipe, built).stderr == ""


def test_incomplete_large_vectors_are_not_kept(fake_recipe: Path, tmp_path: Path) -> None:
    built = tmp_path / "built"
    assert run_fake(fake_recipe, built).returncode == 0
    before = (fake_recipe / "conformance" / "make" / "__main__.py").read_text()
    write_recipe(
        fake_recipe, "(folder / 'big.onnxa').write_text('3')\nraise OSError('disk é full')"
    )
    done = run_fake(fake_recipe, built)
    assert done.returncode == 2
    making, line = done.stderr.splitlines()
    assert making.startswith("making")
    assert line.startswith("the large vectors cannot be made: exit status 1; OSError: disk")
    (fake_recipe / "conformance" / "make" / "__main__.py").write_text(before)
    assert "passed over: big: 1\n" in run_fake(fake_recipe, built).stdout


def test_a_folder_for_large_vectors_that_cannot_be_made_is_reported_in_one_line(
    fake_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    done = run_fake(fake_recipe, tmp_path / "file")
    assert done.returncode == 2
    assert "the large vectors cannot be made: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


# The runner, interrupted


# A reader that starts another process, and both take long.
SLEEPER = """
import subprocess, os
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
log = open({log!r}, "a")
log.write(f"{{os.getpid()}}\\n{{child.pid}}\\n")
log.close()
time.sleep(600)
"""


@pytest.fixture
def sleepers(tmp_path: Path) -> Iterator[Callable[[], list[int]]]:
    """Gives the processes of `SLEEPER` that have been started."""
    log = tmp_path / "processes"
    log.touch()

    def sleepers() -> list[int]:
        return [int(line) for line in log.read_text().split()]

    yield sleepers
    for process in filter(is_running, sleepers()):  # which the runner was to end
        os.kill(process, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_an_interrupted_runner_prints_one_line_and_ends_all_readers(
    tmp_path: Path, sleepers: Callable[[], list[int]]
) -> None:
    reader = scripted(tmp_path, SLEEPER.format(log=str(tmp_path / "processes")))
    command = [sys.executable, RUNNER, "--reader", reader, "--no-large", "--jobs", "2"]
    with started(command) as running:
        wait_until(lambda: len(sleepers()) == 4, running)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=280)
    assert (running.returncode, output, errors) == (130, "", "interrupted\n")
    wait_until(lambda: not any(map(is_running, sleepers())))


@pytest.mark.tool
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_reader_that_takes_too_long_is_ended_with_its_child_processes(
    tmp_path: Path, sleepers: Callable[[], list[int]]
) -> None:
    reader = scripted(tmp_path, SLEEPER.format(log=str(tmp_path / "processes")))
    done = run_suite(reader, "--only", "file-link", "--timeout", "10")
    assert "took more than 10 seconds" in done.stdout
    assert len(sleepers()) == 2
    wait_until(lambda: not any(map(is_running, sleepers())))
