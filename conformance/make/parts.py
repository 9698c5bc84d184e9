"""Makes vectors and their parts: models, tensors and archives."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from conformance.make import zips as v
from conformance.make.zips import Entry, Image, Zeros, content, extra_field, number, numbers

MODEL_PROTO = b"__MODEL_PROTO"
GIB = 1 << 30

FLOAT, UINT8, INT8, UINT16, INT16, INT32, INT64, STRING, BOOL = range(1, 10)
UINT4, INT4, FLOAT4, UINT2, INT2, FLOAT6, FLOAT6E3M2 = 21, 22, 23, 25, 26, 27, 28
# Bits per element, by number of the data type.
BITS = {
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),
    **dict.fromkeys((4, 5, 10, 16), 16),
    **dict.fromkeys((1, 6, 12), 32),
    **dict.fromkeys((7, 11, 13, 14), 64),
    **dict.fromkeys((21, 22, 23), 4),
    **dict.fromkeys((25, 26), 2),
    **dict.fromkeys((27, 28), 6),
    15: 128,
}

Source: TypeAlias = "Image | bytes"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model, and its entry.

    Attributes:
        key: Name of the entry.
        data_type: Number of the ONNX data type.
        dims: Shape.
        data: Data of the entry.
        name: Name in the model; None for `key`.
        pairs: Pairs of external_data; None for one pair, with `key` as the location.
        more: Further fields of the TensorProto, serialized.
        is_external: True if data_location is EXTERNAL.
    """

    key: str
    data_type: int = UINT8
    dims: tuple[int, ...] = (8,)
    data: bytes | Zeros = b"\1\2\3\4\5\6\7\10"
    name: str | None = None
    pairs: tuple[tuple[str, str | bytes], ...] | None = None
    more: bytes = b""
    is_external: bool = True

    @property
    def proto(self) -> bytes:
        """The serialized TensorProto."""
        named = (("location", self.key),)
        pairs = named if self.pairs is None else self.pairs
        return (
            numbers(1, self.dims)
            + number(2, self.data_type)
            + content(8, self.key if self.name is None else self.name)
            + b"".join(content(13, content(1, key) + content(2, value)) for key, value in pairs)
            + (number(14, 1) if self.is_external else b"")
            + self.more
        )

    @property
    def entry(self) -> Entry:
        """The entry with the data of the tensor, and no overridden field."""
        return Entry(self.key.encode(), self.data)


@dataclass(frozen=True)
class Vector:
    """A file and the verdict that a reader must give.

    Attributes:
        name: Name of the vector.
        about: Description in one sentence.
        rules: If the file is refused, the broken rules (a reader may name any of them); if it is
            accepted, the rules of which it is an example.
        accepted: True if a reader must accept the file.
        source: The file, or a function that makes it if it is large.
        tensors: External tensors of the default model, if the file is accepted.
        further: External tensors of the further models, by model id.
        attack: Class of attack, or None.
        large: True if the file is larger than 1 MiB.
        stage: Stage at which a reader can refuse the file; None for the stage of `rules[0]`.
    """

    name: str
    about: str
    rules: tuple[str, ...]
    accepted: bool
    source: Source | Callable[[], Source]
    tensors: tuple[Tensor, ...] = ()
    attack: str | None = None
    large: bool = False
    stage: str | None = None
    further: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def file(self) -> Source:
        """The file."""
        return self.source() if callable(self.source) else self.source


# Models


def graph(*tensors: Tensor, more: bytes = b"") -> bytes:
    """A serialized GraphProto with these initializers."""
    return b"".join(content(5, tensor.proto) for tensor in tensors) + content(2, "g") + more


def model(graph_proto: bytes, more: bytes = b"") -> bytes:
    """A serialized ModelProto with this graph."""
    opset = content(8, number(2, 21))
    return number(1, 10) + content(7, graph_proto) + opset + more


def node(*attributes: bytes) -> bytes:
    """A serialized NodeProto with these attributes."""
    return content(4, "Constant") + b"".join(content(5, attribute) for attribute in attributes)


