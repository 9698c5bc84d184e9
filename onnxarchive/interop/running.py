"""Running a model once with ONNX Runtime, on random or given inputs, and what that takes."""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from onnxarchive.errors import ArchiveError, ArchiveFormatError, UnsupportedFeatureError
from onnxarchive.interop import inputs as inputs_
from onnxarchive.interop.inputs import Given, Port
from onnxarchive.interop.onnxruntime import session
from onnxarchive.interop.ort_options import require_onnxruntime
from onnxarchive.model import dtypes
from onnxarchive.storage.files import MappedFile
from onnxarchive.zipformat.records import LocalHeader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from onnxarchive.buffers.counting import Progress

_PIECE: Final = 1 << 20  # elements summed up at a time
_STATUS: Final = "/proc/self/status"
_SAMPLING_INTERVAL: Final = 0.005  # seconds
_SILENT: Final = 4  # what goes wrong is raised, too
_PROVIDER: Final = "executionprovider"


class RunError(UnsupportedFeatureError):
    """ONNX Runtime does not load the model, or does not run it on these inputs."""


@dataclass(frozen=True, slots=True)
class Value:
    """An array that went into a model or came out of it.

    Attributes:
        name: The name of the input or output; behind it where in a sequence or map the array is:
            `y[0]`, `y[0].values`.
        data_type: The name of its data type as ONNX has it.
        array: The array; of objects where it holds strings.
    """

    name: str
    data_type: str
    array: NDArray[Any]

    def summary(self) -> Summary | None:
        """A few numbers about it; None where it holds no numbers, or complex ones."""
        array = self.array.reshape(-1)
        if array.dtype.kind in "OUc":
            return None
        if array.dtype.kind in "iu":
            if not array.size:
                return Summary(None, None, None, 0)
            mean = float(array.mean(dtype=np.float64))
            return Summary(array.min().item(), array.max().item(), mean, 0)
        least, greatest, total, count = math.inf, -math.inf, 0.0, 0
        for begin in range(0, array.size, _PIECE):
            piece = array[begin : begin + _PIECE].astype(np.float64)
            piece = piece[~np.isnan(piece)]
            count += piece.size
            least = min(least, float(piece.min(initial=math.inf)))
            greatest = max(greatest, float(piece.max(initial=-math.inf)))
            with np.errstate(invalid="ignore", over="ignore"):  # of both infinities
                total += float(piece.sum())
        if not count:
            return Summary(None, None, None, array.size)
        return Summary(least, greatest, total / count, array.size - count)


@dataclass(frozen=True, slots=True)
class Summary:
    """A few numbers about an array.

    Attributes:
        minimum: Its least number; None where it has none.
        maximum: Its greatest number, likewise.
        mean: The mean of its numbers, likewise.
        nans: How many of its elements are NaN, which the others leave out.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    nans: int


@dataclass(frozen=True, slots=True)
class Memory:
    """How much memory this process took at most for a session and its runs.

    Attributes:
        anonymous: Bytes of its own that it took beyond those of before, sampled every 5 ms; None
            where the system does not tell.
        mapped: Bytes of mapped files that it had in memory beyond those of before, such as weights
            in an archive, which it shares with other processes; None as above.
        resident: The most bytes that the process ever had in memory, all in all; None as above.
    """

    anonymous: int | None
    mapped: int | None
    resident: int | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of running a model.

    Attributes:
        path: The model.
        providers: The execution providers that the session has, the first preferred.
        ports: What the model takes.
        feed: What it was given, by name.
        random: The names of the inputs that were made up.
        assumed: The sizes that the model leaves open and that were assumed, by name.
        inputs: The arrays of the inputs.
        outputs: The arrays of the outputs.
        session_seconds: How long it took to make the session.
        run_seconds: How long each of the runs took.
        memory: How much memory that took.
    """

    path: str
    providers: tuple[str, ...]
    ports: tuple[Port, ...]
    feed: Mapping[str, Given]
    random: frozenset[str]
    assumed: Mapping[str, int]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    session_seconds: float
    run_seconds: tuple[float, ...]
    memory: Memory

    @property
    def median_seconds(self) -> float:
        """The median of `run_seconds`."""
        return statistics.median(self.run_seconds)


