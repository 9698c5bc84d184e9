"""Models of other tools: a `.onnx` with its external data, a directory, a zip.

`models` opens a `Source`: the model, and the unread data of its large tensors. `places` finds files
in a directory, `zip_file` in a zip; `finder` finds the data of tensors in these files, `serialized`
in the model itself. `recognition` judges what kind of file something is; `hugging_face` recognises
the layout of the Hugging Face cache, `safetensors` reads the header of a safetensors file. This
room imports remote and the rooms below it.
"""
