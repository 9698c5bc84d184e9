"""Objects of other libraries, recognised without importing the library."""

from __future__ import annotations


def is_instance(value: object, library: str, name: str) -> bool:
    """True if an object is an instance of a class of a library, or of a subclass.

    Args:
        value: The object.
        library: The library's top module, such as `"torch"`.
        name: The name of the class, such as `"Tensor"`, in any module of the library.
    """
    bases = ((base.__module__.split(".")[0], base.__name__) for base in type(value).__mro__)
    return (library, name) in bases
