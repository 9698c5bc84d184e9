"""ONNX Runtime sessions of archives: the weights are mapped from the archive, not read.

ONNX Runtime is given the model with the archive itself as the file of its external data, and a
session entry that names the archive's directory. It maps each tensor from there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import onnx

from onnxarchive.archive.opening import open
from onnxarchive.archive.reading import Archive
from onnxarchive.buffers.data import Buffer, as_bytes
from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, with_path
from onnxarchive.interop.linked_models import linked_model, real_path, require_utf8, stays_outside
from onnxarchive.interop.optional import needing
from onnxarchive.model import proto
from onnxarchive.model.tensors import TensorRef, text
from onnxarchive.model.walking import graphs
from onnxarchive.storage.files import MappedFile, MemoryFile

if TYPE_CHECKING:
    import onnxruntime as ort

# What a session can be made of: a path, an open archive, or the bytes of one.
Source: TypeAlias = str | os.PathLike[str] | Archive | Buffer

_FOLDER: Final = "session.model_external_initializers_file_folder_path"
_OLDEST: Final = (1, 21)  # the first that knows it

# Domains whose operators ONNX Runtime has itself, so that no library of custom ones is needed.
_OWN_DOMAINS: Final = frozenset(
    {
        "",
        "ai.onnx",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "com.ms.internal.nhwc",
        "org.pytorch.aten",
    }
)

_UNCOPYABLE: Final = (
    "they name execution providers, write files (profiling, the optimized model, EP contexts), or "
    "may have libraries of custom operators, which the model needs"
)


def session(
    path: Source,
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
    **kwargs: Any,
) -> ort.InferenceSession:
    """Makes an ONNX Runtime session of an archive.

    ONNX Runtime maps the weights from the archive's file. By default its CPU provider makes packed
    copies of many of them for speed; with the session entry `session.disable_prepacking` set to
    `"1"` it makes none, memory stays flat, and processes share the pages. (On Windows before
    version 1.23 it maps only tensors that begin at a multiple of 64 KiB, and reads the others.)
    Several sessions of one archive may live at once, and a session outlives the archive's name: the
    file may be renamed or replaced by rename while it runs. (`set_providers` makes it anew, though,
    from the file at its place.)

    Tensors that ONNX Runtime must see for shape inference, or takes only from the model, are handed
    over in the model (`onnxarchive.interop.linked_models.stays_outside`).

    Args:
        path: The archive: its path, an open `Archive`, or its bytes. Of an archive in memory ONNX
            Runtime copies the weights; before version 1.24 it takes them only in the model, which
            must then be below 2 GiB.
        sess_options: Options for the session. They are not changed: the session gets a copy. Those
            that ONNX Runtime cannot copy are lent to the session with the directory's entry in
            them, and afterwards have it empty, which means the same as none; ONNX Runtime logs a
            line about that. They are those that name execution providers or write files, and, for
            a model with operators of other domains, all of them, since they may have a library of
            custom operators. While a session is made, lent options must serve no other.
        providers: As `onnxruntime.InferenceSession` takes them.
        kwargs: As `onnxruntime.InferenceSession` takes them: `provider_options`, ...

    Returns:
        An `onnxruntime.InferenceSession`.

    Raises:
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ChecksumError: Bytes of a small tensor have changed.
        ArchiveError: Another file has taken the place of an open archive, or of `path` meanwhile.
        UnsupportedFeatureError: ONNX Runtime is older than 1.21, or what must be in the model takes
            2 GiB or more.
        ValueError: The archive is closed, or its path is not UTF-8.
        ImportError: ONNX Runtime is not installed.
        OSError: The file cannot be opened or read.
    """
    ort = require_onnxruntime()
    with contextlib.ExitStack() as files:
        prepared = _prepare(path, sess_options, files)
        if prepared.own is not None:
            make, given = ort.InferenceSession, prepared.own
        elif prepared.path is None:
            make, given = ort.InferenceSession, sess_options
        else:
            folder = os.path.dirname(prepared.path)
            make, given = partial(_session_of_lent_options(), folder), sess_options
        try:
            return make(prepared.model, given, providers, **kwargs)
        finally:
            prepared.require_file()  # which ONNX Runtime has opened by its name


def session_options(
    path: Source, sess_options: ort.SessionOptions | None = None
) -> tuple[bytes, ort.SessionOptions]:
    """What `session` makes a session of, for those who make it themselves.

    `onnxruntime.InferenceSession(*onnxarchive.session_options(path))` is a session of the archive.
    The options may be changed before. They name the archive's directory and the model its file:
    they are of use as long as both have these names.

    Args:
        path: The archive, as in `session`. The options keep the bytes of an archive in memory.
        sess_options: Options to copy; they are not changed.

    Returns:
        The serialized model, with its large tensors as external data in the archive, and the
        session options that say where that is.

    Raises:
        UnsupportedFeatureError: `sess_options` cannot be copied: take those that are given without
            them, and set these up. Or as in `session`.
        ArchiveError: As in `session`, and so for the other errors.
        ImportError: ONNX Runtime is not installed.
        OSError: The file cannot be opened or read.
    """
    with contextlib.ExitStack() as files:
        prepared = _prepare(path, sess_options, files)
    if prepared.own is None:
        raise UnsupportedFeatureError(
            f"expected session options that ONNX Runtime copies, found that {_UNCOPYABLE}; "
            "call options(path) without them, and set up the options that it gives"
        )
    return prepared.model, prepared.own


def require_onnxruntime() -> Any:
    """ONNX Runtime, or an error that says how to install one that can run archives."""
    with needing("onnxruntime", "run a model with"):
        import onnxruntime
    version = onnxruntime.__version__
    if tuple(map(int, version.split(".")[:2])) < _OLDEST:
        raise UnsupportedFeatureError(
            f"expected ONNX Runtime 1.21 or newer, which can be told where the external data of a "
            f"model lies, found {version}: pip install --upgrade onnxruntime"
        )
    return onnxruntime


# What a session is made of


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a session is made of; the archive's own objects are gone by then.

    Attributes:
        model: The serialized model.
        own: A copy of the caller's options for this session, or None where there can be none.
        file: The archive's file.
        path: Where that is, without symbolic links; None of an archive in memory.
    """

    model: bytes
    own: ort.SessionOptions | None
    file: MappedFile
    path: str | None

    def require_file(self) -> None:
        """Refuses another file that is at the path by now.

        Raises:
            ArchiveError: There is one.
        """
        if self.path is None or self.file.is_at(self.path):
            return
        error = ArchiveError(
            "expected the same file while the session was made, found another; retry"
        )
        error.path = self.file.path
        raise error


