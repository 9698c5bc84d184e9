"""ONNX Runtime sessions of archives in local files, in memory and in stores.

For an archive in a local file (also a copy in the cache), ONNX Runtime gets a model whose external
data is in this file. The session options name the file's directory, so that ONNX Runtime can map
the weights. For other archives, ONNX Runtime gets a model whose external data has keys as
locations. The session options hold a buffer for each of these keys. If ONNX Runtime or the options
do not accept buffers, the model holds all tensors.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, with_path
from onnxarchive.files.local_file import MappedFile
from onnxarchive.files.progress import Progress
from onnxarchive.interop.ort_options import (
    DIRECTORY,
    OPTIMIZED_DATA,
    USE_BUFFERS,
    archive_session_class,
    compares_packed,
    copy_options,
    machine,
    prepacking_entries,
    require_onnxruntime,
    set_entries,
    shares_optimized_data,
)
from onnxarchive.model import proto
from onnxarchive.model.tensors import TensorRef
from onnxarchive.reading.archive import Archive, open
from onnxarchive.reading.linked_models import (
    Pairs,
    linked_model,
    packed_pairs,
    require_utf8,
    stays_outside,
)
from onnxarchive.remote.location import Access, Location, Openable, require_known

if TYPE_CHECKING:
    import onnxruntime as ort

# ONNX Runtime ignores keywords that it does not know.
_KWARGS: Final = (
    "provider_options",
    "enable_fallback",
    "disabled_optimizers",
    "read_config_from_model",
)
# An open archive, or an argument for `onnxarchive.open`.
Source: TypeAlias = Archive | Openable


def session(
    path: Source,
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
    *,
    model: str = "",
    prepack: bool | None = None,
    store: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | bool | None = None,
    cache_progress: Progress | None = None,
    **kwargs: Any,
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
    tensors refer to offsets in the archive. It is read only from the archive's directory, and gives
    other numbers, without an error, after the archive is replaced or edited. The session config
    entry `session.optimized_model_external_initializers_file_name` gives it a data file of its own.
    A `.ort` contains its weights.

    Args:
        path: The archive: an open `Archive`, or an argument for `onnxarchive.open`. Without a local
            file (bytes, a URL without a cache) all weights are in memory. ONNX Runtime 1.31 and
            newer use the weights in place; older versions copy them. If ONNX Runtime is older than
            1.24 or cannot copy `sess_options`, the weights are copied into the model, and the model
            must be below 2 GiB.
        sess_options: Options for the session; they are copied if possible. ONNX Runtime cannot
            copy options that name execution providers or write files, nor options for a model that
            may need custom operators. Options that are not copied are changed while the session is
            made: do not use them for another session meanwhile. Afterwards the changed session
            config entries have their former values; an entry that was not set before is empty. ONNX
            Runtime logs these changes.
        providers: As for `onnxruntime.InferenceSession`.
        model: Id of the model, such as `"decoder"`; `""` for the default one, or for the model of
            an open `Archive`.
        prepack: Whether ONNX Runtime makes packed copies of weights. None (the default) leaves
            this to `sess_options`; without a setting there, ONNX Runtime makes the copies.
        store: As for `onnxarchive.open`.
        storage_options: As for `onnxarchive.open`.
        cache: As for `onnxarchive.open`.
        cache_progress: As for `onnxarchive.open`.
        kwargs: As for `onnxruntime.InferenceSession`: `provider_options`, ...

    Returns:
        An `onnxruntime.InferenceSession`.

    Raises:
        ArchiveFormatError: The file is not an archive, or breaks a rule.
        ModelNotFoundError: There is no model of this id.
        ChecksumError: The bytes of a model, or of a tensor that is downloaded or passed in the
            model, do not match their CRC-32.
        ArchiveError: The archive's file was replaced or removed after it was opened.
        UnsupportedFeatureError: ONNX Runtime is older than 1.21, or the model and the tensors in it
            take 2 GiB or more.
        ValueError: The archive is closed, was opened with another model, or has a path that is not
            UTF-8.
        ImportError: ONNX Runtime is not installed.
        OSError: The file cannot be opened or read.

    Warns:
        UserWarning: ONNX Runtime writes an optimized model that refers to the archive; see above.
            Or it refused the packed weights of `prepack`, and packed the weights itself.

    Example:
        session = onnxarchive.session("model.onnxa", providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": np.ones((1, 64), np.float32)})
    """
    require_known(kwargs, _KWARGS)
    access = Access(
        store=store, storage_options=storage_options, cache=cache, cache_progress=cache_progress
    )
    with contextlib.ExitStack() as resources:
        inputs = session_inputs(path, model, sess_options, prepack, access, resources)
        is_local = inputs.path is not None
        if is_local and sess_options is not None and shares_optimized_data(sess_options):
            warnings.warn(
                f"{inputs.path}: {sess_options.optimized_model_filepath} will refer to offsets in "
                "this archive, and be wrong after the archive is replaced or edited; set the "
                f"session config entry {OPTIMIZED_DATA!r} to give it a data file of its own",
                stacklevel=2,
            )
        try:
            return inputs.make(sess_options, providers, kwargs)
        except Exception as error:
            if not inputs.packed:
                raise
            reason = " ".join(str(error).split())
        inputs = session_inputs(
            path, model, sess_options, prepack, access, resources, uses_packed=False
        )
        ort_session = inputs.make(sess_options, providers, kwargs)
        warnings.warn(
            f"{inputs.path}: ONNX Runtime did not take the packed weights in the archive, and "
            f"packed the weights itself; onnxarchive.prepack replaces them ({reason})",
            stacklevel=2,
        )
        return ort_session


