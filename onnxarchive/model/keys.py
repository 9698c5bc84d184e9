"""Names of entries: keys derived from tensor names, and the rules for names.

A key is a C identifier, which no file system changes. `Keys` also avoids the names of devices on
Windows. So when an archive is unzipped, the file of each tensor has the key as its name. Names are
compared under ASCII down-casing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from onnxarchive.errors import Report, quoted

PLAIN_PATH: Final = (
    "a relative path of components separated by '/', without a drive, a backslash or a control "
    "character, and without a component that is empty, '.' or '..'"
)
"""Description of a plain path, for messages."""

_NOT_IN_PATH: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\]|\A[A-Za-z]:")


MODEL_PROTO = "__MODEL_PROTO"  # the entry of the default model
FURTHER_MODEL_PREFIX = MODEL_PROTO + "_"  # before a further model's id, in the name of its entry
MAX_MODEL_ID_SIZE = 64  # bytes
ASSET_PREFIX = "assets/"
PACKED_PREFIX = f"{ASSET_PREFIX}onnxruntime/prepacked/"  # of weights that ONNX Runtime packed
_PACKED_ALIGNMENT = 256  # bytes; ONNX Runtime copies a buffer at another offset
MAX_KEY_SIZE = 255  # bytes; the longest name of a file on common file systems
MAX_ASSET_COMPONENT_SIZE = 255
MAX_ASSET_NAME_SIZE = 1024
# Description of an asset's path (rule ASSET-1), for messages.
ASSET_PATH = (
    f"{PLAIN_PATH}; a component must not contain a colon, a semicolon or an unassigned code point, "
    f"or exceed {MAX_ASSET_COMPONENT_SIZE} bytes; the whole path must not exceed "
    f"{MAX_ASSET_NAME_SIZE - len(ASSET_PREFIX)} bytes"
)
ASSET_FORM = "Normalization Form C of Unicode"
# Description of a further model's id (rule MODEL-4), for messages.
MODEL_ID = f"[a-z][a-z0-9_]* of at most {MAX_MODEL_ID_SIZE} bytes, such as 'decoder'"

RESERVED_PREFIX = "__"  # no key has this prefix
_ASSETS = "assets"  # the folder of the assets, once unzipped
# No key is one of these in upper, lower or mixed case. All but the first are devices on Windows.
_AVOIDED = frozenset(
    {_ASSETS, "con", "prn", "aux", "nul"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
)
_KEY = re.compile(
    rf"(?!{RESERVED_PREFIX}|(?ai:{_ASSETS})\Z)[A-Za-z_][A-Za-z0-9_]{{0,{MAX_KEY_SIZE - 1}}}"
)
_MODEL_ID = re.compile(r"[a-z][a-z0-9_]*")
_UNASSIGNED = "Cn"  # the general category of code points without a character
_NOT_IN_KEY = re.compile(r"[^A-Za-z0-9_]")


def fold(name: str) -> str:
    """`name` with ASCII letters in lower case, for comparison (rule NAME-2)."""
    folded = name.lower() if name.isascii() else name.translate(_DOWN_CASE)
    return name if folded == name else folded  # equal names take the memory of one


_DOWN_CASE = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def is_key(name: str) -> bool:
    """True if an entry of a tensor may have this name (rule KEY-1)."""
    return _KEY.fullmatch(name) is not None


def is_model_id(text: str) -> bool:
    """True if a further model may have this id (rule MODEL-4)."""
    return _MODEL_ID.fullmatch(text) is not None and len(text) <= MAX_MODEL_ID_SIZE


def model_entry(model: str) -> str:
    """The name of a model's entry, by the model's id; the default model's id is `""`."""
    return FURTHER_MODEL_PREFIX + model if model else MODEL_PROTO


def model_id(name: str) -> str:
    """The id of the model in an entry of this name; `""` for the default model."""
    return name[len(FURTHER_MODEL_PREFIX) :]


def is_model(name: str) -> bool:
    """True if an entry of this name holds a model, even one with an invalid id."""
    return name == MODEL_PROTO or name.startswith(FURTHER_MODEL_PREFIX)


def least_alignment(name: str) -> int:
    """Least alignment in bytes of the data of an entry; larger for packed weights."""
    return _PACKED_ALIGNMENT if name.startswith(PACKED_PREFIX) else 1


