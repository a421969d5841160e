"""The padding of a model's requests of different lengths, as read from its configuration and checked against its interface."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.queueing.padding import PaddingRule, PaddingSettings
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

KEY = "halfserve.padding"
BUCKETS_KEY = "halfserve.padding_buckets"
TOKENS_KEY = "halfserve.max_batch_tokens"
PROVED_KEY = "halfserve.padding_proved"  # reported to clients: the longest length that requests are padded to


def padding_settings(config: ModelConfig, interface: ModelInterface) -> PaddingSettings | None:
    """Read the padding that a completed configuration asks for; None for none.

    Args:
        config: the completed configuration.
        interface: the interface that clients see.

    Raises:
        ModelLoadError: the padding does not fit the model.
    """
    where = f"model {config.name!r}"
    rule: PaddingRule | None = own_parameter(config, KEY, where)
    if rule is None:
        idle = [key for key in (BUCKETS_KEY, TOKENS_KEY) if key in config.parameters]
        if idle:
            raise ModelLoadError(f"{where}: parameter {idle[0]!r} has no effect without {KEY!r}; add that, or remove it")
        return None
    if not config.max_batch_size:
        raise ModelLoadError(f"{where}: {KEY} is set, but the model has no batch dimension; remove it")
    inputs = {spec.name: spec for spec in interface.inputs}
    outputs = {spec.name: spec for spec in interface.outputs}
    for padded in rule.inputs:
        spec = _known(where, "input", padded.name, inputs)
        _require_open(where, spec, padded.axes)
        _require_value(where, spec, padded.value)
    for name, axis in rule.cut:
        _require_open(where, _known(where, "output", name, outputs), (axis,))
    buckets: tuple[int, ...] | None = own_parameter(config, BUCKETS_KEY, where)
    return PaddingSettings(rule=rule, buckets=buckets or (), max_tokens=own_parameter(config, TOKENS_KEY, where))


def _known(where: str, kind: str, name: str, specs: dict[str, TensorSpec]) -> TensorSpec:
    if name not in specs:
        raise ModelLoadError(f"{where}: {KEY} names the {kind} {name!r}, the model's are {', '.join(map(repr, specs))}")
    spec = specs[name]
    if spec.model_shape is not None:
        raise ModelLoadError(f"{where}: {KEY} names the {kind} {name!r}, which has a reshape and cannot be padded; remove one")
    return spec


def _require_open(where: str, spec: TensorSpec, axes: Sequence[int]) -> None:
    for axis in axes:
        if axis >= len(spec.shape) or spec.shape[axis] != ANY_SIZE:
            raise ModelLoadError(
                f"{where}: {KEY} names axis {axis} of {spec.name!r}, whose shape is {list(spec.shape)}; expected an axis "
                "of any size (-1)"
            )


def _require_value(where: str, spec: TensorSpec, value: float) -> None:
    dtype = spec.datatype.array_dtype
    if dtype.hasobject:
        raise ModelLoadError(f"{where}: {KEY} names {spec.name!r}, which is text and cannot be padded")
    with np.errstate(all="ignore"):
        fits = np.isfinite(value) and (dtype.kind not in "iub" or float(np.array(value).astype(dtype)) == value)
    if not fits:
        raise ModelLoadError(f"{where}: {KEY} pads {spec.name!r} with {value:g}, which is no value of {spec.datatype.wire}")
