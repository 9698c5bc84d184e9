"""Recognises files: unexpected files by content; models, weights and litter by name."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from onnxarchive.errors import (
    AGAIN,
    INTERRUPTED,
    ArchiveError,
    ArchiveFormatError,
    LockedError,
    quoted,
    without_traceback,
)
from onnxarchive.files.data import File
from onnxarchive.files.local_file import MappedFile, locked_file
from onnxarchive.model import wire
from onnxarchive.model.keys import MODEL_PROTO, is_model
from onnxarchive.sources.damage import explain
from onnxarchive.zipformat.records import UINT16_MAX, DirectoryRecord, EndRecord, LocalHeader

HEAD_SIZE = 4096  # number of the first bytes that `kind_of_head` gets
_WHITESPACE = "\t\n\r\f"
# First bytes of a zip: a local header, or the end of central directory of an empty zip.
_ZIP = (LocalHeader.SIGNATURE, EndRecord.SIGNATURE)
MODEL_SUFFIX = ".onnx"
_ZIPS = (".zip", ".onnxa")
_STEP = 1 << 20  # bytes in which the last one that is not zero is searched
_END_SIZE = EndRecord.SIZE + UINT16_MAX  # of an end record with the longest comment
_TORCH_PICKLE = "data.pkl"  # in the zips that torch.save writes since PyTorch 1.6
_KERAS_WEIGHTS = "model.weights.h5"  # in the zips of Keras 3
_SIZE_NBYTES = 8  # a safetensors file begins with the size of its header, in 8 bytes
_CONVERT = "'onnxarchive convert {} NEW.onnxa' makes an archive of it"
_CONVERT_ALL = "'onnxarchive convert {} --output-dir NEW' makes an archive of each"
_EXPORT = "export its model to ONNX, then 'onnxarchive convert MODEL.onnx NEW.onnxa'"
_EXPORT_TORCH = (
    "torch.onnx.export(model, args, 'MODEL.onnx') exports a model, and 'onnxarchive convert "
    "MODEL.onnx NEW.onnxa' makes an archive of it"
)
_EXPORT_TENSORFLOW = f"tf2onnx may {_EXPORT}"
_LOAD_TEXT = (
    "onnx.load('FILE') reads it if the name ends with .textproto, .json or .onnxtxt, and then "
    "onnxarchive.save(model, 'NEW.onnxa') makes an archive of it"
)
_JOIN = "'zip -s 0 NAME.zip --out WHOLE.zip' joins its parts, which have to be in one directory"
# Names of parts, whose content may be anything: m.z02 of m.zip, and m.zip.002.
_PART_OF_ZIP = re.compile(r"(?i)\.z\d\d+$")
_PART_OF_FILE = re.compile(r"\.\d{3}$")
_CONCATENATE = "'cat NAME.??? > NAME' joins its parts"
# Fields with which a text format of an ONNX model begins.
_FIELDS = rb"(ir_?version|opset_?import|producer_?name|graph|doc_?string)"
_NO_ZEROS = re.compile(rb"[^\0]")
_ZEROS = (
    "zeros, as of a download for which space was reserved, and which has not written all of it; "
    "download the file again"
)
_DECOMPRESS = "decompress it first"

# Files that file managers and Python add to zips and directories.
_APPLE_DOUBLE = "._"
_LITTER_FOLDERS = ("__MACOSX", "__pycache__")
_LITTER = (".DS_Store", "Thumbs.db", "desktop.ini")
# Other models with their data files, and weights in the formats of other libraries.
_WEIGHTS = (
    "*.onnx*",
    "*.safetensors",
    "pytorch_model*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.tflite",
)


class FileKind(NamedTuple):
    """Kind of a file.

    Attributes:
        name: Name of the kind with an article, such as `"an ONNX model"`.
        help: Advice to the user; `""` if there is none.
        is_source: True if `convert` searches files of this kind for a model.
    """

    name: str
    help: str = ""
    is_source: bool = False

    def __str__(self) -> str:
        return f"{self.name}; {self.help}" if self.help else self.name


LFS_POINTER = FileKind("a Git LFS pointer", "'git lfs pull' fetches the file")
HTML_PAGE = FileKind("an HTML page", "its address is not that of the file itself, or needs a login")
# Kinds by a pattern of the first bytes.
_KINDS = [
    (re.compile(pattern, re.DOTALL), FileKind(*kind))
    for pattern, *kind in (
        (rb"version https://git-lfs", *LFS_POINTER),
        (
            rb"(?i:(\xef\xbb\xbf)?\s*(<!--.{,1024}?-->\s*)?<(!doctype html|html|head|body))",
            *HTML_PAGE,
        ),
        (rb"(\w+: [^\n]*\n){,4}outs:\s+- [\w-]+: ", "a DVC pointer", "'dvc pull' fetches the file"),
        # protobuf's text format and JSON, and onnx's own text
        (rb"(?i:\s*(#[^\n]*\n\s*)*%b\s*[:{])" % _FIELDS, "an ONNX model as text", _LOAD_TEXT),
        (rb"(?i:\s*\{\s*\"%b\"\s*:)" % _FIELDS, "an ONNX model as JSON", _LOAD_TEXT),
        (rb"\s*<\s*%b\s*:" % _FIELDS, "an ONNX model as text", _LOAD_TEXT),
        (rb"PK(\x07\x08|00)PK\x03\x04", "the first part of a split zip", _JOIN),
        (rb"GGUF", "a GGUF file of llama.cpp", f"it has no ONNX graph: {_EXPORT}"),
        (rb".{4}ORTM", "an ORT format model", "convert the .onnx from which it was made"),
        (rb".{4}TFL3", "a TFLite model", _EXPORT_TENSORFLOW),
        (rb"\x89HDF\r\n\x1a\n", "an HDF5 file, such as a Keras model", _EXPORT_TENSORFLOW),
        # saved_model_schema_version 1, and a MetaGraphDef of 16 KiB or more
        (rb"\x08\x01\x12[\x80-\xff]{2}", "a TensorFlow SavedModel", _EXPORT_TENSORFLOW),
        # specificationVersion, and a ModelDescription that begins with an input
        (rb"\x08[\x01-\x7f]\x12[\x80-\xff]{,3}[\x00-\x7f]\x0a", "a Core ML model", _EXPORT),
        (rb"(\xef\xbb\xbf)?\s*<\?xml.{,1024}?<net ", "an OpenVINO IR", _EXPORT),
        # a number, which is all that the first pickle of torch.save held until PyTorch 1.5
        (rb"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19\.", "a file of torch.save", _EXPORT_TORCH),
        (rb"\x80[\x02-\x05][\x95\]}(cX]", "a pickle, such as of scikit-learn", _EXPORT),
        (rb"\x93NUMPY", "an array of numpy", f"it has no graph: {_EXPORT}"),
        (rb"\x1f\x8b\x08", "a gzip file", f"{_DECOMPRESS}, with gunzip or 'tar -xzf'"),
        (rb"\x28\xb5\x2f\xfd", "a Zstandard file", f"{_DECOMPRESS}, with unzstd"),
        (rb"\xfd7zXZ\0", "an xz file", f"{_DECOMPRESS}, with unxz or 'tar -xJf'"),
        (rb"BZh[1-9]", "a bzip2 file", f"{_DECOMPRESS}, with bunzip2 or 'tar -xjf'"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z file", f"{_DECOMPRESS}, with '7z x'"),
        (rb"Rar!\x1a\x07", "a RAR file", f"{_DECOMPRESS}, with 'unrar x'"),
        (rb".{257}ustar", "a tar file", "unpack it first, with 'tar -xf'"),
    )
]


class OtherKindError(ArchiveFormatError):
    """The file is of an unexpected kind; the message names the kind and the remedy."""

    _remedy = ""


@contextlib.contextmanager
def recognised(
    source: str | os.PathLike[str] | File | memoryview | None,
    *,
    expected: str = "an ONNX archive",
) -> Iterator[None]:
    """Replaces an ArchiveFormatError of the block by an error that says what the file is.

    The error names the kind of another file, or explains the damage of an archive (see `damage`).
    The file is read only after an error.

    Args:
        source: The path of the file, its bytes, or the opened file, of which only the first bytes
            are read; None leaves the error unchanged.
        expected: `"an ONNX archive"`, or `"a model"` if the block opens any source of `convert`.

    Raises:
        OtherKindError: The file is of another kind, or damaged; raised instead of the
            ArchiveFormatError.
    """
    try:
        yield
    except ArchiveFormatError as error:
        kind = None
        if isinstance(source, File):
            with contextlib.suppress(OSError, ValueError, ArchiveError):
                head = source.read(0, HEAD_SIZE)
                kind = _kind_of_file(head, source.size) or _model_of_head(head)
        elif isinstance(source, memoryview):
            kind = _kind_of_bytes(source, convert="")
        elif source is not None:
            kind = kind_of_path(source)
        if kind is not None and not (kind.is_source and expected == "a model"):
            message: str | None = f"expected {expected}, found {kind}"
        else:
            message = _explanation(source, error, expected)
        if message is None:
            raise
        raise OtherKindError(
            message, rule=error.rule, entry=error.entry, path=error.path
        ) from without_traceback(error)


def _explanation(
    source: str | os.PathLike[str] | File | memoryview | None,
    error: ArchiveFormatError,
    expected: str,
) -> str | None:
    """Explains the damage of an archive; None if it is unknown, or the file is not read for it."""
    import shlex  # opening an archive does not need it

    with contextlib.suppress(OSError, ValueError, ArchiveError):
        if isinstance(source, File):
            return explain(source, error, "", expected) if source.is_mapped else None
        if isinstance(source, str | os.PathLike):
            with MappedFile(source) as file:
                return explain(file, error, shlex.quote(os.fsdecode(source)), expected)
    return None


def kind_of_path(path: str | os.PathLike[str]) -> FileKind | None:
    """Recognises a file by its content; None for an archive, even a damaged one, or if unknown."""
    # Imported here, since opening an archive needs neither of them.
    import shlex

    from onnxarchive.sources.zip_file import read_zip

    name = shlex.quote(os.fsdecode(path))
    convert = _CONVERT.format(name)
    try:
        if os.path.isdir(path):
            return _directory(os.listdir(os.fsdecode(path)), name)
        with MappedFile(path) as file:
            view = file.view()
        part = _part(view)
        if part is not None:
            return part
        if not is_zip(view):
            return _kind_of_bytes(view, convert) or _named_part(os.fsdecode(path))
        try:
            names = list(read_zip(view, None)[0])
        except ArchiveError:
            return _named_part(os.fsdecode(path))
        return _zip(names, convert)
    except (OSError, ArchiveError):
        return None


def _named_part(path: str) -> FileKind | None:
    """Recognises a part of a split file by its name; None for other names."""
    if _PART_OF_ZIP.search(path):
        return FileKind("a part of a split zip, by its name", _JOIN)
    if _PART_OF_FILE.search(path):
        return FileKind("a part of a split file, by its name", _CONCATENATE)
    return None


def _part(view: memoryview) -> FileKind | None:
    """Recognises a zip or model of which a part is missing; None for others."""
    end = EndRecord.unpack(view, len(view) - EndRecord.SIZE)
    if end is not None and 0 < end.disk < UINT16_MAX:
        return FileKind("the last part of a split zip", _JOIN)
    ends_with_zeros = len(view) > HEAD_SIZE and not _NO_ZEROS.search(view[-HEAD_SIZE:])
    if ends_with_zeros and is_zip(view) and not _is_padded(view):
        return FileKind(f"a zip that ends with {_ZEROS}")
    return None


def _is_padded(view: memoryview) -> bool:
    """True if a zip is complete, and has zeros after its end."""
    end = len(view)
    while end and not _NO_ZEROS.search(view[max(0, end - _STEP) : end]):
        end = max(0, end - _STEP)
    tail = bytes(view[max(0, end - _STEP - _END_SIZE) : end]).rstrip(b"\0")
    return EndRecord.SIGNATURE in tail[-_END_SIZE:]


def _kind_of_bytes(view: memoryview, convert: str) -> FileKind | None:
    """Recognises a file that does not begin like a zip; `convert` is the advice for a model."""
    kind = _shifted_zip(view) or _kind_of_file(bytes(view[:HEAD_SIZE]), len(view))
    if kind is not None:
        return kind
    if wire.is_model(view):
        return FileKind("an ONNX model", convert, is_source=True)
    missing = wire.missing_nbytes(view)
    return FileKind(f"an ONNX model that {ends_early(missing)}") if missing else None


def is_zip(data: bytes | memoryview) -> bool:
    """True if a file, or its first four bytes, begin like a zip."""
    return bytes(data[: len(LocalHeader.SIGNATURE)]) in _ZIP


def is_model_name(name: str) -> bool:
    """True if a file may be a model by its name, which may be a path."""
    base = name[name.rfind("/") + 1 :]
    return base == MODEL_PROTO or base.lower().endswith(MODEL_SUFFIX)


def is_litter(name: str) -> bool:
    """True for litter, such as `.DS_Store`, and for files in a top-level litter folder."""
    base = name[name.rfind("/") + 1 :]
    in_folder = name.partition("/")[0] in _LITTER_FOLDERS
    return in_folder or base in _LITTER or base.startswith(_APPLE_DOUBLE)


def is_hidden(name: str) -> bool:
    """True for litter, files in litter folders at any level, and paths with a hidden component."""
    parts = name.split("/")
    return is_litter(name) or any(part.startswith(".") or part in _LITTER_FOLDERS for part in parts)


def is_left_out(name: str) -> bool:
    """True for hidden files, litter, other models, weights, and folders that were not read.

    The path of such a folder ends with a slash.
    """
    base = name[name.rfind("/") + 1 :].lower()
    return not base or is_hidden(name) or any(fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def is_model_file(path: str) -> bool:
    """True if a file's content is a model, or a zip with a model; the model is not checked."""
    from onnxarchive.sources.zip_file import read_zip

    try:
        with MappedFile(path) as file:
            if not is_zip(file.read(0, 4)):
                return wire.is_model(file.view())
        # Locked, since the file may be an archive that another process is editing. If it is, its
        # conversion waits for the edit, not the search.
        with locked_file(path, timeout=0) as file, file:
            if isinstance(file.lock_failure, LockedError):
                return True
            names, _ = read_zip(file.view(), None)
    except LockedError:  # this thread is editing the file
        return True
    except (OSError, ArchiveError):
        return False
    return any(is_model_name(name) for name in names)


