"""Names of entries: keys derived from tensor names, and which names there may be.

A key is a C identifier that no file system changes: an archive unzips everywhere, and the tensor's
file there has its key as its name. Names are compared under ASCII down-casing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnxarchive.errors import Report

MODEL_PROTO = "__MODEL_PROTO"
ASSET_PREFIX = "assets/"
MAX_KEY_SIZE = 255  # bytes; the longest name of a file on common file systems
MAX_ASSET_COMPONENT_SIZE = 255
MAX_ASSET_NAME_SIZE = 1024

_RESERVED_PREFIX = "__"
_ASSETS = "assets"  # the folder of the assets, once unzipped
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_IN_KEY = re.compile(r"[^A-Za-z0-9_]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\:]")
# What Windows takes for a device, with any extension and in any case.
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])", re.ASCII | re.IGNORECASE)


def fold(name: str) -> str:
    """`name` under ASCII down-casing, as names are compared (rule NAME-2)."""
    return name.translate(_DOWN_CASE)


_DOWN_CASE = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def is_key(name: str) -> bool:
    """Whether an entry of a tensor may have this name (rule KEY-1)."""
    return (
        _KEY.fullmatch(name) is not None
        and len(name) <= MAX_KEY_SIZE
        and not name.startswith(_RESERVED_PREFIX)
        and fold(name) != _ASSETS
    )


def is_asset_name(name: str) -> bool:
    """Whether an entry of an asset may have this name, `assets/` included (rule ASSET-1)."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    path = name.removeprefix(ASSET_PREFIX)
    return (
        name.startswith(ASSET_PREFIX)
        and size <= MAX_ASSET_NAME_SIZE
        and _CONTROL.search(path) is None
        and all(
            component not in ("", ".", "..") and len(component.encode()) <= MAX_ASSET_COMPONENT_SIZE
            for component in path.split("/")
        )
    )


class Keys:
    """Gives each tensor a key by which a person recognises it, and no two the same.

    The same names in the same order get the same keys.
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next_suffix: dict[str, int] = {}

    def assign(self, name: str) -> str:
        """A key for the next tensor of this name: `layer.0/weight` gives `layer_0_weight`.

        Where that key is taken, `_2`, `_3` and so on follow it.
        """
        base = _derive(name)
        key = base
        while fold(key) in self._taken:
            number = self._next_suffix.get(fold(base), 2)
            self._next_suffix[fold(base)] = number + 1
            suffix = f"_{number}"
            key = base[: MAX_KEY_SIZE - len(suffix)] + suffix
        self._taken.add(fold(key))
        return key


def _derive(name: str) -> str:
    key = _NOT_IN_KEY.sub("_", name)
    if key.startswith(_RESERVED_PREFIX):
        key = "_" + key.lstrip("_")
    if not key.strip("_"):
        key = "tensor"
    if key[0].isdigit():
        key = "_" + key
    if _DEVICE.fullmatch(key) or fold(key) == _ASSETS:
        key += "_"
    return key[:MAX_KEY_SIZE]


def check_names(names: Sequence[str], report: Report) -> None:
    """Checks the names of an archive's entries.

    Args:
        names: The names, in directory order.
        report: Takes each broken rule (MODEL-1, NAME-1, NAME-2, KEY-1, ASSET-1).
    """
    if not names or names[-1] != MODEL_PROTO:
        report.broken(
            "MODEL-1",
            f"expected {MODEL_PROTO} as the last entry, found "
            f"{repr(names[-1]) if names else 'no entry'}",
        )
    seen: dict[str, str] = {}
    for name in names:
        _check_name(name, report)
        folded = fold(name)
        if folded in seen:
            report.broken(
                "NAME-2",
                f"expected no other entry of this name, found {seen[folded]!r} before it",
                entry=name,
            )
        seen[folded] = name
    for folded, name in seen.items():
        for end in (index for index, letter in enumerate(folded) if letter == "/"):
            if folded[:end] in seen:
                report.broken(
                    "NAME-2",
                    f"expected no entry named as its folder, found {seen[folded[:end]]!r}",
                    entry=name,
                )


def _check_name(name: str, report: Report) -> None:
    if name == MODEL_PROTO or is_key(name) or is_asset_name(name):
        return
    if name.startswith(ASSET_PREFIX):
        report.broken("ASSET-1", "expected a plain relative path after assets/", entry=name)
    elif _KEY.fullmatch(name) is not None:
        report.broken(
            "KEY-1",
            f"expected a key of at most {MAX_KEY_SIZE} bytes that is not reserved",
            entry=name,
        )
    else:
        report.broken(
            "NAME-1",
            f"expected {MODEL_PROTO}, a key ([A-Za-z_][A-Za-z0-9_]*) or a name in {ASSET_PREFIX}",
            entry=name,
        )
