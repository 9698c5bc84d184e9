"""Archives in other libraries, a module for each; none is imported before it is used.

ONNX Runtime (`onnxruntime`, `running`), models that refer to an archive (`links`), onnx's registry,
checker and shape inference, onnx_ir, PyTorch, Netron. This room imports conversion and below.
"""
