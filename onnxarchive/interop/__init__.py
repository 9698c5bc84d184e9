"""Uses archives with other libraries; optional libraries are imported on first use.

ONNX Runtime: `onnxruntime`, `ort_options`, `running`, `inputs`. Links (`.onnx` files
with external data in an archive): `links`. onnx: `onnx_registry`,
`onnx_functions`. Functions that change a model, such as `onnxsim.simplify`: `transforming`.
PyTorch: `torch`. Netron: `netron`. The module for onnx_ir is in the room `archive`,
because `save` accepts models of onnx_ir. This room may import all rooms except `cli`.
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
