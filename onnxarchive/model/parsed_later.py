"""For speed only: a model that is parsed on first access; its bytes were checked before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import onnx


class ParsedLater:
    """A model, parsed on first access. Several threads may use it.

    Args:
        data: The serialized model, which protobuf accepts.
        model: The model, if parsed already.
    """

    def __init__(self, data: bytes, model: onnx.ModelProto | None = None) -> None:
        self._data = data if model is None else b""
        self._found = {} if model is None else {"": model}

    @property
    def model(self) -> onnx.ModelProto:
        """The model, always the same object."""
        if not self._found:
            # If several threads get here, the first sets the model; then the bytes are dropped.
            self._found.setdefault("", onnx.ModelProto.FromString(self._data))
            self._data = b""
        return self._found[""]

    def is_parsed_as(self, model: onnx.ModelProto) -> bool:
        """True if `model` is this very object; does not parse it."""
        return self._found.get("") is model


class InitializersParsedLater(Sequence[onnx.TensorProto]):
    """The initializers of the main graph of a `ParsedLater`; `len` does not parse the model."""

    def __init__(self, parsed: ParsedLater, count: int) -> None:
        self._parsed = parsed
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> onnx.TensorProto: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[onnx.TensorProto]: ...

    def __getitem__(self, index: int | slice) -> onnx.TensorProto | Sequence[onnx.TensorProto]:
        return self._parsed.model.graph.initializer[index]