def session_options(
    path: Source,
    sess_options: ort.SessionOptions | None = None,
    *,
    model: str = "",
    prepack: bool | None = None,
    **access: Unpack[Access],
) -> tuple[bytes, ort.SessionOptions]:
    """Returns the model and the options for an ONNX Runtime session of an archive.

    `onnxruntime.InferenceSession(*onnxarchive.session_options(path))` is a session of the archive.
    You may change the options before you make the session. If you set `optimized_model_filepath`,
    the `.onnx` that ONNX Runtime writes refers to the archive; see `session`. Do not rename the
    archive or its directory before the session is made: the options name the directory, and the
    model names the file.

    Args:
        path: The archive, as in `session`. Without a local file, the returned model or the
            returned options hold the weights in memory.
        sess_options: Options to copy. They are not changed.
        model: Id of the model, as in `session`.
        prepack: As in `session`. A session of these options fails if packed weights in the archive
            are damaged.
        access: Options for a remote archive; see `onnxarchive.open`.

    Returns:
        The serialized model and session options. For an archive in a local file, the model's large
        tensors are external data in this file, and the options name the file's directory. For other
        archives, the model or the options hold all tensors.

    Raises:
        UnsupportedFeatureError: As in `session`; also if `sess_options` cannot be copied.
        ArchiveError: As in `session`.
        ValueError: As in `session`.
        ImportError: ONNX Runtime is not installed.
        OSError: The file cannot be opened or read.

    Example:
        model, options = onnxarchive.session_options("model.onnxa")
        session = onnxruntime.InferenceSession(model, options)
    """
    with contextlib.ExitStack() as resources:
        inputs = session_inputs(path, model, sess_options, prepack, access, resources)
    return inputs.model, inputs.own_options()


@dataclass(frozen=True, slots=True)
class SessionInputs:
    """What a session is made from. The Archive itself is not kept, to free its memory.

    Attributes:
        model: The serialized model.
        options: Options for this session alone; None if the caller's options cannot be copied.
        entries: The session config entries that the options need.
        file: The archive's file; None for an archive in memory.
        path: The file's path without symbolic links; None for an archive in memory.
        packed: The number of weights whose packed form the model refers to.
    """

    model: bytes
    options: ort.SessionOptions | None
    entries: Mapping[str, str]
    file: MappedFile | None
    path: str | None
    packed: int = 0

    def make(
        self,
        sess_options: ort.SessionOptions | None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None,
        kwargs: Mapping[str, Any],
    ) -> ort.InferenceSession:
        """Makes the session, with the caller's options if they cannot be copied."""
        options, entries = self.options, {}
        if options is None:
            options, entries = sess_options, dict(self.entries)
        make = partial(archive_session_class(), self.path, entries)
        try:
            ort_session = make(self.model, options, providers, **kwargs)
            ort_session.packed_weights = self.packed
            return ort_session
        finally:
            self.require_same_file()  # ONNX Runtime has opened the file by name

    def own_options(self) -> ort.SessionOptions:
        """The options for this session alone; refused if the caller's cannot be copied."""
        if self.options is None:
            raise UnsupportedFeatureError(
                "ONNX Runtime cannot copy these session options: they are not valid for every "
                "model, name execution providers, write files (profiling, the optimized model, EP "
                "contexts), or may have libraries of custom operators that the model needs; call "
                "session_options(path) and change the options that it returns"
            )
        return self.options

    def require_same_file(self) -> None:
        """Requires that the path still leads to the archive's file."""
        if self.file and self.path and not self.file.is_at(self.path):
            raise ArchiveError(
                "the archive was replaced, renamed or removed while the session was made; try "
                "again",
                path=self.file.path,
            )


