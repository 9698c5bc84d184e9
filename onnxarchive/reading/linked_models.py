"""The model of an archive with its large tensors as external data in one file.

The file is the archive itself for `link`, sessions, the checker, shape inference and `transform`,
and a data file for `export`. So all of them keep the same tensors in the model.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeAlias

import onnx

from onnxarchive.errors import ArchiveFormatError, UnsupportedFeatureError, shown
from onnxarchive.files.filesystem import in_utf8
from onnxarchive.model import prepacked, proto, tensors, walking
from onnxarchive.model.copying import copied
from onnxarchive.model.external import (
    StaysOutside,
    is_constant_value,
    may_give_shape,
    stays_outside,
    weight_name,
)
from onnxarchive.model.keys import model_entry
from onnxarchive.model.prepacked import Forms, PackedSet, WeightId
from onnxarchive.model.walking import MAIN_GRAPH
from onnxarchive.reading.archive import Archive, with_model

# Pairs for the `external_data` of tensors, by key of their entry.
Pairs: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]


def linked_model(
    archive: Archive,
    location: str | None,
    is_outside: StaysOutside | None = None,
    *,
    offsets: Mapping[str, int] | None = None,
    pairs: Pairs | None = None,
    in_place: bool = False,
) -> onnx.ModelProto:
    """The model of an archive with its large tensors as external data in one file.

    Compares local headers with the central directory. Reads and verifies the tensors that become
    part of the model, and no others.

    Args:
        archive: The archive.
        location: Location of the file for `external_data`. None keeps the keys as locations, and
            does not compare the local headers of external tensors.
        is_outside: Called for each tensor outside the archive's model; True if the tensor becomes
            external data. None for `stays_outside`.
        offsets: The offsets of the external tensors in another file than the archive, by key; the
            local headers of these tensors are not compared. None for the archive itself.
        pairs: Further pairs for `external_data` by key, such as those of `packed_pairs`.
        in_place: Whether to change and return `archive.model` instead of a copy.

    Raises:
        UnsupportedFeatureError: The model would take 2 GiB or more.
    """
    model = archive.model if in_place else copied(archive.model)
    is_outside = is_outside or stays_outside(archive.model)
    inner: list[tuple[str, onnx.TensorProto]] = []
    nbytes = archive.entries[model_entry(archive.model_id)].nbytes
    for key in stored_keys(archive):
        ref, entry = archive.tensors.refs[key], archive.entries[key]
        tensor = ref.tensor if in_place else walking.at(model, ref.path)
        if not is_outside(ref, entry.nbytes):
            inner.append((entry.name, tensor))
            nbytes += entry.nbytes
            continue
        if location is not None:
            if offsets is None:
                archive.contents.require_header(entry.name)
            offset = entry.data_offset if offsets is None else offsets[entry.name]
            tensors.set_location(tensor, location, offset=offset, length=entry.nbytes)
            for name, value in pairs.get(entry.name, ()) if pairs else ():
                tensor.external_data.add(key=name, value=value)
    if nbytes >= proto.SIZE_LIMIT:
        raise UnsupportedFeatureError(
            f"expected less than {proto.SIZE_LIMIT} bytes, the limit of a single .onnx, for the "
            "model and the tensors that runtimes do not read from external data, found "
            f"{nbytes} bytes"
        )
    read = archive.contents.verified([key for key, _ in inner])
    for (_, tensor), data in zip(inner, read, strict=True):
        tensors.set_raw_data(tensor, bytes(data))
    return model


def stored_keys(archive: Archive) -> list[str]:
    """The keys of the model's tensors in archive order.

    The time does not grow with the entries of other models.
    """
    return sorted(archive.tensors.refs, key=archive.entries.index_of.__getitem__)


def packable(archive: Archive) -> dict[str, WeightId]:
    """The weights of the main graph that sessions read from the archive, by key.

    Without those whose name another initializer or Constant has, too.
    """
    refs = archive.tensors.refs
    names = {key: weight_name(archive.model, ref) for key, ref in refs.items()}
    count = Counter(tensors.text(tensor.name) for tensor in refs.initializers)
    count.update(
        name for key, name in names.items() if name is not None and not refs[key].is_initializer
    )
    weights = {}
    for key, name in names.items():
        entry = archive.entries[key]
        may_pack = not may_give_shape(refs[key].tensor, entry.nbytes)
        if name is not None and count[name] == 1 and may_pack:
            weights[key] = name, entry.nbytes, entry.crc32
    return weights


def lift_constants(model: onnx.ModelProto) -> None:
    """Replaces Constants of the main graph whose values are external by initializers.

    In the model that ONNX Runtime writes, only initializers have packed forms.
    """
    are_lifted = []
    for index, node in enumerate(model.graph.node):
        path = (*MAIN_GRAPH, ("node", index), ("attribute", 0), ("t", None))
        is_constant = len(node.attribute) == 1 and is_constant_value(model, path)
        is_external = is_constant and node.attribute[0].t.data_location == tensors.EXTERNAL
        # ONNX Runtime says what is wrong with another number of outputs or another name.
        has_name = len(node.output) == 1 and isinstance(node.output[0], str)
        are_lifted.append(is_external and has_name)
        if are_lifted[-1]:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(node.attribute[0].t)
            tensor.name = node.output[0]
    tensors.remove(model.graph.node, are_lifted)


def packed_sets(
    archive: Archive, faults: list[str], machine: str | None = None, version: str = ""
) -> Iterator[PackedSet]:
    """Reads the sets of packed weights in an archive one at a time, since an index takes memory.

    Args:
        archive: The archive.
        faults: Gets a text for each set that cannot be read; see `warn_of_sets`.
        machine: The kind of machine of the sets; None for all sets, in archive order.
        version: The version of ONNX Runtime whose set is first; the others follow, the last one
            first.
    """
    end = f"/{prepacked.INDEX}" if machine is None else f"-{machine}/{prepacked.INDEX}"
    names = [
        name for name in archive.entries if name.startswith(prepacked.PREFIX) and name.endswith(end)
    ]

    def preference(name: str) -> tuple[bool, tuple[int, ...]]:
        own_version = name.removeprefix(prepacked.PREFIX).removesuffix(end)
        return own_version == version, prepacked.version_numbers(own_version)

    if machine is not None:
        names.sort(key=preference, reverse=True)
    for name in names:
        try:
            nbytes = archive.entries[name].nbytes
            if nbytes > prepacked.MAX_INDEX_NBYTES:
                limit = prepacked.MAX_INDEX_NBYTES
                raise ValueError(f"expected at most {limit} bytes, found {nbytes}")
            packed = PackedSet.of_json(bytes(archive.read(name)))
            if packed.folder + prepacked.INDEX != name:
                raise ValueError(
                    f"expected the index of this folder, found that of {shown(packed.folder)}"
                )
        except ArchiveFormatError as error:
            faults.append(error.message)
        except ValueError as error:
            faults.append(f"entry {shown(name)}: {error}")
        else:
            yield packed


def warn_of_sets(archive: Archive, faults: list[str]) -> None:
    """Warns of sets of packed weights that `packed_sets` could not read."""
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        warnings.warn(
            f"{archive.path}: {faults[0]}{more}; its packed weights are not used, "
            "onnxarchive.prepack replaces them",
            stacklevel=3,
        )


def packed_pairs(
    archive: Archive, models: Iterable[str], machine: str, version: str = ""
) -> dict[str, Pairs]:
    """The pairs for `external_data` by key that lead ONNX Runtime to packed weights, by model id.

    They are those of the version of ONNX Runtime that will read the pairs, if it is known, or else
    of the last other one. The archive is in a local file. A model without packed weights is left
    out.
    """
    pairs: dict[str, Pairs] = {}
    left = set(models)
    faults: list[str] = []
    for packed in packed_sets(archive, faults, machine, version):
        found = left & packed.weights.keys()
        place = cache(partial(_place, archive, packed.folder))
        for model in found:
            pairs[model] = _pairs(with_model(archive, model), packed.forms(model), place)
        left -= found
        if not left:
            break
    warn_of_sets(archive, faults)
    return pairs


def _pairs(
    archive: Archive,
    forms: Mapping[WeightId, Forms],
    place: Callable[[str, int], tuple[int, int] | None],
) -> Pairs:
    pairs: dict[str, list[tuple[str, str]]] = {}
    for key, weight in packable(archive).items():
        values = []
        for form, buffers in forms.get(weight, {}).items():
            ranges = [place(file, nbytes) for file, nbytes in buffers]
            if None not in ranges:
                values.append(prepacked.pair_value(form, filter(None, ranges)))
        if values:
            pairs[key] = [(f"prepacked_{index}", value) for index, value in enumerate(values)]
    return pairs


def _place(archive: Archive, folder: str, file: str, nbytes: int) -> tuple[int, int] | None:
    """Offset and size of a packed buffer in the archive; None if it is not as the index says."""
    name = folder + file
    entry = archive.entries.get(name)
    if entry is not None and entry.nbytes == nbytes:
        with contextlib.suppress(ArchiveFormatError):  # `check` names a damaged header
            archive.contents.require_header(name)
            return entry.data_offset, nbytes
    return None


def as_location(path: str) -> str:
    """The location of a path in external data, with the bytes of the path.

    A path that is not UTF-8 is refused with a ValueError, since a model's strings must be UTF-8.
    """
    try:
        location = in_utf8(path)
        location.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        hint = "" if encoding == "utf-8" else f"; the locale's encoding is {encoding}"
        raise ValueError(f"expected a path in UTF-8, found {path!r}{hint}; rename it") from None
    return location
