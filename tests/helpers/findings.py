"""A report that keeps what it is told."""

from __future__ import annotations

from onnxarchive.errors import Report
from onnxarchive.reading.check import rules


class Findings(Report):
    """Keeps broken rules with their messages, which name the expected and the found value.

    Attributes:
        pairs: Rule and entry of each finding.
        messages: The message of each finding.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str | None]] = []
        self.messages: list[str] = []

    @property
    def rules(self) -> list[str]:
        return [rule for rule, _ in self.pairs]

    @property
    def entries(self) -> list[str | None]:
        return [entry for _, entry in self.pairs]

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        assert rule in rules()
        assert "expected" in message
        assert "found" in message
        self.pairs.append((rule, entry))
        self.messages.append(message)
