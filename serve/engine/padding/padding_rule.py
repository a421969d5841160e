"""Reads the padding rule of a model from its configuration, and checks whether the rule fits the model's interface."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.padding.padding import PaddedInput, PaddingRule
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec

EXPECTED = "expected inputs with axis and value, then outputs, such as 'input_ids[1]=0 attention_mask[1]=0 -> hidden[1]'"
_INPUT = re.compile(r"(?P<name>\S+)\[(?P<axis>[0-9]{1,2})\]=(?P<value>\S+)")
_OUTPUT = re.compile(r"(?P<name>\S+)\[(?P<axis>[0-9]{1,2})\]")
KEY = "halfserve.padding"
BUCKETS_KEY = "halfserve.padding_buckets"
TOKENS_KEY = "halfserve.max_batch_tokens"
PROVED_KEY = "halfserve.padding_proved"  # reported to clients: the longest length that requests are padded to


def parse_padding_rule(text: str) -> PaddingRule:
    """Read the text of `halfserve.padding`.

    Raises:
        ValueError: the text is not a rule; the message gives the expected form.
    """
    before, _, after = text.partition("->")
    inputs: dict[str, PaddedInput] = {}
    for part in before.split():
        found = _INPUT.fullmatch(part)
        if found is None:
            raise ValueError(f"{EXPECTED}; {part!r} is no input with axis and value")
        name, axis, value = found["name"], _axis(part, found["axis"]), _value(part, found["value"])
        other = inputs.get(name)
        if other is not None and (other.value != value or axis in other.axes):
            raise ValueError(f"{EXPECTED}; {name!r} is given twice")
        inputs[name] = PaddedInput(name=name, axes=(*(other.axes if other else ()), axis), value=value)
    if not inputs:
        raise ValueError(EXPECTED)
    cut: list[tuple[str, int]] = []
    for part in after.split():
        found = _OUTPUT.fullmatch(part)
        if found is None:
            raise ValueError(f"{EXPECTED}; {part!r} is no output with axis")
        place = (found["name"], _axis(part, found["axis"]))
        if place in cut:
            raise ValueError(f"{EXPECTED}; {part!r} is given twice")
        cut.append(place)
    return PaddingRule(inputs=tuple(inputs.values()), cut=tuple(cut))


def _axis(part: str, text: str) -> int:
    if not int(text):
        raise ValueError(f"{EXPECTED}; {part!r} names axis 0, which is the batch dimension")
    return int(text)


def _value(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{EXPECTED}; {part!r} has no number as its value") from None
    return value


def rising_lengths(text: str) -> tuple[int, ...]:
    """Read the text of `halfserve.padding_buckets`.

    Raises:
        ValueError: the text is not a list of lengths in rising order.
    """
    parts = [part.strip() for part in text.split(",")]
    lengths = [int(part) if part.isascii() and part.isdigit() else 0 for part in parts]
    if 0 in lengths or sorted(set(lengths)) != lengths:
        raise ValueError("expected lengths in rising order, such as '16,32,64,128'")
    return tuple(lengths)


def whole(text: str) -> int:
    """Parse a whole number of 1 or more.

    Raises:
        ValueError: the text is not such a number.
    """
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise ValueError("expected a whole number of 1 or more")
    return int(text)


def require_fit(rule: PaddingRule, interface: ModelInterface, where: str) -> None:
    """Check that a model has the inputs, outputs and axes that a rule names; `interface`: the one that clients see.

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
