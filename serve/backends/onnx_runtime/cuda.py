"""ONNX Runtime on a CUDA device: CUDA graphs, and sessions beside a recording.

A CUDA graph replays a recorded run with one launch for the whole model, at the addresses of the recording, so that every shape
has its own buffers: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview. The
runtime keeps recordings by thread, so that each thread that computes a shape makes its own.

ONNX Runtime records with cudaStreamCaptureModeGlobal (cuda_graph.cc). Until the recording ends, other threads that allocate or
free device memory fail, unless they change their own mode; waiting for the whole device, as opening a session does, fails
always. Both also break the recording. If freeing a session with recordings fails, its destructor throws and ends the process.
See "Prohibited and Unhandled Operations" in https://docs.nvidia.com/cuda/cuda-c-programming-guide/, and
cudaThreadExchangeStreamCaptureMode in https://docs.nvidia.com/cuda/cuda-runtime-api/.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import onnxruntime as ort

from halfserve.nvidia_libraries import why_no_cudnn
from halfserve.serve.backends.onnx_runtime.cuda_errors import reason_of
from halfserve.serve.backends.onnx_runtime.device_feeds import Feed, run_session
from halfserve.serve.engine.cuda_driver import CudaDriver, CudaError, cuda_driver
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.execution.assembly import lock_buffers
from halfserve.serve.engine.execution.device_inputs import DeviceRows
from halfserve.serve.engine.tensors import Array

logger = logging.getLogger(__name__)

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # id of runs that compute without recording
# Most recorded shapes: each holds device buffers, and further shapes are computed without a graph.
MAX_SHAPES = 32

# A failed recording is tried again after this number of batches of its shapes, which doubles with each further failure.
FIRST_WAIT, LONGEST_WAIT = 4, 4096

# Operators whose output sizes depend on values: they wait for the device, which no recording allows.
WAITING = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
# ONNX Runtime's names of memory, by device.
MEMORY_NAMES = {"cuda": "Cuda", "cpu": "Cpu"}

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# Operators whose kernels on CUDA call cuDNN for every shape. Others, such as ReduceMean, call it for some shapes alone.
CUDNN_OPERATORS = frozenset(
    {
        *("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "Einsum", "GRU", "GlobalAveragePool", "GlobalMaxPool"),
        *("InstanceNormalization", "LRN", "LSTM", "MaxPool", "RNN", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax"),
        *("ReduceMin", "ReduceProd"),
    }
)


class RecordingLock:
    """Keeps recordings and session openings apart: one recording, or any number of openings. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._opening = 0
        self._recording = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Wait for the end of a recording (milliseconds), and prevent further ones in this context."""
        with self._changed:
            self._changed.wait_for(lambda: not self._recording)
            self._opening += 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1

    @contextmanager
    def recording(self) -> Iterator[bool]:
        """Yield whether a recording may begin. It does not wait, because opening a session can take minutes."""
        with self._changed:
            may = not (self._recording or self._opening)
            self._recording |= may
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    self._recording = False
                    self._changed.notify_all()


RECORDING_LOCK = RecordingLock()


def settle_thread(device_id: int) -> None:
    """Make a device current for this thread, also while another thread records there."""
    driver = cuda_driver()
    if driver is not None:
        with suppress(CudaError):  # the device is lost, which the caller's next step reports
            driver.settle_thread(device_id)


def wait_asleep(device_id: int) -> None:
    """Have all threads sleep while they wait for a device. Raises ModelLoadError: the driver refuses."""
    driver = cuda_driver()
    if driver is None:
        return
    try:
        driver.set_blocking_waits(device_id, on=True)
    except CudaError as error:
        raise ModelLoadError(f"threads cannot sleep while they wait for CUDA device {device_id}: {error}") from error


def is_lost(device_id: int) -> bool:
    """Ask the device after an error, whose text may be that of a library which saw the fault first, such as cuBLAS."""
    settle_thread(device_id)
    driver = cuda_driver()
    return driver is not None and driver.is_lost(device_id)


def copies_of(device_id: int, *, by_driver: bool) -> RuntimeCopies:
    driver = cuda_driver() if by_driver else None
    return RuntimeCopies() if driver is None else DriverCopies(driver, device_id)


class DeviceSession:
    """Keeps the sessions of a model on a device usable, and their release safe."""

    def __init__(self, sessions: Sequence[Any], device_id: int) -> None:
        self._sessions = sessions
        self._device_id = device_id

    def enter(self) -> None:
        """Prepare the current thread to run the session, with batches assembled in pinned memory."""
        settle_thread(self._device_id)
        lock_buffers(self._device_id)

    def is_lost(self) -> bool:
        """Ask the device after an error."""
        return is_lost(self._device_id)

    def __del__(self) -> None:
        if self.is_lost():
            # Freeing a graph on a lost device throws in its destructor and would end the process, so that the sessions are
            # leaked.
            for session in self._sessions:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


class RuntimeCopies:
    """Copies between the host and buffers of a device by the runtime, which holds Python's lock meanwhile."""

    def write(self, buffer: ort.OrtValue, array: Array) -> None:
        """Copy a contiguous array into a buffer of its size."""
        buffer.update_inplace(array)

    def read(self, buffer: ort.OrtValue, dtype: np.dtype[Any]) -> Array:  # noqa: ARG002  (the runtime knows it)
        # The array is copied because `numpy` returns the buffer itself on the CPU.
        return np.array(buffer.numpy())


