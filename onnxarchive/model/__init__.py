"""ONNX messages: the graphs and tensors of a model, their references, and the wire format.

Nothing here knows of zips or files. `walking` is the walk over a model's messages; `tensors` has
its tensors, `dtypes` and `shapes` their types and shapes, `keys` their names in an archive. `proto`
parses a model and compares it with an archive's entries (`references_at_once` the same, for speed
only). `copying` copies a model without its tensors (`initializers_at_once` small ones, for speed).
`wire` reads serialized messages, `weights` takes the large tensors out of one. This room imports
buffers.
"""
