"""ONNX Runtime on a CUDA device: CUDA graphs, sessions beside a recording, and the text of its errors.

A CUDA graph replays a recorded run with one launch for the whole model, at the addresses of the recording, so that every shape
has its own buffers: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview. Some
models can be opened for recording but not be recorded: operators whose output size depends on values (NonZero) wait for the
device. This shows only when a recording fails.

ONNX Runtime records with cudaStreamCaptureModeGlobal (cuda_graph.cc). Until the recording ends, other threads that allocate or
free device memory fail, unless they change their own mode; waiting for the whole device, as opening a session does, fails
always. Both also break the recording. If freeing a session with recordings fails, its destructor throws and ends the process.
See "Prohibited and Unhandled Operations" in https://docs.nvidia.com/cuda/cuda-c-programming-guide/, and
cudaThreadExchangeStreamCaptureMode in https://docs.nvidia.com/cuda/cuda-runtime-api/.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import onnxruntime as ort

from halfserve.serve.engine.cuda_driver import CudaError, cuda_driver
from halfserve.serve.engine.execution.assembly import lock_buffers
from halfserve.serve.engine.tensors import Array

logger = logging.getLogger(__name__)

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # id of runs that compute without recording
# Most recorded shapes: each holds device buffers, and further shapes are computed without a graph.
MAX_SHAPES = 32

RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
# ONNX Runtime's names of memory, by device.
MEMORY_NAMES = {"cuda": "Cuda", "cpu": "Cpu"}

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
# CUDA's message is surrounded by a C++ signature, the host name and paths of the build machine:
# "... CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a ; file=/b/c.cc ; line=1 ; expr=d();".
OF_CUDA = re.compile(r"\b(?:CUDA|CUBLAS|CUDNN\w*|CUFFT|CURAND|CUSPARSE|NCCL) failure \d+: [^;\n]*[^;\s]")
# "/onnxruntime_src/a/b.cc:1 void c::D::E(int, const f::G&) ", from checks inside the runtime.
WHERE = re.compile(r"/onnxruntime_src/\S+:\d+ [^()\n]*\([^()\n]*\) (?:const )?")
# The runtime places no node for which neither CUDA nor the CPU has a kernel; it adds casts around float16 alone.
OF_KERNEL = re.compile(r"Provider type for (?P<operator>\w+) node with name '(?P<node>[^'\n]*)' is not set")
OF_OPTION = re.compile(r"(?:Unknown|Failed to parse) provider option[^\n]*")


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
    """Let this thread use the device while another one records."""
    driver = cuda_driver()
    if driver is not None:
        with suppress(CudaError):  # the device is lost, which the caller's next step reports
            driver.settle_thread(device_id)


def is_lost(device_id: int) -> bool:
    """Ask the device after an error, whose text may be that of a library which saw the fault first, such as cuBLAS."""
    settle_thread(device_id)
    driver = cuda_driver()
    return driver is not None and driver.is_lost(device_id)


class DeviceSession:
    """Keeps a session on a device usable, and its release safe."""

    def __init__(self, session: Any, device_id: int) -> None:
        self._session = session
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
            # Freeing a graph on a lost device throws in its destructor and would end the process, so that the session is
            # leaked.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))


class GraphReplays:
    """The CUDA graphs of a session, one per combination of input shapes; not thread-safe."""

    def __init__(self, session: ort.InferenceSession, device: str, device_id: int, *, max_shapes: int = MAX_SHAPES) -> None:
        """`session` is opened with `enable_cuda_graph`; on the `device` "cpu" nothing is recorded, but buffers are used."""
        self._session = session
        self._place = (device, device_id)
        self._max_shapes = max_shapes
        self._wanted = [value.name for value in session.get_outputs()]
        self._recordings: dict[Shapes, _Recording] = {}

    def run(self, feeds: Mapping[str, Array]) -> Sequence[Array]:
        """Compute every output, from inputs by the session's names, in its dtypes.

        Returns host arrays in the session's order, owned by the caller. Raises any exception of the runtime.
        """
        shapes = tuple((name, array.shape) for name, array in feeds.items())
        recording = self._recordings.get(shapes)
        if recording is None:
            outputs = self._computed(feeds)
            if len(self._recordings) < self._max_shapes and all(array.size for array in (*feeds.values(), *outputs)):
                self._prepare(shapes, feeds, outputs)
            return outputs
        if recording.is_made_here:
            return recording.run(self._session, feeds)
        with RECORDING_LOCK.recording() as may:
            if may:
                try:
                    return recording.run(self._session, feeds)
                except Exception as error:  # noqa: BLE001  (ORT has no exception class; lasting errors recur below)
                    self._give_up(shapes, error)
        return self._computed(feeds)

    def _computed(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Compute without recording."""
        outputs: Any = self._session.run(self._wanted, dict(feeds), _run_options(NO_GRAPH))
        return list(outputs)

    def _prepare(self, shapes: Shapes, feeds: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Allocate buffers of these shapes; the next run with them records."""
        try:
            given = {name: self._buffer(array) for name, array in feeds.items()}
            wanted = {name: self._buffer(array) for name, array in zip(self._wanted, outputs, strict=True)}
            self._recordings[shapes] = _Recording(self._session, given, wanted, _run_options(len(self._recordings)))
        except Exception as error:  # noqa: BLE001  (such as out of memory; the request is answered)
            self._give_up(shapes, error)

    def _give_up(self, shapes: Shapes, error: Exception) -> None:
        """Record no further shapes, and keep the existing graphs."""
        logger.warning(
            "a CUDA graph could not be recorded (%s); no more are, and batches are computed as usual", reason_of(error)
        )
        self._recordings.pop(shapes, None)
        self._recordings = {key: recording for key, recording in self._recordings.items() if recording.is_made_here}
        self._max_shapes = 0

    def _buffer(self, array: Array) -> ort.OrtValue:
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
    return f"{min(drawn)} draws numbers" if (drawn := nodes & RANDOM) else None


class _Recording:
    """The device buffers and the graph of one combination of shapes."""

    def __init__(
        self, session: ort.InferenceSession, given: dict[str, ort.OrtValue], wanted: dict[str, ort.OrtValue], options: Any
    ) -> None:
        self._thread: int | None = None
        self._given = given
        self._wanted = list(wanted.values())
        self._options = options
        self._binding = session.io_binding()
        for name, value in given.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in wanted.items():
            self._binding.bind_ortvalue_output(name, value)

    @property
    def is_made_here(self) -> bool:
        """Whether this thread has recorded a run: the runtime keeps graphs by thread, and the warm-up runs on another one."""
        return self._thread == threading.get_ident()

    def run(self, session: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
        """Record the first run, and replay it later on the same thread."""
        for name, array in feeds.items():
            self._given[name].update_inplace(np.ascontiguousarray(array))
        session.run_with_iobinding(self._binding, self._options)
        self._thread = threading.get_ident()
        # The array is copied because `numpy` returns the buffer itself on the CPU.
        return [np.array(value.numpy()) for value in self._wanted]


def _run_options(graph: int) -> Any:
    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, str(graph))
    return options


def reason_of(error: Exception) -> str:
    """Return the essential line of a runtime's exception, safe to show to clients."""
    text = str(error).strip() or type(error).__name__
    found = OF_OPTION.search(text) or OF_CUDA.search(text)
    return WHERE.sub("", text.splitlines()[0]) if found is None else found[0]


def missing_kernel(error: Exception) -> str | None:
    """Return which node has no kernel on CUDA and on the CPU, and what to do; None if the refusal has another reason."""
    found = OF_KERNEL.search(str(error))
    if found is None:
        return None
    return (
        f"node {found['node']!r}: neither its CUDA provider nor its CPU provider has a {found['operator']} kernel for the "
        "node's types, such as bfloat16; convert the float32 model again, with "
        "`halfserve convert SOURCE TARGET --dtype bfloat16 --target any`, which keeps such nodes in float32"
    )


def is_about_an_option(error: Exception) -> bool:
    """Return whether a provider rejects an option."""
    return OF_OPTION.search(str(error)) is not None