class DriverCopies(RuntimeCopies):
    """Such copies by the driver, during which other Python threads run."""

    def __init__(self, driver: CudaDriver, device_id: int) -> None:
        self._driver = driver
        self._device_id = device_id

    def write(self, buffer: ort.OrtValue, array: Array) -> None:
        self._driver.copy_to_device(buffer.data_ptr(), array.ctypes.data, array.nbytes, self._device_id)

    def read(self, buffer: ort.OrtValue, dtype: np.dtype[Any]) -> Array:
        array: Array = np.empty(buffer.shape(), dtype)
        self._driver.copy_to_host(array.ctypes.data, buffer.data_ptr(), array.nbytes, self._device_id)
        return array


class GraphReplays:
    """The CUDA graphs of a session, one per combination of input shapes; not thread-safe."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str,
        device_id: int,
        *,
        max_shapes: int = MAX_SHAPES,
        copies: RuntimeCopies | None = None,
    ) -> None:
        """`session` is opened with `enable_cuda_graph`; on the `device` "cpu" nothing is recorded, but buffers are used.

        `copies` fills and reads the buffers; None leaves that to the runtime.
        """
        self._session = session
        self._copies = copies or RuntimeCopies()
        self._place = (device, device_id)
        self._max_shapes = max_shapes
        self._wanted = [value.name for value in session.get_outputs()]
        self._recordings: dict[Shapes, _Recording] = {}
        self._made = 0  # number of recordings so far, the ones that failed included
        self._waits: dict[Shapes, Wait] = {}  # waiting times of shapes whose latest recording failed

    @property
    def has_failed(self) -> bool:
        """Whether the latest recording of some shapes failed."""
        return bool(self._waits)

    def run(self, feeds: Mapping[str, Feed]) -> Sequence[Array]:
        """Compute every output, from inputs by the session's names, in its dtypes.

        Returns host arrays in the session's order, owned by the caller. Raises any exception of the runtime.
        """
        shapes = tuple((name, array.shape) for name, array in feeds.items())
        recording = self._recordings.get(shapes)
        if recording is not None and recording.is_made_here:
            return recording.run(self._session, feeds)
        wait = self._waits.get(shapes)
        if wait is not None and wait.goes_on():
            return self._computed(feeds)
        if recording is None:
            outputs = self._computed(feeds)
            if len(self._recordings) < self._max_shapes and all(array.size for array in (*feeds.values(), *outputs)):
                self._prepare(shapes, feeds, outputs)
            return outputs
        with RECORDING_LOCK.recording() as may:
            if may:
                try:
                    outputs = recording.run(self._session, feeds)
                except Exception as error:  # noqa: BLE001  (ORT has no exception class; lasting errors recur below)
                    self._put_off(shapes, error)
                else:
                    self._waits.pop(shapes, None)
                    return outputs
        return self._computed(feeds)

    def _computed(self, feeds: Mapping[str, Feed]) -> list[Array]:
        """Compute without recording."""
        return run_session(self._session, self._wanted, feeds, _run_options(NO_GRAPH))

    def _prepare(self, shapes: Shapes, feeds: Mapping[str, Feed], outputs: Sequence[Array]) -> None:
        """Allocate buffers of these shapes; the next run with them records."""
        try:
            given = {name: self._buffer(array) for name, array in feeds.items()}
            wanted = {name: self._buffer(array) for name, array in zip(self._wanted, outputs, strict=True)}
            options, dtypes = _run_options(self._made), [array.dtype for array in outputs]
            self._recordings[shapes] = _Recording(self._session, given, wanted, options, self._copies, dtypes)
            self._made += 1  # the runtime keeps what a failed recording leaves by its number
        except Exception as error:  # noqa: BLE001  (such as out of memory; the request is answered)
            self._put_off(shapes, error)

    def _put_off(self, shapes: Shapes, error: Exception) -> None:
        """Free the buffers of these shapes, and compute some batches of them before they are recorded."""
        self._recordings.pop(shapes, None)
        if len(self._waits) >= MAX_SHAPES:
            self._waits.clear()
        wait = self._waits.setdefault(shapes, Wait())
        wait.begin()
        logger.warning(
            "a CUDA graph could not be recorded (%s); the next %d batches of its size are computed without one, and then it is "
            "tried again",
            *(reason_of(error), wait.left),
        )

    def _buffer(self, array: Feed) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype, *self._place)


def why_not_recorded(session: ort.InferenceSession, device: str) -> str | None:
    """Return why replays of a session would return stale outputs; None if they would not.

    A graph holds only the device's work: no copies of CPU values or of inputs to outputs. Kernel arguments, such as the state
    of a random generator, are fixed. The session must be opened with RECORD_ENTRY.
    """
    own, given = MEMORY_NAMES[device], {value.name for value in session.get_inputs()}
    for value, memory in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True):
        if memory.name != own:
            return f"input {value.name!r} is read on the CPU"
    for value, memory in zip(session.get_outputs(), session.get_output_memory_infos(), strict=True):
        if memory.name != own:
            return f"output {value.name!r} is made on the CPU"
        if value.name in given:
            return f"output {value.name!r} is an input"
    nodes = {node.op_type for part in session.get_provider_graph_assignment_info() for node in part.get_nodes()}
    if waiting := nodes & WAITING:
        return f"{min(waiting)} waits for the device"
    return f"{min(drawn)} draws numbers" if (drawn := nodes & RANDOM) else None


def why_not_without_cudnn(session: ort.InferenceSession) -> str | None:
    """Return which node on CUDA needs cuDNN, and why it is not there; None if all nodes can be computed.

    The provider opens such a model without cuDNN, and fails at the first batch. The session must be opened with RECORD_ENTRY.
    """
    reason = why_no_cudnn()
    if reason is None:
        return None
    on_cuda = (part for part in session.get_provider_graph_assignment_info() if part.ep_name == "CUDAExecutionProvider")
    needing = sorted({node.op_type for part in on_cuda for node in part.get_nodes()} & CUDNN_OPERATORS)
    return f"{reason}, and {', '.join(needing)} of this model cannot be computed without it" if needing else None


class Wait:
    """The batches from a failed recording to the next attempt.

    Attributes:
        left: batches to compute before the next attempt.
    """

    def __init__(self) -> None:
        self.left = 0
        self._next = FIRST_WAIT

    def begin(self) -> None:
        self.left, self._next = self._next, min(2 * self._next, LONGEST_WAIT)

    def goes_on(self) -> bool:
        """Count a batch, and return whether it belongs to the wait."""
        self.left -= 1
        return self.left >= 0


class _Recording:
    """The device buffers and the graph of one combination of shapes."""

    def __init__(
        self,
        session: ort.InferenceSession,
        given: dict[str, ort.OrtValue],
        wanted: dict[str, ort.OrtValue],
        options: Any,
        copies: RuntimeCopies,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        """`dtypes`: those of the outputs, in the order of `wanted`."""
        self._thread: int | None = None
        self._given = given
        self._wanted = list(zip(wanted.values(), dtypes, strict=True))
        self._copies = copies
        self._options = options
        self._binding = session.io_binding()
        for name, value in given.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in wanted.items():
            self._binding.bind_ortvalue_output(name, value)

    @property
    def is_made_here(self) -> bool:
        """Whether this thread has recorded a run: the runtime keeps graphs by thread, and models are loaded on another one."""
        return self._thread == threading.get_ident()

    def run(self, session: ort.InferenceSession, feeds: Mapping[str, Feed]) -> list[Array]:
        """Record the first run, and replay it later on the same thread."""
        for name, feed in feeds.items():
            if isinstance(feed, DeviceRows):
                feed.copy_to(self._given[name].data_ptr())
            else:
                self._copies.write(self._given[name], np.ascontiguousarray(feed))
        session.run_with_iobinding(self._binding, self._options)
        self._thread = threading.get_ident()
        return [self._copies.read(value, dtype) for value, dtype in self._wanted]


def _run_options(graph: int) -> Any:
    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, str(graph))
    return options
