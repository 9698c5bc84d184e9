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
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from onnxarchive.errors import ArchiveError, UnsupportedFeatureError, with_path
from onnxarchive.files.local_file import MappedFile
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

# An open archive, or an argument for `onnxarchive.open`.
Source: TypeAlias = Archive | Openable


class Keywords(Access, total=False):
    """Further keywords of `session`: of `onnxarchive.open`, and of `InferenceSession`.

    ONNX Runtime ignores keywords that it does not know.
    """

    provider_options: Sequence[dict[Any, Any]] | None
    enable_fallback: int
    disabled_optimizers: Sequence[str] | None
    read_config_from_model: bool


def session(
    path: Source,
    sess_options: ort.SessionOptions | None = None,
    providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
    *,
    model: str = "",
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
    tensors refer to offsets in the archive. It is read only from the archive's directory, and gives
    other numbers, without an error, after the archive is replaced or edited. The session config
    entry `session.optimized_model_external_initializers_file_name` gives it a data file of its own.
    A `.ort` contains its weights.

    Errors of `onnxarchive.open` pass.

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
        keywords: Options for a remote archive, as for `onnxarchive.open`; and others as for
            `onnxruntime.InferenceSession`: `provider_options`, ...

    Returns:
        An `onnxruntime.InferenceSession`.

    Raises:
        ChecksumError: The bytes of a model, or of a tensor that is downloaded or passed in the
            model, do not match their CRC-32.
        ArchiveError: The archive's file was replaced or removed after it was opened.
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
        if inputs.path and sess_options is not None and shares_optimized_data(sess_options):
            warnings.warn(
                f"{inputs.path}: {sess_options.optimized_model_filepath} will refer to offsets in "
                "this archive, and be wrong after the archive is replaced or edited; set the "
                f"session config entry {OPTIMIZED_DATA!r} to give it a data file of its own",
                stacklevel=2,
            )
        try:
            return inputs.make(providers, given)
        except Exception as error:
            if not inputs.packed:
                raise
            reason = " ".join(str(error).split())
        inputs = prepare(uses_packed=False)
        ort_session = inputs.make(providers, given)
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
    model names the file. Other errors than the one below are those of `session`.

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

    Example:
        model, options = onnxarchive.session_options("model.onnxa")
        session = onnxruntime.InferenceSession(model, options)
    """
    with contextlib.ExitStack() as resources:
        inputs = SessionInputs(path, model, sess_options, prepack, access, resources)
    return inputs.model, inputs.own_options()


class SessionInputs:
    """What a session is made from. The Archive itself is not kept, to free its memory.

    Arguments are those of `session`; `resources` closes a file that is opened here, and without
    `uses_packed`, the model refers to no packed weights.

    Attributes:
        model: The serialized model.
        options: A copy of the caller's options, or these if they cannot be copied.
        entries: Session config entries that the session needs.
        path: Path of the archive's file without symbolic links; None for an archive in memory.
        packed: The number of weights whose packed form the model refers to.
    """

    def __init__(
        self,
        source: Source,
        model: str,
        sess_options: ort.SessionOptions | None,
        prepack: bool | None,
        access: Access,
        resources: contextlib.ExitStack,
        *,
        uses_packed: bool = True,
    ) -> None:
        ort = require_onnxruntime()
        archive = _opened(source, model, access, resources)
        is_own = archive is not source
        self._copy = copy_options(sess_options, archive.model)
        self.options: Any = sess_options if self._copy is None else self._copy
        self.entries = prepacking_entries(prepack)
        self._file: MappedFile | None = None
        self.path: str | None = None
        self.packed = 0
        if not isinstance(archive.contents.file, MappedFile):
            self.model = _model_in_memory(archive, self._copy, in_place=is_own)
        else:
            self._file = archive.contents.local_file
            self.path = self._file.present_path()
            require_utf8(self.path)
            self.entries[DIRECTORY], name = os.path.split(self.path)
            with with_path(archive.path):
                pairs: Pairs = {}
                if uses_packed and prepack is not False and compares_packed():
                    pairs = packed_pairs(archive, machine(), ort.__version__)
                linked = linked_model(archive, name, pairs=pairs, in_place=is_own)
                self.model, self.packed = proto.encode(linked), len(pairs)
        if self._copy is not None:
            set_entries(self._copy, self.entries)

    def make(
        self,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None,
        keywords: Mapping[str, Any],
    ) -> ort.InferenceSession:
        """Makes the session."""
        try:
            return archive_session_class()(self, providers, **keywords)
        finally:  # ONNX Runtime has opened the file by name
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


# Buffers by session options. A session keeps its options alive, and these keep the buffers alive:
# ONNX Runtime keeps only addresses.
_buffers: weakref.WeakKeyDictionary[Any, list[memoryview]] = weakref.WeakKeyDictionary()


def _model_in_memory(archive: Archive, options: Any, *, in_place: bool) -> bytes:
    """The model of an archive without a local file; the options get a buffer for each large tensor.

    If ONNX Runtime or the options do not accept buffers, the model holds all tensors.
    """
    # None for options that cannot be copied, and before version 1.24.
    add_buffers = getattr(options, "add_external_initializers_from_files_in_memory", None)

    def is_outside(ref: TensorRef, nbytes: int) -> bool:
        # In subgraphs ONNX Runtime reads external data only from disk.
        return add_buffers is not None and len(ref.path) == 2 and stays_outside(ref, nbytes)

    refs, entries = archive.tensors.refs, archive.entries
    keys = [key for key, ref in refs.items() if is_outside(ref, entries[key].nbytes)]
    views = list(archive.contents.views(keys))
    with with_path(archive.path):
        model = proto.encode(linked_model(archive, None, is_outside, in_place=in_place))
    if add_buffers is not None and keys:
        set_entries(options, {USE_BUFFERS: "1"})
        _buffers[options] = views
        add_buffers(keys, views, [view.nbytes for view in views])
    return model
