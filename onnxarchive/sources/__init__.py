"""Models of other tools: a `.onnx` with its external data, a directory, a zip.

`source` opens a `Source`: the model, and the unread data of its large tensors. `places` finds files
in a directory, `zip_file` in a zip; `finder` finds the data of tensors in these files, `serialized`
in the model itself. `hugging_face` recognises the layout of the Hugging Face cache, `safetensors`
reads the header of a safetensors file, and `recognition` names the kind of a file that is no
archive. This room imports remote and the rooms below it.
"""
