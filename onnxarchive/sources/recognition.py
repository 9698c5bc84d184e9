"""Recognises by content the kind of an unexpected file, for error messages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.model import wire
from onnxarchive.model.keys import MODEL_PROTO
from onnxarchive.remote.urls import is_url, shown_url
from onnxarchive.sources.other_files import is_litter
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat.records import EndRecord, LocalHeader

_HEAD_SIZE = 4096  # number of the first bytes that `_by_head` gets
_WHITESPACE = "\t\n\r\f"
_ZIP = (LocalHeader.SIGNATURE, EndRecord.SIGNATURE)
_GGUF = b"GGUF"
_LFS_POINTER = b"version https://git-lfs.github.com/"
# The first bytes of a file of torch.save until PyTorch 1.5: a pickled number.
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_TORCH_PICKLE = "data.pkl"  # in the zips that torch.save writes since PyTorch 1.6
_SIZE_NBYTES = 8  # a safetensors file begins with the size of its header, in 8 bytes
_CONVERT = "'onnxarchive convert {} NEW.onnxa' makes an archive of it"
_CONVERT_ALL = "'onnxarchive convert {} --output-dir NEW' makes an archive of each"
_EXPORT = "export its model to ONNX, then 'onnxarchive convert MODEL.onnx NEW.onnxa'"
_EXPORT_TORCH = (
    "torch.onnx.export(model, args, 'MODEL.onnx') exports a model, and 'onnxarchive convert "
    "MODEL.onnx NEW.onnxa' makes an archive of it"
)


class Kind(NamedTuple):
    """Kind of a file.

    Attributes:
        name: Name of the kind with an article, such as `"an ONNX model"`.
        help: Advice to the user; `""` if there is none.
        is_source: True if `convert` searches files of this kind for a model.
    """

    name: str
    help: str = ""
    is_source: bool = False


class OtherKindError(ArchiveFormatError):
    """The file is of an unexpected kind; the message names the kind and the remedy."""

    _remedy = ""


@contextlib.contextmanager
def recognised(path: object, *, expected: str = "an ONNX archive") -> Iterator[None]:
    """Replaces an ArchiveFormatError of the block by an error that names the kind of the file.

    The file is read only after an error.

    Args:
        path: The file; objects other than paths are ignored.
        expected: `"an ONNX archive"`, or `"a model"` if the block opens any source of `convert`.

    Raises:
        OtherKindError: The file is of another kind; raised instead of the ArchiveFormatError.
        UnsupportedFeatureError: The path is a URL; raised instead of the FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError:
        if is_url(path):
            raise not_a_file(path) from None
        raise
    except ArchiveFormatError as error:
        kind = kind_of(path) if isinstance(path, str | os.PathLike) else None
        if kind is None or (kind.is_source and expected == "a model"):
            raise
        found = f"{kind.name}; {kind.help}" if kind.help else kind.name
        other = OtherKindError(
            f"expected {expected}, found {found}", rule=error.rule, entry=error.entry
        )
        other.path = error.path
        raise other from error


def not_a_file(found: object) -> UnsupportedFeatureError:
    """The error for a URL, bytes or a file object if only a local file is allowed."""
    kind = "a URL" if is_url(found) else "bytes, a file object or a path in a store"
    error = UnsupportedFeatureError(
        f"expected a local file, found {kind}; 'onnxarchive download' copies a remote archive to a "
        "file"
    )
    error.path = shown_url(found) if is_url(found) else None
    return error


def kind_of(path: str | os.PathLike[str]) -> Kind | None:
    """Recognises a file by its content; None for an archive, even a faulty one, or if unknown."""
    # Imported here, since opening an archive needs neither `shlex` nor `foreign`.
    import shlex

    from onnxarchive.zipformat import foreign

    name = shlex.quote(os.fsdecode(path))
    convert = _CONVERT.format(name)
    try:
        if os.path.isdir(path):
            return _directory(os.listdir(os.fsdecode(path)), name)
        with MappedFile(path) as file:
            head = file.read(0, _HEAD_SIZE)
            if head.startswith(_ZIP):
                return _zip([it.name for it in foreign.read_zip(file.view()).entries], convert)
            kind = _by_head(head, file.size)
            if kind is None and wire.is_model(file.view()):
                return Kind("an ONNX model", convert, is_source=True)
            return kind
    except (OSError, ArchiveError):
        return None


def _directory(names: list[str], path: str) -> Kind:
    count = _count(names)
    if MODEL_PROTO in names and count:  # `convert` refuses this directory
        convert = _CONVERT.format(f"{path}/{MODEL_PROTO}")
        return Kind(f"a directory with {MODEL_PROTO} and other models", convert, is_source=True)
    if count > 1:
        convert = _CONVERT_ALL.format(path)
        return Kind(f"a directory with {count} models", convert, is_source=True)
    if MODEL_PROTO in names or count:
        return Kind("a directory with a model", _CONVERT.format(path), is_source=True)
    return Kind(f"a directory without a model ({MODEL_PROTO} or *.onnx)", is_source=True)


def _zip(names: list[str], convert: str) -> Kind | None:
    bases = [name.rpartition("/")[2] for name in names]
    if any(base.startswith(MODEL_PROTO) for base in bases):
        return None
    if _TORCH_PICKLE in bases:
        return Kind("a file of torch.save", _EXPORT_TORCH)
    count = _count(names)
    if count > 1:
        return Kind(f"a plain zip with {count} models", "unzip it first", is_source=True)
    if count:
        return Kind("a plain zip with a model", convert, is_source=True)
    return Kind(f"a zip without a model ({MODEL_PROTO} or *.onnx)", is_source=True)


def _count(names: list[str]) -> int:
    """The number of `.onnx` files."""
    return sum(_is_onnx(name) and not is_litter(name) for name in names)


def _is_onnx(name: str) -> bool:
    return name.lower().endswith(".onnx")


def _by_head(head: bytes, size: int) -> Kind | None:
    """Recognises a file by its first bytes and its size."""
    if not size:
        return Kind("an empty file", "its download or copy may have been interrupted")
    if head.startswith(_GGUF):
        return Kind("a GGUF file of llama.cpp", f"it has no ONNX graph: {_EXPORT}")
    if head.startswith(_OLD_TORCH):
        return Kind("a file of torch.save", _EXPORT_TORCH)
    json_size = int.from_bytes(head[:_SIZE_NBYTES], "little")
    if head[_SIZE_NBYTES:].startswith(b"{") and json_size <= size - _SIZE_NBYTES:
        return Kind("a safetensors file", f"it has weights and no graph: {_EXPORT}")
    if head.startswith(_LFS_POINTER):
        return Kind("a Git LFS pointer", "'git lfs pull' fetches the file")
    if _is_text(head):
        return Kind("a text file")
    return None


def _is_text(head: bytes) -> bool:
    """True for UTF-8 of printable characters and `_WHITESPACE`; the last character may be cut."""
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.end < len(head):
            return False
        text = head[: error.start].decode()
    return all(it.isprintable() or it in _WHITESPACE for it in text)
