"""Archives by name, and a list of their sizes and SHA-256: `format/archive_digests.txt`.

The list proves that a change to the package changes no byte of an archive. Two ways to write each
archive must give the bytes of the list: with one thread to a stream without seek, and with two
threads to a file. `Writer`, edits and transforms write to files alone.

After a new case, or a change to the models and sources of the cases, write the list anew with code
whose bytes are right, before any other change:

    python tests/helpers/archive_digests.py

It needs onnx_ir, zipfile-deflate64, the newest onnx, and some minutes. In the diff, no line of an
old case may change.

Cases must give the same bytes with every Python, onnx and protobuf. So models are made field by
field, files byte by byte, and nothing asks a clock or a random number without a seed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from digest_models import MODELS, decoder_of, encoder_of, floats, model_named
from digest_sources import (
    SOURCES,
    apart,
    archive_of_three,
    assets_in,
    refer,
    serialized,
    write_files,
)
from models import NEW_TYPES, NUMBERS, model_of, raw_tensor
from onnx import ModelProto, TensorProto
from sparse_files import write_data
from versions import HAS_PYTHON_PARSER

import onnxarchive

LIST: Final = Path(__file__).parents[1] / "format" / "archive_digests.txt"
_TORCH_ZIPS: Final = Path(__file__).parents[1] / "data" / "torch-zip"
_GIB: Final = 1 << 30
_WITH_NANS: Final = ("100 tensors", "5,000 tensors")

Options: TypeAlias = dict[str, Any]
# Writes an archive to the target with a number of threads; its sources go to the folder.
Write: TypeAlias = Callable[[Path, Any, int], object]


@dataclass(frozen=True, slots=True)
class Case:
    """An archive to write.

    Attributes:
        name: What is written, and how.
        write: Writes it.
        marker: The pytest marker of the case; empty for a quick case.
        is_file: True if only a path can be the target.
    """

    name: str
    write: Write
    marker: str = ""
    is_file: bool = False

    @property
    def missing(self) -> str:
        """Why the archive cannot be made here; empty if it can."""
        modules = {"Deflate64": "zipfile_deflate64", "onnx_ir": "onnx_ir"}
        for word, module in modules.items():
            if word in self.name and importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        types = [name for name in NEW_TYPES if name not in NUMBERS]
        if "types of 2 and 6 bits" in self.name and types:
            return f"onnx lacks the types {', '.join(types)}"
        has_nans = self.name.startswith("convert") and any(it in self.name for it in _WITH_NANS)
        if has_nans and HAS_PYTHON_PARSER:
            return "protobuf's Python parser makes all NaNs of float_data the same one"
        return ""


class _Digest:
    """A target that cannot seek; keeps the SHA-256 and the size of what is written to it."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._size = 0

    def write(self, data: Any, /) -> int:
        self._sha256.update(data)
        self._size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def __str__(self) -> str:
        return f"{self._sha256.hexdigest()} {self._size}"


def digests(case: Case, folder: Path) -> dict[str, str]:
    """The SHA-256 and the size of a case's archive, by the way in which it is written."""
    made: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what a conversion leaves out
        for jobs in () if case.is_file else (1, 2) if case.marker == "large" else (1,):
            stream = _Digest()
            case.write(folder, stream, jobs)
            made[f"to a stream, jobs={jobs}"] = str(stream)
        if case.marker != "large":  # would take gigabytes of disk
            case.write(folder, folder / "target.onnxa", 2)
            stream = _Digest()
            stream.write((folder / "target.onnxa").read_bytes())
            made["to a file, jobs=2"] = str(stream)
    return made


def read_list() -> dict[str, str]:
    """The SHA-256 and the size of each archive of the list, by the name of its case."""
    lines = (line.split(maxsplit=2) for line in LIST.read_text("utf-8").splitlines())
    return {name: f"{sha256} {size}" for sha256, size, name in lines}


