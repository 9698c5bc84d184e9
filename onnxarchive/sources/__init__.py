"""Models of other tools: a `.onnx` with its external data, a directory, a foreign zip.

`source` opens a `Source`: the model, and the unread data of its large tensors. `places` finds files
in a directory or a zip (each kind of source has its `Place`), `finder` finds the data of tensors in
these files, `serialized` finds data in the model itself. `hugging_face` recognises the layout of
the Hugging Face cache, `safetensors` reads the header of a safetensors file, and `recognition`
names the kind of a file that is no archive. This room imports remote and the rooms below it.
"""
