"""Makes the models of run.py, and writes the models in several formats.

The files of a group hold the same tensors: square float32 matrices of one width, named
`layer.0/weight`, `layer.1/weight` and so on. All tensors repeat one block of random numbers; only
their first elements differ. In a sparse archive all tensors are zeros. The tensors are the
initializers of a model. The model has one matrix product, or one for each tensor if the group is a
chain; a group may have long lists instead (see lists.py).

Functions import their packages themselves: the time of a whole process includes its imports, and a
process that measures another library must not import onnxarchive.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

ITEM_NBYTES: Final = 4
MIN_COUNT: Final = 8  # least number of tensors after scaling, unless the group has fewer
MIN_WIDTH: Final = 4
BLOCK_NBYTES: Final = 4 << 20
PIECE_NBYTES: Final = 8 << 20
PAGE_NBYTES: Final = 4096
PAGED_NBYTES: Final = 1 << 20  # least size of an external tensor that is aligned to pages


class Group(NamedTuple):
    """The tensors of a model.

    Attributes:
        count: Number of tensors.
        width: Rows and columns of each tensor.
        is_chain: True if the model multiplies by all tensors, one after the other.
        is_sparse: True if the tensors are holes in the file.
        lists: What is long in the model, by name in lists.py; empty for a model of products.
        length: Number of values in these lists.
    """

    count: int  # type: ignore[assignment]  # tuples have a method of this name
    width: int
    is_chain: bool = False
    is_sparse: bool = False
    lists: str = ""
    length: int = 0

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of each tensor."""
        return self.width**2 * ITEM_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.count * self.tensor_nbytes

    def scaled(self, scale: float) -> Group:
        """Scales the bytes of the group: fewer tensors, or smaller tensors if there are few.

        A sparse group takes no room on the disk and stays as it is.
        """
        if self.is_sparse:
            return self
        count = max(round(self.count * scale), min(self.count, MIN_COUNT))
        width = int((self.nbytes * scale / count / ITEM_NBYTES) ** 0.5)
        if count > MIN_COUNT:
            width = self.width
        length = max(round(self.length * scale), min(self.length, 1))
        return self._replace(count=count, width=max(width, MIN_WIDTH), length=length)


# Sizes in the cases about growth: numbers of tensors (up to an archive's limit), and bytes.
COUNTS: Final = (10, 100, 1_000, 10_000, 100_000, 262_143)
SIZES: Final = (10**7, 10**8, 10**9, 10**10, 10**11)
SIZED_COUNT: Final = 100  # number of tensors in the group of each size

GROUPS: Final[Mapping[str, Group]] = {
    "warm": Group(3, 32),  # files to warm up with before the clock starts
    "large": Group(1000, 806),  # 2.6 GB
    "light": Group(1000, 81),  # 26 MB
    "medium": Group(3000, 128),  # 64 KiB each
    "small": Group(1000, 32),  # 4 KiB each
    "many": Group(60_000, 4),  # 64 bytes each
    "single": Group(743, 806),  # 1.8 GiB: just fits into a single .onnx
    "chain": Group(500, 806, is_chain=True),  # 1.3 GB
    "weights": Group(8, 4096, is_chain=True),  # 512 MiB
    "tuned": Group(16, 2048, is_chain=True),  # 268 MB
    "real": Group(80, 8192, is_chain=True),  # 20 GiB
    "near": Group(1000, 164, is_sparse=True),  # 0.1 GiB
    "far": Group(1000, 5129, is_sparse=True),  # 98 GiB; nearly all offsets need 64 bits
    "forest": Group(3, 32, lists="forest", length=700_000),  # a model of 30 MB
    "svm": Group(3, 32, lists="svm", length=3_000_000),
    "labels": Group(3, 32, lists="labels", length=1_000_000),
    "nodes": Group(3, 32, lists="nodes", length=100_000),
    "functions": Group(3, 32, lists="functions", length=10_000),
    "constants": Group(3, 32, lists="constants", length=8),  # 128 MiB
    **{f"count-{count}": Group(count, 4) for count in COUNTS},
    **{
        f"size-{size}": Group(
            SIZED_COUNT, int((size / SIZED_COUNT / ITEM_NBYTES) ** 0.5), is_sparse=True
        )
        for size in SIZES
    },
}

ADDRESS: Final = "address"  # file with the URL of the running server

