"""`onnx.load("m.onnxa")` and `onnx.save(model, "m.onnxa")`: archives in onnx's own functions.

onnx selects a serializer by the extension of the path or by `format=`, reads and writes the file
itself, and exchanges the file's bytes with the serializer. So, unlike in `onnxarchive.load` and
`onnxarchive.save`,

- loading needs memory for the file, too, and gives the complete default model: onnx does not pass
  `load_external_data` to serializers;
- saving overwrites an existing file in place, with one model and no assets, so views of the old
  file change. If the file is an archive with assets or further models, it is refused: remove the
  file first. A file object that is already open for writing is not looked at;
- `torch.onnx.export(model, args, "m.onnxa")` fails, since PyTorch writes the weights to a separate
  file, `m.onnxa.data`, which a serializer cannot find. `onnxarchive.save(torch.onnx.export(
  model, args), "m.onnxa")` works; below 1.5 GiB, `external_data=False` does, too. With
  `dynamo=False` PyTorch does not use onnx, and writes a `.onnx` under any name.

Importing `onnxarchive` imports this module if onnx is imported already; else the first use of a
name of `onnxarchive` that needs onnx does. For speed, other modules are imported in functions.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Collection
from typing import Any

import onnx
from onnx import serialization

EXTENSION = ".onnxa"
# What runs in a call of `onnx.save`, also if another package puts a function around it later.
_CODE_OF_SAVE = getattr(onnx.save_model, "__code__", None)


class ArchiveSerializer:
    """A serializer of onnx's registry (`onnx.serialization.ProtoSerializer`)."""

    supported_format: str = "onnxa"
    file_extensions: Collection[str] = frozenset({EXTENSION})

    def serialize_proto(self, proto: Any) -> bytes:
        """Serializes a ModelProto without external data, as `onnxarchive.save` does."""
        if not isinstance(proto, onnx.ModelProto):
            raise _not_a_model(proto)
        from onnxarchive.errors import ArchiveFormatError
        from onnxarchive.model import tensors
        from onnxarchive.remote.location import Location
        from onnxarchive.writing.overwriting import require_no_loss
        from onnxarchive.writing.save import save

        for ref in tensors.external(proto):
            tensors.require_no_address(ref)
            location = tensors.location(ref.tensor) or ""
            raise ArchiveFormatError(
                f"{ref}: its data is external, not in the model; "
                f"{_remedy(proto.producer_name, location)}"
            )
        path = _path_of_save()
        if path is not None:
            require_no_loss(Location.of(os.path.abspath(path)))  # onnx knows no URLs
        target = io.BytesIO()
        save(proto, target)
        return target.getvalue()

    def deserialize_proto(self, serialized: Any, proto: Any) -> Any:
        """Parses the complete default model of an archive into a ModelProto, which it returns."""
        if not isinstance(serialized, bytes | bytearray | memoryview):
            raise TypeError(
                f"expected the bytes of an archive, found {type(serialized).__name__}; an archive "
                "is binary"
            )
        if not isinstance(proto, onnx.ModelProto):
            raise _not_a_model(proto)
        from onnxarchive.errors import ArchiveError
        from onnxarchive.files.data import as_bytes
        from onnxarchive.files.file import MemoryFile
        from onnxarchive.model import tensors, walking
        from onnxarchive.reading.archive import contents_of, read_archive

        try:
            archive = read_archive(MemoryFile(as_bytes(serialized)))
            proto.CopyFrom(archive.model)
            refs = archive.tensors.refs
            for ref, data in zip(
                refs.values(), contents_of(archive).verified(list(refs)), strict=True
            ):
                tensors.set_raw_data(walking.at(proto, ref.path), bytes(data))
        except ArchiveError as error:
            error.path = None  # the bytes came from memory
            raise
        return proto


def register() -> None:
    """Registers the serializer with onnx, unless there is one for the extension."""
    registry = serialization.registry
    if registry.get_format_from_file_extension(EXTENSION) is None:
        registry.register(ArchiveSerializer())


def _path_of_save() -> str | None:
    """The path that the running call of `onnx.save` writes; None for a file object.

    onnx does not pass the path to serializers, and opens the file only afterwards, so that its
    old content would be lost. So the argument is read from the frame of the call.
    """
    frame = inspect.currentframe()  # None for other Pythons than CPython
    while frame is not None:
        if frame.f_code is _CODE_OF_SAVE:
            path = frame.f_locals.get("f")
            return os.fspath(path) if isinstance(path, str | os.PathLike) else None
        frame = frame.f_back
    return None


def _remedy(producer_name: str, location: str) -> str:
    """The advice at the end of an error about external data."""
    from onnxarchive.errors import quoted

    archive = location.removesuffix(".data")
    if producer_name == "pytorch" and archive.endswith(EXTENSION):
        return (
            "instead of torch.onnx.export(model, args, path) write "
            f"onnxarchive.save(torch.onnx.export(model, args), path); {quoted(location)}, which "
            f"PyTorch has written beside {quoted(archive)}, can be deleted"
        )
    return (
        f"first call onnx.load_external_data_for_model(model, directory of {quoted(location)}), "
        "then save the model without save_as_external_data (which has just written "
        f"{quoted(location)}, if it was given; this file can be deleted then); or convert the "
        "model's file with onnxarchive.convert; for an onnx_ir.Model, call onnxarchive.save"
    )


def _not_a_model(proto: object) -> TypeError:
    kind = type(proto).__name__
    return TypeError(f"expected an onnx.ModelProto, found {kind}: an archive holds a model")
