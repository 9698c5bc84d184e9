"""Exports an encoder and a decoder to one archive, and generates tokens with both.

pip install 'onnxarchive[ort]' torch onnxscript
python encoder_decoder.py model.onnxa

Both models use the embedding: the archive stores it once, and both sessions map the same pages.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from numpy.typing import NDArray

import onnxarchive

VOCABULARY, WIDTH, LENGTH = 2000, 64, 8
START = 0  # the token that the decoder begins with


class Encoder(torch.nn.Module):  # type: ignore[misc]  # mypy does not follow PyTorch
    """Encodes tokens of shape [batch, length] to a memory of shape [batch, length, 64]."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the memory."""
        return self.layer(self.embedding(tokens))


class Decoder(torch.nn.Module):  # type: ignore[misc]
    """Scores every token of the vocabulary as the next token."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layer = torch.nn.TransformerDecoderLayer(WIDTH, 4, 128, batch_first=True)
        self.project = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Returns the scores; the last layer uses the weight of the embedding."""
        decoded = self.layer(self.embedding(tokens), memory)
        return self.project(decoded[:, -1]) @ self.embedding.weight.T


def export(path: str) -> tuple[Encoder, Decoder]:
    """Exports encoder and decoder to an archive; the encoder is the default model."""
    embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
    encoder, decoder = Encoder(embedding).eval(), Decoder(embedding).eval()
    tokens = torch.arange(10).reshape(2, 5)
    sizes = {0: "batch", 1: "length"}
    encoding = torch.onnx.export(
        encoder,
        (tokens,),
        input_names=["tokens"],
        output_names=["memory"],
        dynamic_shapes={"tokens": sizes},
    )
    decoding = torch.onnx.export(
        decoder,
        (tokens, encoder(tokens)),
        input_names=["tokens", "memory"],
        output_names=["scores"],
        dynamic_shapes={"tokens": sizes, "memory": {0: "batch", 1: "source"}},
    )
    onnxarchive.save(encoding, path, models={"decoder": decoding})
    return encoder, decoder


def generate(path: str, source: NDArray[np.int64]) -> NDArray[np.int64]:
    """Generates the most probable tokens for a source of shape [batch, length]."""
    encoder = onnxarchive.session(path, providers=["CPUExecutionProvider"])
    decoder = onnxarchive.session(path, providers=["CPUExecutionProvider"], model="decoder")
    (memory,) = encoder.run(["memory"], {"tokens": source})
    tokens = np.full((len(source), 1), START, np.int64)
    while tokens.shape[1] < LENGTH:
        (scores,) = decoder.run(["scores"], {"tokens": tokens, "memory": memory})
        tokens = np.append(tokens, scores.argmax(1, keepdims=True), 1)
    return tokens


def main() -> None:
    """Writes the archive, and compares the generated tokens with PyTorch's."""
    torch.manual_seed(0)
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    path = sys.argv[1]
    encoder, decoder = export(path)
    source = torch.arange(21).reshape(3, 7)
    generated = generate(path, source.numpy())
    tokens = torch.full((3, 1), START)
    while tokens.shape[1] < LENGTH:
        scores = decoder(tokens, encoder(source))
        tokens = torch.cat([tokens, scores.argmax(1, keepdim=True)], 1)
    assert (generated == tokens.numpy()).all()
    print(f"{path}: {os.path.getsize(path):,} bytes; tokens as PyTorch's:\n{generated}")


if __name__ == "__main__":
    main()
