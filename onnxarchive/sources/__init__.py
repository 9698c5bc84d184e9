"""Models as other tools leave them: a `.onnx` with its external data, a directory, a foreign zip.

`opening` gives a `Source`: the model, and the bytes of each large tensor where they lie. `places`
finds files beside a model, `finder` the bytes of its tensors in them, `serialized` those
that the model itself holds. This room knows no archive. It imports storage, model, zipformat and
buffers.
"""
