"""Archives in onnx's own functions: `onnx.load("m.onnxa")` and `onnx.save(model, "m.onnxa")`.

onnx chooses a serializer by the extension of the path or by `format=`, and gives and takes the
bytes of the whole file. It reads and writes that file itself. So

- loading takes memory for the file and for the model, as it does for a `.onnx`; `onnxarchive.load`
  needs the model's alone;
- the model comes complete, or, with `load_external_data=False`, as a link has it, its large tensors
  as external data in the archive. `onnxarchive.open(path).model` reads none of them;
- saving writes into an existing file instead of replacing it. `onnxarchive.save` replaces it, so
  that views of the old file stay valid and a failure leaves it as it was.

Importing `onnxarchive` imports this module, and this one of its others only what a call needs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

import onnx
from onnx import serialization

__all__ = ["EXTENSION", "FORMAT", "ArchiveSerializer", "register"]

FORMAT = "onnxa"
EXTENSION = ".onnxa"


class ArchiveSerializer:
    """A serializer of onnx's registry (`onnx.serialization.ProtoSerializer`)."""

    supported_format: str = FORMAT
    file_extensions: Collection[str] = frozenset({EXTENSION})

    def serialize_proto(self, proto: Any) -> bytes:
        """The archive of a model, the same that `onnxarchive.save` writes.

        Args:
            proto: The model. It is not changed.

        Raises:
            TypeError: It is not a ModelProto.
            ArchiveFormatError: The data of a tensor is external, or the model breaks a rule.
        """
        if not isinstance(proto, onnx.ModelProto):
            raise _not_a_model(type(proto))
        from onnxarchive.archive.saving import save
        from onnxarchive.errors import ArchiveFormatError
        from onnxarchive.model import tensors

        for site in tensors.walk(proto):
            if site.tensor.data_location == tensors.EXTERNAL:
                raise ArchiveFormatError(
                    f"{site}: expected its data in the model, found it external; load the model "
                    "with its external data, save it without save_as_external_data, or convert "
                    "its file with onnxarchive.convert; onnxarchive.save takes an onnx_ir.Model"
                )
        target = io.BytesIO()
        save(proto, target)
        return target.getvalue()

    def deserialize_proto(self, serialized: Any, proto: Any) -> Any:
        """The complete model of an archive, as `onnxarchive.load` gives it.

        Where `onnx.load` was called with a path and `load_external_data=False`, it is the model as
        a link has it: its large tensors are external data in the archive's file, where
        `onnx.load_external_data_for_model` and onnx_ir find them.

        Args:
            serialized: The bytes of the archive.
            proto: The ModelProto that becomes the model.

        Returns:
            `proto`.

        Raises:
            TypeError: `serialized` is not bytes, or `proto` not a ModelProto.
            ArchiveFormatError: The bytes are not an archive, or break a rule.
            ChecksumError: Bytes of a tensor have changed.
        """
        if not isinstance(serialized, bytes | bytearray | memoryview):
            raise TypeError(
                f"expected the bytes of an archive, found {type(serialized).__name__}: an archive "
                "is no text"
            )
        if not isinstance(proto, onnx.ModelProto):
            raise _not_a_model(type(proto))
        from onnxarchive.archive.reading import Archive, read_verified
        from onnxarchive.buffers.data import as_bytes
        from onnxarchive.errors import ArchiveError
        from onnxarchive.model import tensors
        from onnxarchive.storage.files import MemoryFile

        try:
            archive = Archive(MemoryFile(as_bytes(serialized)))
            path = _path_without_data(sys._getframe(1))
            if path is not None:
                from onnxarchive.interop.links import linked_model

                proto.CopyFrom(linked_model(archive, os.path.basename(path), is_spent=True))
                return proto
            proto.CopyFrom(archive.model)
            for key, site in archive._sites.items():
                data = bytes(read_verified(archive, key))
                tensors.set_raw_data(tensors.at(proto, site.path), data)
        except ArchiveError as error:
            error.path = None  # whoever gave the bytes knows it
            raise
        return proto


def _path_without_data(caller: FrameType) -> str | None:
    """The path of `onnx.load(path, load_external_data=False)`, if that has called a serializer.

    onnx resolves external data itself, by path, and tells no serializer of either: so they are read
    from the call. None for any other caller, who gets the complete model.
    """
    if caller.f_code is not onnx.load_model.__code__:
        return None
    given = caller.f_locals
    path = given.get("f")
    if given.get("load_external_data", True) or not isinstance(path, str | os.PathLike):
        return None
    return os.fsdecode(path)


def register(*, replace: bool = False) -> bool:
    """Registers the serializer with onnx, for the format `onnxa` and the extension `.onnxa`.

    Importing `onnxarchive` does it. What another package has registered for either is left alone
    then, since importing a package should not change what others do.

    Args:
        replace: Whether to take the place of a serializer that another package has registered.

    Returns:
        Whether archives are now onnx's serializer for both.
    """
    if not replace and _is_taken():
        return False
    serialization.registry.register(ArchiveSerializer())
    return True


def _is_taken() -> bool:
    """Whether another serializer has the format or the extension."""
    fmt = serialization.registry.get_format_from_file_extension(EXTENSION)
    if fmt not in (None, FORMAT):
        return True
    try:
        registered = serialization.registry.get(FORMAT)
    except ValueError:
        return False
    kind = type(registered)  # by name, for the module may have been loaded anew
    return (kind.__module__, kind.__qualname__) != (__name__, ArchiveSerializer.__qualname__)


def _not_a_model(kind: type) -> TypeError:
    return TypeError(
        f"expected an onnx.ModelProto, found {kind.__name__}: an archive holds a model"
    )
