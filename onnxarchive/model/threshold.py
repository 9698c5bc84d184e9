"""The default size threshold of external tensors; all modules of the package may import it."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # smallest size in bytes; as in onnx