def _directory(names: list[str], path: str) -> FileKind:
    count = _count(names)
    if MODEL_PROTO in names and count:  # `convert` refuses this directory
        convert = _CONVERT.format(f"{path}/{MODEL_PROTO}")
        return FileKind(f"a directory with {MODEL_PROTO} and other models", convert, is_source=True)
    if count > 1:
        convert = _CONVERT_ALL.format(path)
        return FileKind(f"a directory with {count} models", convert, is_source=True)
    if MODEL_PROTO in names or count:
        return FileKind("a directory with a model", _CONVERT.format(path), is_source=True)
    return FileKind(
        f"a directory without a model ({MODEL_PROTO} or *.onnx)",
        f"'onnxarchive convert {path} NEW.onnxa' searches the folders below it, too",
        is_source=True,
    )


def _zip(names: list[str], convert: str) -> FileKind | None:
    bases = [name.rpartition("/")[2] for name in names]
    if any(is_model(base) for base in bases):
        return None
    if _TORCH_PICKLE in bases:
        return FileKind("a file of torch.save", _EXPORT_TORCH)
    if _KERAS_WEIGHTS in bases:
        return FileKind("a Keras model", _EXPORT_TENSORFLOW)
    if bases and all(base.endswith(".npy") for base in bases):
        return FileKind("a zip of numpy arrays (.npz)", f"it has no graph: {_EXPORT}")
    count = _count(names)
    inner = [name for name in names if name.lower().endswith(_ZIPS)]
    if inner and not count:
        what = "an archive" if inner[0].endswith(".onnxa") else "a zip"
        return FileKind(f"a zip with {what} in it, {quoted(inner[0])}", "unzip it first")
    if count > 1:
        return FileKind(f"a plain zip with {count} models", "unzip it first", is_source=True)
    if count:
        return FileKind("a plain zip with a model", convert, is_source=True)
    return FileKind(f"a zip without a model ({MODEL_PROTO} or *.onnx)", is_source=True)


