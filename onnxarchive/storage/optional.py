"""Optional libraries, needed only by some functions, and objects of their classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# By module: name of the library in messages, and argument of `pip install`.
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
    """Raises an ImportError of the block again, with the command that installs the library.

    Args:
        library: The name of the library's module.
        purpose: The end of the sentence "PyTorch is needed to", such as `"hold a tensor"`.

    Raises:
        ImportError: The library cannot be imported. The error's `name` is `library`; its cause is
            the original error.
    """
    try:
        yield
    except ImportError as error:
        title, package = _LIBRARIES[library]
        reason = " ".join(str(error).split())  # on one line; an error of numpy takes a page
        raise ImportError(
            f"{title} is needed to {purpose}, but cannot be imported ({reason}): "
            f"pip install {package}",
            name=library,
        ) from error


def is_instance(value: object, library: str, name: str) -> bool:
    """True if an object is an instance of a class of a library, or of a subclass.

    Args:
        value: The object.
        library: The library's top module, such as `"torch"`.
        name: The name of the class, such as `"Tensor"`, in any module of the library.
    """
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(value).__mro__)
    return (library, name) in bases
