"""Archives in other libraries, a module for each; none is imported before it is used.

ONNX Runtime (`onnxruntime`, `running`), models that refer to an archive (`links`), onnx's registry,
checker and shape inference, PyTorch, Netron. onnx_ir's is in the room archive, since `save` accepts
its models. This room imports conversion and below.
"""
