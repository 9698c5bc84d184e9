"""Copies a caller's session options for a session of an archive, or changes them temporarily.

A session needs further entries in its options, such as the directory of external data, and the
caller's options must not keep these entries. ONNX Runtime can copy most SessionOptions objects.
Options that cannot be copied get the entries while the session is made, and their former entries
afterwards.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import onnx

from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnsupportedFeatureError, needing
from onnxarchive.model import proto, walking
from onnxarchive.model.tensors import text

if TYPE_CHECKING:
    import onnxruntime as ort

# Session config entries. DIRECTORY: directory of external data. _DISABLE_PREPACKING: "1" makes no
# packed copies of weights. USE_BUFFERS: "1" makes no copies of given buffers (ignored before 1.31).
DIRECTORY: Final = "session.model_external_initializers_file_folder_path"
_DISABLE_PREPACKING: Final = "session.disable_prepacking"
USE_BUFFERS: Final = "session.use_external_initializer_file_buffers_directly"
# Name of the data file of an optimized model that ONNX Runtime writes.
OPTIMIZED_DATA: Final = "session.optimized_model_external_initializers_file_name"
# Least size in bytes of the tensors in this file, and "1" to write packed weights to it.
OPTIMIZED_NBYTES: Final = "session.optimized_model_external_initializers_min_size_in_bytes"
SAVE_PACKED: Final = "session.save_external_prepacked_constant_initializers"
_OLDEST: Final = (1, 21)  # the first version with the entry DIRECTORY
# The first version that refuses packed weights that differ from what it packs itself. Versions from
# 1.24 on use such weights, and give other numbers if they are damaged.
_COMPARING: Final = (1, 32)
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


class RunError(UnsupportedFeatureError):
    """ONNX Runtime cannot load or run the model, or cannot use a provider."""


def require_onnxruntime() -> Any:
    """Imports ONNX Runtime; refuses versions before 1.21, which cannot run archives."""
    with needing("onnxruntime", "run a model"):
        import onnxruntime
    if _version(onnxruntime) < _OLDEST:
        raise UnsupportedFeatureError(
            f"expected ONNX Runtime 1.21 or newer, which accepts a directory of external data, "
            f"found {onnxruntime.__version__}: pip install --upgrade onnxruntime"
        )
    return onnxruntime


def _version(onnxruntime: Any) -> tuple[int, ...]:
    return tuple(map(int, onnxruntime.__version__.split(".")[:2]))


def compares_packed() -> bool:
    """True if ONNX Runtime compares packed weights in a file with what it packs itself."""
    return _version(require_onnxruntime()) >= _COMPARING


def machine() -> str:
    """The kind of this machine: its architecture, and its instructions as far as Linux tells."""
    words: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:
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
    except (ArchiveError, ImportError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if type(error).__name__ == "InvalidProtobuf":
            raise ArchiveFormatError(
                f"expected an archive or a serialized ModelProto, found neither: {reason}"
            ) from error
        name = f" {model!r}" * bool(model)
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


def shares_optimized_data(options: ort.SessionOptions) -> bool:
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
    may need such libraries, or the options name providers. It is also None for options that make a
    session write files.
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

    Nodes may use domains that the model does not import: ONNX Runtime imports the domains of
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
    return proto.serialize(onnx.parser.parse_model(text))


_lending = threading.RLock()


@cache
def archive_session_class() -> Any:
    """The class of an archive's sessions."""
    base: Any = require_onnxruntime().InferenceSession

    class ArchiveSession(base):  # type: ignore[misc]
        """A session of an archive.

        It changes options that could not be copied only while ONNX Runtime reads them. The
        attribute `_model_path`, which libraries such as optimum read, is the archive's path, though
        the session is made from bytes.
        """

        def __init__(self, inputs: Any, *rest: Any, **kwargs: Any) -> None:
            """Takes `SessionInputs`, and what `InferenceSession` takes after the options."""
            self.packed_weights = inputs.packed
            self._archive_path = inputs.path
            self._lent = inputs.options, inputs.entries
            super().__init__(inputs.model, inputs.options, *rest, **kwargs)

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

    return ArchiveSession