def _count(names: list[str]) -> int:
    """The number of `.onnx` files."""
    return sum(name.lower().endswith(MODEL_SUFFIX) and not is_litter(name) for name in names)


def ends_early(missing: int) -> str:
    """Describes a file that lacks this many bytes at its end, or more."""
    unit = "byte" if missing == 1 else "bytes"
    return f"ends at least {missing:,} {unit} too early; {INTERRUPTED}"


def _shifted_zip(view: memoryview) -> FileKind | None:
    """A zip whose entries begin later than it says, or earlier; None for anything else."""
    end = EndRecord.unpack(view, len(view) - EndRecord.SIZE)
    if end is None:
        return None
    directory = len(view) - EndRecord.SIZE - end.directory_size
    first = DirectoryRecord.unpack(view, directory) if directory > 0 else None
    if first is None:
        return None
    size = first.header_offset + directory - end.directory_offset
    if size < 0:
        return FileKind(f"a zip that lacks {-size:,} bytes before its directory", AGAIN)
    if size == 0 or LocalHeader.unpack(view, size) is None:
        return None
    return FileKind(
        f"a zip after {size:,} other bytes, such as a self-extracting program",
        "unzip it, then 'onnxarchive convert DIRECTORY NEW.onnxa'",
    )


def _kind_of_file(head: bytes, size: int) -> FileKind | None:
    """As `kind_of_head`, for an archive or a model: data of tensors may begin with zeros."""
    if len(head) == HEAD_SIZE and not _NO_ZEROS.search(head):
        return FileKind(f"a file that begins with {_ZEROS}")
    return kind_of_head(head, size)


def kind_of_head(head: bytes, size: int) -> FileKind | None:
    """Recognises a file by its first bytes and its size; None if the kind is unknown."""
    if not size:
        return FileKind("an empty file", INTERRUPTED)
    for pattern, kind in _KINDS:
        if pattern.match(head):
            return kind
    json_size = int.from_bytes(head[:_SIZE_NBYTES], "little")
    if head[_SIZE_NBYTES:].startswith(b"{") and json_size <= size - _SIZE_NBYTES:
        return FileKind("a safetensors file", f"it has weights and no graph: {_EXPORT}")
    return FileKind("a text file") if _is_text(head) else None


def _model_of_head(head: bytes) -> FileKind | None:
    """Recognises an ONNX model, whole or not, by its first bytes: the fields up to the graph."""
    if wire.missing_nbytes(head) or wire.is_model(head):
        return FileKind(
            "an ONNX model", "'onnxarchive convert' makes an archive of it", is_source=True
        )
    return None


def _is_text(head: bytes) -> bool:
    """True for UTF-8 of printable characters and `_WHITESPACE`; the last character may be cut."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in _WHITESPACE for character in text)
