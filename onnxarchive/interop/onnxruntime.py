"""ONNX Runtime sessions of archives in local files, in memory and in stores.

For an archive in a local file (also a copy in the cache), ONNX Runtime gets a model whose external
data is in this file. The session options name the file's directory, so that ONNX Runtime can map
the weights. For other archives, ONNX Runtime gets a model whose external data has keys as
locations, and the session options hold a buffer for each key. If ONNX Runtime or the options do not
accept buffers, the model holds all tensors.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

import onnx

from onnxarchive.conversion.linked_models import (
    Pairs,
    as_location,
    with_external_data,
)
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    UnsupportedFeatureError,
    requires_library,
    with_path,
)
from onnxarchive.files.data import crc32
from onnxarchive.files.local_file import MappedFile
from onnxarchive.interop.packed_pairs import packed_pairs
from onnxarchive.model import model_proto, walking
from onnxarchive.model.external import stays_outside
from onnxarchive.model.tensors import TensorRef, text
from onnxarchive.reading.archive import Archive, contents_of, open
from onnxarchive.remote.location import Access, Location, Openable, require_known

if TYPE_CHECKING:
    import onnxruntime as ort

# Session config entries. _DIRECTORY: directory of external data. _DISABLE_PREPACKING: "1" makes no
# packed copies of weights. _USE_BUFFERS: "1" makes no copies of buffers (ignored before 1.31).
_DIRECTORY: Final = "session.model_external_initializers_file_folder_path"
_DISABLE_PREPACKING: Final = "session.disable_prepacking"
_USE_BUFFERS: Final = "session.use_external_initializer_file_buffers_directly"
# Name of the data file of an optimized model that ONNX Runtime writes.
OPTIMIZED_DATA: Final = "session.optimized_model_external_initializers_file_name"
# Least size in bytes of the tensors in this file, and "1" to write packed weights to it.
OPTIMIZED_NBYTES: Final = "session.optimized_model_external_initializers_min_size_in_bytes"
SAVE_PACKED: Final = "session.save_external_prepacked_constant_initializers"
_OLDEST: Final = (1, 21)  # the first version with the entry _DIRECTORY
# The first version that refuses packed weights that differ from what it packs itself. Versions from
# 1.24 on use such weights, and give other numbers if they are damaged.
COMPARING: Final = (1, 32)
# Instructions by which ONNX Runtime chooses kernels, as Linux calls them.
_INSTRUCTIONS: Final = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16", "sve", "sme"),
)

# Domains of ONNX Runtime's own operators, which need no library of custom operators.
_OWN_DOMAINS: Final = {
    *("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"),
    *("ai.onnx.training", "com.microsoft", "com.microsoft.experimental", "com.microsoft.nchwc"),
    *("com.ms.internal.nhwc", "org.pytorch.aten"),
}

# An open archive, or an argument for `onnxarchive.open`.
ArchiveOrPath: TypeAlias = Archive | Openable


class Keywords(Access, total=False):
    """Further keywords of `session`: of `onnxarchive.open`, and of `InferenceSession`.

    ONNX Runtime ignores keywords that it does not know.
    """

    provider_options: Sequence[dict[Any, Any]] | None
    enable_fallback: int
    disabled_optimizers: Sequence[str] | None
    read_config_from_model: bool


def session(
    path: ArchiveOrPath,
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
    *,
    model: str | None = None,
    prepack: bool | None = None,
    **keywords: Unpack[Keywords],
) -> ort.InferenceSession:
    """Makes an ONNX Runtime session of an archive.

    ONNX Runtime maps the weights from the archive's file. By default, its CPU provider makes packed
    copies of many weights for speed, or maps those that `onnxarchive.prepack` has stored. With
    `prepack=False` it makes no copies, so processes share the mapped weights; the README says when
    to turn packing off. On Windows, ONNX Runtime before 1.23 maps only tensors that begin at a
    multiple of 64 KiB, and reads all other tensors.

    Except on Windows, the archive may be renamed or replaced while sessions run. A later call of
    `set_providers` needs the archive at its old path. Tensors that ONNX Runtime needs for shape
    inference, or does not read from external data, are passed in the model.

    With `optimized_model_filepath` in `sess_options`, ONNX Runtime writes a `.onnx` whose large
    tensors refer to offsets in the archive. ONNX Runtime can read it only from the archive's
    directory. After the archive is replaced or edited, this `.onnx` gives wrong results without an
    error. With the session config entry
    `session.optimized_model_external_initializers_file_name`, it has a data file of its own. A
    `.ort` contains its weights.

    Args:
        path: The archive: an open `Archive`, or an argument for `onnxarchive.open`. Without a local
            file (bytes, a URL without a cache) all weights are in memory. ONNX Runtime 1.31 and
            newer use the weights in place; older versions copy them. If ONNX Runtime is older than
            1.24 or cannot copy `sess_options`, the weights are copied into the model, and the model
            must be below 2 GiB.
        sess_options: Options for the session; they are copied if possible. ONNX Runtime cannot copy
            options that name execution providers or write files, and cannot copy any options for a
            model that may need custom operators. Options that cannot be copied are modified while
            the session is made: do not use them for another session meanwhile. Afterwards changed
            session config entries get their old values back, but an entry that was not set before
            is empty. ONNX Runtime logs these changes.
        providers: As for `onnxruntime.InferenceSession`.
        model: Id of the model, such as `"decoder"`; None for the default one, or for the model of
            an open `Archive`.
        prepack: Whether ONNX Runtime makes packed copies of weights. None (the default) leaves this
            to `sess_options`; without a setting there, ONNX Runtime makes the copies.
        keywords: Options for a remote archive, as in `onnxarchive.open`; and further options of
            `onnxruntime.InferenceSession`: `provider_options`, ...

    Returns:
        An `onnxruntime.InferenceSession`.

    Raises:
        ChecksumError: The bytes of a model, or of a tensor that is downloaded or passed in the
            model, do not match their CRC-32.
        ArchiveError: The archive cannot be opened (see `onnxarchive.open`), or its file was
            replaced or removed after it was opened.
        UnsupportedFeatureError: ONNX Runtime is older than 1.21, or the model and the tensors in it
            take 2 GiB or more.
        ValueError: The archive is closed, was opened with another model, or has a path that is not
            UTF-8.
        ImportError: ONNX Runtime is not installed.

    Warns:
        UserWarning: ONNX Runtime writes an optimized model that refers to the archive; see above.
            Or it refused the packed weights of `prepack`, and packed the weights itself.

    Example:
        session = onnxarchive.session("model.onnxa", providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": np.ones((1, 64), np.float32)})
    """
    require_known(keywords, Keywords.__optional_keys__)
    given: dict[str, Any] = {**keywords}
    access: Any = {name: given.pop(name) for name in Access.__optional_keys__ if name in given}
    with contextlib.ExitStack() as resources:
        prepare = partial(SessionInputs, path, model, sess_options, prepack, access, resources)
        inputs = prepare()
        if inputs.path and sess_options is not None and _shares_optimized_data(sess_options):
            warnings.warn(
                f"{inputs.path}: {sess_options.optimized_model_filepath} will refer to offsets in "
                "this archive, and be wrong after the archive is replaced or edited; set the "
                f"session config entry {OPTIMIZED_DATA!r} to give it a data file of its own",
                stacklevel=2,
            )
        try:
            return _session_class()(inputs, providers, **given)
        except MemoryError:
            raise
        except Exception as error:
            if not inputs.packed:
                raise
            reason = " ".join(str(error).split())
        inputs = prepare(uses_packed=False)
        ort_session = _session_class()(inputs, providers, **given)
        warnings.warn(
            f"{inputs.path}: ONNX Runtime did not take the packed weights in the archive, and "
            f"packed the weights itself; onnxarchive.prepack replaces them ({reason})",
            stacklevel=2,
        )
        return ort_session


def session_options(
    path: ArchiveOrPath,
    sess_options: ort.SessionOptions | None = None,
    *,
    model: str | None = None,
    prepack: bool | None = None,
    **access: Unpack[Access],
) -> tuple[bytes, ort.SessionOptions]:
    """Returns the model and the options for an ONNX Runtime session of an archive.

    `onnxruntime.InferenceSession(*onnxarchive.session_options(path))` is a session of the archive.
    You may change the options before you make the session. If you set `optimized_model_filepath`,
    the `.onnx` that ONNX Runtime writes refers to the archive; see `session`. Do not rename the
    archive or its directory before the session is made: the options name the directory, and the
    model names the file.

    Errors are those of `session`.

    Args:
        path: The archive, as in `session`. Without a local file, the returned model or the returned
            options hold the weights in memory.
        sess_options: Options to copy. They are not changed.
        model: Id of the model, as in `session`.
        prepack: As in `session`. A session with these options fails if packed weights in the
            archive are damaged.
        access: Options for a remote archive, as in `onnxarchive.open`.

    Returns:
        The serialized model and session options. For an archive in a local file, the model's large
        tensors are external data in this file, and the options name the file's directory. For other
        archives, the model or the options hold all tensors.

    Raises:
        UnsupportedFeatureError: As in `session`; also if `sess_options` cannot be copied.

    Example:
        model, options = onnxarchive.session_options("model.onnxa")
        session = onnxruntime.InferenceSession(model, options)
    """
    with contextlib.ExitStack() as resources:
        inputs = SessionInputs(path, model, sess_options, prepack, access, resources)
    return inputs.model, inputs.own_options()


class SessionInputs:
    """The inputs of a session. The Archive itself is not kept, to free its memory.

    Arguments are those of `session`. `resources` closes a file that is opened here. Without
    `uses_packed`, the model refers to no packed weights.

    Attributes:
        model: The serialized model.
        model_id: The id of the model.
        name: The archive and the model's id, for messages.
        prepack: As in `session`.
        uses_packed: As above.
        options: A copy of the caller's options, or the caller's if they cannot be copied.
        entries: Session config entries that the session needs.
        path: Path of the archive's file without symbolic links; None for an archive in memory.
        packed: The number of weights whose packed form the model refers to.
    """

    def __init__(
        self,
        source: ArchiveOrPath,
        model: str | None,
        sess_options: ort.SessionOptions | None,
        prepack: bool | None,
        access: Access,
        resources: contextlib.ExitStack,
        *,
        uses_packed: bool = True,
    ) -> None:
        ort = require_onnxruntime()
        archive = _open_source(source, model, access, resources)
        is_own = archive is not source
        self.model_id, self.prepack, self.uses_packed = archive.model_id, prepack, uses_packed
        self.name = repr(archive.path)
        if archive.model_id:
            self.name += f", model {archive.model_id!r}"
        self._copy = copy_options(sess_options, archive.model)
        self.options: Any = sess_options if self._copy is None else self._copy
        self.entries = prepacking_entries(prepack)
        self._file: MappedFile | None = None
        self.path: str | None = None
        self.packed = 0
        if not isinstance(contents_of(archive).file, MappedFile):
            self.model = _model_in_memory(archive, self._copy, in_place=is_own)
        else:
            self._file = contents_of(archive).local_file
            self.path = self._file.present_path()
            self.entries[_DIRECTORY], name = os.path.split(as_location(self.path))
            with with_path(archive.path):
                pairs: Pairs = {}
                if uses_packed and prepack is not False and compares_packed():
                    model_id, version = archive.model_id, ort.__version__
                    packed = packed_pairs(archive, [model_id], machine(), version)
                    pairs = packed.get(model_id, {})
                is_outside = stays_outside(archive.model, in_functions=True)
                linked = with_external_data(archive, name, is_outside, pairs=pairs, in_place=is_own)
                self.model, self.packed = model_proto.encode(linked), len(pairs)
        if self._copy is not None:
            set_entries(self._copy, self.entries)

    def require_current(self) -> None:
        """Refuses a file that is no longer at the path by which ONNX Runtime has opened it."""
        if self._file and self.path and not self._file.is_at(self.path):
            raise ArchiveError(
                "the archive was replaced, renamed or removed while the session was made; try "
                "again",
                path=self._file.path,
            )

    def own_options(self) -> ort.SessionOptions:
        """The options for this session alone; refused if the caller's cannot be copied."""
        if self._copy is None:
            raise UnsupportedFeatureError(
                "ONNX Runtime cannot copy these session options: they are not valid for every "
                "model, name execution providers, write files (profiling, the optimized model, EP "
                "contexts), or may have libraries of custom operators that the model needs; call "
                "session_options(path) and change the options that it returns"
            )
        return self._copy


def _open_source(
    source: ArchiveOrPath, model: str | None, access: Access, resources: contextlib.ExitStack
) -> Archive:
    if isinstance(source, Archive):
        Location.of(source, **access)  # refuses unknown options
        if model not in (None, source.model_id):
            raise ValueError(
                f"{source.path}: the archive was opened with the model {source.model_id!r}, not "
                f"{model!r}; open it with model={model!r}"
            )
        return source
    archive = open(source, model=model, **access)
    resources.enter_context(contents_of(archive).file)
    return archive


# Buffers by session options. A session keeps its options alive, and these keep the buffers alive:
# ONNX Runtime keeps only addresses.
_buffers: weakref.WeakKeyDictionary[Any, list[memoryview]] = weakref.WeakKeyDictionary()


def _model_in_memory(archive: Archive, options: Any, *, in_place: bool) -> bytes:
    """The model of an archive without a local file; the options get a buffer for each large tensor.

    If ONNX Runtime or the options do not accept buffers, the model holds all tensors.
    """
    # None for options that cannot be copied, and before version 1.24.
    add_buffers = getattr(options, "add_external_initializers_from_files_in_memory", None)

    is_read = stays_outside(archive.model)

    def is_outside(ref: TensorRef, nbytes: int) -> bool:
        # Elsewhere than in initializers of the main graph, it reads external data only from disk.
        return add_buffers is not None and len(ref.path) == 2 and is_read(ref, nbytes)

    refs, entries = archive.tensors.refs, archive.entries
    keys = [key for key, ref in refs.items() if is_outside(ref, entries[key].nbytes)]
    views = list(contents_of(archive).views(keys))
    with with_path(archive.path):
        model = model_proto.encode(with_external_data(archive, None, is_outside, in_place=in_place))
    if add_buffers is not None and keys:
        set_entries(options, {_USE_BUFFERS: "1"})
        _buffers[options] = views
        add_buffers(keys, views, [view.nbytes for view in views])
    return model


_lending = threading.RLock()


@cache
def _session_class() -> Any:
    """The class of an archive's sessions."""
    base: Any = require_onnxruntime().InferenceSession

    class ArchiveSession(base):  # type: ignore[misc]
        """A session of an archive.

        Options that could not be copied have the session's entries only while ONNX Runtime reads
        them. The attribute `_model_path`, which libraries such as optimum read, is the archive's
        path, though the session is made from bytes. These bytes are freed if the archive is in a
        file, since a model may hold large tensors.
        """

        _model_bytes: bytes | None

        def __init__(self, inputs: SessionInputs, *rest: Any, **kwargs: Any) -> None:
            """Takes `SessionInputs`, and the arguments of `InferenceSession` after the options."""
            self.packed_weights = inputs.packed
            self._name = inputs.name
            self._archive_path = inputs.path
            self._lent = inputs.options, inputs.entries
            self._read_again: Callable[[], bytes] | None = None
            if inputs.path is not None:
                self._read_again = partial(
                    _read_again,
                    inputs.path,
                    inputs.model_id,
                    inputs.prepack,
                    inputs.uses_packed,
                    crc32(inputs.model),
                )
            try:
                super().__init__(inputs.model, inputs.options, *rest, **kwargs)
            finally:
                inputs.require_current()

        def __repr__(self) -> str:
            return f"<onnxarchive session of {self._name}>"

        def set_providers(self, *arguments: Any, **kwargs: Any) -> None:
            """Makes the session again; it is unchanged if the archive cannot be read again."""
            if self._read_again is not None:
                self._model_bytes = self._read_again()
            super().set_providers(*arguments, **kwargs)

        def _create_inference_session(self, *arguments: Any, **kwargs: Any) -> None:
            """Makes the session, also again for other providers."""
            self._model_path = None
            options, entries = self._lent
            with _lending:
                before = {key: _entry(options, key) for key in entries}
                set_entries(options, entries)  # no change of a copy, which has them
                try:
                    super()._create_inference_session(*arguments, **kwargs)
                finally:
                    set_entries(options, before)
            self._model_path = self._archive_path
            if self._read_again is not None:
                self._model_bytes = None

    return ArchiveSession


def _read_again(path: str, model: str, prepack: bool | None, uses_packed: bool, crc: int) -> bytes:
    """The serialized model of a session, for a session of other providers.

    Raises:
        ArchiveError: The archive is another one than when the session was made.
    """
    with contextlib.ExitStack() as resources:
        inputs = SessionInputs(path, model, None, prepack, {}, resources, uses_packed=uses_packed)
    if crc32(inputs.model) != crc:
        raise ArchiveError(
            "the archive was edited or replaced after the session was made; make a new session",
            path=path,
        )
    return inputs.model


class RunError(UnsupportedFeatureError):
    """ONNX Runtime cannot load or run the model, or cannot use a provider."""


def require_onnxruntime(
    oldest: tuple[int, int] = _OLDEST, reason: str = "which accepts a directory of external data"
) -> Any:
    """Imports ONNX Runtime; refuses versions that lack a needed feature."""
    with requires_library("onnxruntime", "run a model"):
        import onnxruntime
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < oldest:
        raise UnsupportedFeatureError(
            f"expected ONNX Runtime {oldest[0]}.{oldest[1]} or newer, {reason}, found "
            f"{onnxruntime.__version__}: pip install --upgrade onnxruntime"
        )
    return onnxruntime


def compares_packed() -> bool:
    """True if ONNX Runtime is installed and compares packed weights with its own packing."""
    with contextlib.suppress(ImportError, UnsupportedFeatureError):
        require_onnxruntime(COMPARING)
        return True
    return False


def machine() -> str:
    """The kind of this machine: its architecture, and its instructions as far as Linux tells."""
    words: set[str] = set()
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                words = {*value.split()}
                break
    instructions = [name for name in _INSTRUCTIONS if name in words]
    return "-".join([platform.machine().lower() or "unknown", *instructions])


@contextlib.contextmanager
def run_errors(action: str, model: str = "") -> Iterator[None]:
    """Converts ONNX Runtime's exceptions, which have no common base class, to an `ArchiveError`."""
    try:
        yield
    except (ArchiveError, ImportError, MemoryError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if type(error).__name__ == "InvalidProtobuf":
            raise ArchiveFormatError(
                f"this is neither an archive nor a serialized ModelProto: {reason}"
            ) from error
        name = f" {model!r}" if model else ""
        raise RunError(f"ONNX Runtime cannot {action} the model{name}: {reason}") from error


def prepacking_entries(prepack: bool | None) -> dict[str, str]:
    """The session config entries for an argument `prepack`."""
    return {} if prepack is None else {_DISABLE_PREPACKING: "0" if prepack else "1"}


def set_entries(options: ort.SessionOptions, entries: Mapping[str, str]) -> None:
    """Sets session config entries."""
    for key, value in entries.items():
        if _entry(options, key) != value:  # ONNX Runtime logs each change of an entry
            options.add_session_config_entry(key, value)


def _entry(options: ort.SessionOptions, key: str) -> str:
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # there is none
        return ""


def _shares_optimized_data(options: ort.SessionOptions) -> bool:
    """True if ONNX Runtime writes an optimized model that uses the external data of the original.

    Models in ONNX Runtime's own format contain their weights.
    """
    path = os.fspath(options.optimized_model_filepath)
    is_ort = path.endswith(".ort") or _entry(options, "session.save_model_format") == "ORT"
    return bool(path) and not is_ort and not _entry(options, OPTIMIZED_DATA)


def copy_options(
    options: ort.SessionOptions | None, model: onnx.ModelProto
) -> ort.SessionOptions | None:
    """Copies options for a session of a model, or makes new ones; None if a copy may be incomplete.

    The copy is taken from a session of a model without nodes, since only sessions copy options. A
    copy lacks custom operator libraries and execution providers. So the result is None if the model
    may need such libraries, if the options name providers, or if they make a session write files.
    """
    if options is None:
        return require_onnxruntime().SessionOptions()
    if (
        options.enable_profiling
        or options.optimized_model_filepath
        or _entry(options, "ep.context_enable")
        or (hasattr(options, "has_providers") and options.has_providers())
        or _may_need_custom_operators(model)
    ):
        return None
    try:
        session = require_onnxruntime().InferenceSession(
            _identity_model(), options, ["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception:
        # The options may fit other models than `_identity_model`. Wrong options fail again when the
        # archive's session is made.
        return None
    return session.get_session_options()


def _may_need_custom_operators(model: onnx.ModelProto) -> bool:
    """True if the model uses a domain or operator that neither ONNX Runtime nor the model defines.

    A node may use a domain that the model does not import: ONNX Runtime imports the domains of
    registered libraries.
    """
    functions = {(text(function.domain), text(function.name)) for function in model.functions}
    own = _OWN_DOMAINS | {domain for domain, _ in functions}
    if not {text(opset.domain) for opset in model.opset_import} <= own:
        return True
    nodes: Any = walking.below(model, (), onnx.NodeProto.DESCRIPTOR, without="training_info")
    return any(
        node.domain not in _OWN_DOMAINS and (text(node.domain), text(node.op_type)) not in functions
        for _, node in nodes
    )


@cache
def _identity_model() -> bytes:
    """A model without a node, whose output is its input."""
    text = '<ir_version: 7, opset_import: ["": 13]> identity (float[1] x) => (float[1] x) { }'
    return model_proto.serialize(onnx.parser.parse_model(text))