def _write_list() -> None:
    lines = []
    for case in sorted(CASES, key=lambda case: case.name):
        if case.missing:
            raise SystemExit(f"{case.name}: {case.missing}")
        with tempfile.TemporaryDirectory() as folder:
            made = digests(case, Path(folder))
        if len({*made.values()}) != 1:
            raise SystemExit(f"{case.name}: expected the same bytes in each way, found {made}")
        sha256, size = next(iter(made.values())).split()
        lines.append(f"{sha256} {size:>10} {case.name}\n")
    LIST.write_text("".join(lines), "utf-8", newline="\n")


# Options


def _rows() -> Iterator[tuple[str, Options]]:
    """Rows of options; each value of an option meets each value of every other one in a row."""
    thresholds, alignments = (0, 1, 1024, 4096, 1 << 40), (64, 128, 4096, 32768)
    for t, a in product(range(5), range(4)):
        models, assets = (t + a) % 3, (t + 2 * a) % 3
        words = [f"threshold {thresholds[t]}", f"alignment {alignments[a]}"]
        words += ["attributes"] if (t + a) % 2 else []
        words += [f"{models + 1} models"] if models else []
        words += [("an asset", "assets")[assets - 1]] if assets else []
        yield (
            ", ".join(words),
            {
                "size_threshold": thresholds[t],
                "alignment": alignments[a],
                "convert_attribute": (t + a) % 2 == 1,
                "models": models,
                "assets": assets,
            },
        )


_ROWS: Final = [*_rows()]
_FIRST: Final = _ROWS[0]


def _assets(folder: Path, number: int) -> Mapping[str, bytes | Path]:
    return ({}, {"labels.txt": b"cat\ndog\n"}, assets_in(folder))[number]


def _save(model: str, row: Options) -> Write:
    def write(folder: Path, target: Any, jobs: int) -> None:
        main = model_named(model)
        further = {"decoder": decoder_of(main), "encoder": encoder_of(main)}
        models = dict([*further.items()][: row["models"]])
        options = row | {"models": models, "assets": _assets(folder, row["assets"])}
        onnxarchive.save(main, target, jobs=jobs, **options)

    return write


def _convert(source: str, model: str, row: Options, **more: Any) -> Write:
    def write(folder: Path, target: Any, jobs: int) -> None:
        main = model_named(model)
        further = [
            ("decoder", "a .onnx and pieces", decoder_of),
            ("encoder", "a deflated zip", encoder_of),
        ]
        models = {}
        for identifier, kind, of in further[: row["models"]]:
            (folder / identifier).mkdir(exist_ok=True)
            models[identifier] = SOURCES[kind](folder / identifier, of(main))
        options = row | {"models": models, "assets": _assets(folder, row["assets"])} | more
        onnxarchive.convert(SOURCES[source](folder, main), target, jobs=jobs, **options)

    return write


def _convert_torch(folder: Path, target: Any, jobs: int, *, name: str, threshold: int) -> None:
    onnxarchive.convert(_TORCH_ZIPS / name, target, size_threshold=threshold, jobs=jobs)


def _convert_set_bits(folder: Path, target: Any, jobs: int) -> None:
    """Converts packed tensors whose unused bits are not 0, which are cleared."""
    tensors = [raw_tensor(f"w{count}", TensorProto.INT4, (count,)) for count in (5, 4097)]
    files = apart(model_of(*tensors))
    files = {name: data[:-1] + b"\xf1" if "data" in name else data for name, data in files.items()}
    onnxarchive.convert(write_files(folder, files) / "m.onnx", target, size_threshold=0, jobs=jobs)


# Other ways to write


def _five() -> ModelProto:
    return model_of(*(floats(f"w{number}", 300 * number, number) for number in range(5)))


