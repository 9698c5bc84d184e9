"""Runs a model with ONNX Runtime on given or random inputs, and measures time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

import numpy as np

from onnxarchive.errors import (
    ModelNotFoundError,
    quoted,
    quoted_names,
    with_path,
    without_traceback,
)
from onnxarchive.files.paths import in_utf8
from onnxarchive.interop.onnxruntime import (
    RunError as RunError,
    prepacking_entries,
    require_onnxruntime,
    run_errors,
    session,
    set_entries,
)
from onnxarchive.model import dtypes
from onnxarchive.remote.location import Access, Location
from onnxarchive.sources.recognition import is_zip, recognised

if TYPE_CHECKING:
    from numpy.typing import NDArray

STATUS: Final = "/proc/self/status"
_KINDS: Final = {"RssAnon": "anonymous", "RssFile": "mapped", "RssShmem": "mapped"}
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    f"tensor({data_type.name.lower()})": data_type.dtype for data_type in dtypes.BY_NUMBER.values()
} | {"tensor(string)": np.dtype(object)}
_WORDS: Final = ("archive", "model", "one", "tensor", "two", "weight")

# An input: an array, or a list of arrays for a sequence.
Input: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a model.

    Attributes:
        name: Name of the input or output.
        type: Type in ONNX Runtime's notation: `tensor(float)`, `seq(tensor(int64))`.
        dims: Size of each axis, or the name of an open (dynamic) dimension. An unnamed open
            dimension is named by port and axis: `x[0]`. Empty for a scalar or an unknown shape.
    """

    name: str
    type: str
    dims: tuple[int | str, ...]

    @classmethod
    def of(cls, argument: Any) -> Port:
        """Converts an `onnxruntime.NodeArg`."""
        dims = []
        for axis, dim in enumerate(argument.shape):
            is_named = isinstance(dim, str) and dim != ""
            is_size = isinstance(dim, int) and dim >= 0
            dims.append(dim if is_named or is_size else f"{argument.name}[{axis}]")
        return cls(argument.name, argument.type, tuple(dims))

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Data type of the port's arrays, `object` for strings; None if the port is no tensor."""
        return _DTYPES.get(self.type)

    @property
    def needs_ml_dtypes(self) -> bool:
        """True for a tensor of a type that numpy lacks, such as bfloat16."""
        return self.dtype is not None and dtypes.is_extension(self.dtype)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of running a model.

    Attributes:
        providers: Execution providers of the session, in order of preference.
        random: Names of the random inputs.
        assumed: Open (dynamic) dimensions without a given size, by name; each has the size 1.
        inputs: Arrays of the inputs by name. A sequence or map has several: `x[0].values`. Arrays
            of strings have numpy's type `object` or `str`.
        outputs: Arrays of the outputs, in the same way.
        run_seconds: The time of each run.
        memory: Growth of memory in bytes, from before the session to after the last run.
            `"anonymous"` is the process's own memory; `"mapped"` is the memory of mapped files,
            which processes share. Empty if the system does not report memory.
        packed: The number of weights whose packed form the session was told to map from the
            archive.
    """

    path: str
    providers: tuple[str, ...]
    random: frozenset[str]
    assumed: Mapping[str, int]
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]
    session_seconds: float
    run_seconds: tuple[float, ...]
    memory: Mapping[str, int]
    packed: int = 0


def run(
    path: str | os.PathLike[str],
    inputs: Mapping[str, Input] | None = None,
    *,
    model: str | None = None,
    dims: Mapping[str, int] | None = None,
    providers: Sequence[str] | None = None,
    repeat: int = 1,
    prepack: bool | None = None,
    **access: Unpack[Access],
) -> Outcome:
    """Runs a model with ONNX Runtime and measures time and memory.

    `path` names an archive, from which `onnxarchive.session` makes the session, or a `.onnx`.
    `inputs` and `dims` are as in `make_inputs`, with a list of arrays for a sequence. Names of
    execution providers may lack the suffix and be in lower case: `["cuda", "cpu"]`.

    Raises:
        RunError: ONNX Runtime cannot load or run the model, or cannot use a provider.
        ValueError: An input, dimension or provider is unknown or does not fit, a random input
            cannot be made, or `repeat` is below 1.
    """
    if repeat < 1:
        raise ValueError(f"repeat must be 1 or more, got {repeat}")
    location, inputs = Location.of(path, **access), inputs or {}
    name = location.name
    require_onnxruntime()  # its import is not measured
    before = _memory()
    with with_path(name):
        begin = time.perf_counter()
        with recognised(location.path, expected="a model"):
            ort_session = _make_session(location, model, providers, prepack)
        session_seconds = time.perf_counter() - begin
        ports = [Port.of(argument) for argument in ort_session.get_inputs()]
        try:
            feed, assumed = make_inputs(ports, inputs, dims or {})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        run_seconds: list[float] = []
        results: list[Any] = []
        with _naming_sizes(assumed), run_errors("run"):
            call = _prepare(ort_session, ports, feed)
            for _ in range(repeat):
                results.clear()  # frees the outputs of the run before
                begin = time.perf_counter()
                results += call()
                run_seconds.append(time.perf_counter() - begin)
            memory = _memory()
            names = [argument.name for argument in ort_session.get_outputs()]
            outputs = dict(zip(names, map(_as_array, results), strict=True))
    return Outcome(
        path=name,
        providers=tuple(ort_session.get_providers()),
        random=frozenset(feed) - frozenset(inputs),
        assumed=assumed,
        inputs=dict(_arrays(feed)),
        outputs=dict(_arrays(outputs)),
        packed=getattr(ort_session, "packed_weights", 0),
        session_seconds=session_seconds,
        run_seconds=tuple(run_seconds),
        memory={kind: max(memory[kind] - nbytes, 0) for kind, nbytes in before.items()},
    )


@contextlib.contextmanager
def _naming_sizes(assumed: Mapping[str, int]) -> Iterator[None]:
    """Adds the open dimensions whose size was assumed to the message of a RunError."""
    try:
        yield
    except RunError as error:
        if not assumed:
            raise
        sizes = ", ".join(f"{quoted(dim)}: {size}" for dim, size in assumed.items())
        raise RunError(
            f"{error.message}; these sizes of dimensions were assumed, others may fit: {sizes}; "
            "dims={NAME:SIZE} (--dim NAME=SIZE) gives them"
        ) from without_traceback(error)


def _make_session(
    location: Location,
    model: str | None,
    providers: Sequence[str] | None,
    prepack: bool | None,
) -> Any:
    """Makes a session of an archive or a `.onnx`, recognised by content."""
    ort, full_names = require_onnxruntime(), None
    if providers is not None:
        known = {_brief(name): name for name in ort.get_available_providers()}
        full_names = [known.get(_brief(name), "") for name in providers]
        if not all(full_names):
            raise ValueError(
                f"expected providers among {', '.join(known)}, found {', '.join(providers)}"
            )
    is_archive = True
    if location.path is not None:
        # Of directories, which `convert` takes, this says what they are.
        with recognised(location.path), location.open() as file:
            is_archive = not file.size or is_zip(file.read(0, 4))
    if model and not is_archive:
        raise ModelNotFoundError(
            f"only an archive has a model {model!r}, and the file is not an archive"
        )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal; errors are raised
    set_entries(options, prepacking_entries(prepack))
    with run_errors("load"):
        if is_archive:
            make = partial(session, model=model, prepack=prepack, **location.access)
            ort_session = make(location.address, options, full_names, enable_fallback=0)
        else:
            path = in_utf8(location.address)
            ort_session = ort.InferenceSession(path, options, full_names, enable_fallback=0)
    missing = {*(full_names or ())} - {*ort_session.get_providers()}
    if missing:
        raise RunError(
            f"ONNX Runtime cannot use {', '.join(sorted(missing))}; its log has the reason"
        )
    return ort_session


def _brief(provider: str) -> str:
    return provider.lower().removesuffix("executionprovider")


def _prepare(
    ort_session: Any, ports: Sequence[Port], feed: Mapping[str, Input]
) -> Callable[[], Sequence[Any]]:
    """Prepares the inputs for ONNX Runtime, and returns a function that runs the model."""
    make = require_onnxruntime().OrtValue
    # Outputs of ml_dtypes types are returned only as OrtValues; inputs must be OrtValues, too.
    are_values = any(Port.of(argument).needs_ml_dtypes for argument in ort_session.get_outputs())
    values = dict(feed)
    for port in ports:
        value = feed[port.name]
        if port.needs_ml_dtypes:
            number = dtypes.of_array(value).number
            values[port.name] = tensor = make.ortvalue_from_shape_and_type(value.shape, number)
            data = bytes(dtypes.as_raw_data(value))
            ctypes.memmove(tensor.data_ptr(), data, len(data))
        elif are_values and isinstance(value, np.ndarray):
            values[port.name] = make.ortvalue_from_numpy(value)
    run = ort_session.run_with_ort_values if are_values else ort_session.run
    return partial(run, None, values)


def _as_array(value: Any) -> Any:
    """Converts an OrtValue to an array; returns other outputs unchanged."""
    if not isinstance(value, require_onnxruntime().OrtValue):
        return value
    data_type = dtypes.BY_NUMBER.get(value.element_type())
    if data_type is None or not dtypes.is_extension(data_type.dtype):
        return value.numpy()
    data = ctypes.string_at(value.data_ptr(), data_type.nbytes(value.shape()))
    return dtypes.as_array(memoryview(data), data_type, value.shape())


def _arrays(named: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields name and array of tensors, and of the parts of sequences, maps and optionals."""
    for name, value in named.items():
        if isinstance(value, list | tuple):
            yield from _arrays({f"{name}[{index}]": item for index, item in enumerate(value)})
        elif isinstance(value, dict):
            yield f"{name}.keys", np.array(list(value))
            yield f"{name}.values", np.array(list(value.values()))
        elif value is not None:  # None is an empty optional
            yield name, np.asarray(value)