def attribute(field_number: int, *values: bytes) -> bytes:
    """A serialized AttributeProto; the field `field_number` has the values `values`."""
    return content(1, "value") + b"".join(content(field_number, value) for value in values)


def everywhere() -> tuple[bytes, tuple[Tensor, ...]]:
    """Returns a model with a tensor at every place that can hold a tensor, and these tensors."""
    names = ("init", "t", "ts1", "ts2", "g", "gs", "sv", "si", "spa", "spv", "fa", "fn", "ti", "ta")
    tensors = {it: Tensor(f"{it}_key", data=it.encode().ljust(8)) for it in names}
    proto = {key: tensor.proto for key, tensor in tensors.items()}
    sparse_initializer = content(1, proto["sv"]) + content(2, proto["si"]) + number(3, 64)
    sparse_attribute = content(1, proto["spa"])
    sparse_attributes = content(2, proto["spv"])
    attributes = node(
        attribute(5, proto["t"]),
        attribute(10, proto["ts1"], proto["ts2"]),
        attribute(6, graph(tensors["g"])),
        attribute(11, graph(), graph(tensors["gs"])),
        attribute(22, sparse_attribute),
        attribute(23, sparse_attributes),
    )
    function = (
        content(1, "f")
        + content(11, attribute(5, proto["fa"]))
        + content(7, node(attribute(5, proto["fn"])))
    )
    training = content(1, graph(tensors["ti"])) + content(2, graph(tensors["ta"]))
    main = graph(tensors["init"], more=content(15, sparse_initializer) + content(1, attributes))
    return (
        model(main, more=content(20, training) + content(25, function)),
        tuple(tensors.values()),
    )


def nested_graphs(depth: int) -> bytes:
    """A model whose messages are nested `depth` deep, not counting the ModelProto."""
    message = b""
    for level in range(depth, 1, -1):
        # Graphs are at depths 1, 4, 7 ..., nodes at 2, 5, 8 ..., attributes at 3, 6, 9 ...
        field_number = {1: 6, 2: 1, 0: 5}[level % 3]
        message = content(field_number, message)
    return number(1, 10) + content(7, message)


# Archives

W_DATA = struct.pack("<6f", 1, -2, 0.5, 4, -0.25, 3)
W = Tensor("w", FLOAT, (2, 3), W_DATA)
V = Tensor("v", INT4, (5,), b"\x21\x43\x05")
B = Tensor("b", BOOL, (3,), b"\0\1\1")
LABELS = Entry(b"assets/labels.txt", b"cat\ndog\n")


def plus(by: int) -> Callable[[int], int]:
    """A function that adds `by` to the value of a field."""
    return lambda value: value + by


def archive(*tensors: Tensor, assets: tuple[Entry, ...] = (), proto: bytes | None = None) -> Image:
    """An archive of tensors, assets and the model `proto`, by default a model with the tensors."""
    data = model(graph(*tensors)) if proto is None else proto
    return Image([*(it.entry for it in tensors), *assets, Entry(MODEL_PROTO, data)])


def with_models(
    entries: Iterable[Tensor | Entry], default: bytes, further: Mapping[str, bytes]
) -> Image:
    """An archive of these tensors and assets, further models by id, and the default model."""
    return Image(
        [
            *(it.entry if isinstance(it, Tensor) else it for it in entries),
            *(Entry(MODEL_PROTO + b"_" + it.encode(), proto) for it, proto in further.items()),
            Entry(MODEL_PROTO, default),
        ]
    )


def plain() -> Image:
    """An archive with two tensors and an asset."""
    return archive(W, V, assets=(LABELS,))


def changed(index: int, **changes: object) -> Image:
    """The image of `plain` with entry `index` changed: 0 `w`, 1 `v`, 2 the asset, 3 the model."""
    image = plain()
    image.entries[index] = replace(image.entries[index], **changes)  # type: ignore[arg-type]
    return image


def image_with(**changes: object) -> Image:
    """The image of `plain` with these attributes replaced."""
    return replace(plain(), **changes)  # type: ignore[arg-type]


