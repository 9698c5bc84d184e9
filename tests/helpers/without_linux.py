"""A plugin of pytest that removes what Linux has and other systems, such as macOS, lack.

    PYTHONPATH=.:tests/helpers python -m pytest -p without_linux tests/files tests/writing

All of it is missing at once: locks of open files, clones by `ioctl`, holes, extended attributes,
`O_PATH`, maps that are read in advance, calls that copy within the system, and for the package
/proc. Programs that tests start still have all of it. Tests about what is missing are skipped by
name.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

_CALLS = (
    *("SEEK_DATA", "SEEK_HOLE", "O_PATH", "listxattr", "getxattr", "setxattr"),
    *("removexattr", "posix_fadvise", "posix_fallocate", "sendfile", "copy_file_range", "splice"),
    *("memfd_create", "sched_getaffinity"),
)
_OF_FCNTL = ("F_OFD_SETLK", "F_OFD_GETLK", "F_OFD_SETLKW", "F_ADD_SEALS", "F_GET_SEALS")

_ACL = "access control lists are extended attributes here"
_PROC = "/proc leads to open files"
_LOCKS = "the programs that the test starts have other locks"
# Why tests are skipped, by a part of their names.
NOT_WITHOUT = {
    "test_an_nfs_acl_that_names_users_leaves_the_new_file_to_its_owner": _ACL,
    "acl_that_masks": _ACL,
    "touches_nothing_where_a_link_leads": _PROC,
    "test_a_file_says_where_it_was_opened_and_where_it_is_by_now": _PROC,
    "test_a_pipe_without_a_path_is_refused_as_a_pipe": _PROC,
    "test_a_temporary_directory_is_found_and_removed_when_its_name_leads_elsewhere": _PROC,
    "test_the_types_of_file_systems_are_read_from_the_table_of_mounts": _PROC,
    "test_an_edit_in_an_append_only_directory_makes_no_name": "a flag that ioctl reads",
    "test_fifty_killed_writers_leave_one_temporary_file": _LOCKS,
    "test_the_lock_of_a_process_that_is_killed_is_free": _LOCKS,
    "test_the_file_of_a_living_process_stays": _LOCKS,
    "test_writers_at_once_lose_nothing_of_one_another": _LOCKS,
}


def _is_of_package(depth: int) -> bool:
    frame: Any = sys._getframe(depth)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("pathlib", "io")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("onnxarchive")


def _is_proc(path: object) -> bool:
    return isinstance(path, str) and path.startswith("/proc/")


def _missing(path: object) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _without_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if _is_proc(path) and _is_of_package(2):
            raise _missing(path)
        return call(path, *arguments, **options)

    return refuse


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _is_proc(arguments[0]) and _is_of_package(2):
        raise _missing(arguments[0])


def _take_away() -> None:
    import fcntl

    for module, names in ((os, _CALLS), (fcntl, _OF_FCNTL), (mmap, ("MAP_POPULATE",))):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    # What shutil found when it was imported.
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    shutil._copyxattr = lambda *_, **__: None  # type: ignore[attr-defined]
    control = fcntl.ioctl

    def refuse(descriptor: int, request: int, *arguments: Any) -> Any:
        if _is_of_package(2):
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        return control(descriptor, request, *arguments)

    setattr(fcntl, "ioctl", refuse)  # noqa: B010 its type is that of another function
    for name in ("readlink", "stat"):
        setattr(os, name, _without_proc(getattr(os, name)))
    sys.addaudithook(_audit)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests about what is missing."""
    for item in items:
        for part, reason in NOT_WITHOUT.items():
            if part in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))


_take_away()