def _save_ir(folder: Path, target: Any, jobs: int, **options: Any) -> None:
    """Saves a model of onnx_ir with a lazy and an external tensor."""
    import onnx_ir as ir

    model = ir.from_proto(_five())
    array, shape = np.arange(700, dtype=np.float32), ir.Shape([700])
    (folder / "w").write_bytes(bytes(8) + array.tobytes())
    tensors = [
        ir.LazyTensor(lambda: ir.Tensor(array * 2), ir.DataType.FLOAT, shape, name="lazy"),
        ir.ExternalTensor(
            "w", 8, 2800, ir.DataType.FLOAT, shape=shape, name="external", base_dir=folder
        ),
        ir.Tensor(array[:3].astype(ml_dtypes.bfloat16), name="small"),
    ]
    for tensor in tensors:
        model.graph.register_initializer(ir.Value(name=tensor.name, const_value=tensor))
    onnxarchive.save(model, target, jobs=jobs, **options)


def _save_ir_archive(
    folder: Path, target: Any, jobs: int, *, is_alone: bool = False, **options: Any
) -> None:
    """Saves a model of onnx_ir from an archive of 3 models, with a tensor more; alone or not."""
    import onnx_ir as ir

    import onnxarchive.ir

    path = archive_of_three(folder, _five())
    model = onnxarchive.ir.load(path)
    tensor = ir.Tensor(np.arange(500, dtype=np.int16), name="added")
    model.graph.register_initializer(ir.Value(name="added", const_value=tensor))
    with onnxarchive.open(path) as archive:
        if not is_alone:
            others = {id: onnxarchive.load(path, model=id) for id in archive.models if id}
            options |= {"models": others, "assets": archive.assets, "convert_attribute": True}
        onnxarchive.save(model, target, jobs=jobs, **options)


def _write_tensors(folder: Path, target: Path, jobs: int, **options: Any) -> None:
    """Writes tensors and assets by `Writer`, then two models; one tensor is in neither."""
    model = _five()
    for tensor in model.graph.initializer[1:3]:
        tensor.ClearField("raw_data")
    model.graph.initializer[1].ClearField("data_type")
    model.graph.initializer[1].ClearField("dims")
    with onnxarchive.Writer(target, **options) as writer:
        writer.add("w1", np.frombuffer(floats("", 300, 1).raw_data, "<f4"))
        writer.add("unused", np.ones((3, 5), ml_dtypes.int4))
        for name, asset in assets_in(folder).items():
            writer.add_asset(name, asset)
        writer.add("w2", floats("other", 600, 2))
        writer.add("W2", np.zeros((0, 4), np.float64))
        writer.finish(model, {"decoder": decoder_of(_five())})


