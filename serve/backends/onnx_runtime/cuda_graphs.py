"""Record the device's work for one shape of batch, and replay it: one launch for the whole model, not one for each operator.

A replay reads and writes the addresses that it was recorded with, so every shape has buffers of its own. See
https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview

Some models can be opened for recording and not be recorded: operators whose output's size depends on values (NonZero) wait for
the device, which is not allowed meanwhile. That shows when it is tried.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from serve.backends.onnx_runtime.cuda_neighbours import TURNS
from serve.backends.runtime_errors import reason_of
from serve.engine.tensors import Array

logger = logging.getLogger(__name__)

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # computes without recording
# Each holds buffers on the device: shapes beyond are computed as usual.
MAX_SHAPES = 32

RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
# Of memory in general: a device's own, and the host's.
MEMORY_NAMES = {"cuda": "Cuda", "cpu": "Cpu"}

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class GraphReplays:
    """A session's recordings, one for each combination of input shapes. For one thread at a time."""

    def __init__(self, session: ort.InferenceSession, device: str, device_id: int, *, max_shapes: int = MAX_SHAPES) -> None:
        """No recordings yet.

        Args:
            session: opened with `enable_cuda_graph`.
            device: "cuda" (or "cpu", where nothing is recorded, but the buffers are the same).
            device_id: which of them.
            max_shapes: recordings that are kept.
        """
        self._session = session
        self._place = (device, device_id)
        self._max_shapes = max_shapes
        self._wanted = [value.name for value in session.get_outputs()]
        self._recordings: dict[Shapes, _Recording] = {}

    def run(self, feeds: Mapping[str, Array]) -> Sequence[Array]:
        """Compute every output.

        Args:
            feeds: the session's inputs by name, in its dtypes.

        Returns:
            Arrays on the host, in the session's order, that no later run touches.

        Raises:
            Exception: whatever the runtime raises.
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
        with TURNS.recording() as may:
            if may:
                try:
                    return recording.run(self._session, feeds)
                except Exception as error:  # noqa: BLE001  (the runtime's have no class of their own; what lasts is raised below)
                    self._give_up(shapes, error)
        return self._computed(feeds)

    def _computed(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Every output, computed as usual."""
        outputs: list[Array] = self._session.run(self._wanted, dict(feeds), _options(NO_GRAPH))
        return outputs

    def _prepare(self, shapes: Shapes, feeds: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Make buffers like these arrays; the next run with such shapes records."""
        try:
            given = {name: self._buffer(array) for name, array in feeds.items()}
            wanted = {name: self._buffer(array) for name, array in zip(self._wanted, outputs, strict=True)}
            self._recordings[shapes] = _Recording(self._session, given, wanted, _options(len(self._recordings)))
        except Exception as error:  # noqa: BLE001  (out of memory, say, and the request is answered)
            self._give_up(shapes, error)

    def _give_up(self, shapes: Shapes, error: Exception) -> None:
        """Record no further shapes; those that are recorded stay."""
        logger.warning(
            "a CUDA graph could not be recorded (%s); no more are, and batches are computed as usual", reason_of(error)
        )
        self._recordings.pop(shapes, None)
        self._recordings = {key: recording for key, recording in self._recordings.items() if recording.is_made_here}
        self._max_shapes = 0

    def _buffer(self, array: Array) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype, *self._place)


def why_not_recorded(session: ort.InferenceSession, device: str) -> str | None:
    """What of a session a recording would not do anew, so that answers would be an earlier batch's; None where it does all.

    What is recorded is the device's work alone: not the copy of a value that is on the CPU, nor that of an input to an output.
    And it is recorded with its arguments, such as the state of a random generator. For sessions opened with RECORD_ENTRY.
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
    """One shape's buffers on the device."""

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
        """A run with the buffers has been recorded; the runtime keeps recordings by thread, and a warm-up has its own."""
        return self._thread == threading.get_ident()

    def run(self, session: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
        """Record, or replay on the thread that has recorded."""
        for name, array in feeds.items():
            self._given[name].update_inplace(np.ascontiguousarray(array))
        session.run_with_iobinding(self._binding, self._options)
        self._thread = threading.get_ident()
        # On the CPU, `numpy` shows the buffer itself.
        return [np.array(value.numpy()) for value in self._wanted]


def _options(graph: int) -> Any:
    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, str(graph))
    return options
