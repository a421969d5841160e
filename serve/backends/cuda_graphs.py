"""Record the device's work for one shape of batch, and replay it: one launch for the whole model, not one for each operator.

A replay reads and writes the addresses that it was recorded with, so every shape has buffers of its own. See
https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html#using-cuda-graphs-preview
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from serve.engine.tensors import Array

GRAPH_ID = "gpu_graph_id"
NO_GRAPH = -1  # computes without recording
# Each holds buffers on the device: shapes beyond are computed as usual.
MAX_SHAPES = 32

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
            outputs: list[Array] = self._session.run(self._wanted, dict(feeds), _options(NO_GRAPH))
            if len(self._recordings) < self._max_shapes and all(array.size for array in (*feeds.values(), *outputs)):
                self._recordings[shapes] = self._new(feeds, outputs)
            return outputs
        return recording.run(self._session, feeds)

    def _new(self, feeds: Mapping[str, Array], outputs: Sequence[Array]) -> _Recording:
        """Buffers like these arrays; the first run with them records."""
        given = {name: self._buffer(array) for name, array in feeds.items()}
        wanted = {name: self._buffer(array) for name, array in zip(self._wanted, outputs, strict=True)}
        return _Recording(self._session, given, wanted, _options(len(self._recordings)))

    def _buffer(self, array: Array) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype, *self._place)


class _Recording:
    """One shape's buffers on the device."""

    def __init__(
        self, session: ort.InferenceSession, given: dict[str, ort.OrtValue], wanted: dict[str, ort.OrtValue], options: Any
    ) -> None:
        self._given = given
        self._wanted = list(wanted.values())
        self._options = options
        self._binding = session.io_binding()
        for name, value in given.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in wanted.items():
            self._binding.bind_ortvalue_output(name, value)

    def run(self, session: ort.InferenceSession, feeds: Mapping[str, Array]) -> list[Array]:
        for name, array in feeds.items():
            self._given[name].update_inplace(np.ascontiguousarray(array))
        session.run_with_iobinding(self._binding, self._options)
        # On the CPU, `numpy` shows the buffer itself.
        return [np.array(value.numpy()) for value in self._wanted]


def _options(graph: int) -> Any:
    options = ort.RunOptions()
    options.add_run_config_entry(GRAPH_ID, str(graph))
    return options
