"""Archives on a web server, and all kinds of sources of an archive."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import onnx
from models import mixed_model, model_of, raw_tensor
from onnx import numpy_helper
from versions import object_store
from web_server import Answer, Request, WebServer
from written import saved

PATH = "/models/m.onnxa"
ASSETS = {"labels.txt": b"cat\n", "folder/big.bin": bytes(range(256)) * 600}
# Tensors so large that reading them one by one takes one request each.
LARGE = {f"large{number}": 300_000 + 4 * number for number in range(4)}


def a_model() -> onnx.ModelProto:
    """`mixed_model`, and tensors of 300,000 bytes."""
    model = mixed_model()
    for seed, (name, nbytes) in enumerate(LARGE.items()):
        model.graph.initializer.append(raw_tensor(name, dims=(nbytes // 4,), seed=seed))
    return model


def an_archive() -> bytes:
    """An archive of `a_model`, with a further model, tensors of 0 bytes as entries, and assets."""
    further = model_of(a_model().graph.initializer[-1], raw_tensor("own", dims=(5000,), seed=9))
    return saved(a_model(), models={"further": further}, size_threshold=0, assets=ASSETS)


def many_tensors(count: int = 300, nbytes: int = 4000) -> onnx.ModelProto:
    return model_of(*(raw_tensor(f"w{it}", dims=(nbytes // 4,), seed=it) for it in range(count)))


def arrays_of(model: onnx.ModelProto) -> dict[str, Any]:
    """The initializers of a model as arrays, converted by onnx."""
    return {it.name: numpy_helper.to_array(it) for it in model.graph.initializer}


def require_equal(found: Any, expected: Any) -> None:
    """Requires arrays of the same names, shapes, types and bits."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        if array.dtype.hasobject:
            assert found[name].tolist() == array.tolist()
        else:
            assert np.ascontiguousarray(found[name]).tobytes() == array.tobytes()


# Makes a source with the bytes of an archive; returns the source and further arguments of `open`.
Place = Callable[[bytes, Path, WebServer], tuple[Any, dict[str, Any]]]


def _path(data: bytes, folder: Path, _: WebServer) -> tuple[Any, dict[str, Any]]:
    path = folder / "m.onnxa"
    path.write_bytes(data)
    return path, {}


def _opened(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return open(_path(data, folder, web)[0], "rb"), {}


def _local_fsspec(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return fsspec.open(str(_path(data, folder, web)[0])).open(), {}


def _file_url(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return _path(data, folder, web)[0].as_uri(), {}


def _local_url(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return f"local://{_path(data, folder, web)[0]}", {}


def _memory(data: bytes, folder: Path, _: WebServer) -> str:
    url = f"memory:/{folder}/m.onnxa"
    fsspec.filesystem("memory").pipe(url, data)
    return url


def _web(data: bytes, _: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    web.files[PATH] = data
    return web.url(PATH), {}


def _web_file(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return fsspec.open(_web(data, folder, web)[0], block_size=1 << 18).open(), {}


def _cached(data: bytes, folder: Path, web: WebServer) -> tuple[Any, dict[str, Any]]:
    return _web(data, folder, web)[0], {"cache": folder / "cache"}


def _store(data: bytes, *_: object) -> tuple[Any, dict[str, Any]]:
    store = object_store("MemoryStore")
    store.put("models/m.onnxa", data)
    return "models/m.onnxa", {"store": store}


PLACES: dict[str, Place] = {
    "path": _path,
    "bytes": lambda data, *_: (data, {}),
    "bytearray": lambda data, *_: (bytearray(data), {}),
    "view": lambda data, *_: (memoryview(b"x" + data)[1:], {}),
    "BytesIO": lambda data, *_: (io.BytesIO(data), {}),
    "open file": _opened,
    "fsspec's file": _local_fsspec,
    "fsspec's file in memory": lambda data, *it: (fsspec.open(_memory(data, *it)).open(), {}),
    "fsspec's file of the web": _web_file,
    "file URL": _file_url,
    "fsspec's URL of a file": _local_url,
    "memory URL": lambda data, *it: (_memory(data, *it), {}),
    "web": _web,
    "web with a cache": _cached,
    "store": _store,
}


def with_byte_flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 0x40]) + data[offset + 1 :]


def sends(web: WebServer, data: bytes) -> None:
    """Makes the server send ranges of `data` with the ETag of its own file."""

    def change(request: Request, answer: Answer) -> Answer:
        if answer.status != 206:
            return answer
        first, _, rest = str(answer.headers["Content-Range"]).removeprefix("bytes ").partition("-")
        return Answer(206, answer.headers, [data[int(first) : int(rest.partition("/")[0]) + 1]])

    web.change = change


def changes_after(web: WebServer, count: int, path: str = PATH) -> None:
    """Makes the server change a byte of a file after `count` answers, from the next opening on.

    Late requests of a transfer that has ended do not count: opening asks for the end of the file.
    """
    before = web.files[path]
    seen: list[Request] = []
    changed: list[Request] = []

    def change(request: Request, answer: Answer) -> Answer:
        is_opening = request.range.startswith("bytes=-")
        if request.path.partition("?")[0] == path and (seen or is_opening):
            seen.append(request)
        if len(seen) >= count and not changed:  # once: a late request must not change it again
            changed.append(request)
            web.files[path] = with_byte_flipped(before, 0)
        return answer

    web.change = change


@contextmanager
def placed(
    kind: str, data: bytes, folder: Path, web: WebServer
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Makes a source of one of `PLACES`; closes a file object after the block."""
    source, access = PLACES[kind](data, folder, web)
    try:
        yield source, access
    finally:
        if hasattr(source, "close"):
            source.close()
