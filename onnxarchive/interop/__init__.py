"""Archives in other libraries, a module for each; a library is imported when it is first used.

ONNX Runtime: `onnxruntime`, `ort_options`, `running`, `comparing`, `inputs`. Links, `.onnx` files
with external data in an archive: `linked_models`, `links`, `link_checks`. onnx: `onnx_registry`,
`checker`, `shape_inference`; other functions on models: `transforming`. PyTorch: `torch`. Netron:
`netron`. onnx_ir is in the room `archive`, because `save` accepts its models. This room imports
conversion and below.
"""
