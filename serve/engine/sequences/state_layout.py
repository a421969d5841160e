"""Models whose states have the batch in another dimension than the first, such as torch's LSTM: [layers, batch, hidden]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import Backend, BackendView, DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.tensors import ANY_SIZE, Tensors, TensorSpec


def batch_first(runtime: Runtime, declared: DeclaredConfig) -> Runtime:
    """Return a runtime that shows states with the batch first; the given one if no model of this configuration can differ."""
    config = declared.message
    if not config.sequence_batching.state or (declared.says_batch_size and not config.max_batch_size):
        return runtime
    return StateLayout(runtime, config)


class StateLayout:
    """A runtime that moves the batch dimension of states to the front."""

    def __init__(self, runtime: Runtime, config: ModelConfig) -> None:
        self._runtime = runtime
        self._states = config.sequence_batching.state
        self._whole: dict[Path, ModelInterface] = {}
        self._axes: dict[Path, dict[str, int]] = {}

    def describe(self, path: Path) -> ModelInterface:
        """Return the interface with states in the layout in which they are kept: [batch, *dims]. Their dims identify the batch
        axis.
        """
        whole = self._whole[path] = self._runtime.describe(path)
        shapes = {spec.name: spec.shape for spec in (*whole.inputs, *whole.outputs)}
        axes = self._axes[path] = {}
        for state in self._states:
            axis = _batch_axis(shapes.get(state.input_name, ()), tuple(state.dims))
            if axis:
                axes |= {state.input_name: axis, state.output_name: axis}
        if not axes:
            return whole
        inputs, outputs = (tuple(_moved(spec, axes) for spec in specs) for specs in (whole.inputs, whole.outputs))
        batched = all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *outputs))
        return replace(whole, inputs=inputs, outputs=outputs, batched=batched)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """See `Runtime.load`."""
        axes = self._axes[path]
        backend = self._runtime.load(path, self._whole[path] if axes else interface, placement, config)
        return _BatchFirst(backend, axes) if axes else backend


def _batch_axis(shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
    """Return the dimension of any size without which a shape equals `dims`; the first one if there are several, 0 if there is
    none.
    """
    if len(shape) != len(dims) + 1:
        return 0
    for axis, size in enumerate(shape):
        rest = shape[:axis] + shape[axis + 1 :]
        if size == ANY_SIZE and all(ANY_SIZE in {own, wanted} or own == wanted for own, wanted in zip(rest, dims, strict=True)):
            return axis
    return 0


def _moved(spec: TensorSpec, axes: Mapping[str, int]) -> TensorSpec:
    axis = axes.get(spec.name, 0)
    if not axis or axis >= len(spec.shape):
        return spec
    return replace(spec, shape=(spec.shape[axis], *spec.shape[:axis], *spec.shape[axis + 1 :]))


@dataclass(frozen=True)
class _BatchFirst(BackendView):
    """A backend that takes and returns some tensors with the batch in the first dimension."""

    _axes: Mapping[str, int]

    def run(self, inputs: Tensors) -> Tensors:
        """See `Backend.run`."""
        own = dict(inputs)
        for name, axis in self._axes.items():
            if name in own:
                own[name] = np.ascontiguousarray(np.moveaxis(own[name], 0, axis))
        outputs = dict(self._backend.run(own))
        for name, axis in self._axes.items():
            if name in outputs and outputs[name].ndim > axis:
                outputs[name] = np.moveaxis(outputs[name], axis, 0)
        return outputs