def is_asset_name(name: str) -> bool:
    """True if an asset's entry may have this name, `assets/` included (rule ASSET-1)."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    path = name.removeprefix(ASSET_PREFIX)
    return (
        name.startswith(ASSET_PREFIX)
        and size <= MAX_ASSET_NAME_SIZE
        and unicodedata.is_normalized("NFC", name)
        and is_plain_path(path)
        and {":", ";"}.isdisjoint(path)
        and all(len(part.encode()) <= MAX_ASSET_COMPONENT_SIZE for part in path.split("/"))
        and (name.isascii() or _UNASSIGNED not in map(unicodedata.category, name))
    )


class Keys:
    """Assigns each tensor a unique key, derived from the tensor's name; `used` are in use already.

    The same names in the same order get the same keys.
    """

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = {fold(key) for key in used}
        self._next_number: dict[tuple[str, int], int] = {}

    def assign(self, name: str) -> str:
        """A key for the next tensor of this name: `layer.0/weight` gives `layer_0_weight`.

        If that key is taken, a suffix is appended: the first of `_2`, `_3` and so on with which the
        key is free. A long key is cut before the suffix.
        """
        key = _derive(name)
        folded = fold(key)
        if folded in self._used:
            key = self._numbered(key)
            folded = fold(key)
        self._used.add(folded)
        return key

    def _numbered(self, base: str) -> str:
        """The key with the lowest free number.

        A long base is cut before the number is appended, so different bases can have the same
        beginning. For each beginning, each number is tried once, so failed tries never outnumber
        the keys in use.
        """
        digits = 0
        while True:
            digits += 1
            beginning = base[: MAX_KEY_SIZE - digits - len("_")]
            searched = fold(beginning), digits
            # The first tensor's key has no number, so numbers begin with 2.
            first = self._next_number.get(searched, max(2, 10 ** (digits - 1)))
            for number in range(first, 10**digits):
                key = f"{beginning}_{number}"
                if fold(key) not in self._used:
                    self._next_number[searched] = number + 1
                    return key
            self._next_number[searched] = 10**digits


def _derive(name: str) -> str:
    key = _NOT_IN_KEY.sub("_", name)
    if not key[:1].isalpha():
        if key.startswith(RESERVED_PREFIX):
            key = "_" + key.lstrip("_")
        if not key.strip("_"):
            key = "tensor"
        if key[0].isdigit():
            key = "_" + key
    if key.lower() in _AVOIDED:
        key += "_"
    return key[:MAX_KEY_SIZE]


def check_names(
    names: Sequence[str | None], report: Report, *, are_all: bool = True
) -> Sequence[str]:
    """Checks the names of an archive's entries, in directory order; returns the keys among them.

    Args:
        names: The names; None for one that is not UTF-8.
        report: Receives each broken rule (VERSION-1, MODEL-1, MODEL-4, NAME-2, KEY-1, ASSET-1).
        are_all: True if these are the names of all entries.
    """
    reserved = [name for name in names if name is not None and name.startswith(RESERVED_PREFIX)]
    _check_versions(reserved, report)
    if are_all and (not names or names[-1] != MODEL_PROTO):
        last = names[-1] if names else None
        found = (
            "no entry"
            if not names
            else "a name that is not UTF-8"
            if last is None
            else quoted(last)
        )
        report.broken(
            "MODEL-1", f"expected {MODEL_PROTO} as the last entry, found {found}", entry=last
        )
    _check_models(names, reserved, report, are_all=are_all)
    found_keys: list[str] = []
    seen: dict[str, str] = {}
    assets: list[tuple[str, str]] = []
    for name in names:
        if name is None:
            continue
        folded = fold(name)
        if _KEY.fullmatch(name):
            found_keys.append(name)
        elif name.startswith(ASSET_PREFIX):
            if _is_named_as_asset(name, report):
                # With NUL for each slash, a folder's files sort directly after the folder's name.
                assets.append((folded.replace("/", "\0"), name))
        elif not name.startswith(RESERVED_PREFIX):
            report.broken(
                "KEY-1",
                f"expected the name of a model, a name in {ASSET_PREFIX}, or a key ([A-Za-z_]"
                f"[A-Za-z0-9_]*, at most {MAX_KEY_SIZE} bytes, not {_ASSETS!r} in upper, lower or "
                f"mixed case), found {quoted(name)}",
                entry=name,
            )
        if folded in seen:
            report.broken(
                "NAME-2",
                f"the earlier entry {quoted(seen[folded])} has the same name in upper, lower or "
                "mixed case",
                entry=name,
            )
        seen[folded] = name
    _check_folders(assets, report)
    return found_keys


def _check_versions(reserved: Sequence[str], report: Report) -> None:
    """Reports names that are reserved for later versions of the format (VERSION-1)."""
    origin = (
        "this file was written for a later version of the format; upgrade onnxarchive to read it"
    )
    if MODEL_PROTO not in reserved:
        origin = f"there is no {MODEL_PROTO}, so another tool may have made this zip"
    for name in reserved:
        if not is_model(name):
            report.broken(
                "VERSION-1",
                f"only names of models begin with two underscores, not {quoted(name)}: {origin}",
                entry=name,
            )


def _check_models(
    names: Sequence[str | None], reserved: Sequence[str], report: Report, *, are_all: bool
) -> None:
    """Checks ids and order of the further models (MODEL-4)."""
    further = [name for name in reserved if name.startswith(FURTHER_MODEL_PREFIX)]
    for name in further:
        if not is_model_id(name.removeprefix(FURTHER_MODEL_PREFIX)):
            report.broken(
                "MODEL-4",
                f"expected {FURTHER_MODEL_PREFIX} and an id, {MODEL_ID}, found {quoted(name)}",
                entry=name,
            )
    last = len(names) - (1 if names and names[-1] == MODEL_PROTO else 0)
    before = list(names[last - len(further) : last])
    if are_all and before != sorted(further):
        report.broken(
            "MODEL-4",
            f"the further models are not in ascending order directly before {MODEL_PROTO}",
            entry=further[0],
        )


def _check_folders(assets: list[tuple[str, str]], report: Report) -> None:
    """Reports names of assets that are also folders; by KEY-1, no key is a folder."""
    folder: tuple[str, str] | None = None
    for path, name in sorted(assets):
        if folder is not None and path.startswith(folder[0] + "\0"):
            report.broken(
                "NAME-2",
                f"its folder has the name of the entry {quoted(folder[1])}",
                entry=name,
            )
        else:
            folder = path, name


def _is_named_as_asset(name: str, report: Report) -> bool:
    if is_asset_name(name):
        return True
    expected, found = f"{ASSET_PREFIX} and {ASSET_PATH}", quoted(name)
    is_short = len(name) <= MAX_ASSET_NAME_SIZE
    if is_short and is_asset_name(unicodedata.normalize("NFC", name)):
        expected, found = f"a name in {ASSET_FORM}", quoted(name, in_ascii=True)
    report.broken("ASSET-1", f"expected {expected}, found {found}", entry=name)
    return False


def is_plain_path(path: str) -> bool:
    """True if a path is as `PLAIN_PATH` describes."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and _NOT_IN_PATH.search(path) is None
