"""Uses archives with other libraries, which are imported on first use.

Code for onnx_ir is in `writing`, because `save` accepts models of onnx_ir.
"""

import errno
import os

__all__ = ["get_include"]


def get_include() -> str:
    """The directory of the C and C++ headers `onnxa.h` and `onnxa_ort.hpp`, for a compiler's `-I`.

    `onnxa.h` reads archives in memory. `onnxa_ort.hpp` maps an archive and makes sessions of ONNX
    Runtime whose weights are buffers in the map.

    Returns:
        The directory in the installed package, or in a clone of the repository.

    Raises:
        FileNotFoundError: The package is in a zip, or was frozen without its data.

    Example:
        print(f"c++ -std=c++17 -I{onnxarchive.get_include()} main.cpp -lonnxruntime")
    """
    import importlib.resources  # rarely used

    package = str(importlib.resources.files("onnxarchive"))
    of_clone = os.path.join(os.path.dirname(package), "conformance", "readers", "c")
    for directory in (os.path.join(package, "include"), of_clone):
        if os.path.isdir(directory):
            return directory
    raise FileNotFoundError(
        errno.ENOENT,
        "this program was packed without the headers of onnxarchive as files; install onnxarchive "
        "for the compiler, or pack its data, too (PyInstaller: --collect-data onnxarchive)",
        os.path.join(package, "include"),
    )
