"""Tiny transformers with shared embeddings, and their export by either of PyTorch's exporters."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

Module: Any = torch.nn.Module  # mypy does not follow PyTorch
VOCABULARY = 2048
WIDTH = 64
INPUTS = {
    "encoder": ["tokens"],
    "decoder": ["tokens", "memory"],
    "prompt": ["tokens"],
    "step": ["tokens", "past_key", "past_value"],
}


class Attention(Module):  # type: ignore[misc]
    """Single-head attention; also returns keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Any, memory: Any, past: Sequence[Any] = ()) -> Any:
        key, value = self.key(memory), self.value(memory)
        if past:
            key, value = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        weights = torch.softmax(self.query(x) @ key.transpose(1, 2) / WIDTH**0.5, -1)
        return x + self.out(weights @ value), key, value


class Transformer(Module):  # type: ignore[misc]
    """The layers that encoder and decoder share; the head is tied to the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.attention, self.cross = Attention(), Attention()
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight


class Part(Module):  # type: ignore[misc]
    """A model that uses layers of a transformer."""

    def __init__(self, parts: Transformer) -> None:
        super().__init__()
        self.parts = parts


class Encoder(Part):
    def forward(self, tokens: Any) -> Any:
        x = self.parts.embedding(tokens)
        return self.parts.attention(x, x)[0]


class Decoder(Part):
    def forward(self, tokens: Any, memory: Any) -> Any:
        return self.parts.head(self.parts.cross(self.parts.embedding(tokens), memory)[0])


class Prompt(Part):
    """A decoder without past keys and values."""

    def forward(self, tokens: Any) -> Any:
        x = self.parts.embedding(tokens)
        x, key, value = self.parts.attention(x, x)
        return self.parts.head(x), key, value


class Step(Part):
    """The same decoder with past keys and values."""

    def forward(self, tokens: Any, past_key: Any, past_value: Any) -> Any:
        x = self.parts.embedding(tokens)
        x, key, value = self.parts.attention(x, x, (past_key, past_value))
        return self.parts.head(x), key, value


def inputs(name: str) -> dict[str, Any]:
    """Inputs of a part, as numpy arrays by name."""
    generator = torch.Generator().manual_seed(1)
    length = 1 if name == "step" else 5
    made = {"tokens": torch.randint(VOCABULARY, (2, length), generator=generator)}
    for other in INPUTS[name][1:]:
        made[other] = torch.randn(2, 7, WIDTH, generator=generator)
    return {it: made[it].numpy() for it in INPUTS[name]}


def export(folder: Path, exporter: str, names: Sequence[str]) -> Mapping[str, Path]:
    """Exports parts of one transformer, each to its own file; returns the paths by name."""
    if exporter == "dynamo":
        pytest.importorskip("onnxscript", reason="PyTorch's newer exporter needs onnxscript")
    torch.manual_seed(0)
    parts = Transformer().eval()
    classes = {"encoder": Encoder, "decoder": Decoder, "prompt": Prompt, "step": Step}
    paths = {}
    for name in names:
        paths[name] = folder / f"{name}.onnx"
        arguments = tuple(map(torch.from_numpy, inputs(name).values()))
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                classes[name](parts).eval(),
                arguments,
                paths[name],
                dynamo=exporter == "dynamo",
                input_names=INPUTS[name],
            )
    return paths
