"""Uses archives with other libraries; optional libraries are imported on first use.

ONNX Runtime: `onnxruntime`, `ort_options`, `running`, `inputs`. Links (`.onnx` files
with external data in an archive): `links`. onnx: `onnx_registry`, `checker`,
`shape_inference`. Functions that change a model, such as `onnxsim.simplify`: `transforming`.
PyTorch: `torch`. Netron: `netron`. The module for onnx_ir is in the room `archive`,
because `save` accepts models of onnx_ir. This room may import all rooms except `cli`.
"""
