"""The index of weights packed by ONNX Runtime, kept as assets of an archive.

Each folder below `PREFIX` has a set of packed weights: an index (`INDEX`, JSON) and the buffers
that the index names. ONNX Runtime finds a buffer by a key, which contains a hash of the packed
bytes; the index says which weights of which models need which keys. Appendix C of the specification
describes the index.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol, TypeAlias

from onnxarchive.errors import ArchiveFormatError, quoted
from onnxarchive.model.external import may_give_shape, weight_name
from onnxarchive.model.keys import PACKED_PREFIX
from onnxarchive.model.references import CheckedModel
from onnxarchive.model.tensors import text

PREFIX: Final = PACKED_PREFIX
INDEX: Final = "index.json"
MAX_INDEX_NBYTES: Final = 1 << 24
# Of a weight. ONNX Runtime has one packed form of a weight for each kind of operator that uses it,
# of one or a few buffers.
MAX_FORMS: Final = 64
MAX_BUFFERS: Final = 64

_KEY: Final = re.compile(r"[A-Za-z0-9_.+-]{1,200}")  # a name of a file, and of a pair without "|"
_MAX_NUMBER: Final = (1 << 63) - 1

# The packed forms of a weight: for each key of ONNX Runtime, the names of files in the folder and
# their sizes in bytes.
Forms: TypeAlias = Mapping[str, tuple[tuple[str, int], ...]]
# By what a weight is recognised: name, size in bytes and CRC-32 of the initializer.
WeightId: TypeAlias = tuple[str, int, int]


class EntryOfWeight(Protocol):
    """The needed attributes of an entry of an archive."""

    @property
    def nbytes(self) -> int:
        """Size of its data in bytes."""

    @property
    def crc32(self) -> int:
        """CRC-32 of its data."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The packed buffers of an initializer.

    Attributes:
        nbytes: Size in bytes of the initializer's own bytes.
        crc32: Their CRC-32.
        buffers: Its packed forms.
    """

    nbytes: int
    crc32: int
    buffers: Forms


@dataclass(frozen=True, slots=True)
class PackedSet:
    """The packed weights for a version of ONNX Runtime and a kind of machine.

    Attributes:
        onnxruntime: The version.
        machine: The kind of machine: its architecture and the instructions that matter.
        weights: The packed initializers of the main graph by name, for each id that a model had
            when they were packed.
        unpacked: The names of large initializers that ONNX Runtime does not pack, for each such id.
    """

    onnxruntime: str
    machine: str
    weights: Mapping[str, Mapping[str, PackedWeight]]
    unpacked: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> str:
        """The folder of the set, the beginning of its entries' names."""
        return f"{PREFIX}{self.onnxruntime}-{self.machine}/"

    def forms(self) -> dict[WeightId, Forms]:
        """The packed forms of each weight, from all models that had it when it was packed.

        So a renamed or replaced model finds the forms of its weights. Models that use a weight
        differently have packed it in different forms.
        """
        found: dict[WeightId, Forms] = {}
        for named in self.weights.values():
            for name, weight in named.items():
                identity = name, weight.nbytes, weight.crc32
                before = found.get(identity, {})
                together = {**before, **weight.buffers}
                is_bounded = len(together) == len(before) or fault_of(together) is None
                found[identity] = together if is_bounded else before
        return found

    def unused_nbytes(self, present: Collection[WeightId]) -> int:
        """The bytes of the buffers that belong to none of these weights."""
        files = self.files
        for weight, forms in self.forms().items():
            if weight in present:
                for file, _ in chain.from_iterable(forms.values()):
                    files.pop(file, None)
        return sum(files.values())

    @property
    def files(self) -> dict[str, int]:
        """The sizes of all buffers by file name, in bytes."""
        return {
            name: nbytes
            for weights in self.weights.values()
            for weight in weights.values()
            for buffers in weight.buffers.values()
            for name, nbytes in buffers
        }

    def to_json(self) -> bytes:
        """The index."""
        weights = {
            identifier: {
                name: {"nbytes": weight.nbytes, "crc32": weight.crc32, "packed": weight.buffers}
                for name, weight in sorted(named.items())
            }
            for identifier, named in sorted(self.weights.items())
        }
        index = {
            "onnxruntime": self.onnxruntime,
            "machine": self.machine,
            "weights": weights,
            "unpacked": {id: list(names) for id, names in sorted(self.unpacked.items())},
        }
        return json.dumps(index).encode() + b"\n"

    @classmethod
    def of_json(cls, data: bytes) -> PackedSet:
        """Reads an index.

        Raises:
            ValueError: The bytes are not an index.
        """
        try:
            index = json.loads(data)
            weights = {
                id: {name: _weight(fields) for name, fields in named.items()}
                for id, named in index["weights"].items()
            }
            unpacked = {
                id: tuple(_of(str, name) for name in names)
                for id, names in index["unpacked"].items()
            }
            version, machine = _of(str, index["onnxruntime"]), _of(str, index["machine"])
            return cls(version, machine, weights, unpacked)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"this is no index of packed weights: {error!r}") from None


