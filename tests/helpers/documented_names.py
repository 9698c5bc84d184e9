"""The public functions, classes, methods and properties, which are documented."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from tools.docs import reference


def _documented() -> Iterator[tuple[str, Any]]:
    for module in map(importlib.import_module, reference.MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            yield f"{module.__name__}.{name}", value
            for member, found in vars(value).items() if inspect.isclass(value) else ():
                is_documented = isinstance(found, FunctionType | property)
                if is_documented and not member.startswith("_"):
                    yield f"{module.__name__}.{name}.{member}", found


DOCUMENTED = dict(_documented())
"""By full name, such as `onnxarchive.Archive.read`."""
