"""The benchmark's report on given figures: verdicts, tables, growth, pictures, pages."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tools.bench import cases, inputs, plot, process, publish, report, ways
from tools.bench.cases import CASES, Case, Measure, Target
from tools.bench.process import Figures
from tools.bench.report import Point, Result, Spread, Verdict

MIB = 1 << 20
HALF = Target("at most", 0.5, "other")


def result_of(
    target: Target,
    ours: list[float],
    others: list[float],
    anonymous: tuple[int | None, int | None] = (None, None),
) -> Result:
    """The result of a case with two measures and one target."""
    measures = tuple(Measure(name, "warm", ways.open_archive) for name in ("ours", "other"))
    rounds = {
        name: [Figures(it, it / 2, memory, memory) for it in seconds]
        for name, seconds, memory in zip(("ours", "other"), (ours, others), anonymous, strict=True)
    }
    return Result("case", Case("title", measures, (target,)), "size", 1, rounds)


RESIDENT = Target("at most", 16 * MIB, figure="resident")
ANONYMOUS = Target("at most", 16 * MIB, figure="anonymous")
MEMORY = Target("at most", 1.05, "other", figure="anonymous")
FIVE_TIMES = Target("at least", 5, "other")


@pytest.mark.parametrize(
    ("target", "ours", "others", "met"),
    [
        (HALF, [1, 1, 1], [4, 4, 4], True),
        (HALF, [2, 2, 2], [4, 4, 4], True),  # the limit itself
        (HALF, [3, 3, 3], [4, 4, 4], False),
        (HALF, [1, 1.5, 1], [4, 4, 4], True),
        (HALF, [1, 20, 300], [4, 80, 1200], True),  # compared within each round
        (HALF, [9, 9, 8], [10, 10, 10], False),
        (FIVE_TIMES, [2], [10], True),
        (FIVE_TIMES, [2], [9.9], False),
        (FIVE_TIMES, [10], [1], False),
    ],
)
def test_a_target_is_judged_by_the_median_of_the_ratios_of_rounds(
    target: Target, ours: list[float], others: list[float], met: bool
) -> None:
    result = result_of(target, ours, others)
    (verdict,) = result.verdicts()
    rounds = len(ours)
    assert (verdict.met, verdict.rounds_met, verdict.rounds) == (met, rounds * met, rounds)
    assert ("NOT MET" in report.text(result)) == (not met)


@pytest.mark.parametrize(
    ("target", "nbytes", "met"),
    [
        *((target, 16 * MIB, True) for target in (RESIDENT, ANONYMOUS)),
        *((target, 16 * MIB + 1, False) for target in (RESIDENT, ANONYMOUS)),
        (ANONYMOUS, 0, True),
        (MEMORY, 105, True),
        (MEMORY, 106, False),
    ],
)
def test_memory_is_compared_with_a_limit_or_with_that_of_the_other_library(
    target: Target, nbytes: int, met: bool
) -> None:
    (verdict,) = result_of(target, [1], [1], (nbytes, 100)).verdicts()
    assert verdict.met == met
    assert target is MEMORY or f"{nbytes / MIB:.1f} MiB" in report.describe(verdict)


@pytest.mark.parametrize(
    ("ours", "is_judged"),
    [
        ([1, 2, 3], True),  # as wide as its margin of 2
        ([1, 2, 3.1], False),
        ([0.9, 2, 3], False),
        ([5, 6, 7], True),
        ([5, 5.5, 7], False),
        ([4.25, 4.25, 4.375], True),
        ([4.125, 4.125, 4.375], False),  # missed in each round, but by less than its spread
    ],
)
def test_a_spread_greater_than_the_margin_is_no_verdict(ours: list[float], is_judged: bool) -> None:
    target = Target("at most", 4, "other")
    result = result_of(target, ours, [1, 1, 1])
    (verdict,) = result.verdicts()
    assert verdict.met == ((sorted(ours)[1] <= 4) if is_judged else None)
    sentence = report.describe(verdict)
    assert sentence.startswith("no verdict") == (not is_judged)
    assert ("the spread exceeds the difference of median and target" in sentence) == (not is_judged)
    assert (report.summary([result]).splitlines()[0]).endswith(f"verdict: {not is_judged:d}")


def test_scaled_sizes_are_no_verdict() -> None:
    result = result_of(Target("at most", 4, "other"), [1, 1, 1], [1, 1, 1])
    assert [it.met for it in result.verdicts()] == [True]
    result.is_scaled = True
    (verdict,) = result.verdicts()
    assert verdict.met is None
    assert report.describe(verdict).endswith("in 3 of 3 rounds (the target is for full sizes)")


def test_a_target_without_its_figures_is_not_judged() -> None:
    left_out, failed = result_of(HALF, [1], []), result_of(HALF, [], [1])
    left_out.left_out["other"] = "other is not installed"
    failed.failures["ours"] = "Traceback\nexit status 1"
    untold = result_of(Target("at most", 1, figure="anonymous"), [1], [1])
    reasons = {
        "other: other is not installed": left_out,
        "ours: exit status 1": failed,
        "anonymous is 0 or not reported by this system": untold,
    }
    for reason, result in reasons.items():
        (verdict,) = result.verdicts()
        assert verdict == Verdict(verdict.target, "ours", reason=reason)
        assert reason in report.describe(verdict)
    summary = report.summary([left_out, failed, untold])
    assert summary.startswith("targets met: 0 of 3, without a verdict: 3")


def test_every_target_is_about_rows_that_its_case_takes() -> None:
    for case in CASES.values():
        rows = {it.name for it in case.measures}
        for target in case.targets:
            assert {target.row or case.measures[0].name, target.beside} <= rows | {None}


def test_a_table_shows_medians_ratios_and_their_spread() -> None:
    result = result_of(HALF, [1, 2, 3], [2, 2, 2])
    ours, other = report.table(result).splitlines()[1:]
    assert ours.split() == ["ours", "2.00", "s", "1.00", "s..3.00", "s", "1.00", "s"]
    assert "1 (0.5..1.5)" in other


def test_a_round_has_the_median_of_its_figures() -> None:
    figures = [Figures(3, 1, 5), Figures(1, 2, 6), Figures(2, 3, 4)]
    assert process.median_of(figures) == Figures(2, 2, 5)


# Growth


def growing(exponent: float) -> list[Point]:
    return [Point(it, Spread.of([it**exponent]), None) for it in (1, 10, 100, 1000)]


@pytest.mark.parametrize("exponent", [0, 0.5, 1, 2])
def test_the_slope_is_the_exponent_of_growth_where_nothing_constant_hides_it(
    exponent: float,
) -> None:
    points = growing(exponent)
    assert report.slope(points) == pytest.approx(exponent)
    points[0] = Point(1, Spread.of([100.0]), None)
    assert exponent != 1 or report.slope(points) == pytest.approx(1)
    assert report.slope(points[:1] * 2) is None  # one amount


def grown(name: str) -> Result:
    """A made-up result of a case about growth, in proportion."""
    case = CASES[name]
    amounts = {it.name: 10 ** (index % 5 + 1) for index, it in enumerate(case.measures)}
    rounds = {it: [Figures(amount / 1000, 1, amount * 10)] for it, amount in amounts.items()}
    return Result(name, case, "", 1, rounds, amounts)


def test_growth_is_reported_with_its_slope() -> None:
    result = grown("growth-bytes")
    assert list(report.growth(result)) == ["open", "ls", "edit", "save"]
    assert "  open: slope 1.00 (1: time in proportion to size; 0: constant time)" in report.text(
        result
    )


# Pictures


def measured(name: str) -> Result:
    """A made-up result of a case."""
    rows = [it.name for it in CASES[name].measures]
    rounds = {
        row: [Figures((place + 1) * factor, 1, 1, 1) for factor in (0.9, 1, 1.2)]
        for place, row in enumerate(rows)
    }
    nbytes = inputs.GROUPS[CASES[name].measures[0].group].nbytes
    return Result(name, CASES[name], "10 tensors of 64 bytes", nbytes, rounds)


def file_of(results: list[Result]) -> Any:
    """A made-up file of a run."""
    machine = {"CPU": "a processor, 2 cores, load 0", "memory": "1 GiB", "file system": "ext4"}
    as_json = json.loads(json.dumps(report.as_json(machine, {"rounds": 3, "scale": 1}, results)))
    return {**as_json, "packed weights": [["weights", "start"], ["float32", "0.77 s"]]}


@pytest.fixture
def run() -> Any:
    """A made-up file of `run.py --readme` and prepacking.py."""
    results = [measured(it) for it in cases.README if not CASES[it].grows]
    return file_of([*results, grown("growth-bytes")])


def contrast(first: str, second: str) -> float:
    """The contrast of two colours as WCAG 2 computes it, from 1 to 21."""

    def luminance(color: str) -> float:
        parts = [int(color[it : it + 2], 16) / 255 for it in (1, 3, 5)]
        red, green, blue = (
            it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def labels(picture: bytes) -> list[str]:
    """The texts of a picture."""
    texts = (it for it in ElementTree.fromstring(picture).iter() if it.tag.endswith("}text"))
    return ["".join(it.itertext()).strip() for it in texts]


@pytest.mark.tool
def test_the_same_figures_give_the_same_pictures_byte_for_byte(run: Any) -> None:
    pytest.importorskip("matplotlib")
    first = plot.pictures(run)
    assert first == plot.pictures(run)
    assert list(first) == ["speed.svg", "ways.svg", "growth.svg"]
    for data in first.values():
        assert b"<dc:date>" not in data
    assert set(plot.LIBRARIES) <= set(labels(first["speed.svg"]))
    for name in ("use-large", "save-large"):
        assert {it.name for it in CASES[name].measures} <= set(labels(first["ways.svg"]))
    assert b"slope 1.00" in first["growth.svg"]


@pytest.mark.tool
def test_pictures_are_readable_in_light_and_dark(run: Any) -> None:
    pytest.importorskip("matplotlib")
    text = plot.pictures(run)["speed.svg"].decode()
    for form in (plot.LIGHT, plot.DARK):
        assert all(f"--{name}: {color}" in text for name, color in form.items())
        assert contrast(form["text"], form["background"]) > 7
        for color in (plot.OURS, plot.PEER, plot.MACHINE):
            assert contrast(color, form["background"]) > 3
    assert "prefers-color-scheme: dark" in text
    assert "#000000" not in text
    assert contrast(plot.LIGHT["background"], plot.DARK["background"]) > 7


# Pages


@pytest.mark.tool
def test_words_tables_and_pictures_are_those_of_one_run(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("spec/images", "tools/bench/images"):
        (tmp_path / folder).mkdir(parents=True)
    for page in publish.PAGES:
        shutil.copy(publish.ROOT / page, tmp_path / page)
    for name, row, seconds, nbytes in (
        ("use-large", "onnxarchive", 1.234, 7 * MIB),
        ("real-open", "session", 0.0987, 33 * MIB),
    ):
        run["cases"][name]["medians"][row] = {"seconds": seconds, "anonymous": nbytes}
        run["cases"][name]["rounds"][row] = [{"seconds": seconds}]
    publish.publish(run, tmp_path)
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| open 2.6 GB and use every tensor | 1.23 s, 7.0 MiB | " in readme
    assert "in 98.7 ms, with 33.0 MiB of private memory" in " ".join(readme.split())
    proposal = (tmp_path / "spec" / "proposal.md").read_text(encoding="utf-8")
    assert "| open 2.6 GB and use every tensor | 1.23 s, 7.0 MiB | " in proposal
    assert "in 98.7 ms with 33.0 MiB of private memory" in " ".join(proposal.split())
    shown = labels((tmp_path / "spec" / "images" / "speed.svg").read_bytes())
    assert {"1.23 s", "7.0 MiB"} <= set(shown)
    page = (tmp_path / "tools" / "bench" / "README.md").read_text(encoding="utf-8")
    assert "| CPU | a processor, 2 cores, load 0 |\n" in page
    assert "| float32 | 0.77 s |\n" in page
    before = {it: it.read_bytes() for it in tmp_path.rglob("*") if it.is_file()}
    publish.publish(run, tmp_path)
    assert before == {it: it.read_bytes() for it in tmp_path.rglob("*") if it.is_file()}


def test_bars_of_the_readme_have_the_figures_of_its_table() -> None:
    readme = (publish.ROOT / "README.md").read_text(encoding="utf-8")
    picture = (publish.ROOT / "spec" / "images" / "speed.svg").read_bytes()
    rows = re.findall(r"^\| (?:open|save) [\d.]+ GB.*$", readme, re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        title, *cells = (it.strip() for it in row.strip("|").split("|"))
        assert title in labels(picture)
        assert set(", ".join(cells).split(", ")) - {""} <= set(labels(picture))


def test_figures_of_the_proposal_are_those_of_the_readme() -> None:
    readme, proposal = (
        (publish.ROOT / page).read_text(encoding="utf-8")
        for page in ("README.md", "spec/proposal.md")
    )
    rows = re.findall(r"^\| (?:open|save) [\d.]+ GB.*\|$", proposal, re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        assert row in readme  # whose table has a further column
    _, _, block = proposal.partition("<!-- figures -->\n")
    words, _, _ = block.partition("<!-- end -->")
    figures = re.findall(r"[\d.]+ (?:ms|s|MiB|GB)\b", words.rpartition("|")[2])
    assert len(figures) == 8
    for figure in figures:
        assert figure in " ".join(readme.split())


def test_a_run_that_lacks_a_case_changes_no_page(run: Any, tmp_path: Path) -> None:
    del run["cases"]["real-open"]
    with pytest.raises(KeyError, match="real-open"):
        publish.publish(run, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "<!-- a -->\n<!-- end -->\n" * 2])
def test_a_page_has_each_block_once(text: str) -> None:
    with pytest.raises(ValueError, match="expected one block <!-- a -->"):
        publish.replaced(text, "a", "")


def test_cases_that_run_only_if_asked_for_are_named() -> None:
    everything = cases.names()
    assert "real" not in everything
    assert cases.names(["real"]) == ["real-open", "real", "real-convert"]
    assert set(cases.names((), True)) < set(everything)
    assert cases.names(["save"]) == ["save-many", "save-large"]
    assert cases.names(["sav"]) == []
    assert "torch" in cases.missing(True)
