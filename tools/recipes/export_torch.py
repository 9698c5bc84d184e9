"""Exports a PyTorch module to an archive, and runs it with ONNX Runtime.

pip install 'onnxarchive[ort]' torch onnxscript
python export_torch.py model.onnxa

`torch.onnx.export` without a path returns a program, and `onnxarchive.save` writes it, one weight
at a time: no `.onnx`, no file of external data, and no limit of 2 GiB.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import onnxarchive


class Classifier(torch.nn.Module):  # type: ignore[misc]  # mypy does not follow PyTorch
    """Classifies sequences of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 64)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.head = torch.nn.Linear(64, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns scores of shape [batch, 10] for tokens of shape [batch, length]."""
        return self.head(self.layer(self.embedding(tokens)).mean(1))


def main() -> None:
    """Exports the module, and compares the scores with PyTorch's."""
    torch.manual_seed(0)
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    path, module = sys.argv[1], Classifier().eval()
    tokens = torch.arange(14).reshape(2, 7)
    program = torch.onnx.export(
        module,
        (tokens,),
        input_names=["tokens"],
        output_names=["scores"],
        dynamic_shapes={"tokens": {0: "batch", 1: "length"}},
    )
    onnxarchive.save(program, path)

    session = onnxarchive.session(path, providers=["CPUExecutionProvider"])
    tokens = torch.arange(30).reshape(3, 10)  # another batch and length than in the export
    (scores,) = session.run(["scores"], {"tokens": tokens.numpy()})
    expected = module(tokens).detach().numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-5)
    print(f"{path}: scores of shape {scores.shape}, as PyTorch's")


if __name__ == "__main__":
    main()
