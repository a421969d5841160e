"""One line of a record: one output of one operation in one module, in one direction and in one combination of dtypes."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from amp_core.recorder.magnitudes import COUNTS, Magnitudes

Direction = Literal["forward", "backward"]
EntryKey = tuple[str, str, Direction, int, tuple[str, ...], str]
_MAGNITUDES = tuple(field.name for field in fields(Magnitudes))
_FLOATS = ("largest", "smallest", "unscaled_largest", "unscaled_smallest")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What one output of an operation was, over all calls of the recorded steps.

    Attributes:
        module: Path of the innermost module that the operation ran in, or whose backward it was part of, as `get_submodule`
            takes it; "." is the recorded model itself, "" is outside of it (the loss, say).
        op: The operation that ran, below autograd and autocast, such as `aten.addmm.default`.
        direction: `forward` or `backward`. What activation checkpointing computes again is forward.
        output: Which of the operation's outputs, from 0.
        inputs: The dtype of each tensor among the arguments, in order; a list of tensors gives each of its dtypes once.
        dtype: Of the output.
        calls: How many such outputs there were.
        magnitudes: Of the output as it was: gradients of a scaled loss are scaled.
        unscaled_largest: The largest magnitude divided by the loss scale of its step; in forward the magnitude itself.
        unscaled_smallest: The same of the smallest.
    """

    module: str
    op: str
    direction: Direction
    output: int
    inputs: tuple[str, ...]
    dtype: str
    calls: int
    magnitudes: Magnitudes
    unscaled_largest: float | None
    unscaled_smallest: float | None

    @property
    def key(self) -> EntryKey:
        """What two entries have in common that can be merged."""
        return (self.module, self.op, self.direction, self.output, self.inputs, self.dtype)

    def merged(self, other: Entry) -> Entry:
        """The entry of both entries' calls; both have the same key."""
        pairs = [(e.unscaled_largest, e.unscaled_smallest) for e in (self, other)]
        return Entry(
            module=self.module,
            op=self.op,
            direction=self.direction,
            output=self.output,
            inputs=self.inputs,
            dtype=self.dtype,
            calls=self.calls + other.calls,
            magnitudes=Magnitudes.of_all([self.magnitudes, other.magnitudes]),
            unscaled_largest=max((largest for largest, _ in pairs if largest is not None), default=None),
            unscaled_smallest=min((smallest for _, smallest in pairs if smallest is not None), default=None),
        )

    def to_dict(self) -> dict[str, Any]:
        """The entry in plain values, its magnitudes among them."""
        values = asdict(self)
        magnitudes: dict[str, Any] = values.pop("magnitudes")
        return values | {"inputs": list(self.inputs)} | magnitudes

    @classmethod
    def from_dict(cls, values: Any) -> Entry:
        """Read what `to_dict` returned.

        Raises:
            ValueError: If it is anything else; says what is wrong first.
        """
        if not isinstance(values, dict):
            raise ValueError(f"an entry is a {type(values).__name__}; expected a dict")  # noqa: TRY004  (a broken file is a value)
        own = [field.name for field in fields(cls) if field.name != "magnitudes"]
        expected = {*own, *_MAGNITUDES}
        for problem, names in (("lacks", expected - set(values)), ("has an unknown", set(values) - expected)):
            if names:
                raise ValueError(f"an entry {problem} {min(map(str, names))!r}")
        for name, value in values.items():
            _check(name, value)
        magnitudes = Magnitudes(**{name: values[name] for name in _MAGNITUDES})
        return cls(**{name: values[name] for name in own} | {"inputs": tuple(values["inputs"])}, magnitudes=magnitudes)


def unscaled(magnitude: float | None, scale: float) -> float | None:
    """A magnitude divided by a loss scale, finite whatever the two are."""
    return None if magnitude is None else min(magnitude / scale, sys.float_info.max)


def _check(name: str, value: Any) -> None:
    if name in {"calls", "output", *COUNTS}:
        fits, expected = type(value) is int and value >= 0, "a whole number from 0"
    elif name in _FLOATS:
        is_number = type(value) in {int, float} and math.isfinite(value) and value >= 0
        fits, expected = value is None or is_number, "a finite number from 0, or None"
    elif name == "inputs":
        fits = isinstance(value, list | tuple) and all(isinstance(dtype, str) for dtype in value)
        expected = "a list of dtype names"
    elif name == "direction":
        fits, expected = isinstance(value, str) and value in {"forward", "backward"}, "'forward' or 'backward'"
    else:
        fits, expected = isinstance(value, str), "a text"
    if not fits:
        raise ValueError(f"an entry's {name!r} is {value!r}; expected {expected}")
