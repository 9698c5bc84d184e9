"""The specification's rules over an archive: every broken one, not only the first."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from onnxarchive.archive import (
    MAX_MODEL_NBYTES,
    Contents,
    check_crc32,
    check_local_header,
    read_contents,
)
from onnxarchive.errors import ArchiveFormatError, Report
from onnxarchive.files import MappedFile
from onnxarchive.model import tensors
from onnxarchive.zipformat import writer
from onnxarchive.zipformat.writer import Counter, Progress

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the specification.

    Attributes:
        id: Its id, such as `"ZIP-6"`.
        severity: `"error"`: a reader refuses the archive; `"warning"`: it does not.
        seen: What a reader needs to decide: `"open"`, `"header"` or `"data"`.
        text: What the rule demands, in a sentence.
        mended: Whether a zip that breaks it may be one of another tool, of which `convert` makes an
            archive.
    """

    id: str
    severity: str
    seen: str
    text: str
    mended: bool = False


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule of the specification by id, as `spec/rules.toml` has them."""
    directory = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(directory, "rules.toml")  # where an installed package has it
    if not os.path.exists(path):
        path = os.path.join(os.path.dirname(directory), "spec", "rules.toml")
    with open(path, "rb") as file:
        table = tomllib.load(file)
    return MappingProxyType({id: Rule(id, **fields) for id, fields in table.items()})


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule.

    Attributes:
        rule: Its id in `spec/rules.toml`.
        entry: Name of the entry concerned, or None.
        message: What was expected and what was found.
    """

    rule: str
    entry: str | None
    message: str

    @property
    def severity(self) -> str:
        """`"error"` or `"warning"`, as the rule has it."""
        return rules()[self.rule].severity

    def __str__(self) -> str:
        subject = "" if self.entry is None else f"entry {self.entry!r}: "
        return f"{self.rule}: {subject}{self.message}"


class _Findings(Report):
    """Keeps broken rules instead of raising them."""

    def __init__(self) -> None:
        self.list: list[Finding] = []

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        self.list.append(Finding(rule, entry, message))


def check(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    progress: Progress | None = None,
    max_model_nbytes: int = MAX_MODEL_NBYTES,
) -> list[Finding]:
    """Holds an archive against every rule of the specification.

    Args:
        path: The archive.
        full: Whether to read the bytes of every entry, for the rules that need them: CRC-32,
            SHA-1 checksums, unused bits and booleans.
        progress: Called with the bytes done and the bytes in all, under `full`.
        max_model_nbytes: Size in bytes above which a model is a finding and is not read.

    Returns:
        Every broken rule, in the order in which a reader comes upon them; nothing for a sound
        archive.

    Raises:
        OSError: The file cannot be opened or read.
    """
    findings = _Findings()
    try:
        file = MappedFile(path, rule="FILE-1")
    except ArchiveFormatError as error:
        return [Finding("FILE-1", None, error.message)]
    with file:
        contents = read_contents(file, findings, max_model_nbytes)
        for entry, record in zip(contents.entries, contents.records, strict=True):
            check_local_header(file, entry, record, findings)
        if full:
            _check_data(file, contents, findings, progress)
    return findings.list


def _check_data(
    file: MappedFile, contents: Contents, report: Report, progress: Progress | None
) -> None:
    """Reads every entry once, for ZIP-15, DATA-6, TENSOR-4 and TENSOR-5."""
    counter = Counter(progress, sum(entry.nbytes for entry in contents.entries))
    for entry in contents.entries:
        site = contents.sites.get(entry.name)
        pieces: Iterator[memoryview] = map(memoryview, file.pieces(entry.data_offset, entry.nbytes))
        checksum = None
        if site is not None:
            checksum = tensors.checksum(site.tensor)
            if tensors.stored_type(site.tensor) is not None:
                pieces = tensors.checked(site, pieces, report, entry=entry.name)
        sha1 = hashlib.sha1(usedforsecurity=False)
        crc32 = nbytes = 0
        for piece in counter(pieces):
            crc32 = writer.crc32(piece, crc32)
            nbytes += len(piece)
            if checksum is not None:
                sha1.update(piece)
        check_crc32(entry, nbytes, crc32, report)
        if checksum not in (None, sha1.hexdigest()):
            report.broken(
                "DATA-6",
                f"expected the checksum {checksum}, found {sha1.hexdigest()}",
                entry=entry.name,
            )
