"""ONNX messages: the graphs and tensors of a model, their references, and the wire format.

These modules know neither zips nor files. `walking` walks over a model's messages. `tensors` reads
tensors, `dtypes` describes data types, `shapes` stores shapes, `keys` derives names of entries.
`proto` parses a model and checks it against an archive's entries. `copying`, `deduplication` and
`renaming` change copies of a model; `changes` compares two models. `wire` reads serialized
messages, `weights` removes the large tensors from a serialized model. `references_at_once`,
`parsed_later` and `initializers_at_once` are for speed only. This room imports buffers and
errors.
"""