def version_numbers(version: str) -> tuple[int, ...]:
    """A version of ONNX Runtime as numbers, for comparisons."""
    return tuple(map(int, re.findall("[0-9]{1,9}", version)))


def packable(checked: CheckedModel, entries: Mapping[str, EntryOfWeight]) -> dict[str, WeightId]:
    """The weights of a model's main graph that sessions read from the archive, by key.

    A weight is left out if another initializer or Constant has the same name. `entries` are those
    of the archive by name.
    """
    refs = checked.refs
    names = {key: weight_name(checked.model, ref) for key, ref in refs.items()}
    count = Counter(text(tensor.name) for tensor in refs.initializers)
    count.update(
        name for key, name in names.items() if name is not None and not refs[key].is_initializer
    )
    weights = {}
    for key, name in names.items():
        entry = entries[key]
        may_pack = not may_give_shape(refs[key].tensor, entry.nbytes)
        if name is not None and count[name] == 1 and may_pack:
            weights[key] = name, entry.nbytes, entry.crc32
    return weights


def packed_sets(
    entries: Mapping[str, EntryOfWeight],
    read: Callable[[str], memoryview],
    faults: list[str],
    machine: str | None = None,
    version: str = "",
) -> Iterator[PackedSet]:
    """Reads the sets of packed weights in an archive one at a time, since an index takes memory.

    Args:
        entries: The entries of the archive by name.
        read: Reads the bytes of an entry.
        faults: Receives a text for each set that cannot be read; see `warn_of_sets`.
        machine: The kind of machine of the sets; None for all sets, in archive order.
        version: The version of ONNX Runtime whose set is first; the others follow, the last one
            first.
    """
    end = f"/{INDEX}" if machine is None else f"-{machine}/{INDEX}"
    names = [name for name in entries if name.startswith(PREFIX) and name.endswith(end)]

    def preference(name: str) -> tuple[bool, tuple[int, ...]]:
        own_version = name.removeprefix(PREFIX).removesuffix(end)
        return own_version == version, version_numbers(own_version)

    if machine is not None:
        names.sort(key=preference, reverse=True)
    for name in names:
        try:
            nbytes = entries[name].nbytes
            if nbytes > MAX_INDEX_NBYTES:
                limit = MAX_INDEX_NBYTES
                raise ValueError(f"expected at most {limit} bytes, found {nbytes}")
            packed = PackedSet.of_json(bytes(read(name)))
            if packed.folder + INDEX != name:
                raise ValueError(
                    f"the index is that of the folder {quoted(packed.folder)}, not of its own"
                )
        except ArchiveFormatError as error:
            faults.append(error.message)
        except ValueError as error:
            faults.append(f"entry {quoted(name)}: {error}")
        else:
            yield packed


def unused_nbytes(
    models: Iterable[CheckedModel],
    entries: Mapping[str, EntryOfWeight],
    read: Callable[[str], memoryview],
    faults: list[str],
) -> int:
    """The bytes of packed weights in all sets whose weight is in none of the models.

    For the other arguments see `packed_sets`.
    """
    present = {weight for checked in models for weight in packable(checked, entries).values()}
    return sum(packed.unused_nbytes(present) for packed in packed_sets(entries, read, faults))


def warn_of_sets(path: str, faults: list[str]) -> None:
    """Warns of sets of packed weights in the archive at `path` that could not be read."""
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        warnings.warn(
            f"{path}: {faults[0]}{more}; its packed weights are not used, "
            "onnxarchive.prepack replaces them",
            stacklevel=3,
        )


def fault_of(forms: Forms) -> str | None:
    """The fault of an index about one weight; None without a fault. It bounds what is read."""
    files = [file for buffers in forms.values() for file, _ in buffers]
    if len(forms) > MAX_FORMS:
        return f"expected at most {MAX_FORMS} packed forms of a weight, found {len(forms)}"
    if len(files) > MAX_BUFFERS:
        return f"expected at most {MAX_BUFFERS} packed buffers of a weight, found {len(files)}"
    if len(set(files)) < len(files):
        return "a weight has a packed buffer twice"
    return None


def _weight(index: Mapping[str, Any]) -> PackedWeight:
    fault = fault_of(index["packed"])
    if fault is not None:
        raise ValueError(fault)
    forms = {
        _key(key): tuple((_key(name), _number(nbytes)) for name, nbytes in buffers)
        for key, buffers in index["packed"].items()
    }
    return PackedWeight(_number(index["nbytes"]), _number(index["crc32"]), forms)


def _key(text: str) -> str:
    if not _KEY.fullmatch(text):
        raise ValueError(f"expected letters, digits, '_', '.', '+' and '-', found {quoted(text)}")
    return text


def _number(value: Any) -> int:
    number: int = _of(int, value)
    if not 0 <= number <= _MAX_NUMBER:
        raise ValueError(f"expected a number from 0 to {_MAX_NUMBER}, found {number}")
    return number


def _of(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
