"""`check` finds rules of the specification that an archive breaks."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from types import MappingProxyType
from typing import Unpack

from onnxarchive.errors import ArchiveFormatError, Report, quoted
from onnxarchive.files import threads
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress, ProgressCounter
from onnxarchive.model.keys import is_model
from onnxarchive.reading.archive_file import locked_archive_file, require_finished
from onnxarchive.reading.contents import MAX_MODEL_NBYTES, Contents, read_contents
from onnxarchive.remote.location import Access, Location, Openable
from onnxarchive.zipformat.local_header import check_local_header

MAX_FINDINGS = 1000  # of one rule


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the specification.

    Attributes:
        id: Its id, such as `"ZIP-6"`.
        seen: The stage at which a reader can check the rule: `"open"`, `"header"` (local header) or
            `"data"`.
        text: The rule as a sentence.
        mended: True if `convert` accepts other tools' zips that break the rule, and writes a valid
            archive.
    """

    id: str
    seen: str
    text: str
    mended: bool = False


@cache
def rules() -> Mapping[str, Rule]:
    """The rules of `spec/rules.toml` by id."""
    import importlib.resources  # takes longer than opening an archive

    package = importlib.resources.files("onnxarchive")
    file = package / "rules.toml"  # of an installed package, perhaps in a zip
    if not file.is_file():
        file = package / os.pardir / "spec" / "rules.toml"  # of a clone
    if not file.is_file():
        raise FileNotFoundError(
            errno.ENOENT,
            "this program was packed without the table of rules of onnxarchive; pack its data, too "
            "(PyInstaller: --collect-data onnxarchive)",
            str(file),
        )
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return MappingProxyType({id: Rule(id, **fields) for id, fields in table.items()})


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that `check`, `check_link` or `check_model` found; `str` formats it as one line.

    Attributes:
        rule: Id of the broken rule in `spec/rules.toml`; None from `check_link` and `check_model`.
        entry: Name of the entry at fault, or None.
        message: Description of the fault.

    Example:
        for finding in onnxarchive.check("model.onnx"):
            print(finding.rule, finding.message)
    """

    rule: str | None
    entry: str | None
    message: str

    def __str__(self) -> str:
        entry = None if self.entry is None else f"entry {quoted(self.entry)}"
        return ": ".join(part for part in (self.rule, entry, self.message) if part is not None)


class _Findings(Report):
    """Collects findings instead of raising errors; keeps the first `MAX_FINDINGS` of each rule."""

    def __init__(self) -> None:
        self.first: list[Finding] = []
        self._counts: collections.Counter[str | None] = collections.Counter()

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        self.add(Finding(rule, entry, message))

    def add(self, finding: Finding) -> None:
        # A model's CRC-32 is compared before the model is parsed, and again with all entries.
        is_of_model = finding.entry is not None and is_model(finding.entry)
        if finding.rule == "ZIP-15" and is_of_model and finding in self.first:
            return
        self._counts[finding.rule] += 1
        if self._counts[finding.rule] <= MAX_FINDINGS:
            self.first.append(finding)

    @property
    def list(self) -> list[Finding]:
        """The findings, then one for each rule with more findings than the limit."""
        more = (
            Finding(rule, None, f"{count - MAX_FINDINGS} more findings of this rule are not listed")
            for rule, count in self._counts.items()
            if count > MAX_FINDINGS
        )
        return [*self.first, *more]


def check(
    source: Openable,
    *,
    full: bool = False,
    progress: Progress | None = None,
    jobs: int | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
    **access: Unpack[Access],
) -> list[Finding]:
    """Checks an archive against the rules of the specification.

    Args:
        source: The archive, as in `onnxarchive.open`.
        full: Whether to read all data and also check CRC-32, SHA-1 checksums, unused bits and
            booleans.
        progress: With `full`, as in `onnxarchive.save`.
        jobs: With `full`, number of threads; None for one per core. Remote archives and file
            objects are read by one thread.
        max_model_nbytes: Limit in bytes on all models together. If they exceed it, no model is
            read, and a finding says so.
        access: Options for a remote archive, as in `onnxarchive.open`.

    Returns:
        The faults, in the order in which a reader finds them; empty for a valid archive. There are
        at most 1,000 findings per rule, and one that counts the rest. Long names and values are cut
        to about 100 characters.

    Raises:
        UnfinishedEditError: An edit of the archive was interrupted.
        UnsupportedFeatureError: protobuf's Python parser cannot read a valid model.
        OSError: The file cannot be opened or read.

    Example:
        for finding in onnxarchive.check("model.onnxa", full=True):
            print(finding)
    """
    findings = _Findings()
    jobs = threads.require_jobs(jobs)
    location = Location.of(source, **access)
    with contextlib.ExitStack() as lock:
        try:
            file = lock.enter_context(locked_archive_file(location))
        except ArchiveFormatError as error:
            if error.rule != "FILE-1":
                raise
            return [Finding("FILE-1", None, error.message)]
        if isinstance(file, MappedFile):
            require_finished(file)
        contents = read_contents(file, findings, max_model_nbytes)
        if full:
            _check_entries(contents, findings, progress, jobs)
        else:
            _check_headers(contents, findings)
    file.close()
    return findings.list


def _check_headers(contents: Contents, findings: _Findings) -> None:
    """Compares all local headers with their directory records."""
    entries, records = contents.directory.entries, contents.directory.records
    ranges = ((entry.header_offset, entry.data_offset - entry.header_offset) for entry in entries)
    headers = contents.file.read_ranges(ranges)
    for header, entry, record in zip(headers, entries, records, strict=True):
        check_local_header(bytes(header), entry, record, findings)


def _check_entries(
    contents: Contents,
    findings: _Findings,
    progress: Progress | None,
    jobs: int,
) -> None:
    """Checks local headers and data of all entries; findings about data come last.

    A file that is not mapped is read by one thread, from its beginning to its end.
    """
    sizes = [entry.nbytes for entry in contents.directory.entries]
    counter = ProgressCounter(progress, sum(sizes))
    found: list[tuple[bool, int, Finding]] = []  # True for a finding about data, number of entry

    def check_entry(number: int) -> None:
        header, data = _Findings(), _Findings()
        contents.check_header(number, header)
        contents.check_data(number, data, counter)
        found.extend((False, number, finding) for finding in header.first)
        found.extend((True, number, finding) for finding in data.first)

    jobs = jobs if contents.file.is_mapped else 1
    threads.for_each(range(len(sizes)), sizes, check_entry, jobs)
    for _, _, finding in sorted(found, key=itemgetter(0, 1)):
        findings.add(finding)
