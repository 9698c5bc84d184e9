"""Errors: one base class and its subclasses, and the report of broken rules.

A missing file, a full disk or a lack of permission usually raises an `OSError`. In some cases the
error is an `ArchiveError`, for example if external data cannot be opened or a rollback fails. A
missing library is an `ImportError` that says how to install it.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, TypeVar

# Rules about checksums: CRC-32 and SHA-1.
CHECKSUM_RULES = frozenset({"ZIP-15", "DATA-6"})

# Rules that zips of other tools may break; `convert` makes an archive of such a zip.
MENDED_RULES = frozenset(
    {
        *("ALIGN-1", "ALIGN-2", "ALIGN-3", "DATA-2", "DATA-3", "KEY-1", "MODEL-1"),
        *("ZIP-6", "ZIP-8", "ZIP-9", "ZIP-12", "ZIP-13", "ZIP-14"),
    }
)

# Rules that are broken where bytes of an archive were changed after it was written.
DAMAGE_RULES = frozenset({"ZIP-7", "ZIP-15"})

INTERRUPTED = "its download or copy may have been interrupted"  # of a file that ends too early
AGAIN = "copy or download it again"
DAMAGED = f"the file is damaged: {AGAIN}"

_Error = TypeVar("_Error", bound=BaseException)
_MAX_SHOWN = 100  # characters of a value in a message; escapes may double this number
_MAX_NAMES = 16  # in a message
_MAX_COMPARED = 4_000  # names, which take up to a second


class ArchiveError(Exception):
    """Base class of this library's errors.

    Attributes:
        rule: Id of the broken rule in `spec/rules.toml`, such as `"ZIP-6"`; None for other errors.
        entry: Name of the entry at fault, or None.
        path: The file at fault, or the name of other data, such as `"archive in memory"`; None if
            unknown.

    Example:
        try:
            onnxarchive.open("model.onnx")
        except onnxarchive.ArchiveError as error:
            print(error.path, error.rule, error.message)
    """

    # With `path` as an argument, an error is raised without a variable. A variable would complete a
    # reference cycle (error, traceback, frame), and the cycle would keep the frames' files mapped.
    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        entry: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.entry = entry
        self.path = path

    @property
    def message(self) -> str:
        """The message without file and rule."""
        return str(self.args[0])

    def __str__(self) -> str:
        file = f"{self.path}: " if self.path is not None else ""
        rule = f" [{self.rule}]" if self.rule is not None else ""
        return f"{file}{self.message}{rule}{self._remedy}"

    @property
    def _remedy(self) -> str:
        if self.path is not None and self.rule in DAMAGE_RULES:
            return f"; {DAMAGED}"
        if self.path is None or self.rule not in MENDED_RULES:
            return ""
        if "://" not in self.path and not os.path.exists(self.path):  # such as data in memory
            return ""
        import shlex  # rarely used

        command = f"onnxarchive convert {shlex.quote(self.path)} NEW.onnxa"
        return f"; if another tool made this zip, '{command}' makes an archive of it"


class ArchiveFormatError(ArchiveError, ValueError):
    """The data is not a valid archive, or not a valid source of a conversion.

    Example:
        try:
            onnxarchive.open(b"no archive")
        except onnxarchive.ArchiveFormatError as error:
            print(error.rule)
    """


class ChecksumError(ArchiveFormatError):
    """The bytes of an entry, a data file or a whole archive do not match their checksum.

    Example:
        try:
            onnxarchive.load("model.onnxa")
        except onnxarchive.ChecksumError as error:
            print(error.entry)
    """


class UnsupportedFeatureError(ArchiveError):
    """The request or file is valid, but this version does not support it.

    Example:
        try:
            with onnxarchive.edit("https://example.com/model.onnxa") as edit:
                edit.metadata["author"] = "Ada"
        except onnxarchive.UnsupportedFeatureError as error:
            print(error)
    """


class ModelNotFoundError(ArchiveError, KeyError):
    """The archive has no model with the requested id.

    Example:
        try:
            onnxarchive.open("model.onnxa", model="encoder")
        except onnxarchive.ModelNotFoundError as error:
            print(error)
    """


class TensorNotFoundError(ArchiveError, KeyError):
    """No tensor, entry or asset has the requested name, or several tensors have it.

    The message ends with the most similar name, if there is one.

    Example:
        with onnxarchive.open("model.onnxa") as archive:
            try:
                archive.tensors["bias"]
            except onnxarchive.TensorNotFoundError as error:
                print(error)
    """

    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        entry: str | None = None,
        path: str | None = None,
        name: object = None,
        names: Iterable[str] = (),
    ) -> None:
        super().__init__(message, rule=rule, entry=entry, path=path)
        # Compared only if the error is shown: a program may look up many names that are not there.
        self._name = name
        self._names = tuple(names)

    @property
    def _remedy(self) -> str:
        return did_you_mean(self._name, self._names)


class ObjectChangedError(ArchiveError):
    """A remote object has changed since it was opened.

    Example:
        try:
            onnxarchive.open("models/model.onnxa", store=store)
        except onnxarchive.ObjectChangedError as error:
            print(error)
    """


class LockedError(ArchiveError):
    """Another process, or a thread of this process, has locked the file.

    Example:
        try:
            onnxarchive.open("model.onnxa", timeout=0)
        except onnxarchive.LockedError as error:
            print(error)
    """


class UnfinishedEditError(ArchiveError):
    """An edit of the archive was interrupted; `recover` rolls it back.

    Example:
        try:
            onnxarchive.open("model.onnxa")
        except onnxarchive.UnfinishedEditError:
            onnxarchive.recover("model.onnxa")
    """


class AttributesWarning(UserWarning):
    """A file that is replaced loses its owner, permissions, access control list or attributes.

    The new file gets owner and permissions of the old one if the system allows it, and never more
    permissions. Access control lists and extended attributes are not copied. If the old file has an
    access control list, only the owner can access the new file.

    The warning is issued before the file is replaced: if a filter turns the warning into an error,
    the file is unchanged.

    Example:
        warnings.simplefilter("error", onnxarchive.AttributesWarning)
    """


def did_you_mean(name: object, names: Sequence[str]) -> str:
    """A question with the name most similar to a given name, for the end of a message.

    It is empty if no name is similar, or if there are too many names to compare them quickly.
    """
    if not isinstance(name, str) or len(names) > _MAX_COMPARED:
        return ""
    import difflib  # rarely used

    near = difflib.get_close_matches(name[:_MAX_SHOWN], names, n=1)
    return f"; did you mean {quoted(near[0])}?" if near else ""


def without_traceback(error: _Error) -> _Error:
    """The error without its traceback, for a `@contextmanager` that raises another error from it.

    On Python 3.12 and newer, the error would be in a reference cycle (error, traceback, frame of
    the context manager, frame of its caller), which would keep the frames' files mapped until the
    next garbage collection.
    """
    return error.with_traceback(None)


def describe_error(error: object) -> str:
    """The message of an error; for an `OSError`, the file and the fault, without the number."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    file = "" if error.filename is None else f"{error.filename or repr(error.filename)}: "
    remedy = ""
    if error.errno == errno.EMFILE and "ulimit" not in error.strerror:
        remedy = "; raise the limit of open files ('ulimit -n'), or choose fewer jobs"
    return file + error.strerror + remedy


