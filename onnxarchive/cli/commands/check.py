"""The commands `check`, for the rules of the specification, and `diff`, for two archives."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import onnxarchive
from onnxarchive.cli.output import DONE, FOUND, fail, say, status_of, warn
from onnxarchive.cli.parser import access, add_command, file_name
from onnxarchive.cli.terminal import cut, progress_bar
from onnxarchive.errors import ArchiveError
from onnxarchive.remote.location import Access
from onnxarchive.remote.urls import url_without_secrets

if TYPE_CHECKING:
    from onnxarchive.comparing.changes import Change
    from onnxarchive.comparing.diff import Difference
    from onnxarchive.comparing.values import ValueChange
    from onnxarchive.reading.check import Finding

_MAX_OF_RULE: Final = 3  # findings
_MAX_LINES: Final = 50  # of a section
_MAX_PARTS: Final = 8  # of a line
_MAX_LENGTH: Final = 100  # characters of a name or a value
_SIGNS: Final = {"added": "+ ", "removed": "- ", "changed": "~ "}


def add_check(commands: Any) -> None:
    help = "Check archives against the specification, and list broken rules."
    command = add_command(commands, check, help, "--full model.onnxa", archive=False)
    command.usage = (
        "onnxarchive check [options] ARCHIVE...\n"
        "       onnxarchive check [options] --link LINK [ARCHIVE]"
    )
    help = "an archive; with --link, the link's archive"
    command.add("archives ARCHIVE", help, type=file_name, nargs="*")
    command.add("--full", "read every byte and compare checksums")
    command.add("--link LINK", "check that this link fits its archive", type=file_name)
    command.add_jobs()
    command.add_url_options()


def check(arguments: argparse.Namespace) -> int:
    archives, link = arguments.archives, arguments.link
    if len(archives) > 1 and link is not None:
        raise ValueError("check takes only one ARCHIVE with --link")
    if not (archives or link):
        raise ValueError("check takes an ARCHIVE, or --link LINK")
    result: list[dict[str, Any]] = []
    lines: list[str] = []
    status = DONE
    sources = archives
    if not archives:
        from onnxarchive.interop.links import linked_archive

        sources = filter(None, [linked_archive(link)])  # without one, `check_link` names the fault
    for source in sources:
        archive = url_without_secrets(source)
        try:
            with progress_bar("check") as progress:
                findings = onnxarchive.check(
                    source,
                    full=arguments.full,
                    progress=progress,
                    jobs=arguments.jobs,
                    **access(arguments),
                )
        except (ArchiveError, MemoryError, OSError) as error:  # the other archives are checked
            status = max(status, fail(error, status_of(type(error)), debug=arguments.debug))
            continue
        result += [{"archive": archive, **asdict(finding)} for finding in findings]
        if findings:
            explanation = _explanation(source, access(arguments), findings[0])
            if arguments.json:  # the list of findings has no place for it
                for text in explanation:
                    warn(f"{archive}: {text}")
            texts = [*explanation, *_by_rule(findings)]
        else:
            texts = [_passed(arguments.full)]
        lines += [f"{archive}: {text}" for text in texts]
    if link is not None and not result and status == DONE:
        findings = onnxarchive.check_link(link, *archives)
        result = [{"link": link, **asdict(finding)} for finding in findings]
        lines += [f"{link}: {text}" for text in findings or ("fits the archive",)]
    if lines:
        say(arguments, result, lines)
    return max(status, FOUND if result else DONE)


def _explanation(source: str, access: Access, first: Finding) -> list[str]:
    """A list with an explanation of the file's kind or damage, and what helps; empty if unknown.

    The first finding, which the error may quote, is printed after it.
    """
    from onnxarchive.sources.recognition import OtherKindError

    try:
        onnxarchive.open(source, storage_options=access.get("storage_options")).close()
    except OtherKindError as error:
        fault = str(first).removeprefix(f"{first.rule}: ")
        return [error.message.removesuffix(f" ({fault})")]
    except (ArchiveError, OSError):  # as described by the findings
        pass
    return []


def _by_rule(findings: Sequence[Finding]) -> Iterator[str]:
    """The first findings of each rule, and the number of the others; then all numbers together."""
    rules: dict[str | None, list[Finding]] = {}
    for finding in findings:
        rules.setdefault(finding.rule, []).append(finding)
    for rule, found in rules.items():
        yield from map(str, found[:_MAX_OF_RULE])
        if len(found) > _MAX_OF_RULE:
            yield f"{rule}: and {len(found) - _MAX_OF_RULE:,} more"
    if any(len(found) > _MAX_OF_RULE for found in rules.values()):
        counts = [f"{rule} {len(found):,}" for rule, found in rules.items()]
        yield f"{len(findings):,} faults ({', '.join(counts)}); --json lists them"


def _passed(full: bool) -> str:
    from onnxarchive.reading.check import rules

    checked = [rule for rule in rules().values() if full or rule.seen != "data"]
    unread = "" if full else "; weights not read, --full reads them"
    return f"valid ({len(checked)} rules checked{unread})"


def add_diff(commands: Any) -> None:
    help = "Compare archives, or what 'convert' takes: graphs, tensors (by CRC-32) and assets."
    command = add_command(commands, diff, help, "model.onnxa decoder.onnx")
    command.add_argument("other", type=file_name, metavar="OTHER")
    command.add_model("compare this model only")
    command.add("--full", "also compare bytes, not only the CRC-32s of tensors and assets")
    command.add("--values", "say by how much the elements of tensors of equal shape differ")
    command.add("--stack-traces", "also compare the stack traces in the metadata of nodes")
    command.add_url_options(sha256=False)


def diff(arguments: argparse.Namespace) -> int:
    with progress_bar("diff") as progress:
        difference = onnxarchive.diff(
            arguments.archive,
            arguments.other,
            model=arguments.model,
            full=arguments.full,
            values=arguments.values,
            stack_traces=arguments.stack_traces,
            progress=progress,
            **access(arguments),
        )
    result = {"path": difference.path, "other": difference.other, "is_same": difference.is_same}
    sections = {name: [*map(_as_json, changes)] for name, changes in difference.sections.items()}
    say(arguments, result | sections, _lines(difference, arguments.model, arguments.full))
    return DONE if difference.is_same else FOUND


def _as_json(change: Change) -> dict[str, Any]:
    parts = [*map(_as_json, change.parts)]
    return {
        "name": change.name,
        "kind": change.kind,
        "before": change.before,
        "after": change.after,
        "before_type": change.before_type,
        "after_type": change.after_type,
        "values": None if change.values is None else _values_as_json(change.values),
        "parts": parts,
    }


def _values_as_json(values: ValueChange) -> dict[str, Any]:
    """The fields as JSON, which has no infinity."""
    return {name: None if number == math.inf else number for name, number in asdict(values).items()}


def _lines(difference: Difference, model: str | None, full: bool) -> Iterator[str]:
    path, other = difference.path, difference.other
    if difference.is_same:
        how = "byte by byte" if full else "by CRC-32"
        what = "model and tensors"
        if model is not None:
            what = f"model {model}".strip()
        elif "assets" in difference.sections:
            what = "model, tensors and assets"
        yield f"{path} and {other}: the same {what} (weights compared {how})"
        return
    yield f"--- {path}"
    yield f"+++ {other}"
    for section, changes in difference.sections.items():
        if changes:
            kinds = [change.kind for change in changes]
            counts = [f"{kinds.count(kind):,} {kind}" for kind in _SIGNS if kind in kinds]
            yield f"{section}: {', '.join(counts)}"
            yield from (f"  {_line(change)}" for change in changes[:_MAX_LINES])
            if len(changes) > _MAX_LINES:
                yield f"  and {len(changes) - _MAX_LINES:,} more"


def _line(change: Change) -> str:
    parts = [_line(part).removeprefix(_SIGNS["changed"]) for part in change.parts[:_MAX_PARTS]]
    if len(change.parts) > _MAX_PARTS:
        parts.append(f"and {len(change.parts) - _MAX_PARTS:,} more")
    texts = (_shown(text) for text in (change.before, change.after) if text is not None)
    line = f"{_SIGNS[change.kind]}{_shown(change.name)}: {'; '.join(parts) or ' => '.join(texts)}"
    return line if change.values is None else f"{line}; {_values(change.values)}"


def _values(values: ValueChange) -> str:
    if not values.different:
        return f"no element of {values.elements:,} differs in value"
    return (
        f"{values.different:,} of {values.elements:,} elements differ, by at most "
        f"{values.max_absolute:.3g}, relatively {values.max_relative:.3g}"
    )


def _shown(text: str) -> str:
    return cut(text, _MAX_LENGTH) or "''"
