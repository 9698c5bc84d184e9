"""ONNX models: tensors, data types, keys. Knows nothing of zip."""
