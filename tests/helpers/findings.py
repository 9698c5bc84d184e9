"""A report that keeps the broken rules."""

from __future__ import annotations

import re

from onnxarchive.errors import Report
from onnxarchive.reading.check import rules

# What the messages of rules say; of the faults, those in which no two values are compared.
_COMPARISON = re.compile("expected .*, found .", re.DOTALL)
_FAULTS = re.compile(
    "|".join(
        (
            "there is no end record without comment in the last 22 of [0-9]+ bytes",  # ZIP-2
            "the file lacks the last [0-9,]+ of the [0-9,]+ bytes of the archive; ",  # ZIP-2
            "the file has only [0-9,]+ bytes of an archive of [0-9,]+ bytes or more; ",  # ZIP-2
            "the archive ends at [0-9,]+ bytes, and [0-9,]+ bytes? follows? it",  # ZIP-2
            "there is no directory record at offset [0-9]+",  # ZIP-4
            "there are no entries, but bytes before the directory at offset [0-9]+",  # ZIP-6
            "there is a false end record in the last [0-9]+ bytes",  # ZIP-16
            "the [a-z ]*offset [a-z ]*, 0x[0-9a-f]+, has the signature of an end record",  # ZIP-16
            "there is no Zip64 locator before the saturated end record",  # ZIP64-1
            r"there is a Zip64 end record, although the values fit the end record \(",  # ZIP64-1
            "there is no Zip64 end record .*, at offset -?[0-9]+",  # ZIP64-3
            "the earlier entry .+ has the same name in upper, lower or mixed case",  # NAME-2
            "its folder has the name of the entry .",  # NAME-2
            "only names of models begin with two underscores, not .+: .",  # VERSION-1
            "(the model has|all models together have) more than [0-9]+ messages",  # MODEL-3
            "this is no serialized ModelProto .*: .",  # MODEL-3
            "the model has no (ir_version|graph)",  # MODEL-3
            "the further models are not in ascending order directly before __",  # MODEL-4
            "tensor .*: no entry has the key .*, its location",  # DATA-1
            "no tensor uses this entry",  # DATA-2
            "tensor .*: external_data has no location",  # DATA-4
            ".+ and tensor .+ use this entry; each needs its own",  # DATA-3
            "tensor .*: data_location is not EXTERNAL, although there is external_data",  # DATA-7
            "tensor .*: there is data beside external_data, in [a-z_, ]+",  # DATA-7
        )
    ),
    re.DOTALL,
)


def states_fault(message: str) -> bool:
    """True if the message of a broken rule compares two values, or states one of the faults."""
    return bool(_COMPARISON.search(message) or _FAULTS.search(message))


class Findings(Report):
    """Keeps broken rules with their messages, which say what is wrong.

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
        assert states_fault(message), message
        self.pairs.append((rule, entry))
        self.messages.append(message)