def run(
    path: str | os.PathLike[str],
    inputs: Mapping[str, Given] | None = None,
    *,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    providers: Sequence[str] | None = None,
    repeat: int = 1,
    progress: Progress | None = None,
) -> Outcome:
    """Runs a model with ONNX Runtime and tells what came out, how fast, and in how much memory.

    Args:
        path: An archive, whose weights are mapped as by `onnxarchive.session`, or a `.onnx`.
        inputs: Arrays by the names of the inputs; a list of arrays for a sequence. What is not
            given is made up (`onnxarchive.interop.inputs.random`).
        seed: Random inputs follow from it.
        dims: Sizes of dimensions that the model leaves open, by their names; those without a name
            have that of the input with the number of the axis: `x[0]`. A size that neither this
            nor a given input says is assumed to be 1.
        providers: Execution providers in the order of preference, with or without the ending of
            their names, in any case: `["cuda", "cpu"]`. None for what ONNX Runtime takes itself.
        repeat: How often to run the model.
        progress: Called with the runs done and the runs in all, after each.

    Raises:
        ArchiveFormatError: The file is neither an archive nor a model, or breaks a rule.
        RunError: ONNX Runtime does not load or run the model, or has not such a provider.
        UnsupportedFeatureError: As in `onnxarchive.session`.
        ValueError: An input or dimension is unknown or does not fit, an input cannot be made up
            and is not given, or `repeat` is below 1.
        ImportError: ONNX Runtime is not installed.
        OSError: The file cannot be opened or read.
    """
    require_repeat(repeat)
    if seed < 0:
        raise ValueError(f"expected a seed of 0 or more, found {seed}")
    model = Model(path, providers)
    return model.run(inputs or {}, seed, dims or {}, repeat, progress)


def require_repeat(repeat: int) -> None:
    """Refuses to run a model less than once.

    Raises:
        ValueError: `repeat` is below 1.
    """
    if repeat < 1:
        raise ValueError(f"expected to run the model once or more, found repeat {repeat}")


class Model:
    """A model that ONNX Runtime has loaded.

    Attributes:
        path: Its path as it was given.
        inputs: What it takes.
        outputs: What it gives.
    """

    def __init__(
        self, path: str | os.PathLike[str], providers: Sequence[str] | None = None
    ) -> None:
        """Makes a session of an archive or a `.onnx`; arguments and errors are those of `run`."""
        self.path = os.fsdecode(path)
        self._ort = require_onnxruntime()
        names = None if providers is None else _provider_names(self._ort, providers)
        self._watch = _Watch()
        begin = time.perf_counter()
        with self._watch:
            self._session = self._make(names)
        self._seconds = time.perf_counter() - begin
        self._providers = tuple(self._session.get_providers())
        missing = [name for name in names or () if name not in self._providers]
        if missing:
            raise self._error(
                f"expected a session with {', '.join(missing)}, found ONNX Runtime made one with "
                f"{', '.join(self._providers)}; it has logged why"
            )
        self.inputs = tuple(Port.of(it) for it in self._session.get_inputs())
        self.outputs = tuple(Port.of(it) for it in self._session.get_outputs())

    def _make(self, providers: Sequence[str] | None) -> Any:
        with MappedFile(self.path) as file:
            signature = file.read(0, len(LocalHeader.SIGNATURE))
        options = self._ort.SessionOptions()
        options.log_severity_level = _SILENT
        try:
            if signature == LocalHeader.SIGNATURE:
                return session(self.path, options, providers, enable_fallback=0)
            return self._ort.InferenceSession(self.path, options, providers, enable_fallback=0)
        except _runtime_errors() as error:
            if type(error).__name__ == "InvalidProtobuf":
                wrong = ArchiveFormatError(
                    f"expected an archive or a serialized ModelProto, found neither: {_line(error)}"
                )
                wrong.path = self.path
                raise wrong from error
            raise self._error(f"ONNX Runtime does not load the model: {_line(error)}") from error

    def run(
        self,
        given: Mapping[str, Given],
        seed: int = 0,
        dims: Mapping[str, int] = MappingProxyType({}),
        repeat: int = 1,
        progress: Progress | None = None,
    ) -> Outcome:
        """Runs it; arguments and errors are those of the function `run`."""
        try:
            feed, assumed = inputs_.make(self.inputs, given, dims, seed)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        seconds = []
        results: list[Any] = []
        with self._watch:  # and not over what the inputs take, which were made before
            call = self._prepared(feed)
            for done in range(repeat):
                results.clear()
                begin = time.perf_counter()
                results += self._try(call)
                seconds.append(time.perf_counter() - begin)
                if progress is not None:
                    progress(done + 1, repeat)
        outputs = self._outputs(results, feed)
        return Outcome(
            path=self.path,
            providers=self._providers,
            ports=self.inputs,
            feed=feed,
            random=frozenset(feed) - frozenset(given),
            assumed=assumed,
            inputs=_values(self.inputs, feed.values()),
            outputs=_values(self.outputs, outputs),
            session_seconds=self._seconds,
            run_seconds=tuple(seconds),
            memory=self._watch.memory(),
        )

    def _prepared(self, feed: Mapping[str, Given]) -> Callable[[], Any]:
        """The call that runs the model and is timed."""
        handed = self._handed(feed)
        if not any(port.is_foreign for port in self.outputs):
            return partial(self._session.run, None, handed)
        # Tensors of types that numpy lacks are given out only so, and then all must be taken so.
        for port in self.inputs:
            if not port.is_tensor or port.data_type == inputs_.STRING:
                raise self._error(
                    f"expected inputs that are tensors of numbers, since an output is of a type "
                    f"that ONNX Runtime gives out only then, found input {port.name!r} of type "
                    f"{port.type}"
                )
        tensors = {
            name: value
            if isinstance(value, self._ort.OrtValue)
            else self._ort.OrtValue.ortvalue_from_numpy(value)
            for name, value in handed.items()
        }
        return partial(self._session.run_with_ort_values, None, tensors)

    def _outputs(self, results: Sequence[Any], feed: Mapping[str, Given]) -> list[Any]:
        """The outputs of a run as arrays, lists and dicts of them."""
        outputs = []
        for port, result in zip(self.outputs, results, strict=True):
            if not isinstance(result, self._ort.OrtValue):
                outputs.append(result)
            elif result.is_tensor():
                outputs.append(inputs_.from_runtime(result))
            else:
                outputs += self._try(partial(self._session.run, [port.name], self._handed(feed)))
        return outputs

    def _handed(self, feed: Mapping[str, Given]) -> dict[str, Any]:
        return {
            port.name: self._try(partial(inputs_.to_runtime, self._ort, port, feed[port.name]))
            for port in self.inputs
        }

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except _run_errors() as error:
            raise self._error(f"ONNX Runtime does not run the model: {_line(error)}") from error

    def _error(self, message: str) -> ArchiveError:
        error = RunError(message)
        error.path = self.path
        return error


