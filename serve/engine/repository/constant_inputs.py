"""Inputs that a configuration fixes, so that clients do not send them: `halfserve.constant_inputs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import Backend, BackendView, DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

KEY = "halfserve.constant_inputs"


def with_constants(runtime: Runtime, config: ModelConfig, source: Path) -> Runtime:
    """Return a runtime that fills the inputs which the configuration in `source` fixes; the given one if it fixes none.

    Raises:
        ModelLoadError: the parameter is invalid.
    """
    values: Mapping[str, float] | None = own_parameter(config, KEY, source)
    return ConstantInputs(runtime, values, source) if values else runtime


class ConstantInputs:
    """A runtime that hides inputs from clients and fills them with numbers."""

    def __init__(self, runtime: Runtime, values: Mapping[str, float], source: Path) -> None:
        """`values`: the value of all elements, by the input's name."""
        self._runtime = runtime
        self._values = values
        self._source = source
        self._whole: dict[Path, ModelInterface] = {}

    def describe(self, path: Path) -> ModelInterface:
        """Return the interface without the fixed inputs.

        Raises:
            ModelLoadError: see `Runtime.describe`; or the model has no such input, or its size is open.
        """
        whole = self._whole[path] = self._runtime.describe(path)
        self._constants(whole)
        inputs = tuple(spec for spec in whole.inputs if spec.name not in self._values)
        batched = bool(inputs) and all(spec.shape[:1] == (ANY_SIZE,) for spec in (*inputs, *whole.outputs))
        return replace(whole, inputs=inputs, batched=batched)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:  # noqa: ARG002  (the wrapped runtime takes all inputs)
        """See `Runtime.load`."""
        whole = self._whole[path]
        backend = self._runtime.load(path, whole, placement, config)
        constants = {name: array.astype(backend.compute_dtype(name)) for name, array in self._constants(whole).items()}
        return _Filled(backend, constants)

    def _constants(self, whole: ModelInterface) -> dict[str, Array]:
        specs = {spec.name: spec for spec in whole.inputs}
        return {name: self._constant(specs.get(name), name, value, specs) for name, value in self._values.items()}

    def _constant(self, spec: TensorSpec | None, name: str, value: float, specs: Mapping[str, TensorSpec]) -> Array:
        where = f"{self._source}: parameter {KEY!r} fixes the input {name!r}"
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
        """See `Backend.run`."""
        return self._backend.run({**inputs, **self._constants})
