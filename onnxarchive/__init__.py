"""ONNX archives: a model of any size as one zip file that is mapped, not read.

An archive (`.onnxa`) is a plain zip whose tensors lie uncompressed at 64-byte boundaries, with the
model as its last entry. It opens in milliseconds, its weights are views of the file, and unzipped
it is a directory of ONNX external data that every ONNX tool reads.

    import onnxarchive

    onnxarchive.convert("model.onnx", "model.onnxa")
    with onnxarchive.open("model.onnxa") as archive:
        weight = archive.tensors["layer.0/weight"]
"""

from onnxarchive.archive import Archive, load, open
from onnxarchive.batch import convert_many
from onnxarchive.convert import Conversion, convert, export, extract
from onnxarchive.errors import (
    ArchiveError,
    ArchiveFormatError,
    ChecksumError,
    TensorNotFoundError,
    UnsupportedFeatureError,
)
from onnxarchive.rules import Finding, check
from onnxarchive.runtime.checker import check_model
from onnxarchive.runtime.link import Misfit, check_link, link
from onnxarchive.runtime.onnx_registry import register as _register_with_onnx
from onnxarchive.runtime.onnxruntime import options, session
from onnxarchive.runtime.shape_inference import infer_shapes
from onnxarchive.runtime.transform import transform
from onnxarchive.save import Writer, save
from onnxarchive.zipformat.directory import Entry

__all__ = [
    "Archive",
    "ArchiveError",
    "ArchiveFormatError",
    "ChecksumError",
    "Conversion",
    "Entry",
    "Finding",
    "Misfit",
    "TensorNotFoundError",
    "UnsupportedFeatureError",
    "Writer",
    "check",
    "check_link",
    "check_model",
    "convert",
    "convert_many",
    "export",
    "extract",
    "infer_shapes",
    "link",
    "load",
    "open",
    "options",
    "save",
    "session",
    "transform",
]

__version__ = "0.1.0"

_register_with_onnx()