def session_inputs(
    source: Source,
    model: str,
    sess_options: ort.SessionOptions | None,
    prepack: bool | None,
    access: Access,
    resources: contextlib.ExitStack,
    *,
    uses_packed: bool = True,
) -> SessionInputs:
    """Prepares the model and options of a session.

    Args:
        source: As in `session`.
        model: As in `session`.
        sess_options: The caller's options.
        prepack: As in `session`.
        access: Options for a remote archive.
        resources: Closes a file that is opened here.
        uses_packed: Whether the model may refer to packed weights in the archive.
    """
    ort = require_onnxruntime()
    archive = _opened(source, model, access, resources)
    is_own = archive is not source
    if sess_options is None:
        options = ort.SessionOptions()
    else:
        options = copy_options(sess_options, archive.model)
    entries = prepacking_entries(prepack)
    path = file = None
    pairs: Pairs = {}
    if not isinstance(archive.contents.file, MappedFile):
        serialized, buffers = _model_and_buffers(archive, options, in_place=is_own)
        if buffers:
            _lend_buffers(options, buffers)
    else:
        file, path = archive.contents.local_file, archive.contents.local_file.present_path()
        require_utf8(path)
        entries[DIRECTORY], name = os.path.split(path)
        with with_path(archive.path):
            if uses_packed and prepack is not False and compares_packed():
                pairs = packed_pairs(archive, machine(), ort.__version__)
            linked = linked_model(archive, name, pairs=pairs, in_place=is_own)
            serialized = proto.encode(linked)
    if options is not None:
        set_entries(options, entries)
    return SessionInputs(serialized, options, entries, file, path, len(pairs))


def _opened(source: Source, model: str, access: Access, resources: contextlib.ExitStack) -> Archive:
    if isinstance(source, Archive):
        Location.of(source, **access)  # refuses unknown options
        if model not in ("", source.model_id):
            raise ValueError(
                f"{source.path}: expected the model {source.model_id!r}, chosen when the archive "
                f"was opened, found {model!r}; open it with model={model!r}"
            )
        return source
    archive = open(source, model=model, **access)
    resources.enter_context(archive.contents.file)
    return archive


def _model_and_buffers(
    archive: Archive, options: ort.SessionOptions | None, *, in_place: bool
) -> tuple[bytes, dict[str, memoryview]]:
    """The model of an archive without a local file, and the bytes of the external tensors by key.

    If ONNX Runtime or the options do not accept buffers, the model holds all tensors.
    """
    takes_buffers = hasattr(options, _ADD_BUFFERS)

    def is_outside(ref: TensorRef, nbytes: int) -> bool:
        # In subgraphs ONNX Runtime reads external data only from disk.
        is_of_main_graph = [field for field, _ in ref.path] == ["graph", "initializer"]
        return takes_buffers and is_of_main_graph and stays_outside(ref, nbytes)

    refs, entries = archive.tensors.refs, archive.entries
    keys = [key for key, ref in refs.items() if is_outside(ref, entries[key].nbytes)]
    buffers = dict(zip(keys, archive.contents.views(keys), strict=True))
    with with_path(archive.path):
        model = linked_model(archive, None, is_outside, in_place=in_place)
        return proto.encode(model), buffers


_ADD_BUFFERS = "add_external_initializers_from_files_in_memory"  # from version 1.24 on
# Buffers by session options. A session keeps its options alive, and these keep the buffers alive:
# ONNX Runtime keeps only addresses.
_buffers: weakref.WeakKeyDictionary[Any, list[memoryview]] = weakref.WeakKeyDictionary()


def _lend_buffers(options: Any, buffers: Mapping[str, memoryview]) -> None:
    """Adds buffers of external data, by location, to session options."""
    set_entries(options, {USE_BUFFERS: "1"})
    _buffers[options] = views = list(buffers.values())
    getattr(options, _ADD_BUFFERS)(list(buffers), views, [view.nbytes for view in views])
