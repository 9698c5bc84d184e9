"""The ways of run.py to do the same work: this library, its peers, and plain system calls.

A way is a function that takes a `Place`, the files of a group of tensors. A way imports the
libraries that it needs, prepares the work and returns the timed step. `whole` runs in a new process
whose imports are timed, so this module imports almost nothing.

Every step that writes files syncs them, as this library does.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from tools.bench.inputs import PIECE_NBYTES, Place, places

Step: TypeAlias = Callable[[], object]


def whole(way: str, arguments: Mapping[str, Any], folder: str, group: str, scale: float) -> None:
    """Runs a way and its step; prints the seconds of the step."""
    step: Step = globals()[way](places(Path(folder), scale)[group], **arguments)
    begun = time.perf_counter()
    try:
        _kept = step()
    finally:  # the step of `run_ls` raises SystemExit
        print(f"\n{time.perf_counter() - begun}", flush=True)


def _synced(place: Place, step: Step) -> Step:
    """Adds to a step a sync of the output files, and of their directory except on Windows."""

    def durable() -> object:
        result = step()
        directory = [] if os.name == "nt" else [place.output]
        for path in [*place.output.iterdir(), *directory]:
            descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)
        return result

    return durable


# Starting


def import_package(place: Place, *, package: str) -> Step:
    """Imports a package."""
    # `import_module` would add frames. At an unlucky depth, CPython 3.11 maps and unmaps a chunk of
    # its stack of frames at every call, which makes an import a tenth slower.
    return lambda: __import__(package)


def list_archive(place: Place, *, is_remote: bool = False) -> Step:
    """Runs `onnxarchive ls` on the archive, or on its URL."""
    from onnxarchive.cli import main

    source = place.url if is_remote else os.fspath(place.archive)
    return lambda: main(["ls", source])


def run_ls(place: Place) -> Step:
    """Runs `onnxarchive ls` on the archive and ends the process, as the installed command does."""
    from onnxarchive.cli import run

    sys.argv[1:] = ["ls", os.fspath(place.archive)]
    return run


# Opening, listing and mapping


def open_archive(place: Place) -> Step:
    """Opens the archive."""
    import onnxarchive

    return lambda: onnxarchive.open(place.archive)


def view_archive(place: Place) -> Step:
    """Opens the archive, makes a view of every tensor, and so checks the local headers."""
    import onnxarchive

    def step() -> object:
        with onnxarchive.open(place.archive) as archive:
            return [archive.tensors[name] for name in archive.tensors]

    return step


def use(place: Place, *, way: str, **options: Any) -> Step:
    """Opens in another way, keeps what it returns, and adds up the elements of every tensor."""
    import numpy as np

    opened: Step = globals()[way](place, **options)

    def step() -> object:
        held = opened()
        return held, [np.asarray(tensor).sum() for tensor in _tensors(held)]

    return step


def _tensors(held: Any) -> Iterable[Any]:
    """The tensors of what a step returned: an array or a tensor of PyTorch each."""
    if hasattr(held, "graph"):
        from onnx import numpy_helper

        return map(numpy_helper.to_array, held.graph.initializer)
    if isinstance(held, dict):
        return held.values()
    return held[1] if isinstance(held, tuple) else held  # type: ignore[no-any-return]


def verify(place: Place) -> Step:
    """Opens the archive and compares every CRC-32."""
    import onnxarchive

    def step() -> None:
        with onnxarchive.open(place.archive) as archive:
            archive.verify()

    return step


def check(place: Place) -> Step:
    """Checks the archive against every rule; reads all bytes."""
    import onnxarchive

    return lambda: onnxarchive.check(place.archive, full=True)


def parse_model(place: Place) -> Step:
    """Parses the model with its tensors from memory into a ModelProto."""
    import onnx

    serialized = place.model().SerializeToString()
    return lambda: onnx.ModelProto.FromString(serialized)


def open_safetensors(place: Place) -> Step:
    """Opens the safetensors file and lists its tensors."""
    safe_open = importlib.import_module("safetensors").safe_open

    def step() -> object:
        file = safe_open(place.file("safetensors"), framework="numpy")
        return file, file.keys()

    return step


def view_safetensors(place: Place, framework: str = "numpy") -> Step:
    """Opens the safetensors file and gets every tensor.

    Tensors are copies for numpy, and views for PyTorch (`"pt"`).
    """
    safe_open = importlib.import_module("safetensors").safe_open
    if framework == "pt":
        importlib.import_module("torch")

    def step() -> object:
        with safe_open(place.file("safetensors"), framework=framework) as file:
            return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118

    return step


def view_onnx_ir(place: Place) -> Step:
    """Loads the `.onnx` and makes an array over a memory map for every tensor."""
    import onnx_ir

    def step() -> tuple[object, list[Any]]:
        model = onnx_ir.load(place.file("external"))
        values: Iterable[Any] = model.graph.initializers.values()
        return model, [value.const_value.numpy() for value in values]

    return step


def load_torch(place: Place) -> Step:
    """Loads a PyTorch file through a memory map."""
    import torch

    return lambda: torch.load(place.file("pickled"), mmap=True, weights_only=True)


def load_onnx(place: Place, *, kind: str = "external") -> Step:
    """Loads the `.onnx` with its external data."""
    import onnx

    return lambda: onnx.load(place.file(kind))


def read_map(place: Place) -> Step:
    """Adds up the archive's bytes as 8-byte numbers, through a memory map."""
    import numpy as np

    def step() -> object:
        with open(place.archive, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers = np.frombuffer(mapped, np.uint64, len(mapped) // 8)
        piece = PIECE_NBYTES // 8
        return [np.add.reduce(numbers[it : it + piece]) for it in range(0, len(numbers), piece)]

    return step


# Saving models in memory


def save_archive(place: Place) -> Step:
    """Saves a ModelProto from memory."""
    import onnxarchive

    model = place.model()
    path = place.output / "model.onnxa"
    return lambda: onnxarchive.save(model, path, size_threshold=0)


def write_archive(place: Place) -> Step:
    """Writes an archive tensor by tensor; one array serves for all tensors."""
    import onnxarchive

    _, array = next(place.arrays())

    def step() -> None:
        with onnxarchive.Writer(place.output / "model.onnxa", size_threshold=0) as writer:
            for index, name in enumerate(place.names()):
                array[0, 0] = index
                writer.add(name, array)
            writer.finish(place.graph())

    return step


def write_raw(place: Place) -> Step:
    """Writes the bytes of all tensors to a new file with pwrite, at most 8 MiB at once."""
    arrays = [array.data.cast("B") for _, array in place.arrays()]

    def step() -> None:
        path = place.output / "raw"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        offset = 0
        for view in arrays:
            for start in range(0, len(view), PIECE_NBYTES):
                offset += os.pwrite(descriptor, view[start : start + PIECE_NBYTES], offset)
        os.close(descriptor)

    return _synced(place, step)


def save_onnx(place: Place) -> Step:
    """Saves a ModelProto from memory, with external data."""
    import onnx

    model = place.model()
    return _synced(place, lambda: _save_with_onnx(onnx, model, place))


def _save_with_onnx(onnx: Any, model: object, place: Place) -> None:
    onnx.save_model(
        model,
        place.output / "model.onnx",
        save_as_external_data=True,
        location="weights.data",
        size_threshold=0,
    )


def save_onnx_ir(place: Place) -> Step:
    """Saves a model of onnx_ir from memory, with external data."""
    import onnx_ir

    model = onnx_ir.from_proto(place.model())
    return _synced(place, lambda: _save_with_onnx_ir(onnx_ir, model, place))


def _save_with_onnx_ir(onnx_ir: Any, model: object, place: Place) -> None:
    path = place.output / "model.onnx"
    onnx_ir.save(model, path, external_data="weights.data", size_threshold_bytes=0)


def save_safetensors(place: Place) -> Step:
    """Saves numpy arrays."""
    save_file = importlib.import_module("safetensors.numpy").save_file
    tensors = dict(place.arrays())
    return _synced(place, lambda: save_file(tensors, place.output / "tensors.safetensors"))


def save_numpy(place: Place) -> Step:
    """Saves numpy arrays, uncompressed."""
    import numpy as np

    tensors: Mapping[str, Any] = dict(place.arrays())
    return _synced(place, lambda: np.savez(place.output / "tensors.npz", **tensors))


def save_torch(place: Place) -> Step:
    """Saves tensors that share the memory of numpy arrays."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in place.arrays()}
    return _synced(place, lambda: torch.save(tensors, place.output / "tensors.pt"))


# Converting files


def convert(place: Place, *, kind: str) -> Step:
    """Converts a `.onnx`."""
    import onnxarchive

    source, path = place.file(kind), place.output / "model.onnxa"
    return lambda: onnxarchive.convert(source, path, size_threshold=0)


def export_archive(place: Place) -> Step:
    """Exports the archive as a `.onnx` with external data."""
    import onnxarchive

    path = place.output / "model.onnx"
    return lambda: onnxarchive.export(place.archive, path, external_data="weights.data")


def copy_raw(place: Place, *, kind: str) -> Step:
    """Copies the file with the weights through one buffer of 8 MiB."""
    source = place.files(kind)[-1]
    buffer = memoryview(bytearray(PIECE_NBYTES))

    def step() -> None:
        with (
            open(source, "rb", buffering=0) as file,
            open(place.output / "raw", "xb", buffering=0) as target,
        ):
            while size := file.readinto(buffer):
                target.write(buffer[:size])

    return _synced(place, step)


def convert_onnx(place: Place, *, kind: str) -> Step:
    """Loads a `.onnx`, and saves it with external data."""
    import onnx

    return _synced(place, lambda: _save_with_onnx(onnx, onnx.load(place.file(kind)), place))


def convert_onnx_ir(place: Place, *, kind: str) -> Step:
    """Loads a `.onnx`, and saves it with external data."""
    import onnx_ir

    return _synced(
        place, lambda: _save_with_onnx_ir(onnx_ir, onnx_ir.load(place.file(kind)), place)
    )


# Downloading


def download(place: Place) -> Step:
    """Downloads the archive, and verifies it."""
    import onnxarchive

    return lambda: onnxarchive.download(place.url, place.output / "model.onnxa")


def download_with_curl(place: Place) -> Step:
    """Downloads the archive with curl."""
    import subprocess

    path = os.fspath(place.output / "raw")
    command = ["curl", "--silent", "--fail", "--output", path, place.url]
    return _synced(place, lambda: subprocess.run(command, check=True))


def download_with_obstore(place: Place) -> Step:
    """Downloads the archive with obstore, in ranges of 8 MiB, 16 at a time."""
    from concurrent.futures import ThreadPoolExecutor

    store_of = importlib.import_module("obstore.store").HTTPStore.from_url
    server, _, name = place.url.rpartition("/")

    def step() -> None:
        store = store_of(server, client_options={"allow_http": True})
        size = store.head(name)["size"]
        descriptor = os.open(place.output / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        def fetch(start: int) -> None:
            end = min(start + PIECE_NBYTES, size)
            os.pwrite(descriptor, store.get_range(name, start=start, end=end), start)

        with ThreadPoolExecutor(16) as executor:
            list(executor.map(fetch, range(0, size, PIECE_NBYTES)))
        os.close(descriptor)

    return _synced(place, step)


# Running


def session_of_archive(place: Place, *, is_packed: bool = True, kind: str = "archive") -> Step:
    """Makes a session of the archive."""
    import onnxarchive

    options = _session_options(is_packed)
    return lambda: onnxarchive.session(place.file(kind), options, ["CPUExecutionProvider"])


def session_of_onnx(place: Place, *, is_packed: bool = True, kind: str = "external") -> Step:
    """Makes a session of the `.onnx`."""
    import onnxruntime as ort

    options = _session_options(is_packed)
    path = os.fspath(place.file(kind))
    return lambda: ort.InferenceSession(path, options, ["CPUExecutionProvider"])


def session_of_overlay(place: Place, *, verify: bool, count: int = 1) -> Step:
    """Makes sessions of the overlay without packed copies, and keeps them."""
    from functools import partial

    from tools.recipes import overlay

    base, path = (str(place.file(kind)) for kind in ("archive", "overlay"))
    make = partial(
        overlay.session, base, path, None, ["CPUExecutionProvider"], verify=verify, prepack=False
    )
    return lambda: [make() for _ in range(count)]


def _session_options(is_packed: bool) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    if not is_packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


# Changing


def edit_archive(place: Place) -> Step:
    """Sets an item of the metadata to 64 random characters."""
    import onnxarchive

    def edit() -> None:
        with onnxarchive.edit(place.archive) as edit:
            edit.metadata["author"] = os.urandom(32).hex()

    return edit


def change_weights(place: Place, *, to: str) -> Step:
    """Runs the recipe that quantizes to 4 bits, or converts to float16, one weight at a time."""
    module, function = {
        "4 bits": ("quantize", "quantize_to_4_bits"),
        "float16": ("to_float16", "convert"),
    }[to]
    convert = getattr(importlib.import_module(f"tools.recipes.{module}"), function)
    return lambda: convert(str(place.archive), str(place.output / "changed.onnxa"))


def change_loaded(place: Place, *, to: str) -> Step:
    """Does the same with the whole model in memory."""
    from functools import partial

    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers.float16 import convert_float_to_float16

    import onnxarchive

    def to_4_bits(model: Any) -> Any:
        quantizer = MatMulNBitsQuantizer(model, bits=4, block_size=32)
        quantizer.process()
        return quantizer.model.model

    to_float16 = partial(convert_float_to_float16, keep_io_types=True)
    function: Any = {"4 bits": to_4_bits, "float16": to_float16}[to]
    target = place.output / "changed.onnxa"
    return lambda: onnxarchive.transform(place.archive, target, function, weights="loaded")


def make_overlay(place: Place) -> Step:
    """Makes the overlay of a fine-tuned archive."""
    from tools.recipes import overlay

    base, tuned = (str(place.file(kind)) for kind in ("archive", "tuned"))
    return lambda: overlay.make(base, tuned, str(place.output / "overlay.onnxa"))


def merge_overlay(place: Place) -> Step:
    """Writes the archive of the fine-tuned model."""
    from tools.recipes import overlay

    base, path = (str(place.file(kind)) for kind in ("archive", "overlay"))
    return lambda: overlay.merge(base, path, str(place.output / "merged.onnxa"))
