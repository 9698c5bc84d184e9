"""ONNX archives: a model of any size as one zip file that is mapped, not read.

An archive (`.onnxa`) is a plain zip whose tensors lie uncompressed at 64-byte boundaries, with the
model as its last entry. It opens in milliseconds, its weights are views of the file, and unzipped
it is a directory of ONNX external data that every ONNX tool reads.

    import onnxarchive

    onnxarchive.convert("model.onnx", "model.onnxa")
    with onnxarchive.open("model.onnxa") as archive:
        weight = archive.tensors["layer.0/weight"]

The names in `__all__` are imported when they are first used. What is in a submodule alone needs
an import of that: `import onnxarchive.ir`, `import onnxarchive.runtime.torch`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import onnx  # noqa: F401  here already, since one module deeper it takes a fifth longer to import

if TYPE_CHECKING:
    from onnxarchive.archive import Archive, load, open
    from onnxarchive.batch import convert_many
    from onnxarchive.convert import Conversion, convert, export, extract
    from onnxarchive.diff import Change, Difference, diff
    from onnxarchive.edit import EditableArchive, change_model, replace_model, replace_tensor
    from onnxarchive.errors import (
        ArchiveError,
        ArchiveFormatError,
        AttributesWarning,
        ChecksumError,
        LockedError,
        TensorNotFoundError,
        UnfinishedEditError,
        UnsupportedFeatureError,
    )
    from onnxarchive.recovery import Recovery, recover
    from onnxarchive.rules import Finding, check
    from onnxarchive.runtime.checker import check_model
    from onnxarchive.runtime.link import Misfit, check_link, link
    from onnxarchive.runtime.onnxruntime import options, session
    from onnxarchive.runtime.shape_inference import infer_shapes
    from onnxarchive.runtime.transform import transform
    from onnxarchive.save import Writer, save
    from onnxarchive.zipformat.directory import Entry

__all__ = [
    "Archive",
    "ArchiveError",
    "ArchiveFormatError",
    "AttributesWarning",
    "Change",
    "ChecksumError",
    "Conversion",
    "Difference",
    "EditableArchive",
    "Entry",
    "Finding",
    "LockedError",
    "Misfit",
    "Recovery",
    "TensorNotFoundError",
    "UnfinishedEditError",
    "UnsupportedFeatureError",
    "Writer",
    "change_model",
    "check",
    "check_link",
    "check_model",
    "convert",
    "convert_many",
    "diff",
    "export",
    "extract",
    "infer_shapes",
    "link",
    "load",
    "open",
    "options",
    "recover",
    "replace_model",
    "replace_tensor",
    "save",
    "session",
    "transform",
]

__version__ = "0.1.0"

# Where each name comes from when it is used, as the imports above tell type checkers.
_SUBMODULES: Final = {
    "Archive": "archive",
    "ArchiveError": "errors",
    "ArchiveFormatError": "errors",
    "AttributesWarning": "errors",
    "Change": "diff",
    "ChecksumError": "errors",
    "Conversion": "convert",
    "Difference": "diff",
    "EditableArchive": "edit",
    "Entry": "zipformat.directory",
    "Finding": "rules",
    "LockedError": "errors",
    "Misfit": "runtime.link",
    "Recovery": "recovery",
    "TensorNotFoundError": "errors",
    "UnfinishedEditError": "errors",
    "UnsupportedFeatureError": "errors",
    "Writer": "save",
    "change_model": "edit",
    "check": "rules",
    "check_link": "runtime.link",
    "check_model": "runtime.checker",
    "convert": "convert",
    "convert_many": "batch",
    "diff": "diff",
    "export": "convert",
    "extract": "convert",
    "infer_shapes": "runtime.shape_inference",
    "link": "runtime.link",
    "load": "archive",
    "open": "archive",
    "options": "runtime.onnxruntime",
    "recover": "recovery",
    "replace_model": "edit",
    "replace_tensor": "edit",
    "save": "save",
    "session": "runtime.onnxruntime",
    "transform": "runtime.transform",
}


class _Package(ModuleType):
    """This package, as a module that imports its public names when they are first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _SUBMODULES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}", name=name, obj=self
            )
        value = getattr(import_module(f"{__name__}.{_SUBMODULES[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule sets the package's attribute of its name. `onnxarchive.convert` is
        # a function at all times, though there is a submodule of that name, too.
        if not (name in _SUBMODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package

# Not before, for it may import submodules.
from onnxarchive.runtime.onnx_registry import register as _register_with_onnx  # noqa: E402

_register_with_onnx()
