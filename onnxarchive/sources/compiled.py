"""Compiled binaries beside a model, which its EPContext nodes name.

An execution provider of ONNX Runtime stores what it has compiled in an EPContext node, or in a file
whose path, relative to the model, is in the node. Source:
https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Final

import onnx

from onnxarchive.errors import quoted_names
from onnxarchive.files.paths import is_below
from onnxarchive.model import tensors, walking
from onnxarchive.model.keys import ASSET_PREFIX, PLAIN_PATH
from onnxarchive.sources.source import CompiledBinary, Source

_OP_TYPE: Final = "EPContext"
_DOMAIN: Final = "com.microsoft"
_IN_FILE: Final = 0  # embed_mode; it is 1 if the node has the binary itself, also by default

# Why no asset stores a compiled binary; each continues a sentence about several.
MISSING: Final = (
    "are missing; copy them along with the model, and convert it with other_files=True (--assets)"
)
NOT_PLAIN: Final = f"are not looked for; ep_cache_context must be {PLAIN_PATH}"
BESIDE_REMOTE: Final = (
    "are not looked for beside a remote .onnx; name them as assets={...} (--asset), or convert a "
    "copy of its directory"
)
_NOT_ASKED_FOR = "are left out; other_files=True (--assets) adds them as assets"
_OF_FURTHER_MODEL = (
    "are left out, as all other files of further models; name them as assets={...} (--asset)"
)


def binaries_of(model: onnx.ModelProto, serialized: bytes) -> tuple[CompiledBinary, ...]:
    """The compiled binaries that EPContext nodes of a model name, each once, not yet looked for.

    `serialized` is the same model, which is searched first: a walk over all nodes takes longer.
    """
    if _OP_TYPE.encode() not in serialized:
        return ()
    paths: list[str] = []
    for _, node in walking.below(model, (), onnx.NodeProto.DESCRIPTOR):
        assert isinstance(node, onnx.NodeProto)
        if (node.domain, node.op_type) != (_DOMAIN, _OP_TYPE):
            continue
        attributes = {attribute.name: attribute for attribute in node.attribute}
        embed_mode, context = attributes.get("embed_mode"), attributes.get("ep_cache_context")
        if embed_mode is None or context is None:
            continue
        if embed_mode.i == _IN_FILE and context.s:
            paths.append(tensors.text(context.s))
    return tuple(map(CompiledBinary, dict.fromkeys(paths)))


def paths_below(directory: str, sources: Iterable[Source]) -> set[str]:
    """The paths, in a directory, of the compiled binaries of the models that are below it."""
    paths: set[str] = set()
    for source in sources:
        folder = _folder_in(directory, source)
        if folder is not None:
            paths |= {folder + binary.path for binary in source.compiled if binary.fault is None}
    return paths


def not_stored(
    default: Source, further: Iterable[Source], directory: str | None, assets: Collection[str]
) -> tuple[list[str], list[str]]:
    """The compiled binaries that an archive does not store.

    Args:
        default: The default model.
        further: The further models.
        directory: The directory whose other files may become assets; None if there is none.
        assets: The paths of the archive's assets.

    Returns:
        The paths of binaries that exist, and a warning for each reason why binaries are not stored.
    """
    left_out: list[str] = []
    paths_by_fault: dict[str, list[str]] = {}
    for source in (default, *further):
        folder = _folder_in(directory, source)
        if source is default and directory is None:
            folder = ""  # as those in a zip, beside its model
        for path, fault in source.compiled:
            shown_path = asset = path
            if fault != NOT_PLAIN and folder is not None:
                shown_path = asset = folder + path
            elif fault is None and source.directory is not None:
                shown_path = os.path.join(source.directory, *path.split("/"))
            if asset.removeprefix(ASSET_PREFIX) in assets:
                continue
            if fault is None:
                left_out.append(shown_path)
                fault = _OF_FURTHER_MODEL if folder is None else _NOT_ASKED_FOR
            paths_by_fault.setdefault(fault, []).append(shown_path)
    warnings = [
        "the compiled binaries of EPContext nodes, without which a session of the model fails, "
        f"{fault}: {quoted_names(dict.fromkeys(paths))}"
        for fault, paths in paths_by_fault.items()
    ]
    return [*dict.fromkeys(left_out)], warnings


def _folder_in(directory: str | None, source: Source) -> str | None:
    """The folder of a model in a directory, `""` or with a slash at its end; None if elsewhere."""
    if directory is None or source.directory is None or not is_below(source.directory, directory):
        return None
    folder = os.path.relpath(source.directory, directory)
    return "" if folder == os.curdir else f"{folder.replace(os.sep, '/')}/"