def _memory() -> dict[str, int]:
    """Size of this process's memory in bytes, by kind; empty if the system does not report it."""
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError), open(STATUS, errors="replace") as status:
        for line in status:
            name, _, size = line.partition(":")
            if name in _KINDS:  # in KiB
                sizes[_KINDS[name]] = sizes.get(_KINDS[name], 0) + (int(size.split()[0]) << 10)
    return sizes


def make_inputs(
    ports: Sequence[Port], given: Mapping[str, Input], dims: Mapping[str, int]
) -> tuple[dict[str, Input], dict[str, int]]:
    """Checks the given inputs and makes random arrays for the other inputs.

    `dims` gives sizes of open dimensions by the names in `Port.dims`. Sizes found in given inputs
    apply to all inputs; any other open dimension has the size 1. Returns the inputs, and the open
    dimensions whose size was assumed.
    """
    by_name = {port.name: port for port in ports}
    open_dims = {dim for port in ports for dim in port.dims if isinstance(dim, str)}
    for noun, names, known in ("input", given, [*by_name]), ("open dimension", dims, [*open_dims]):
        for name in names:
            if name not in known:
                raise ValueError(
                    f"the model has no {noun} {name!r} ({noun}s: {quoted_names(sorted(known))})"
                )
    inputs = {name: _fitted(by_name[name], value) for name, value in given.items()}
    sizes = _sizes_of([(by_name[name], value) for name, value in inputs.items()], dims)
    assumed: dict[str, int] = {}
    for port in ports:
        if port.name not in inputs:
            assumed |= {dim: 1 for dim in port.dims if isinstance(dim, str) and dim not in sizes}
            shape = [dim if isinstance(dim, int) else (assumed | sizes)[dim] for dim in port.dims]
            inputs[port.name] = random_input(port, shape)
    return {name: inputs[name] for name in by_name}, assumed


