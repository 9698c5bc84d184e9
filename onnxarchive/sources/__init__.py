"""Models of other tools: a `.onnx` with its external data, a directory, a zip.

`models` opens a `Source`: the model, and the unread data of its large tensors. `places` finds files
in a directory, `zip_file` in a zip; `finder` finds the data of tensors in these files, `serialized`
in the model itself. `recognition` judges by content what kind of file something is, `other_files`
judges by name what lies beside a model, `safetensors` reads the header of a safetensors file. This
room imports remote and the rooms below it.
"""