@cache
def _runtime_errors() -> tuple[type[Exception], ...]:
    """What ONNX Runtime raises; its own exceptions have no common base."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [it for it in vars(state).values() if isinstance(it, type) and issubclass(it, Exception)]
    return (*own, RuntimeError, MemoryError)


def _run_errors() -> tuple[type[Exception], ...]:
    """What it raises for inputs, in addition."""
    return (*_runtime_errors(), ValueError, TypeError)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _provider_names(ort: Any, given: Sequence[str]) -> list[str]:
    """The full names of execution providers.

    Raises:
        ValueError: This ONNX Runtime has no such provider.
    """
    known = {_bare(name): name for name in ort.get_available_providers()}
    for name in given:
        if _bare(name) not in known:
            raise ValueError(
                f"expected an execution provider of this ONNX Runtime, which has "
                f"{', '.join(known.values())}, found {name!r}"
            )
    return [known[_bare(name)] for name in given]


def _bare(provider: str) -> str:
    return provider.lower().removesuffix(_PROVIDER)


def _values(ports: Sequence[Port], values: Any) -> tuple[Value, ...]:
    found: list[Value] = []
    for port, value in zip(ports, values, strict=True):
        _collect(port.name, port, value, found)
    return tuple(found)


def _collect(name: str, port: Port, value: Any, found: list[Value]) -> None:
    """The arrays in a value: itself, those of a sequence, keys and values of a map."""
    if value is None:  # an optional without a value
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(f"{name}[{index}]", port, item, found)
    elif isinstance(value, dict):
        _collect(f"{name}.keys", port, np.array(list(value)), found)
        _collect(f"{name}.values", port, np.array(list(value.values())), found)
    else:
        array = np.asarray(value)
        found.append(Value(name, port.data_type if port.is_tensor else _type_of(array), array))


def _type_of(array: NDArray[Any]) -> str:
    return inputs_.STRING if array.dtype.kind in "UO" else dtypes.of_array(array).name


# Memory


@dataclass
class _Watch:
    """The most memory that this process took in the blocks under watch.

    What it took or gave back between two blocks is not counted.
    """

    _before: tuple[int, int] | None = None
    _after: tuple[int, int] = (0, 0)
    _peaks: list[int] = field(default_factory=lambda: [0, 0])
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> _Watch:
        found = _resident_parts()
        if found is None:
            return self
        if self._before is None:
            self._before = found
        else:
            anonymous, mapped = (
                before + now - after
                for before, now, after in zip(self._before, found, self._after, strict=True)
            )
            self._before = (anonymous, mapped)
        self._done.clear()
        self._thread = threading.Thread(target=self._sample_often, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._sample()
            self._after = _resident_parts() or self._after

    def memory(self) -> Memory:
        """What was found."""
        if self._before is None:
            return Memory(None, None, _most_resident())
        return Memory(self._peaks[0], self._peaks[1], _most_resident())

    def _sample_often(self) -> None:
        while not self._done.wait(_SAMPLING_INTERVAL):
            self._sample()

    def _sample(self) -> None:
        found = _resident_parts()
        if found is None or self._before is None:
            return
        for part, (now, before) in enumerate(zip(found, self._before, strict=True)):
            self._peaks[part] = max(self._peaks[part], now - before)


def _resident_parts() -> tuple[int, int] | None:
    """Bytes in memory that are this process's own, and those of mapped files; None: not known."""
    try:
        with open(_STATUS, encoding="ascii", errors="replace") as status:
            lines = dict(line.split(":", 1) for line in status)
        anonymous, files, shared = (
            int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssFile", "RssShmem")
        )
    except (OSError, KeyError, ValueError):
        return None
    return anonymous, files + shared


def _most_resident() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10
