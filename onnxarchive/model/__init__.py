"""ONNX messages: the graphs, tensors and external data of a model, and the wire format.

These modules know neither zips nor files. `walking` walks over a model's messages. `tensors` reads
tensors, `dtypes` describes data types, `keys` derives names of entries. `proto` parses a model and
checks it against an archive's entries. `copying` copies models with changes. `wire` reads
serialized messages, `weights` removes the data of large tensors from a serialized model and puts
data back. This room imports buffers and errors.
"""

from typing import Final

DEFAULT_SIZE_THRESHOLD: Final = 1024  # bytes, as in onnx; smaller tensors stay in the model
