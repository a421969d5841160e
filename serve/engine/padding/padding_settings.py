"""The settings of a model's padding, their keys in its configuration, and their check against its interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.padding.padding_rule import PaddingRule
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

KEY = "halfserve.padding"
BUCKETS_KEY = "halfserve.padding_buckets"
TOKENS_KEY = "halfserve.max_batch_tokens"
PROVED_KEY = "halfserve.padding_proved"  # reported to clients: the longest length that requests are padded to


@dataclass(frozen=True, kw_only=True)
class PaddingSettings:
    """The padding of a model's requests.

    Attributes:
        rule: names the axes and values.
        buckets: lengths that requests are padded to, in rising order; if empty, they are padded to the longest of their batch.
        max_tokens: most rows times padded length in a batch; None for any.
        longest: greatest length that requests are padded to; longer requests keep theirs. None for any.
    """

    rule: PaddingRule
    buckets: tuple[int, ...] = ()
    max_tokens: int | None = None
    longest: int | None = None


def require_fit(rule: PaddingRule, interface: ModelInterface, where: str) -> None:
    """Check that a model has the inputs, outputs and axes that a rule names.

    Args:
        rule: the rule of its configuration.
        interface: the interface that clients see.
        where: the model, for error texts.

    Raises:
        ModelLoadError: the rule does not fit the model.
    """
    inputs = {spec.name: spec for spec in interface.inputs}
    outputs = {spec.name: spec for spec in interface.outputs}
    for padded in rule.inputs:
        spec = _known(where, "input", padded.name, inputs)
        _require_open(where, spec, padded.axes)
        _require_value(where, spec, padded.value)
    for name, axis in rule.cut:
        _require_open(where, _known(where, "output", name, outputs), (axis,))


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
