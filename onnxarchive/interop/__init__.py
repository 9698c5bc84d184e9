"""Uses archives with other libraries, which are imported on first use.

What is for onnx_ir lies in `writing`, because `save` accepts models of onnx_ir.
"""

import os

__all__ = ["get_include"]


def get_include() -> str:
    """The directory of the C and C++ headers `onnxa.h` and `onnxa_ort.hpp`, for a compiler's `-I`.

    `onnxa.h` reads archives over memory; `onnxa_ort.hpp` maps an archive and makes sessions of ONNX
    Runtime whose weights are buffers in the map.

    Returns:
        The directory: that of the installed package, or that of a clone.

    Example:
        print(f"c++ -std=c++17 -I{onnxarchive.get_include()} main.cpp -lonnxruntime")
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    installed = os.path.join(package, "include")
    if os.path.isdir(installed):
        return installed
    return os.path.join(os.path.dirname(package), "conformance", "readers", "c")  # of a clone