def _prepare(
    source: Source, given: ort.SessionOptions | None, files: contextlib.ExitStack
) -> _Prepared:
    """Prepares a session; `files` closes what is opened for it."""
    ort = require_onnxruntime()
    archive, is_own = _opened(source, files)
    own = ort.SessionOptions() if given is None else _copy(given, archive.model)
    if isinstance(archive._file, MemoryFile):
        return _Prepared(_model_in_memory(archive, own, is_own), own, archive._file, None)
    path = real_path(archive)
    require_utf8(path)
    folder, name = os.path.split(path)
    with with_path(archive.path):
        model = proto.encode(linked_model(archive, name, in_place=is_own))
    if own is not None:
        _set_folder(own, folder)
    return _Prepared(model, own, archive._file, path)


def _opened(source: Source, files: contextlib.ExitStack) -> tuple[Archive, bool]:
    """An archive, and whether it was opened here and `files` closes its file."""
    if isinstance(source, Archive):
        return source, False
    if isinstance(source, str | os.PathLike):
        archive = open(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        archive = Archive(MemoryFile(as_bytes(source)))
    else:
        raise TypeError(f"expected a path, an Archive or bytes, found {type(source)}")
    files.enter_context(archive._file)
    return archive, True


def _set_folder(options: ort.SessionOptions, folder: str) -> None:
    if _entry(options, _FOLDER) != folder:  # ONNX Runtime logs what is set anew
        options.add_session_config_entry(_FOLDER, folder)


# An archive in memory


_numbers = count()
# ONNX Runtime has only the addresses of what it is to read while a session is made.
_buffers: weakref.WeakKeyDictionary[Any, memoryview] = weakref.WeakKeyDictionary()


def _model_in_memory(archive: Archive, own: ort.SessionOptions | None, is_spent: bool) -> bytes:
    """The model, and in the options the bytes of the archive, where they take them."""
    add = getattr(own, "add_external_initializers_from_files_in_memory", None)
    if add is None:
        model = linked_model(archive, "", lambda ref, nbytes: False, in_place=is_spent)
        return proto.encode(model)
    location = f"onnxarchive-{next(_numbers)}.onnxa"
    model = linked_model(archive, location, _is_taken_from_memory, in_place=is_spent)
    data = archive._file.view()
    _buffers[own] = data
    add([location], [data], [data.nbytes])
    return proto.encode(model)


def _is_taken_from_memory(ref: TensorRef, nbytes: int) -> bool:
    """As `stays_outside`, but that those of subgraphs are looked for on disk only."""
    return stays_outside(ref, nbytes) and [it for it, _ in ref.path] == ["graph", "initializer"]


# Session options of the caller


def _copy(given: ort.SessionOptions, model: onnx.ModelProto) -> ort.SessionOptions | None:
    """A copy of options that makes the same sessions of `model`, or None.

    ONNX Runtime copies options into a session, and gives them out of it: here of one that runs
    nothing. The copy lacks custom operators and execution providers, which options have beside
    their values; and such a session must write no files.
    """
    if (
        given.enable_profiling
        or given.optimized_model_filepath
        or _entry(given, "ep.context_enable")
    ):
        return None
    if hasattr(given, "has_providers") and given.has_providers():
        return None
    if _may_need_custom_operators(model):
        return None
    ort = require_onnxruntime()
    try:
        nothing = ort.InferenceSession(
            _nothing(), given, ["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception:  # such as an entry for another kind of model; the session itself will tell
        return None
    return nothing.get_session_options()


def _may_need_custom_operators(model: onnx.ModelProto) -> bool:
    """Whether an operator, or a domain, is neither ONNX Runtime's nor one of the model's functions.

    A node may use a domain that only a function imports, or nobody: ONNX Runtime adds those of
    libraries that were registered.
    """
    functions = {(text(it.domain), text(it.name)) for it in model.functions}
    own = _OWN_DOMAINS | {domain for domain, _ in functions}
    if not {text(it.domain) for it in model.opset_import} <= own:
        return True
    lists = chain(
        (ref.graph.node for ref in graphs(model) if ref.root != "training_info"),
        (function.node for function in model.functions),
    )
    return any(
        node.domain not in _OWN_DOMAINS and (text(node.domain), text(node.op_type)) not in functions
        for node in chain.from_iterable(lists)
    )


@cache
def _nothing() -> bytes:
    """A model without a node, which gives its input."""
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([], "nothing", [x], [x])
    opset = onnx.helper.make_opsetid("", 13)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=7)
    return proto.serialize(model)


def _entry(options: ort.SessionOptions, key: str) -> str:
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # which is how it says that there is none
        return ""


_lending = threading.RLock()


@contextlib.contextmanager
def _lent(given: ort.SessionOptions, folder: str) -> Iterator[None]:
    """The caller's own options, with the entry of the directory for the time being."""
    with _lending:
        before = _entry(given, _FOLDER)
        _set_folder(given, folder)
        try:
            yield
        finally:
            _set_folder(given, before)


@cache
def _session_of_lent_options() -> Any:
    """A session that is made with its caller's own options, which it changes for the time being."""
    base: Any = require_onnxruntime().InferenceSession

    class Session(base):  # type: ignore[misc]
        def __init__(self, folder: str, model: bytes, given: Any, *rest: Any, **kwargs: Any):
            self._archive_folder = folder
            self._lent_options = given
            with _lent(given, folder):
                super().__init__(model, given, *rest, **kwargs)

        def set_providers(self, *arguments: Any, **kwargs: Any) -> None:
            """As that of the base, which makes the session anew with the same options."""
            with _lent(self._lent_options, self._archive_folder):
                super().set_providers(*arguments, **kwargs)

    return Session
