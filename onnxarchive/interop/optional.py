"""Libraries that only some functions need, so that installing this package does not bring them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# What people call them, and what pip is given to install them, by the names of their modules.
_LIBRARIES: Final = {
    "netron": ("Netron", "'onnxarchive[view]'"),
    "onnx_ir": ("onnx_ir", "'onnxarchive[ir]'"),
    "onnxruntime": ("ONNX Runtime", "'onnxarchive[ort]'"),
    "torch": ("PyTorch", "torch"),
}


@contextmanager
def needing(library: str, purpose: str) -> Iterator[None]:
    """Says what to install when a library cannot be imported in here.

    Args:
        library: The name of its module.
        purpose: What it is needed for, after "expected PyTorch to": `"hold a tensor"`.

    Raises:
        ImportError: It cannot be imported. Its `name` is `library`, its cause what went wrong.
    """
    try:
        yield
    except ImportError as error:
        title, package = _LIBRARIES[library]
        reason = " ".join(str(error).split())  # such as that of numpy, which takes a page
        raise ImportError(
            f"expected {title} to {purpose}, found none that can be imported ({reason}): "
            f"pip install {package}",
            name=library,
        ) from error
