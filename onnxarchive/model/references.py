"""Checks the external tensors of models against the entries of their archive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import onnx

from onnxarchive.errors import Report, quoted
from onnxarchive.model import dtypes, tensors
from onnxarchive.model.tensors import TensorRef, TensorRefs

TypeAndDims: TypeAlias = tuple[int, tuple[int, ...]]
"""Data type and dims of a tensor, from which `check_all_references` takes at most 65 dims."""


class CheckedModel(NamedTuple):
    """A model whose external tensors were compared with the entries of its archive.

    Attributes:
        model: The model.
        refs: The external tensor of each key.
        kinds: Data type and shape of each of these tensors, as they were checked: an array has this
            shape even if the model changes afterwards.
        has_inner: True if subgraphs have initializers.
    """

    model: onnx.ModelProto
    refs: TensorRefs
    kinds: Mapping[str, TypeAndDims]
    has_inner: bool  # not their refs, which take more memory than the parsed messages


def check_all_references(
    models: Mapping[str, onnx.ModelProto],
    sizes: Mapping[str, int | None],
    report: Report,
    *,
    are_all: bool = True,
    are_all_models: bool = True,
) -> dict[str, CheckedModel]:
    """Checks the external tensors of models against the entries of their archive.

    Args:
        models: The models by the names of their entries.
        sizes: Size in bytes of the entry of each key; None if it is unknown.
        report: Receives each broken rule (DATA-1 to DATA-5, DATA-7, DATA-8, TENSOR-1 to TENSOR-3).
        are_all: True if `sizes` has all keys of the archive.
        are_all_models: True if `models` has all models of the archive.
    """
    checked: dict[str, CheckedModel] = {}
    named: set[str] = set()
    for name, model in models.items():
        checked[name] = _check_model(model, name, sizes, report, are_all, named)
    for key in sizes if are_all_models else ():
        if key not in named:
            report.broken("DATA-2", "no tensor uses this entry", entry=key)
    if len(models) > 1:
        _check_shared(checked, report)
    return checked


def _check_model(
    model: onnx.ModelProto,
    entry: str,
    sizes: Mapping[str, int | None],
    report: Report,
    are_all: bool,
    named: set[str],
) -> CheckedModel:
    """Checks one model; adds to `named` every key that is the location of an external tensor.

    `entry` is the name of the model's entry.
    """
    refs = TensorRefs(model.graph.initializer)
    kinds: dict[str, TypeAndDims] = {}
    has_inner = False
    nbytes_of: dict[
        TypeAndDims, tuple[TypeAndDims, int | None]
    ] = {}  # most tensors share a few types and shapes
    key_of = dict(zip(sizes, sizes, strict=True))  # equal strings are kept once
    count = len(refs.initializers)
    for number, ref in enumerate(tensors.walk(model)):
        has_inner = has_inner or (number >= count and ref.is_initializer)
        tensor = ref.tensor
        pairs = tensor.external_data
        if tensor.data_location == tensors.EXTERNAL:
            kind = tensor.data_type, tuple(tensor.dims[: dtypes.MAX_RANK + 1])
            if kind not in nbytes_of:
                nbytes_of[kind] = kind, tensors.array_nbytes(tensor)
            kind, nbytes = nbytes_of[kind]
            is_plain = len(pairs) == 1 and pairs[0].key == tensors.LOCATION
            location = pairs[0].value if is_plain else ""
            key: str | None = location
            if (
                nbytes is None
                or sizes.get(location) != nbytes
                or location in refs.positions
                or tensors.has_data(tensor)
                or tensor.HasField("segment")
            ):  # perhaps a broken rule
                if len(pairs) > 1:  # perhaps several locations
                    named.update(pair.value for pair in pairs if pair.key == tensors.LOCATION)
                key = _check_reference(ref, entry, sizes, refs, report, are_all)
            if key is not None:
                key = key_of[key]
                refs.positions[key] = number if number < count else ref
                kinds[key] = kind
        elif pairs:
            report.broken(
                "DATA-7",
                f"{ref}: data_location is not EXTERNAL, although there is external_data",
                entry=entry,
            )
    named.update(refs.positions)
    return CheckedModel(model, refs, kinds, has_inner)


def _check_shared(checked: Mapping[str, CheckedModel], report: Report) -> None:
    """Compares data type and dims of the tensors that models share (DATA-8)."""
    first: dict[str, tuple[str, TypeAndDims]] = {}
    for model, (_, refs, kinds, _) in checked.items():
        for key, kind in kinds.items():
            other_model, other = first.setdefault(key, (model, kind))
            if kind != other:
                report.broken(
                    "DATA-8",
                    f"{refs[key]} of {model}: expected {_type_and_shape(other)}, like "
                    f"{checked[other_model].refs[key]} of {other_model}, found "
                    f"{_type_and_shape(kind)}",
                    entry=key,
                )


def _type_and_shape(kind: TypeAndDims) -> str:
    data_type, dims = kind
    return f"{dtypes.name_of(data_type)} of shape {quoted(dims)}"


def _check_reference(
    ref: TensorRef,
    entry: str,
    sizes: Mapping[str, int | None],
    refs: Mapping[str, TensorRef],
    report: Report,
    are_all: bool,
) -> str | None:
    """Checks an external tensor of any form; returns its key if no other tensor has the key."""
    location = tensors.location(ref.tensor)
    key = location if location in sizes else None
    broken = partial(report.broken, entry=entry if key is None else key)
    reference = tensors.external_data(ref, report, entry=entry if key is None else key)
    nbytes = None if key is None else sizes[key]
    is_new = key is not None and key not in refs
    if key is not None and not is_new:
        broken(
            "DATA-3",
            f"{refs[key].where} and {ref} use this entry; each needs its own",
        )
    elif key is None and location is not None and are_all:
        broken("DATA-1", f"{ref}: no entry has the key {quoted(location)}, its location")
    if reference is not None:
        if reference.offset:
            broken("DATA-5", f"{ref}: expected offset 0, found {reference.offset}")
        if nbytes is not None and reference.length not in (None, nbytes):
            broken("DATA-5", f"{ref}: expected length {nbytes}, found {reference.length}")
    _check_tensor(ref, nbytes, broken)
    return key if is_new else None


def _check_tensor(ref: TensorRef, nbytes: int | None, broken: Callable[[str, str], None]) -> None:
    """Checks an external tensor; `nbytes` is the size of the tensor's entry, None if unknown."""
    tensor = ref.tensor
    data = {*tensors.DATA_FIELDS, "segment"}
    fields = [field.name for field, _ in tensor.ListFields() if field.name in data]
    if fields:  # even an empty raw_data
        broken("DATA-7", f"{ref}: there is data beside external_data, in {', '.join(fields)}")
    data_type = dtypes.BY_NUMBER.get(tensor.data_type)
    if data_type is None:
        broken(
            "TENSOR-1",
            f"{ref}: expected a data type of fixed width, found number {tensor.data_type}",
        )
    if not tensors.are_dims(tensor.dims, data_type):
        broken(
            "TENSOR-2",
            f"{ref}: expected a shape that an array can have, found {quoted(tensor.dims)}",
        )
    elif data_type is not None and nbytes is not None and data_type.nbytes(tensor.dims) != nbytes:
        broken(
            "TENSOR-3",
            f"{ref}: expected {data_type.nbytes(tensor.dims)} bytes for {data_type.name} of shape "
            f"{quoted(tensor.dims)}, found an entry of {nbytes}",
        )
