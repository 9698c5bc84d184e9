"""What a request's error means; the libraries' own texts contain secrets and are never shown."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from onnxarchive.errors import ObjectChangedError

_Made = TypeVar("_Made")
_STATUS = re.compile(r"status code: (\d{3})")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore names, if any."""
    status = getattr(error, "status", None)  # as aiohttp's errors have it
    if isinstance(status, int):
        return status
    match = _STATUS.search(str(error))
    return None if match is None else int(match[1])


def changed(name: str) -> ObjectChangedError:
    """The error for an object that another one has replaced."""
    error = ObjectChangedError(
        "expected the object that was opened, found that it has changed since; open it again"
    )
    error.path = name
    return error


def failure(error: Exception, name: str) -> Exception:
    """The error to raise in place of one of obstore, fsspec or a library that these use.

    It is raised after the block that catches, so that it has neither cause nor context.

    Args:
        error: What the library raised.
        name: The object's name for messages.
    """
    kind, status = type(error).__name__, status_of(error)
    if kind == "PreconditionError":
        return changed(name)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return FileNotFoundError(errno.ENOENT, "No such object", name)
    refused = isinstance(error, PermissionError) or kind in (
        "PermissionDeniedError",
        "UnauthenticatedError",
    )
    if refused or status in (401, 403):
        answer = "" if status is None else f" (HTTP status {status})"
        return PermissionError(
            errno.EACCES,
            f"the server refuses access{answer}; expected credentials that allow it, from the "
            "environment or in storage_options",
            name,
        )
    if isinstance(error, TimeoutError) or re.search(r"\bTimedOut|\bTimeout\b", str(error)):
        # No TimeoutError: asyncio would make another one of it, without the name.
        return OSError(errno.EIO, "the server took too long to answer", name)
    if kind == "NotSupportedError":
        return OSError(
            errno.EIO,
            "the server does not answer requests for ranges of bytes; download the file and open "
            "the copy",
            name,
        )
    if status is not None:
        return OSError(errno.EIO, f"the server answered with HTTP status {status}", name)
    if re.search(r"CONTENT_RANGE|UnexpectedRange", str(error)):
        return OSError(errno.EIO, "the server sent other bytes than those asked for", name)
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, os.strerror(error.errno), name)
    return OSError(errno.EIO, f"the request failed ({kind})", name)


def attempt(name: str, call: Callable[[], _Made]) -> _Made:
    """Calls a library; its errors become those of `failure`."""
    try:
        return call()
    except Exception as error:
        problem = failure(error, name)
    raise problem


async def asked(name: str, call: Callable[[], Awaitable[_Made]]) -> _Made:
    """Awaits a call of a library; its errors become those of `failure`."""
    try:
        return await call()
    except Exception as error:
        problem = failure(error, name)
    raise problem
