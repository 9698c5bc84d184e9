"""No test asserts a time; and the counts at the end of a run: what was tried, over all tests."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# Recorded by tests with `record_property`, in the order in which they are shown.
COUNTS = (
    "vectors",
    "rules",
    "vectors given to independent readers",
    "mutated files",
    "readers compared",
    "archives read by other tools",
    "models compared with their archives' sessions",
    "models of which only a session is made",
    "calls of changes made to fail",
    "faults tried",
    "interrupted edits recovered",
    "schedules of two editors",
    "accepted that should be refused",
)
# What a run is to have none of is counted also where it made a test fail.
ALSO_OF_FAILED = COUNTS[-1:]


def pytest_configure() -> None:
    """Lets tests see how processes end; a parent may ignore this signal, which is inherited."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what was counted by the tests that passed, and what made others fail."""
    counts: Counter[str] = Counter()
    for outcome, names in (("passed", COUNTS), ("failed", ALSO_OF_FAILED)):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name in names and isinstance(value, int):
                    counts[name] += value
    if counts:
        terminalreporter.section("counts")
        for name in COUNTS:
            if name in counts:
                terminalreporter.line(f"{name}: {counts[name]:,}")
