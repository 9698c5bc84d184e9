"""The vectors of archives with several models, and of archives of later versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conformance.make.parts import (
    FLOAT,
    LABELS,
    MODEL_PROTO,
    UINT8,
    W_DATA,
    Tensor,
    V,
    Vector,
    W,
    accepted,
    alignment_extra,
    archive,
    attribute,
    graph,
    model,
    node,
    refused,
    with_models,
)
from conformance.make.zips import Entry, Image, content, number

OF_W = model(graph(W))
NO_TENSOR = model(graph())
OTHER_NAME = replace(W, name="shared")


def several_models() -> Iterator[Vector]:
    """The vectors of archives with several models, and of archives of later versions."""
    yield from _conforming()
    yield from _bad_names()
    yield from _bad_places()
    yield from _bad_contents()
    yield from _bad_tensors()


def _conforming() -> Iterator[Vector]:
    yield accepted(
        "models-share-a-tensor: MODEL-4 DATA-2 DATA-3 DATA-8 VERSION-1",
        "Two models share a tensor under two names, and each model has another tensor; the archive "
        "also has an asset.",
        with_models(
            (W, Tensor("d"), V, LABELS),
            model(graph(W, Tensor("d"))),
            {"decoder": model(graph(V, OTHER_NAME))},
        ),
        W,
        Tensor("d"),
        further={"decoder": (V, OTHER_NAME)},
    )
    yield accepted(
        "models-default-names-nothing: DATA-2",
        "All external tensors are in the further model, none in the default model.",
        with_models((W, V), NO_TENSOR, {"a": model(graph(W, V))}),
        further={"a": (W, V)},
    )
    yield accepted(
        "models-alone: MODEL-4 DATA-2",
        "Three models without external tensors.",
        with_models((), NO_TENSOR, {"a": NO_TENSOR, "b": NO_TENSOR}),
    )
    ids = ("a", "a0", "a_", "a_b", "aa", "b", "x" * 64)
    yield accepted(
        "models-ids: MODEL-4 VERSION-1",
        "Model ids: shortest, longest, with digits and underscores, in the order of bytes.",
        with_models((W,), OF_W, dict.fromkeys(ids, OF_W)),
        W,
        further=dict.fromkeys(ids, (W,)),
    )
    in_attribute = model(graph(more=content(1, node(attribute(5, W.proto)))))
    yield accepted(
        "models-other-place: DATA-8",
        "An initializer of one model shares an entry with a tensor in an attribute of the other.",
        with_models((W,), OF_W, {"a": in_attribute}),
        W,
        further={"a": (W,)},
    )
    of_no_elements = Tensor("none", FLOAT, (0, 3), b"")
    yield accepted(
        "models-share-no-elements: DATA-8",
        "Two models share a tensor of no elements.",
        with_models(
            (of_no_elements,), model(graph(of_no_elements)), {"a": model(graph(of_no_elements))}
        ),
        of_no_elements,
        further={"a": (of_no_elements,)},
    )
    yield accepted(
        "models-pairs-differ: DATA-5 DATA-8",
        "Two models give different, correct pairs of external_data for one tensor.",
        with_models(
            (W,),
            OF_W,
            {
                "a": model(
                    graph(replace(W, pairs=(("offset", "0"), ("location", "w"), ("length", "24"))))
                )
            },
        ),
        W,
        further={"a": (W,)},
    )


def _named(name: bytes) -> Image:
    """An archive with an entry of this name before the model."""
    image = archive(W)
    image.entries.insert(1, Entry(name, NO_TENSOR))
    return image


def _bad_names() -> Iterator[Vector]:
    for name, identifier in (
        ("empty", b""),
        ("capital", b"Decoder"),
        ("capital-inside", b"deCoder"),
        ("digit-first", b"2"),
        ("underscore-first", b"_a"),
        ("hyphen", b"decoder-2"),
        ("dot", b"a.onnx"),
        ("65-bytes", b"x" * 65),
        ("newline", b"a\n"),
        ("blank", b" a"),
        ("folder", b"a/b"),
        ("letter-beyond-ascii", "é".encode()),
    ):
        yield refused(
            f"model-id-{name}: MODEL-4 (model-id)",
            f"A further model with the id {identifier.decode()!r}.",
            _named(MODEL_PROTO + b"_" + identifier),
        )
    for name, entry_name in (
        ("word", b"__INDEX"),
        ("letter", b"__MODEL_PROTOS"),
        ("small-letters", b"__model_proto_a"),
        ("underscores", b"__"),
        ("folder", b"__later/a"),
        ("beyond-ascii", "__größe".encode()),
    ):
        yield refused(
            f"later-version-{name}: VERSION-1 (later-version)",
            f"An entry {entry_name.decode()!r}, which a later version may define.",
            _named(entry_name),
        )
    yield refused(
        "later-version-tensor: VERSION-1 (later-version)",
        "A tensor whose key begins with two underscores.",
        archive(Tensor("__w")),
    )


def _bad_places() -> Iterator[Vector]:
    def of_order(*suffixes: str) -> Image:
        """An archive of models with these suffixes, in this order."""
        return Image([W.entry, *(Entry(MODEL_PROTO + it.encode(), OF_W) for it in suffixes)])

    yield refused(
        "models-out-of-order: MODEL-4 (model-order)",
        "Further models in descending order.",
        of_order("_b", "_a", ""),
    )
    yield refused(
        "models-in-order-without-underscores: MODEL-4 (model-order)",
        "The id 'ab' comes before 'a_', although the byte of '_' is less than the byte of 'b'.",
        of_order("_ab", "_a_", ""),
    )
    yield refused(
        "models-after-the-default: MODEL-1 MODEL-4 (model-not-last)",
        "A further model is the last entry.",
        of_order("", "_a"),
    )
    yield refused(
        "models-without-a-default: MODEL-1 (model-missing)",
        "A further model without a default model.",
        of_order("_a"),
    )
    yield refused(
        "models-twice: NAME-2 MODEL-4 (duplicate)",
        "Two further models with the same id.",
        of_order("_a", "_a", ""),
    )
    yield refused(
        "models-before-an-asset: MODEL-4 (model-order)",
        "An asset between a further model and the default model.",
        Image([W.entry, Entry(MODEL_PROTO + b"_a", OF_W), LABELS, archive(W).entries[-1]]),
    )
    yield refused(
        "models-before-a-tensor: MODEL-4 (model-order)",
        "A further model before the tensors.",
        Image([Entry(MODEL_PROTO + b"_a", OF_W), W.entry, archive(W).entries[-1]]),
    )


def _bad_contents() -> Iterator[Vector]:
    def further(data: bytes, **attributes: object) -> Image:
        """An archive whose further model has these Entry attributes."""
        image = with_models((W,), OF_W, {"a": data})
        image.entries[1] = replace(image.entries[1], **attributes)  # type: ignore[arg-type]
        return image

    for name, about, data in (
        ("empty", "of no bytes", b""),
        ("cut", "that ends within a field", OF_W[:-1]),
        ("no-graph", "without a graph", number(1, 10)),
        ("no-ir-version", "without ir_version", content(7, graph(W))),
        ("two-models", "of two ModelProtos", OF_W * 2),
        ("zip", "that begins with the signature of an end record", b"PK\5\6" + b"\1" * 18),
    ):
        yield refused(
            f"further-model-{name}: MODEL-3 (proto-corrupt)",
            f"A further model {about}.",
            further(data),
        )
    yield refused(
        "further-model-crc: ZIP-15 (crc)",
        "The CRC-32 of a further model is wrong.",
        further(OF_W, crc=1),
        stage="open",
    )
    yield refused(
        "further-model-local-name: ZIP-7 (lfh-name)",
        "The local header of a further model has a wrong name.",
        further(OF_W, local_name=MODEL_PROTO + b"_b"),
        stage="open",
    )
    yield refused(
        "further-model-local-date: ZIP-7 (size-mismatch)",
        "The local header of a further model has a wrong date.",
        further(OF_W, local={"date": 0x22}),
        stage="open",
    )
    yield refused(
        "further-model-padding: ALIGN-3 (padding-nonzero)",
        "The padding of a further model is not zero.",
        _with_padding(with_models((W,), OF_W, {"a": OF_W})),
        stage="open",
    )


def _with_padding(image: Image) -> Image:
    """Sets the last padding byte of the second entry to 1; returns the image."""
    placed = image.place()[1]
    nbytes = len(placed.local_header) - 30 - len(placed.entry.name) - 6
    extra = alignment_extra(64, nbytes)[:-1] + b"\1"
    image.entries[1] = replace(image.entries[1], local_extra=extra)
    return image


def _bad_tensors() -> Iterator[Vector]:
    def with_further(*tensors: Tensor) -> Image:
        """An archive of W and V; a further model has `tensors`."""
        return with_models((W, V), OF_W, {"a": model(graph(*tensors))})

    yield refused(
        "models-unreferenced: DATA-2 (unreferenced)",
        "An entry is the location of no tensor of any model.",
        with_further(W),
    )
    yield refused(
        "models-dangling: DATA-1 (dangling)",
        "A location in a further model is no key of the archive.",
        with_further(V, Tensor("x")),
    )
    yield refused(
        "models-shared-key: DATA-3 (shared-key)",
        "Two tensors of a further model have the same location.",
        with_further(V, replace(V, name="v2")),
    )
    yield refused(
        "models-location-model: DATA-1 (dangling)",
        "A location in a further model is the name of the same further model.",
        with_further(V, replace(W, name="x", pairs=(("location", "__MODEL_PROTO_a"),))),
    )
    yield refused(
        "models-location-default-model: DATA-1 (dangling)",
        "A location in a further model is the name of the default model.",
        with_further(V, replace(W, name="x", pairs=(("location", "__MODEL_PROTO"),))),
    )
    for name, about, tensor in (
        ("dims-order", "the dims [3, 2] in place of [2, 3]", replace(W, dims=(3, 2))),
        ("dims-rank", "the dims [6] in place of [2, 3]", replace(W, dims=(6,))),
        ("dims-one", "the dims [2, 3, 1] in place of [2, 3]", replace(W, dims=(2, 3, 1))),
        ("data-type", "the type INT32 in place of FLOAT", replace(W, data_type=6)),
        (
            "data-type-and-dims",
            "the type UINT8 and the dims [24]",
            replace(W, data_type=UINT8, dims=(24,)),
        ),
    ):
        yield refused(
            f"models-differ-in-{name}: DATA-8 (shared-key-differs)",
            f"Two models share an entry; the tensor of the further model has {about}.",
            with_further(V, tensor),
        )
    yield refused(
        "models-differ-in-size: DATA-8 TENSOR-3 (size-lie)",
        "Two models share an entry that is too short for the tensor of the further model.",
        with_further(V, replace(W, dims=(2, 4))),
    )
    yield refused(
        "models-further-length: DATA-5 (ext-numbers)",
        "Only the further model states a length, and it is wrong.",
        with_further(V, replace(W, pairs=(("location", "w"), ("length", "23")))),
    )
    location = ("location", "w")
    in_further: tuple[tuple[str, str, Tensor, str], ...] = (
        ("two-locations", "two pairs location", replace(W, pairs=(location,) * 2), "DATA-4"),
        (
            "other-pair",
            "a pair that no tensor may have",
            replace(W, pairs=(location, ("basepath", "/etc"))),
            "DATA-4",
        ),
        ("offset", "a wrong offset", replace(W, pairs=(location, ("offset", "4"))), "DATA-5"),
        ("two-sources", "raw_data, too", replace(W, more=content(9, W_DATA)), "DATA-7"),
        ("not-external", "pairs, but is not external", replace(W, is_external=False), "DATA-7"),
    )
    for name, about, tensor, rule in in_further:
        yield refused(
            f"models-further-{name}: {rule}",
            f"Two models share an entry; the tensor of the further model has {about}.",
            with_further(V, tensor),
        )
    of_further: tuple[tuple[str, str, Tensor, str], ...] = (
        ("data-type", "an invalid data type", replace(V, data_type=29), "TENSOR-1 (dtype)"),
        ("dims", "a negative dim", replace(V, dims=(-5,)), "TENSOR-2 (dims)"),
        ("size", "another size than its entry", replace(V, dims=(7,)), "TENSOR-3 (size-lie)"),
    )
    for name, about, tensor, rule in of_further:
        yield refused(
            f"models-further-{name}: {rule}",
            f"A tensor that only the further model has, with {about}.",
            with_further(W, tensor),
        )
    yield refused(
        "models-further-unused-bits: TENSOR-4 (dtype)",
        "A tensor that only the further model has, with an unused bit that is set.",
        with_models((W, replace(V, data=b"\x21\x43\x15")), OF_W, {"a": model(graph(W, V))}),
    )
    yield refused(
        "models-two-further-differ: DATA-8 (shared-key-differs)",
        "Two further models share an entry and give it different dims; the default model has no "
        "tensor.",
        with_models((W,), NO_TENSOR, {"a": OF_W, "b": model(graph(replace(W, dims=(3, 2))))}),
    )
    yield refused(
        "models-further-checksum: DATA-6 (ext-keys)",
        "Only the further model states a checksum, and it is wrong.",
        with_further(V, replace(W, pairs=(("location", "w"), ("checksum", "0" * 40)))),
    )
