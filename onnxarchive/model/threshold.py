"""The default size threshold of external tensors; imports nothing, so all modules can use it."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # smallest size in bytes; as in onnx
