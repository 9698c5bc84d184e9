"""The command that checks archives."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

import onnxarchive
from onnxarchive.cli.frame import DONE, FOUND, access, fail, say, status_of
from onnxarchive.cli.terminal import printable, progress_bar
from onnxarchive.errors import ArchiveError
from onnxarchive.remote.location import Access
from onnxarchive.remote.urls import shown_url
from onnxarchive.sources.recognition import OtherKindError


def check_command(arguments: argparse.Namespace) -> int:
    """Runs `check`."""
    archives, link = arguments.archives, arguments.link
    if len(archives) > 1 and link is not None:
        raise ValueError("check takes only one ARCHIVE with --link")
    if not (archives or link):
        raise ValueError("check takes an ARCHIVE, or --link LINK")
    result: list[dict[str, Any]] = []
    lines: list[str] = []
    status = DONE
    for given in archives or _linked(link):
        archive = shown_url(given)
        try:
            with progress_bar("check") as progress:
                findings = onnxarchive.check(
                    given,
                    full=arguments.full,
                    progress=progress,
                    jobs=arguments.jobs,
                    **access(arguments),
                )
        except (ArchiveError, OSError) as error:  # the other archives are checked
            status = max(status, fail(error, status_of(type(error)), debug=arguments.debug))
            continue
        result += [{"archive": archive, **asdict(finding)} for finding in findings]
        lines += [f"{archive}: {it}" for it in findings or (_passed(arguments.full),)]
        if findings:
            lines += [f"{archive}: {it}" for it in _other_kind(given, access(arguments))]
    if link is not None and not result and status == DONE:
        findings = onnxarchive.check_link(link, *archives)
        result = [{"link": link, **asdict(finding)} for finding in findings]
        lines += [f"{link}: {it}" for it in findings or ("fits the archive",)]
    if lines:
        say(arguments, result, map(printable, lines))
    return max(status, FOUND if result else DONE)


def _other_kind(source: str, access: Access) -> list[str]:
    """What the source is, in a list, if it is no archive and of a known kind."""
    try:
        opened = onnxarchive.open(source, storage_options=access.get("storage_options"))
        opened.close()
    except OtherKindError as error:
        return [error.message]
    except (ArchiveError, OSError):  # as described by the findings
        pass
    return []


def _linked(link: str) -> list[str]:
    """The path of a link's archive, in a list.

    The list is empty if the archive does not exist, or if `linked_archive` finds no path;
    `check_link` then reports the fault.
    """
    from onnxarchive.interop.links import linked_archive

    archive = linked_archive(link)
    return [archive] if archive is not None and os.path.exists(archive) else []


def _passed(full: bool) -> str:
    from onnxarchive.reading.rules import rules

    checked = [rule for rule in rules().values() if full or rule.seen != "data"]
    unread = "" if full else "; weights not read, --full reads them"
    return f"valid ({len(checked)} rules checked{unread})"