def _sizes_of(given: Iterable[tuple[Port, Input]], dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of open dimensions in given inputs, and those of `dims`, which must agree."""
    sizes: dict[str, int] = {}
    for port, value in given:
        if port.dtype is not None:
            for dim, size in zip(port.dims, value.shape, strict=False):
                if isinstance(dim, str):
                    sizes.setdefault(dim, size)
    for dim, size in dims.items():
        expected = None
        if dim in sizes and sizes[dim] != size:
            expected = f"{sizes[dim]}, as in a given input"
        elif size < 0:
            expected = "a size of 0 or more"
        if expected is not None:
            raise ValueError(f"dimension {dim!r}: expected {expected}, found {size}")
        sizes[dim] = size
    return sizes


def _fitted(port: Port, value: Input) -> Input:
    """Checks a given input, and returns it as an array of the port's data type.

    Strings of fixed length, raw bytes of ml_dtypes types and other byte orders are converted. An
    input that is no tensor is returned unchanged.
    """
    dtype = port.dtype
    if dtype is None:
        return value
    array = np.asarray(value)
    if port.needs_ml_dtypes and array.dtype == np.dtype((np.void, dtype.itemsize)):
        array = array.view(dtype)  # `.npy` files hold raw bytes of these types
    fits = array.dtype.kind in "UO" if dtype.hasobject else np.can_cast(array.dtype, dtype, "equiv")
    if not fits:
        raise ValueError(
            f"input {port.name!r}: expected {port.type}, an array of {dtype}, found an array of "
            f"{array.dtype}; convert it with array.astype"
        )
    # ONNX Runtime gives the same shape for scalars and for unknown shapes.
    fits = len(port.dims) in (0, array.ndim) and all(
        isinstance(dim, str) or dim == size
        for dim, size in zip(port.dims, array.shape, strict=False)
    )
    if not fits:
        dims = ", ".join(map(str, port.dims))
        raise ValueError(f"input {port.name!r}: expected shape [{dims}], found {list(array.shape)}")
    return array.astype(dtype, copy=False)


def random_input(port: Port, shape: Sequence[int]) -> NDArray[Any]:
    """Makes a random array for an input; name, type and shape determine the values.

    Floating-point numbers are normally distributed. Integers of 16 bits or more are 0 or 1, which
    are valid indices, masks and token types. Integers of 8 bits or less take all values.
    """
    dtype = port.dtype
    if dtype is None:
        raise ValueError(
            f"input {port.name!r}: no random value can be made for type {port.type}; give one: "
            f"--input {port.name}=FILE.npy, or FILE.npz for a sequence"
        )
    generator = np.random.default_rng(zlib.crc32(port.name.encode()))
    try:
        if dtype.hasobject:
            return generator.choice(_WORDS, shape).astype(dtype)
        if "int" in dtype.name or dtype.kind == "b":
            # astype wraps: 200 gives -56 as int8.
            count = 1 << 8 if dtype.itemsize == 1 and dtype.kind != "b" else 2
            return generator.integers(0, count, shape, np.uint8).astype(dtype)
        width = np.float64 if dtype == np.float64 else np.float32
        numbers: NDArray[Any] = generator.standard_normal(shape, width)
        numbers = np.abs(numbers) if "e8m0" in dtype.name else numbers  # a type without a sign
        return numbers.astype(dtype, copy=False)
    except (MemoryError, ValueError, OverflowError) as error:
        raise ValueError(
            f"input {port.name!r}: expected a shape that fits memory, found {list(shape)}; {error}"
        ) from error
