"""The default size threshold of external tensors."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # smallest size in bytes; as in onnx
