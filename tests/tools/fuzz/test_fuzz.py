"""Targets of the fuzzer on seeds and mutations, and changes of the reader that vectors notice."""

from __future__ import annotations

import ast
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import completed

from onnxarchive.errors import ArchiveFormatError
from onnxarchive.model import wire
from tools.fuzz import mutate_reader, run as fuzz, seeds

MUTATIONS = 2500
NUMBERS = [0, 1, 2, 20, 44, 45, 46, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFE, 0xFFFF, 1 << 31, -2, -1]

each_target = pytest.mark.parametrize("name", sorted(fuzz.TARGETS))


def _mutated(generator: random.Random, data: bytes, other: bytes) -> bytes:
    """The bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        # Half of the changes are in the end of a file, where directory and end records are.
        begin = max(len(changed) - 300, 0) if generator.getrandbits(1) else 0
        at = generator.randint(begin, len(changed))
        kind = generator.choice(["bit", "bit", "byte", "number", "insert", "delete", "copy", "cut"])
        if kind == "bit" and at < len(changed):
            changed[at] ^= 1 << generator.randrange(8)
        elif kind == "byte":
            changed[at : at + 1] = bytes([generator.choice(NUMBERS) % 256])
        elif kind == "number":
            width = generator.choice([2, 4, 8])
            number = generator.choice(NUMBERS) % (1 << 8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
        elif kind == "insert":
            changed[at:at] = generator.choice([generator.randbytes(3), bytes(64), b"PK\1\2"])
        elif kind == "delete":
            del changed[at : at + generator.randint(1, 64)]
        elif kind == "copy":
            begin = generator.randint(0, len(other))
            changed[at:at] = other[begin : begin + generator.randint(1, 100)]
        elif kind == "cut" and generator.randrange(10) == 0:
            del changed[at:]
    return bytes(changed)


@each_target
def test_the_seeds_of_a_target_are_no_findings_and_some_are_accepted(name: str) -> None:
    target = fuzz.TARGETS[name]
    verdicts = [target.run(data) for data in target.seeds()]
    assert verdicts.count(True) >= 5


@pytest.mark.sweep
@each_target
def test_mutated_seeds_cause_no_findings_of_the_fuzzer(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    target = fuzz.TARGETS[name]
    generator = random.Random(f"{name} 1")
    first = target.seeds()
    verdicts = []
    for index in range(MUTATIONS):
        data = _mutated(generator, first[index % len(first)], generator.choice(first))
        verdicts.append(bool(target.run(data)))
    assert 0 < sum(verdicts) < MUTATIONS
    record_property("mutated files", MUTATIONS)


@each_target
@pytest.mark.parametrize("data", [b"", b"\0", b"PK\5\6" + bytes(18), bytes(100), b"\x08\x0a:\0"])
def test_few_bytes_are_no_finding(name: str, data: bytes) -> None:
    fuzz.TARGETS[name].run(data)


def test_a_disagreement_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeds.serialized_models()[0]
    assert fuzz.run_wire(model)

    def broken(data: bytes) -> int:
        raise ArchiveFormatError("no")

    monkeypatch.setattr(wire, "count_graphs", broken)
    with pytest.raises(fuzz.DisagreementError):
        fuzz.run_wire(model)


def test_an_input_can_be_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "input"
    for data, verdict in ((seeds.archives()[-1], "accepted\n"), (b"text", "refused\n")):
        path.write_bytes(data)
        assert fuzz.main(["archive", "--reproduce", str(path)]) == 0
        assert capsys.readouterr().out == verdict


def test_reproducing_an_input_leaves_no_file(tmp_path: Path) -> None:
    before = [tmp_path / "input", tmp_path / "temporary"]
    before[0].write_bytes(seeds.archives()[-1])
    before[1].mkdir()
    done = completed(
        [sys.executable, fuzz.__file__, "archive", "--reproduce", before[0]],
        env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(before[1]))},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "accepted\n"), done.stderr
    assert list(before[1].iterdir()) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_wrong_crc_breaks_a_rule_and_is_no_finding() -> None:
    assert not fuzz.is_archive(seeds.VECTORS / "crc.onnxa")


@pytest.mark.parametrize(
    "vector", ["bool-2", "unused-bits-int4", "external-data-checksum", "plain"]
)
def test_rules_that_the_data_of_tensors_breaks_are_compared_with_a_second_check(
    vector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = seeds.VECTORS / f"{vector}.onnxa"
    is_sound = vector == "plain"
    assert fuzz.is_archive(path) is is_sound
    otherwise = {"TENSOR-5"} if is_sound else set()
    monkeypatch.setattr(fuzz, "_broken_by_data", lambda model, data: otherwise)
    with pytest.raises(fuzz.DisagreementError):
        fuzz.is_archive(path)


def test_a_missing_fuzzer_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fuzz.main(["archive", "--seconds", "1"]) == 2
    assert "pip install atheris" in capsys.readouterr().err


PROGRAM = """
_MAX_SIZE = 3
LIMIT = 3

def check(size, kind):
    if size > _MAX_SIZE or kind:
        _refuse('A-1', 'size', size)
    if size == 2:
        size = 1
    _expect('A-2', 'both', (0, 1), (size, kind))
    _expect('A-3', 'one', 0, size)
"""


def lines(tree: ast.Module) -> list[str]:
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


def test_each_condition_and_limit_is_changed_once_and_alone() -> None:
    before = lines(ast.parse(PROGRAM))
    changed = {}
    for change in mutate_reader.changes(PROGRAM):
        after = lines(change.tree)
        assert len(after) == len(before)
        (pair,) = ((one, other) for one, other in zip(before, after, strict=True) if one != other)
        changed[change.name] = pair[1]
    assert changed == {
        "module: _MAX_SIZE: -1": "_MAX_SIZE = 2",
        "module: _MAX_SIZE: +1": "_MAX_SIZE = 4",
        "check: size > _MAX_SIZE or kind: dropped": "if False:",
        "check: size > _MAX_SIZE or kind: without `size > _MAX_SIZE`": "if kind:",
        "check: size > _MAX_SIZE or kind: without `kind`": "if size > _MAX_SIZE:",
        "check: size > _MAX_SIZE: bound moved": "if size >= _MAX_SIZE or kind:",
        "check: 'A-2' 'both': removed": "None",
        "check: 'A-2' 'both': without `size`": ("_expect('A-2', 'both', (1,), (kind,))"),
        "check: 'A-2' 'both': without `kind`": ("_expect('A-2', 'both', (0,), (size,))"),
        "check: 'A-3' 'one': removed": "None",
    }


def test_vectors_notice_every_change_of_the_check_of_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mutate_reader.main(["--only", "_check_key"]) == 0
    printed = capsys.readouterr().out
    assert " 0 unnoticed and not listed; " in printed
    assert not printed.startswith("0 changes")


def test_an_unnoticed_change_and_a_wrong_entry_of_the_list_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate_reader, "passes", lambda *_: True)
    monkeypatch.setattr(mutate_reader, "EQUIVALENT", {"_check_key: gone": "a reason"})
    assert mutate_reader.main(["--only", "_check_key"]) == 1
    *unnoticed, wrong, summary = capsys.readouterr().out.splitlines()
    assert unnoticed
    assert all(it.startswith("onnxa_reader.py:") for it in unnoticed)
    assert wrong == (
        "listed as unnoticed, but a vector notices it, or no such change exists: _check_key: gone"
    )
    assert f" {len(unnoticed)} unnoticed and not listed; " in summary
