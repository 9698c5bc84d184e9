"""The index of weights that ONNX Runtime has packed, kept as assets of an archive.

Each folder below `PREFIX` has a set of packed weights: an index (`INDEX`, JSON) and the buffers
that the index names. ONNX Runtime finds a buffer by a key, which contains a hash of the packed
bytes; the index says which weights of which models need which keys. Appendix C of the specification
describes the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from onnxarchive.errors import shown
from onnxarchive.model.keys import PACKED_PREFIX

PREFIX: Final = PACKED_PREFIX
INDEX: Final = "index.json"
MAX_INDEX_NBYTES: Final = 1 << 24
# Of a weight. ONNX Runtime has one packed form of a weight for each kind of operator that uses it,
# of one or a few buffers.
MAX_FORMS: Final = 64
MAX_BUFFERS: Final = 64

_KEY: Final = re.compile(r"[A-Za-z0-9_.+-]{1,200}")  # a name of a file, and of a pair without "|"
_PLACE: Final = re.compile(r"\|([0-9]{1,19});([0-9]{1,19});")
_MAX_NUMBER: Final = (1 << 63) - 1

# The packed forms of a weight: for each key of ONNX Runtime, the names of files in the folder and
# their sizes in bytes.
Forms: TypeAlias = Mapping[str, tuple[tuple[str, int], ...]]
# By what a weight is recognised: name, size in bytes and CRC-32 of the initializer.
WeightId: TypeAlias = tuple[str, int, int]


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
        weights: The packed initializers of the main graph by name, for each id of a model.
        unpacked: The names of large initializers that ONNX Runtime does not pack.
    """

    onnxruntime: str
    machine: str
    weights: Mapping[str, Mapping[str, PackedWeight]]
    unpacked: Mapping[str, tuple[str, ...]]

    @property
    def folder(self) -> str:
        """The folder of the set, the beginning of its entries' names."""
        return f"{PREFIX}{self.onnxruntime}-{self.machine}/"

    def forms(self, model: str) -> dict[WeightId, Forms]:
        """The packed forms of a model's weights."""
        weights = self.weights.get(model, {})
        return {
            (name, weight.nbytes, weight.crc32): weight.buffers for name, weight in weights.items()
        }

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
            ValueError: It is no index.
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
            raise ValueError(f"expected an index of packed weights, found {error!r}") from None


def version_numbers(version: str) -> tuple[int, ...]:
    """A version of ONNX Runtime as numbers, for comparisons."""
    return tuple(map(int, re.findall("[0-9]{1,9}", version)))


def fault_of(forms: Forms) -> str | None:
    """What an index must not say of one weight, so that reading it is bounded; None if nothing."""
    files = [file for buffers in forms.values() for file, _ in buffers]
    if len(forms) > MAX_FORMS:
        return f"expected at most {MAX_FORMS} packed forms of a weight, found {len(forms)}"
    if len(files) > MAX_BUFFERS:
        return f"expected at most {MAX_BUFFERS} packed buffers of a weight, found {len(files)}"
    if len(set(files)) < len(files):
        return "expected each packed buffer once in a weight, found one again"
    return None


def pair_value(key: str, ranges: Iterable[tuple[int, int]]) -> str:
    """The value of a pair in `external_data` that names packed weights.

    They have a key of ONNX Runtime; the ranges are offset and size of each buffer in bytes.
    """
    return "|".join([key, *(f"{offset};{nbytes};0" for offset, nbytes in ranges)])


def ranges_of(value: str) -> list[tuple[int, int]]:
    """Offset and size of each buffer that the value of a pair names; see `pair_value`."""
    return [(int(offset), int(nbytes)) for offset, nbytes in _PLACE.findall(value)]


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
        raise ValueError(f"expected letters, digits, '_', '.', '+' and '-', found {shown(text)}")
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
