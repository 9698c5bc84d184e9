"""ONNX messages: the graphs and tensors of a model, their references, and the wire format.

Nothing here knows of zips or files. `walking` walks over a model's messages; `tensors` has its
tensors, `dtypes` and `shapes` their types and shapes, `keys` their names in an archive. `proto`
parses a model and compares it with an archive's entries; `copying`, `deduplication` and `renaming`
change copies of a model, `changes` compares two. `wire` reads serialized messages, `weights` takes
the large tensors out of one. `references_at_once`, `parsed_later` and `initializers_at_once` are
for speed only. This room imports buffers.
"""
