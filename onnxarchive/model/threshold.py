"""The default size threshold of external tensors."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # bytes, as in onnx; smaller tensors stay in the model
