"""For speed only: a model that is parsed when it is first asked for; its bytes were checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import onnx


class ParsedLater:
    """A model that may not be parsed yet. Several threads may use it.

    Args:
        data: Its bytes, which protobuf accepts.
        model: The model if it is parsed already.
    """

    def __init__(self, data: bytes, model: onnx.ModelProto | None = None) -> None:
        self._data = data if model is None else b""
        self._found = {} if model is None else {"": model}

    @property
    def model(self) -> onnx.ModelProto:
        """The model, always the same object."""
        if not self._found:
            # If several threads get here, the first sets it; only then are the bytes dropped.
            self._found.setdefault("", onnx.ModelProto.FromString(self._data))
            self._data = b""
        return self._found[""]


class InitializersParsedLater(Sequence[onnx.TensorProto]):
    """The initializers of the main graph of a `ParsedLater`; their number is known before."""

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