def of_proto(proto: bytes, *tensors: Tensor) -> Image:
    """An archive with the entries of these tensors and this model."""
    return archive(*tensors, proto=proto)


def to_bytes(image: Image) -> bytes:
    """The bytes of a small file."""
    data = bytearray()
    for offset, piece in image.pieces():
        if piece:
            data[len(data) :] = bytes(max(0, offset + len(piece) - len(data)))
            data[offset : offset + len(piece)] = piece
    return bytes(data)


EMPTY_ZIP = v.pack(v.END_RECORD, {**dict.fromkeys(v.END_RECORD, 0), "signature": b"PK\5\6"}, {})
TIMESTAMP = extra_field(0x5455, b"\1" + bytes(4))
SIGNING_BLOCK = struct.pack("<QQI4xQ16s", 36, 12, 0x7109871A, 36, b"APK Sig Block 42")


def alignment_extra(alignment: int, padding: int) -> bytes:
    """An alignment field with `padding` bytes of padding."""
    return extra_field(0xD935, struct.pack("<H", alignment) + bytes(padding))


def more_entries(count: int) -> Image:
    """An archive of a tensor, empty assets and the model, `count` entries in all."""
    assets = tuple(Entry(b"assets/%06d" % index) for index in range(count - 2))
    return archive(W, assets=assets)


MESSAGES = 4_194_304  # the largest number, of all models together
BIG = Tensor("big", UINT8, (v.SATURATED_32,), Zeros(v.SATURATED_32))
# Constants: computing them would read 4 GiB of zeros.
BIG_CRC32 = 0  # as for empty data: the CRC-32 of zeros repeats every 0xFFFFFFFF bytes
BIG_SHA256 = "318eea1453f3a536e42d9637db593982c5c297220b2019bd4b7ad08e88d91e4b"


def sparse(**changes: object) -> Image:
    """An archive that needs Zip64 for a size, for offsets and for the directory.

    Entries: 0 `big`, 1 `w`, 2 the model. `changes` sets attributes of the image. An attribute that
    the image does not have is set in the entry `w`.
    """
    image = archive(BIG, W)
    image.entries[0].crc = BIG_CRC32
    for name, value in changes.items():
        setattr(image if hasattr(image, name) else image.entries[1], name, value)
    return image


def sparse_big(**changes: object) -> Image:
    """The archive of `sparse` with changes of the entry `big`."""
    image = sparse()
    for name, value in changes.items():
        setattr(image.entries[0], name, value)
    return image


# Vectors


def accepted(
    heading: str,
    about: str,
    source: Source | Callable[[], Source],
    *tensors: Tensor,
    large: bool = False,
    further: Mapping[str, tuple[Tensor, ...]] | None = None,
) -> Vector:
    """A vector of a file that conforms; `heading` is as in `refused`."""
    name, rules, attack = _split(heading)
    return Vector(name, about, rules, True, source, tensors, attack, large, None, further or {})


def refused(
    heading: str,
    about: str,
    source: Source | Callable[[], Source],
    *,
    large: bool = False,
    stage: str | None = None,
) -> Vector:
    """A vector of a file that breaks a rule.

    Args:
        heading: Name, rules and class of attack, as in `name: ZIP-5 ZIP-16 (stacked)`; the class
            may be missing.
        about: Description in one sentence.
        source: The file, or a function that makes it if it is large.
        large: True if the file is larger than 1 MiB.
        stage: Stage at which a reader can refuse the file; None for the stage of the first rule.
    """
    name, rules, attack = _split(heading)
    return Vector(name, about, rules, False, source, (), attack, large, stage)


def _split(heading: str) -> tuple[str, tuple[str, ...], str | None]:
    """Name, rules and class of attack of a heading."""
    parts = re.fullmatch(r"(\S+): ([A-Z0-9-]+(?: [A-Z0-9-]+)*)(?: \(([a-z0-9-]+)\))?", heading)
    if parts is None:
        raise ValueError(f"expected a heading as in 'name: ZIP-1 ZIP-2 (class)', found {heading!r}")
    return parts[1], tuple(parts[2].split()), parts[3]
