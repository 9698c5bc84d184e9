"""ONNX archives: a model of any size as one zip file that is mapped, not read.

An archive (`.onnxa`) is a plain zip. Large tensors are uncompressed entries whose data begins at
multiples of 64 bytes; the last entry is the model, or the default model of several. An archive
opens in milliseconds, and weights of 8 bits and more are views of the file. Unzipped, an archive is
a directory of models with ONNX external data.

    import onnxarchive

    onnxarchive.convert("model.onnx", "model.onnxa")
    with onnxarchive.open("model.onnxa") as archive:
        weight = archive.tensors["layer.0/weight"]

The names in `__all__` are imported when they are first used, and onnx and numpy with them. Other
names need an import of their module: `import onnxarchive.ir`, `import onnxarchive.interop.torch`.

`onnx.load` and `onnx.save` support archives if onnx is imported before this package; else from the
first use of a name that needs onnx, such as `onnxarchive.open`.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from typing import Any as _Any

    from onnxarchive.comparing.changes import Change as Change
    from onnxarchive.comparing.diff import Difference as Difference, diff as diff
    from onnxarchive.comparing.values import ValueChange as ValueChange
    from onnxarchive.conversion.convert import Conversion as Conversion, convert as convert
    from onnxarchive.conversion.convert_many import convert_many as convert_many
    from onnxarchive.conversion.download import download as download
    from onnxarchive.conversion.export import export as export, extract as extract
    from onnxarchive.editing.edit import Edit as Edit, edit as edit
    from onnxarchive.editing.recover import Recovery as Recovery, recover as recover
    from onnxarchive.errors import (
        ArchiveError as ArchiveError,
        ArchiveFormatError as ArchiveFormatError,
        AttributesWarning as AttributesWarning,
        ChecksumError as ChecksumError,
        LockedError as LockedError,
        ModelNotFoundError as ModelNotFoundError,
        ObjectChangedError as ObjectChangedError,
        TensorNotFoundError as TensorNotFoundError,
        UnfinishedEditError as UnfinishedEditError,
        UnsupportedFeatureError as UnsupportedFeatureError,
    )
    from onnxarchive.interop import get_include as get_include
    from onnxarchive.interop.links import check_link as check_link, link as link
    from onnxarchive.interop.onnx_functions import (
        check_model as check_model,
        infer_shapes as infer_shapes,
    )
    from onnxarchive.interop.onnxruntime import (
        session as session,
        session_options as session_options,
    )
    from onnxarchive.interop.prepack import prepack as prepack
    from onnxarchive.interop.transform import transform as transform
    from onnxarchive.reading.archive import Archive as Archive, load as load, open as open
    from onnxarchive.reading.check import Finding as Finding, check as check
    from onnxarchive.reading.detection import is_archive as is_archive
    from onnxarchive.reading.slices import TensorSlice as TensorSlice
    from onnxarchive.writing.save import save as save
    from onnxarchive.writing.writer import Writer as Writer
    from onnxarchive.zipformat.directory import Entry as Entry

__version__ = "0.2.0"

# Public names by module. A module is imported on the first use of one of its names.
_NAMES = {
    "reading.archive": "Archive load open",
    "reading.detection": "is_archive",
    "reading.check": "Finding check",
    "reading.slices": "TensorSlice",
    "writing.save": "save",
    "writing.writer": "Writer",
    "conversion.convert_many": "convert_many",
    "conversion.convert": "Conversion convert",
    "comparing.diff": "Difference diff",
    "comparing.changes": "Change",
    "comparing.values": "ValueChange",
    "conversion.download": "download",
    "conversion.export": "export extract",
    "editing.edit": "Edit edit",
    "editing.recover": "Recovery recover",
    "errors": "ArchiveError ArchiveFormatError AttributesWarning ChecksumError "
    "LockedError ModelNotFoundError ObjectChangedError TensorNotFoundError UnfinishedEditError "
    "UnsupportedFeatureError",
    "interop": "get_include",
    "interop.links": "check_link link",
    "interop.onnx_functions": "check_model infer_shapes",
    "interop.onnxruntime": "session session_options",
    "interop.prepack": "prepack",
    "interop.transform": "transform",
    "zipformat.directory": "Entry",
}
# Names that `dir` shows once they are imported; other modules are for this library.
_PUBLIC_MODULES = {"interop", "ir"}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> "_Any":
    if name not in _MODULES:
        package = _sys.modules[__name__]
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=package)
    value = globals()[name] = getattr(_import_module(f"{__name__}.{_MODULES[name]}"), name)
    _register_with_onnx()
    return value


def __dir__() -> list[str]:
    here = {name for name in globals() if name.startswith("__") or name in _PUBLIC_MODULES}
    return sorted(here | {*__all__})


def _register_with_onnx() -> None:
    """Registers archives with `onnx.load` and `onnx.save`, if onnx is imported."""
    if "onnx" in _sys.modules:
        from onnxarchive.interop.onnx_registry import register

        register()


_register_with_onnx()
