"""The pages of the reference: every public name, in groups by what a user does.

The package is read by griffe and not imported, so that neither onnx nor numpy is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Group:
    """A page of the reference.

    Attributes:
        title: Title of the page.
        text: What the names of the page are for.
        names: Public names, functions first, by module.
    """

    title: str
    text: str
    names: dict[str, str]


PACKAGE: Final = "onnxarchive"
TORCH: Final = "onnxarchive.interop.torch"
IR: Final = "onnxarchive.ir"
MODULES: Final = (PACKAGE, IR, TORCH)
"""The modules whose `__all__` is public."""

GROUPS: Final = {
    "open": Group(
        "Open",
        "Open an archive and read its models, tensors and assets.",
        {PACKAGE: "open load is_archive Archive TensorSlice Entry"},
    ),
    "save": Group(
        "Save",
        "Write an archive from a model in memory, or one tensor at a time.",
        {PACKAGE: "save Writer"},
    ),
    "convert": Group(
        "Convert",
        "Make archives from models of other tools, and give models back to other tools.",
        {PACKAGE: "convert convert_many download export extract link Conversion"},
    ),
    "edit": Group(
        "Edit",
        "Change an archive in one transaction, recover it after an interrupted edit, or pass its "
        "model through a function.",
        {PACKAGE: "edit recover transform infer_shapes Edit Recovery"},
    ),
    "run": Group(
        "Run",
        "Run the model of an archive with ONNX Runtime, which maps its weights.",
        {PACKAGE: "session session_options prepack get_include"},
    ),
    "check": Group(
        "Check",
        "Check archives, links and models, and compare two models.",
        {PACKAGE: "check check_link check_model diff Finding Difference Change ValueChange"},
    ),
    "errors": Group(
        "Errors",
        "What functions raise, and a warning. Every error about a file is an `ArchiveError`.",
        {
            PACKAGE: "ArchiveError ArchiveFormatError ChecksumError LockedError "
            "ModelNotFoundError ObjectChangedError TensorNotFoundError UnfinishedEditError "
            "UnsupportedFeatureError AttributesWarning"
        },
    ),
    "libraries": Group(
        "PyTorch and onnx_ir",
        "Modules for other libraries; each needs an import of its own.",
        {TORCH: "tensor tensors from_numpy", IR: "load"},
    ),
}
"""The pages by file name."""


def pages() -> Iterator[tuple[str, str]]:
    """Yields the file name and the Markdown text of each page."""
    import griffe  # only the environment of the site has it

    package = griffe.load(PACKAGE, search_paths=[str(ROOT)])
    for file, group in GROUPS.items():
        parts = [f"# {group.title}", group.text]
        for module, names in group.names.items():
            if module != PACKAGE:
                parts += [f"## {module}", package[module.partition(".")[2]].docstring.value]
            parts.append(f"```{{py:currentmodule}} {module}\n```")
            for name in names.split():
                found = package[f"{module}.{name}".partition(".")[2]]
                parts.append(_describe(_target(found), package))
        yield file, _text(parts)


def _target(found: Any) -> Any:
    """What an imported name stands for."""
    return found.final_target if found.is_alias else found


def _describe(found: Any, package: Any) -> str:
    """The directive of a function or class, with the members of the class."""
    if found.is_function:
        return _directive("function", _signature(found, package), _docstring(found))
    # Objects that only functions make have no arguments.
    has_arguments = any(it.kind.value == "parameters" for it in _sections(found))
    signature = _signature(found, package) if has_arguments else found.name
    kind = "exception" if found.name.endswith(("Error", "Warning")) else "class"
    # The bases of errors are on their page; those of other classes are not.
    all_members = found.members if kind == "exception" else found.all_members
    members = [_member(it, package) for it in all_members.values() if _is_documented(it)]
    return _directive(kind, signature, _text([_docstring(found), *members]), colons=4)


def _is_documented(member: Any) -> bool:
    """True for public methods and properties; attributes are in the docstring of their class."""
    if member.name.startswith("_"):
        return False
    found = _target(member)
    return bool(found.docstring) and (found.is_function or "property" in found.labels)


def _member(member: Any, package: Any) -> str:
    found = _target(member)
    if found.is_function:
        return _directive("method", _signature(found, package), _docstring(found))
    return _directive("property", f"{found.name}\n:type: {found.annotation}", _docstring(found))


def _directive(kind: str, signature: str, text: str, colons: int = 3) -> str:
    fence = ":" * colons
    return f"{fence}{{py:{kind}}} {signature}\n\n{text}\n{fence}"


def _signature(found: Any, package: Any) -> str:
    """Name, arguments and result, as in the source; but numbers instead of their names."""
    text = str(found.signature(return_type=found.is_function))
    for parameter in found.parameters:
        name = getattr(parameter.default, "canonical_path", "")
        if name.startswith(f"{PACKAGE}."):
            value = str(package[name.partition(".")[2]].value)
            if re.fullmatch(r"[\d._]+", value):
                text = text.replace(f"= {parameter.default}", f"= {value}")
    return re.sub(r"\(self(, )?", "(", text, count=1)


def _sections(found: Any) -> list[Any]:
    options = {"returns_multiple_items": False, "warnings": False}
    return list(found.docstring.parse("google", **options))


def _docstring(found: Any) -> str:
    """A docstring in Markdown: its sections as a list of fields, its example as code."""
    parts: list[str] = []
    for section in _sections(found):
        kind, value = section.kind.value, section.value
        if kind == "text":
            parts.append(value)
        elif kind == "parameters":
            parts.append(_fields(value, "param {0.name}"))
        elif kind == "attributes":
            parts += [_attribute(it) for it in value]
        elif kind in ("returns", "yields"):
            parts.append(_fields(value, "returns"))
        elif kind == "raises":
            parts.append(_fields(value, "raises {0.annotation}"))
        elif kind == "warns":
            parts.append(_fields(value, "warns {0.annotation}"))
        elif section.title == "Example":
            parts.append(f"```python\n{value.contents}\n```")
        else:
            raise ValueError(f"{found.path}: a page has no place for the section {kind}")
    return _text(parts)


def _attribute(item: Any) -> str:
    name = item.name if item.annotation is None else f"{item.name}\n:type: {item.annotation}"
    return _directive("attribute", name, item.description)


def _fields(items: Any, field: str) -> str:
    """A list of fields; lines of a field that begin with a keyword in backticks are a list."""
    fields = []
    for item in items:
        text = re.sub(r"^(?=`\w+`: )", "- ", item.description, flags=re.MULTILINE)
        fields.append(f":{field.format(item)}: " + text.replace("\n", "\n    "))
    return "\n".join(fields)


def _text(parts: list[str]) -> str:
    return "\n\n".join(parts)