def _write_safetensors(folder: Path, target: Path, jobs: int, **options: Any) -> None:
    """Writes tensors of a safetensors file by `Writer`, in another order than the file's."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    types = {"F32": "FLOAT", "BF16": "BFLOAT16", "BOOL": "BOOL", "I64": "INT64"}
    for (dtype, name), count in product(types.items(), (0, 3, 1201)):
        content = raw_tensor("", NUMBERS[name], (count,)).raw_data
        offsets = [len(data), len(data) + len(content)]
        header[f"{dtype}.{count}"] = {"dtype": dtype, "shape": [count], "data_offsets": offsets}
        data += content
    text = json.dumps(dict(reversed(header.items()))).encode()
    path = folder / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    model = _five()
    del model.graph.initializer[1]
    with onnxarchive.Writer(target, **options) as writer:
        writer.add_from(path, {"BF16.3": "renamed", "F32.1201": "w1"})
        writer.add_from(path, ["I64.1201", "BOOL.1201", "F32.0", "BOOL.3"])
        writer.finish(model)


def _compact(folder: Path, target: Path, jobs: int, *, change: Callable[..., object]) -> None:
    """Compacts an archive of 3 models in an edit."""
    shutil.move(archive_of_three(folder, _five()), target)
    with onnxarchive.edit(target, compact=True) as edit:
        change(edit)


def _replace_model(edit: onnxarchive.Edit) -> None:
    edit.model = model_of(floats("new", 500, 5), *_five().graph.initializer[2:])


def _change_all(edit: onnxarchive.Edit) -> None:
    edit.model.graph.name = "renamed"
    edit.models["added"] = encoder_of(_five())
    edit.assets["new.txt"] = b"new"
    edit.tensors["w3"] = np.zeros(900, np.float32)


_CHANGES: Final[dict[str, Callable[[onnxarchive.Edit], object]]] = {
    "nothing": lambda edit: None,
    "metadata": lambda edit: edit.metadata.update(author="Ada"),
    "a model replaced": _replace_model,
    "a model removed": lambda edit: edit.models.pop("decoder"),
    "an asset removed": lambda edit: edit.assets.pop("labels.txt"),
    "all kinds": _change_all,
}


def _transform(folder: Path, target: Path, jobs: int, *, weights: Any) -> None:
    def rename(model: ModelProto) -> ModelProto:
        model.graph.name = "renamed"
        return model

    onnxarchive.transform(archive_of_three(folder, _five()), target, rename, weights=weights)


def _save_with_onnx(folder: Path, target: Path, jobs: int) -> None:
    onnx.save(model_named("every place"), target)


# Large files


def _convert_sparse(folder: Path, target: Any, jobs: int, *, parts: list[tuple[int, int]]) -> None:
    """Converts a model whose tensors are parts of a sparse file: offset and size of each."""
    end = max(map(sum, parts))
    write_data(folder / "data", end, dict.fromkeys((0, end // 2, end - 4), b"mark"))
    tensors = [
        TensorProto(name=f"w{number}", data_type=TensorProto.INT8, dims=[size])
        for number, (_, size) in enumerate(parts)
    ]
    for tensor, (offset, size) in zip(tensors, parts, strict=True):
        refer(tensor, location="data", offset=offset, length=size)
    model = serialized(model_of(*tensors, floats("small", 300)))
    source = write_files(folder, {"m.onnx": model}) / "m.onnx"
    onnxarchive.convert(source, target, jobs=jobs)


def _save_up_to(folder: Path, target: Any, jobs: int, *, offset: int) -> None:
    """Saves an asset that would end at an offset with the bytes of a signature; none may end so."""
    data_offset = 64
    path, end = folder / "asset", offset - data_offset
    write_data(path, end, {end - 4: b"mark"})
    onnxarchive.save(
        model_named("tiny"), target, assets={"a": path}, size_threshold=2000, jobs=jobs
    )


# Cases


# Of models that take long: the rows with which they are saved, with their markers.
_SOME: Final = (6, 11, 13)
_HEAVY: Final[dict[str, dict[int, str]]] = {
    "300 tensors": dict.fromkeys((0, *_SOME), ""),
    "1 MiB": dict.fromkeys((0, *_SOME), ""),
    "5,000 tensors": {0: "", **dict.fromkeys(_SOME, "sweep")},
    "8 MiB": {0: "", **dict.fromkeys(_SOME, "sweep")},
    "4, 16 and 32 MiB": dict.fromkeys((0, *_SOME), "sweep"),
    "65,533 tensors": {0: "large"},
    "65,534 tensors": {0: "large"},
    "70,000 tensors": {0: "large", 1: "large"},
}


def _saves() -> Iterator[Case]:
    every: dict[int, str] = dict.fromkeys(range(len(_ROWS)), "")
    for model in MODELS:
        for number, marker in _HEAVY.get(model, every).items():
            words, row = _ROWS[number]
            yield Case(f"save: {model}, {words}", _save(model, row), marker)
    changes: dict[str, Options] = {
        "": {},
        ", threshold 0": {"size_threshold": 0},
        ", alignment 4096": {"alignment": 4096},
    }
    of_the_archive: Options = {"alignment": 4096}
    for words, options in changes.items():
        yield Case(f"save: onnx_ir{words}", partial(_save_ir, **options))
        write = partial(_save_ir_archive, **of_the_archive | options)
        yield Case(f"save: onnx_ir from an archive{words}", write)
    threshold: Options = {"size_threshold": 2000}
    yield Case("save: onnx_ir, alone", partial(_save_ir, **threshold))
    write = partial(_save_ir_archive, is_alone=True, **threshold)
    yield Case("save: onnx_ir from an archive, alone", write)
    yield Case("onnx.save: every place", _save_with_onnx, is_file=True)
    for signature in (b"PK\5\6", b"PK\6\6", b"PK\6\7"):
        offset = int.from_bytes(signature, "little")
        write = partial(_save_up_to, offset=offset)
        yield Case(f"save: an entry up to offset {offset}", write, "large")


def _conversions() -> Iterator[Case]:
    slow = ("a bzip2 zip", "an LZMA zip")
    models = ("100 tensors", "types", "every place", "names")
    for count, (source, model) in enumerate(product(SOURCES, models)):
        for number, (words, row) in enumerate(_ROWS):
            turn = (number + 7 * count) % 20
            if turn % 4 == 0:  # so all rows are used for each source
                name, write = f"convert: {source}, {model}, {words}", _convert(source, model, row)
                is_quick = turn == 0 or (turn == 12 and model in ("100 tensors", "names"))
                is_quick &= source not in slow or model == "names"
                yield Case(name, write, "" if is_quick else "sweep")
    words, row = _FIRST
    for source, model in product(SOURCES, ("64 KiB", "1 MiB", "8 MiB", "5,000 tensors")):
        name, write = f"convert: {source}, {model}, {words}", _convert(source, model, row)
        yield Case(name, write, "" if model == "64 KiB" else "sweep")
    for source in ("a .onnx", "a .onnx and pieces", "an archive"):
        write = _convert(source, "70,000 tensors", row)
        yield Case(f"convert: {source}, 70,000 tensors, {words}", write, "large")
    for source in ("a directory", "a deflated zip", "a .onnx"):
        write = _convert(source, "names", _ROWS[10][1], other_files=True)
        yield Case(f"convert: {source}, names, with other files", write)
    yield Case("convert: unused bits", _convert_set_bits)
    forms = (".onnx", ".zip", ".deflated.zip", ".dir", ".dir/__MODEL_PROTO")
    for version, form, threshold in product(("1.4.0", "1.11.0"), forms, (0, 1024)):
        name = f"conv_torch{version}{form}"
        write = partial(_convert_torch, name=name, threshold=threshold)
        yield Case(f"convert: {name}, threshold {threshold}", write)
    for name, parts in {
        "a tensor over 4 GiB": [(0, 4 * _GIB + 100), (7, 5000)],
        "tensors over 4 GiB together": [
            *((offset, 3 * _GIB // 2 + offset) for offset in (0, 4096, 1)),
            (9, 2000),
        ],
    }.items():
        yield Case(f"convert: {name}", partial(_convert_sparse, parts=parts), "large")


def _files() -> Iterator[Case]:
    changes: dict[str, Options] = {
        "": {},
        ", threshold 0, alignment 4096": {"size_threshold": 0, "alignment": 4096},
    }
    for words, options in changes.items():
        yield Case(f"Writer{words}", partial(_write_tensors, **options), is_file=True)
        write = partial(_write_safetensors, **options)
        yield Case(f"Writer: safetensors{words}", write, is_file=True)
    for name, change in _CHANGES.items():
        yield Case(f"edit, compact: {name}", partial(_compact, change=change), is_file=True)
    for weights in ("hidden", "external", "loaded"):
        write = partial(_transform, weights=weights)
        yield Case(f"transform: {weights}", write, is_file=True)


CASES: Final = (*_saves(), *_conversions(), *_files())


if __name__ == "__main__":
    _write_list()
