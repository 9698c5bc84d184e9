"""Which tensors go outside a model unless somebody says it; imports nothing, as all need it."""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # bytes and more; onnx's
