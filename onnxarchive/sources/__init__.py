"""Models of other tools: a `.onnx` with its external data, a directory, a foreign zip.

`source` opens a `Source`: the model, and the data of its large tensors, which is not read. `places`
finds files in a directory or a zip (another kind of source is another `Place`), `finder` the data
of tensors in these files, `serialized` the data in the model itself. `hugging_face` recognises the
layout of that cache, `safetensors` reads the header of a safetensors file, and `recognition` names
the kind of a file that is no archive. This room knows no archive. It imports remote and below.
"""
