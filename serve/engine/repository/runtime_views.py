"""Runtimes that show a model with another interface than its file has, as its configuration asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ONNX, Backend, BackendView, DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.config.model_config import DeclaredConfig
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.config.sequence_batching import state_outputs
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

CONSTANTS = "halfserve.constant_inputs"


class RuntimeView:
    """A runtime that shows another interface than the runtime behind it; subclasses say which one, and adapt the backend."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._whole: dict[Path, ModelInterface] = {}

    def describe(self, path: Path) -> ModelInterface:
        whole = self._whole[path] = self._runtime.describe(path)
        return self.shown(whole)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        whole = self._whole[path]
        return self.adapted(self._runtime.load(path, whole, placement, config), whole, interface)

    def shown(self, whole: ModelInterface) -> ModelInterface:
        """Return the interface to show of a model whose file has the interface `whole`.

        Raises:
            ModelLoadError: the configuration does not fit the model.
        """
        raise NotImplementedError

    def adapted(self, backend: Backend, whole: ModelInterface, interface: ModelInterface) -> Backend:
        """Return a backend with the shown `interface`, of one with the interface `whole`."""
        raise NotImplementedError


def declared_outputs(runtime: Runtime, config: ModelConfig) -> Runtime:
    """Return a runtime that hides outputs which this configuration does not list, as in Triton; without a list, all outputs are
    kept.
    """
    names = frozenset(entry.name for entry in config.output)
    names |= state_outputs(config) if names else names
    return DeclaredOutputs(runtime, names, says_batch_size=config.max_batch_size > 0) if names else runtime


class DeclaredOutputs(RuntimeView):
    """A runtime that hides outputs from clients."""

    def __init__(self, runtime: Runtime, names: frozenset[str], *, says_batch_size: bool) -> None:
        """`says_batch_size`: whether the configuration declares a batch size, so that the kept tensors may be batched if not
        all are.
        """
        super().__init__(runtime)
        self._names = names
        self._says_batch_size = says_batch_size

    def shown(self, whole: ModelInterface) -> ModelInterface:
        """Return the interface with the kept outputs; the whole one if a listed output is missing, which is then refused."""
        left = tuple(spec for spec in whole.outputs if spec.name in self._names)
        if len(left) < len(self._names):
            return whole
        firsts = [spec.shape[:1] for spec in (*whole.inputs, *left)]
        # Only ONNX models are treated so: a torch program declares its batch dimension.
        is_batch = self._says_batch_size and whole.kind is ONNX and all(first == (ANY_SIZE,) for first in firsts)
        return replace(whole, outputs=left, batched=whole.batched or is_batch)

    def adapted(self, backend: Backend, whole: ModelInterface, interface: ModelInterface) -> Backend:
        if len(interface.outputs) == len(whole.outputs):
            return backend
        return _SomeOutputs(backend, tuple(spec.name for spec in interface.outputs))


@dataclass(frozen=True)
class _SomeOutputs(BackendView):
    """A backend that returns only some of its outputs."""

    _names: tuple[str, ...]

    def run(self, inputs: Tensors) -> Tensors:
        outputs = self._backend.run(inputs)
        return {name: outputs[name] for name in self._names}


def with_constants(runtime: Runtime, config: ModelConfig, source: Path) -> Runtime:
    """Return a runtime that fills the inputs which the configuration in `source` fixes; the given one if it fixes none.

    Raises:
        ModelLoadError: the parameter is invalid.
    """
    values: Mapping[str, float] | None = own_parameter(config, CONSTANTS, source)
    return ConstantInputs(runtime, values, source) if values else runtime