FILES: Final[Mapping[str, tuple[str, ...]]] = {
    "archive": ("model.onnxa",),
    "outside": ("outside.onnxa",),  # with tensors of attributes outside the model, too
    "external": ("external/model.onnx", "external/weights.data"),
    "single": ("single.onnx",),
    "safetensors": ("tensors.safetensors",),
    "pickled": ("tensors.pt",),
    "tuned": ("tuned.onnxa",),  # with another last tensor
    "overlay": ("overlay.onnxa",),  # of "tuned" over "archive", which are made before
}
# Packages needed to make files of a kind, in addition to onnx and this library.
MADE_WITH: Final[Mapping[str, str]] = {
    "safetensors": "safetensors",
    "pickled": "torch",
    "overlay": "onnxruntime",
}


class Place(NamedTuple):
    """The files of a group.

    Attributes:
        folder: The directory of all groups.
        name: The group's name.
        group: The group.
    """

    folder: Path
    name: str
    group: Group

    @property
    def output(self) -> Path:
        """The directory for the output of a step; removed after each step."""
        return self.folder / f"{self.name}-output"

    @property
    def archive(self) -> Path:
        """The archive."""
        return self.file("archive")

    @property
    def url(self) -> str:
        """The URL of the archive on the server."""
        relative = self.archive.relative_to(self.folder).as_posix()
        return f"{(self.folder / ADDRESS).read_text()}/{relative}"

    def file(self, kind: str) -> Path:
        """The main file of this kind."""
        return self.files(kind)[0]

    def files(self, kind: str) -> list[Path]:
        """All files of this kind."""
        return [self.folder / self.name / name for name in FILES[kind]]

    def names(self) -> list[str]:
        """The names of the tensors."""
        return [f"layer.{index}/weight" for index in range(self.group.count)]

    def arrays(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yields the names and arrays of the tensors; makes each array on demand."""
        import numpy as np

        shape = (self.group.width, self.group.width)
        count = min(BLOCK_NBYTES // ITEM_NBYTES, self.group.width**2)
        block = np.random.default_rng(seed=0).standard_normal(count, np.float32)
        block /= np.float32(self.group.width**0.5)
        tiled = np.resize(block, shape)
        for index, name in enumerate(self.names()):
            array = tiled if self.group.count == 1 else tiled.copy()
            array[0, 0] = index / self.group.count
            yield name, array

    def model(self) -> onnx.ModelProto:
        """The model with its tensors in memory."""
        from onnx import TensorProto

        model = self.graph()
        for name, array in self.arrays():
            model.graph.initializer.append(
                TensorProto(
                    name=name,
                    data_type=TensorProto.FLOAT,
                    dims=array.shape,
                    raw_data=array.tobytes(),
                )
            )
        return model

    def graph(self) -> onnx.ModelProto:
        """The model without its tensors."""
        from onnx import TensorProto, helper

        if self.group.lists:
            return self._graph_of_lists()
        names = self.names()
        shape = [1, self.group.width]
        if self.group.is_chain:
            operator = [("MatMul", [f"x{index}", name]) for index, name in enumerate(names)]
        else:
            operator = [("MatMul", ["x0", names[0]])]
        nodes = [
            helper.make_node(op_type, inputs, [f"x{index + 1}"])
            for index, (op_type, inputs) in enumerate(operator)
        ]
        graph = helper.make_graph(
            nodes,
            "measured",
            [helper.make_tensor_value_info("x0", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(f"x{len(nodes)}", TensorProto.FLOAT, shape)],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _graph_of_lists(self) -> onnx.ModelProto:
        from onnx import TensorProto, helper

        from tools.bench import lists

        nodes, functions = lists.MAKERS[self.group.lists](self.group.length)
        graph = helper.make_graph(
            nodes,
            "measured",
            [helper.make_tensor_value_info("x0", TensorProto.FLOAT, [1, "width"])],
            [helper.make_tensor_value_info(nodes[-1].output[-1], TensorProto.FLOAT, None)],
        )
        opsets = {"": 17, lists.CLASSICAL: 3}
        if functions:
            opsets[lists.LOCAL] = 1
        return helper.make_model(
            graph,
            functions=functions,
            opset_imports=[helper.make_opsetid(*opset) for opset in opsets.items()],
            ir_version=8,
        )

    def external_model(self, location: str | None) -> tuple[onnx.ModelProto, list[int]]:
        """The model with external tensors in the file `location`.

        If `location` is None, the location of each tensor is its key.

        Returns:
            The model, and the offset of each tensor in the file (of no use without `location`).
        """
        from onnx import TensorProto

        model = self.graph()
        nbytes = self.group.tensor_nbytes
        shape = (self.group.width, self.group.width)
        offset, offsets = 0, []
        for name in self.names():
            tensor = TensorProto(
                name=name,
                data_type=TensorProto.FLOAT,
                dims=shape,
                data_location=TensorProto.EXTERNAL,
            )
            if location is None:
                tensor.external_data.add(key="location", value=key_of(name))
            else:
                offset += -offset % (PAGE_NBYTES if nbytes >= PAGED_NBYTES else 1)
                for key, value in (("location", location), ("offset", offset), ("length", nbytes)):
                    tensor.external_data.add(key=key, value=str(value))
            model.graph.initializer.append(tensor)
            offsets.append(offset)
            offset += nbytes
        return model, offsets


def key_of(name: str) -> str:
    """The key that this library gives to a tensor of this name."""
    return name.replace(".", "_").replace("/", "_")


def places(folder: Path, scale: float) -> dict[str, Place]:
    """The place of each group in a directory; all but "warm" are scaled (`Group.scaled`)."""
    return {
        name: Place(folder, name, group if name == "warm" else group.scaled(scale))
        for name, group in GROUPS.items()
    }


def make(place: Place, kinds: Sequence[str]) -> None:
    """Writes the files of these kinds, in the order of `FILES`."""
    for kind in sorted(kinds, key=list(FILES).index):
        place.file(kind).parent.mkdir(parents=True, exist_ok=True)
        if kind == "archive" and place.group.is_sparse:
            _make_sparse_archive(place)
        else:
            _MAKERS[kind](place)


def _make_archive(place: Place) -> None:
    import onnxarchive

    with onnxarchive.Writer(place.archive, size_threshold=0) as writer:
        for name, array in place.arrays():
            writer.add(name, array)
        writer.finish(place.graph())


def _make_tuned(place: Place) -> None:
    import onnxarchive

    last = place.names()[-1]
    with onnxarchive.Writer(place.file("tuned"), size_threshold=0) as writer:
        for name, array in place.arrays():
            writer.add(name, -array if name == last else array)
        writer.finish(place.graph())


def _make_overlay(place: Place) -> None:
    from tools.recipes import overlay

    base, tuned, target = (str(place.file(kind)) for kind in ("archive", "tuned", "overlay"))
    overlay.make(base, tuned, target)


def _make_sparse_archive(place: Place) -> None:
    """Writes an archive of tensors of zeros, which are holes in the file."""
    from onnxarchive.files.data import crc32 as checksum
    from onnxarchive.model.keys import MODEL_PROTO
    from onnxarchive.zipformat import layout

    nbytes = place.group.tensor_nbytes
    zeros = bytes(min(nbytes, PIECE_NBYTES))
    crc32 = 0
    for start in range(0, nbytes, PIECE_NBYTES):
        crc32 = checksum(zeros[: nbytes - start], crc32)
    model, _ = place.external_model(None)
    serialized = model.SerializeToString()
    placed = []
    offset = 0
    with open(place.archive, "wb") as file:
        for name in place.names():
            placement = layout.EntryLayout(key_of(name).encode(), nbytes, crc32, offset)
            file.seek(offset)
            file.write(placement.pack()[0])
            placed.append(placement)
            offset = placement.end
        file.seek(offset)
        crc32 = checksum(serialized)
        placement = layout.EntryLayout(MODEL_PROTO.encode(), len(serialized), crc32, offset)
        placed.append(placement)
        directory = b"".join(it.pack()[1] for it in placed)
        end = layout.end_of_archive(len(placed), len(directory), placement.end)
        file.write(placement.pack()[0] + serialized + directory + end)


def _make_external(place: Place) -> None:
    import onnx

    path, weights = place.files("external")
    model, offsets = place.external_model(weights.name)
    onnx.save_model(model, path)
    with open(weights, "wb") as file:
        for offset, (_, array) in zip(offsets, place.arrays(), strict=True):
            file.seek(offset)
            file.write(array.data)


def _make_single(place: Place) -> None:
    import onnx

    onnx.save_model(place.model(), place.file("single"))


def _make_outside(place: Place) -> None:
    import onnxarchive

    onnxarchive.save(place.model(), place.file("outside"), convert_attribute=True)


def _make_safetensors(place: Place) -> None:
    numpy: Any = importlib.import_module("safetensors.numpy")
    numpy.save_file(dict(place.arrays()), place.file("safetensors"))


def _make_pickled(place: Place) -> None:
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in place.arrays()}
    torch.save(tensors, place.file("pickled"))


_MAKERS: Final = {
    "archive": _make_archive,
    "outside": _make_outside,
    "external": _make_external,
    "single": _make_single,
    "safetensors": _make_safetensors,
    "pickled": _make_pickled,
    "tuned": _make_tuned,
    "overlay": _make_overlay,
}


def main(argv: Sequence[str]) -> int:
    """Makes the files that the JSON argument names."""
    import json

    request = json.loads(argv[0])
    make(places(Path(request["folder"]), request["scale"])[request["group"]], request["kinds"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