def recover_command(path: str) -> str:
    """The command that recovers a file, in quotes, for a message."""
    import shlex  # rarely used

    return f"'onnxarchive recover {shlex.quote(path)}'"


@contextmanager
def with_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Sets `path` on an `ArchiveError` that the block raises without a path."""
    try:
        yield
    except ArchiveError as error:
        if error.path is None:
            error.path = os.fsdecode(path)
        raise


@contextmanager
def path_in_errors(
    path: str | os.PathLike[str], failure: str | None = None, remedy: str = ""
) -> Iterator[None]:
    """Names the file in an `OSError` of the block.

    Args:
        path: The file, in place of a descriptor, a temporary name or no name at all.
        failure: What failed, such as "cannot be synced", to put before the system's reason.
        remedy: What to do, to put after the reason.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # the error is a text, which a file's name would hide
            raise
        name = os.fsdecode(path)
        if failure is not None:
            reason = f"{failure}: {error.strerror}{remedy}"
            raise OSError(error.errno, reason, name) from without_traceback(error)
        error.filename = name
        raise


def quoted(value: str | bytes | Iterable[int], *, in_ascii: bool = False) -> str:
    """The `repr` of a value for a message, cut short if the value is long.

    Args:
        value: A string, bytes, or numbers. Numbers beyond the cut are not read.
        in_ascii: Whether to escape characters that are not ASCII.
    """
    if not isinstance(value, str | bytes):
        return _shown_numbers(value)
    form = ascii if in_ascii else repr
    count = min(len(value), _MAX_SHOWN)
    while len(form(value[:count])) > 2 * _MAX_SHOWN:  # an escape takes up to ten characters
        count //= 2
    if count == len(value):
        return form(value)
    unit = "characters" if isinstance(value, str) else "bytes"
    return f"{form(value[:count])}... ({len(value)} {unit})"


