"""ONNX messages: the tensors of a model, what they refer to, and its wire format.

Nothing here knows of zips or files. `tensors` walks over a model's tensors, `dtypes` knows their
types and `shapes` their arrays; `keys` gives them names in an archive; `wire` finds large tensors
in serialized models. This room imports buffers.
"""
