"""An independent reader of ONNX archives."""
