"""ONNX messages: the graphs, tensors and external data of a model, and the wire format.

These modules know neither zips nor files.
"""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # bytes, as in onnx; smaller tensors stay in the model
