"""Optional libraries, which only some functions need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# Their names and the arguments for `pip install`, by module.
_LIBRARIES: Final = {
    "fsspec": ("fsspec", "'onnxarchive[remote]'"),
    "netron": ("Netron", "'onnxarchive[view]'"),
    "obstore": ("obstore", "'onnxarchive[remote]'"),
    "onnx_ir": ("onnx_ir", "'onnxarchive[ir]'"),
    "onnxruntime": ("ONNX Runtime", "'onnxarchive[ort]'"),
    "shtab": ("shtab", "'onnxarchive[completion]'"),
    "torch": ("PyTorch", "torch"),
}


@contextmanager
def needing(library: str, purpose: str) -> Iterator[None]:
    """Says in an ImportError of the block how to install the library.

    Args:
        library: The name of the library's module.
        purpose: Completes the sentence "PyTorch is needed to": `"hold a tensor"`.

    Raises:
        ImportError: The library cannot be imported. Its `name` is `library`, its cause the error of
            the import.
    """
    try:
        yield
    except ImportError as error:
        title, package = _LIBRARIES[library]
        reason = " ".join(str(error).split())  # on one line; numpy's takes a page
        raise ImportError(
            f"{title} is needed to {purpose}, but cannot be imported ({reason}): "
            f"pip install {package}",
            name=library,
        ) from error