def quoted_names(names: Iterable[str]) -> str:
    """The first names for a message, with "..." for the others; "none" if there are none."""
    first = [*map(quoted, islice(names, _MAX_NAMES + 1))]
    if len(first) > _MAX_NAMES:
        first[-1] = "..."
    return ", ".join(first) or "none"


def _shown_numbers(numbers: Iterable[int]) -> str:
    text = ""
    for number in numbers:
        if len(text) > _MAX_SHOWN:
            text += ", ..."
            break
        text += f", {number}" if text else f"{number}"
    return f"[{text}]"


class Report(ABC):
    """Receives broken rules: `Strict` raises the first as an error, others collect all."""

    @abstractmethod
    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        """Reports a broken rule of `spec/rules.toml`; the message says what is wrong.

        A message has the expected and the found value only if two values are compared.
        """


class Strict(Report):
    """Raises a broken rule as an error."""

    def __init__(self, path: str | None = None) -> None:
        """Names the file `path` in errors; None leaves that to callers (`with_path`)."""
        self._path = path

    def broken(self, rule: str, message: str, *, entry: str | None = None) -> None:
        """Raises a ChecksumError for a rule about checksums, else an ArchiveFormatError."""
        kind = ChecksumError if rule in CHECKSUM_RULES else ArchiveFormatError
        subject = "" if entry is None else f"entry {quoted(entry)}: "
        raise kind(subject + message, rule=rule, entry=entry, path=self._path)


# The packages of the extra `remote`. Messages name what an extra installs: if this package was
# installed from a clone, an extra of it cannot be installed by name.
_REMOTE: Final = "obstore fsspec platformdirs"
# By module: name of the library in messages, and arguments of `pip install`.
_LIBRARIES: Final = {
    "fsspec": ("fsspec", _REMOTE),
    "netron": ("Netron", "netron"),
    "obstore": ("obstore", _REMOTE),
    "platformdirs": ("platformdirs", _REMOTE),
    "onnx_ir": ("onnx_ir", "onnx-ir"),
    "onnxruntime": ("ONNX Runtime", "onnxruntime"),
    "shtab": ("shtab", "shtab"),
    "torch": ("PyTorch", "torch"),
}


@contextmanager
def requires_library(library: str, purpose: str) -> Iterator[None]:
    """Raises an ImportError of the block again, with the command that installs the library.

    Args:
        library: The name of the library's module, which becomes the `name` of the error.
        purpose: The end of the sentence "PyTorch is needed to", such as `"hold a tensor"`.
    """
    try:
        yield
    except ImportError as error:
        title, package = _LIBRARIES[library]
        reason = " ".join(str(error).split())  # on one line; an error of numpy takes a page
        raise ImportError(
            f"{title} is needed to {purpose}, but cannot be imported ({reason}): "
            f"pip install {package}",
            name=library,
        ) from error


def is_instance(value: object, library: str, name: str) -> bool:
    """True for an instance of a class of this name in any module of a library, or of a subclass."""
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(value).__mro__)
    return (library, name) in bases
