"""Puts a model and its tokenizer into one archive, and runs the model on text.

pip install 'onnxarchive[ort]' tokenizers
python with_tokenizer.py model.onnxa "the cat sat" "a dog ran"

The tokenizer is an asset, `tokenizer.json`, the file that Hugging Face's transformers uses. To
convert a directory with a model and its `tokenizer.json`, run
`onnxarchive convert directory model.onnxa --assets`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import onnxarchive

TEXTS = ["the cat sat on the mat", "a dog ran after the cat"]
MODEL = """
<ir_version: 10, opset_import: ["": 21]>
sentence (int64[batch, length] input_ids, int64[batch, length] attention_mask)
    => (float[batch, 64] embedding) {
  vectors = Gather(table, input_ids)
  each = Constant<value_ints = [2]>()
  length = Constant<value_ints = [1]>()
  mask = Cast<to = 1>(attention_mask)
  wide = Unsqueeze(mask, each)
  masked = Mul(vectors, wide)
  total = ReduceSum<keepdims = 0>(masked, length)
  count = ReduceSum(mask, length)
  embedding = Div(total, count)
}
"""


def make_archive(path: str) -> None:
    """Saves a tokenizer and a model that returns the mean vector of a text's tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_padding()
    table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), 64), np.float32)
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    onnxarchive.save(model, path, assets={"tokenizer.json": tokenizer.to_str().encode()})


def embed(path: str, texts: Sequence[str]) -> NDArray[np.float32]:
    """Computes the vectors of texts; needs only the archive."""
    with onnxarchive.open(path) as archive:
        tokenizer = Tokenizer.from_buffer(archive.assets["tokenizer.json"])
    session = onnxarchive.session(path, providers=["CPUExecutionProvider"])
    encodings = tokenizer.encode_batch(list(texts))
    inputs = {
        "input_ids": np.array([encoding.ids for encoding in encodings]),
        "attention_mask": np.array([encoding.attention_mask for encoding in encodings]),
    }
    vectors: NDArray[np.float32] = session.run(["embedding"], inputs)[0]
    return vectors


def main() -> None:
    """Writes the archive, and prints the cosine similarity of the texts."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    path, *texts = sys.argv[1:]
    make_archive(path)
    vectors = embed(path, texts)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    print((vectors @ vectors.T).round(3))


if __name__ == "__main__":
    main()
