"""The default size of tensors stored outside a model; it imports nothing, so all can import it."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # smallest size in bytes; as in onnx