class ConstantInputs(RuntimeView):
    """A runtime that hides inputs from clients and fills them with numbers."""

    def __init__(self, runtime: Runtime, values: Mapping[str, float], source: Path) -> None:
        """`values`: the value of all elements, by the input's name."""
        super().__init__(runtime)
        self._values = values
        self._source = source

    def shown(self, whole: ModelInterface) -> ModelInterface:
        """Return the interface without the fixed inputs.

        Raises:
            ModelLoadError: the model has no such input, or its size is open.
        """
        self._constants(whole)
        inputs = tuple(spec for spec in whole.inputs if spec.name not in self._values)
        batched = bool(inputs) and all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *whole.outputs))
        return replace(whole, inputs=inputs, batched=batched)

    def adapted(self, backend: Backend, whole: ModelInterface, interface: ModelInterface) -> Backend:  # noqa: ARG002  (the model takes all inputs)
        constants = {name: array.astype(backend.compute_dtype(name)) for name, array in self._constants(whole).items()}
        return _Filled(backend, constants)

    def _constants(self, whole: ModelInterface) -> dict[str, Array]:
        specs = {spec.name: spec for spec in whole.inputs}
        return {name: self._constant(specs.get(name), name, value, specs) for name, value in self._values.items()}

    def _constant(self, spec: TensorSpec | None, name: str, value: float, specs: Mapping[str, TensorSpec]) -> Array:
        where = f"{self._source}: parameter {CONSTANTS!r} fixes the input {name!r}"
        if spec is None:
            raise ModelLoadError(f"{where}, the model has {', '.join(map(repr, sorted(specs)))}")
        dtype = spec.datatype.array_dtype
        if dtype.hasobject or ANY_SIZE in spec.shape:
            raise ModelLoadError(f"{where}, which is {spec.datatype.wire} {list(spec.shape)}; expected numbers of a fixed size")
        with np.errstate(over="ignore", invalid="ignore"):
            array = np.full(spec.shape, value).astype(dtype)
        if float(array.ravel()[0] if array.size else value) != value and dtype.kind in "iub":
            raise ModelLoadError(f"{where} as {value:g}, which is no {spec.datatype.wire}")
        return array


@dataclass(frozen=True)
class _Filled(BackendView):
    """A backend whose fixed inputs are filled."""

    _constants: Mapping[str, Array]

    def run(self, inputs: Tensors) -> Tensors:
        return self._backend.run({**inputs, **self._constants})


def batch_first(runtime: Runtime, declared: DeclaredConfig) -> Runtime:
    """Return a runtime that shows states with the batch first; the given one if no model of this configuration can differ."""
    config = declared.message
    if not config.sequence_batching.state or (declared.says_batch_size and not config.max_batch_size):
        return runtime
    return StateLayout(runtime, config)


class StateLayout(RuntimeView):
    """A runtime that moves the batch dimension of states to the front: torch's LSTM, for one, has [layers, batch, hidden]."""

    def __init__(self, runtime: Runtime, config: ModelConfig) -> None:
        super().__init__(runtime)
        self._states = config.sequence_batching.state

    def shown(self, whole: ModelInterface) -> ModelInterface:
        """Return the interface with states in the layout in which they are kept: [batch, *dims]."""
        axes = self._axes(whole)
        if not axes:
            return whole
        inputs, outputs = (tuple(_moved(spec, axes) for spec in specs) for specs in (whole.inputs, whole.outputs))
        batched = all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *outputs))
        return replace(whole, inputs=inputs, outputs=outputs, batched=batched)

    def adapted(self, backend: Backend, whole: ModelInterface, interface: ModelInterface) -> Backend:  # noqa: ARG002  (the states' dims say where the batch is)
        axes = self._axes(whole)
        return _BatchFirst(backend, axes) if axes else backend

    def _axes(self, whole: ModelInterface) -> dict[str, int]:
        """Return the batch axis of each state that does not have it first, which the dims of the configuration identify."""
        shapes = {spec.name: spec.shape for spec in (*whole.inputs, *whole.outputs)}
        axes: dict[str, int] = {}
        for state in self._states:
            axis = _batch_axis(shapes.get(state.input_name, ()), tuple(state.dims))
            if axis:
                axes |= {state.input_name: axis, state.output_name: axis}
        return axes


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
        own = dict(inputs)
        for name, axis in self._axes.items():
            if name in own:
                own[name] = np.ascontiguousarray(np.moveaxis(own[name], 0, axis))
        outputs = dict(self._backend.run(own))
        for name, axis in self._axes.items():
            if name in outputs and outputs[name].ndim > axis:
                outputs[name] = np.moveaxis(outputs[name], axis, 0)
        return outputs
