"""The record of a training run: which operation ran in which dtype and range."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

LARGEST = 65504.0
SMALLEST_NORMAL = 2.0**-14
SMALLEST_SUBNORMAL = 2.0**-24


COUNTS = ("elements", "non_finite", "zeros", "overflow", "underflow", "subnormal")


@dataclass(frozen=True, kw_only=True)
class Magnitudes:
    """Summary of the absolute values of tensors. Each element counts in at most one of the five kinds."""

    elements: int = 0  # the number of values; a complex number counts as two
    non_finite: int = 0  # the number of infinities and NaNs
    zeros: int = 0  # the number of zeros
    overflow: int = 0  # the number of finite values above float16's largest number, 65504
    underflow: int = 0  # the number of non-zero values below float16's smallest number, 2**-24
    subnormal: int = 0  # the number of values from 2**-24 up to 2**-14, where float16 loses digits
    largest: float | None = None  # the largest finite magnitude; None if no value was finite and non-zero
    smallest: float | None = None  # the smallest finite magnitude above zero; None if there was none

    def share(self, count: int) -> float:
        """Return a count as a share of all elements, from 0 to 1."""
        return count / self.elements if self.elements else 0.0

    @property
    def lost_above(self) -> float:
        """The share of elements that are infinite or NaN, or would be in float16."""
        return self.share(self.non_finite + self.overflow)

    @property
    def lost_below(self) -> float:
        """The share of non-zero elements below float16's smallest number."""
        return self.share(self.underflow)

    @classmethod
    def of_all(cls, parts: Iterable[Magnitudes]) -> Magnitudes:
        """Return the magnitudes of several groups of values together."""
        parts = tuple(parts)
        counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
        return cls(
            **counts,
            largest=max((part.largest for part in parts if part.largest is not None), default=None),
            smallest=min((part.smallest for part in parts if part.smallest is not None), default=None),
        )


Direction = Literal["forward", "backward"]
EntryKey = tuple[str, str, Direction, int, tuple[str, ...], str]
_MAGNITUDES = tuple(field.name for field in fields(Magnitudes))
_FLOATS = ("largest", "smallest", "unscaled_largest", "unscaled_smallest")


@dataclass(frozen=True, kw_only=True)
class RecordEntry:
    """One output of an operation, over all calls of the recorded steps.

    Attributes:
        module: Path of the innermost module that the operation ran in, or whose backward it was part of, as `get_submodule`
            takes it; "." is the recorded model itself, "" is outside of it (the loss, say).
        op: The operation that ran, below autograd and autocast, such as `aten.addmm.default`.
        direction: `forward` or `backward`. The recomputation of activation checkpointing is forward.
        output: The index of the operation's output.
        inputs: The dtype of each tensor among the arguments, in order; a list of tensors gives each of its dtypes once.
        dtype: The dtype of the output.
        calls: The number of such outputs.
        magnitudes: The magnitudes of the unchanged output: gradients of a scaled loss are scaled.
        unscaled_largest: The largest magnitude divided by the loss scale of its step; in forward the magnitude itself.
        unscaled_smallest: The smallest magnitude divided by the loss scale, as in `unscaled_largest`.
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
        """The identity of an entry; entries with equal keys can be merged."""
        return (self.module, self.op, self.direction, self.output, self.inputs, self.dtype)

    def merged(self, other: RecordEntry) -> RecordEntry:
        """Return the entry of both entries' calls; both have the same key."""
        pairs = [(e.unscaled_largest, e.unscaled_smallest) for e in (self, other)]
        return replace(
            self,
            calls=self.calls + other.calls,
            magnitudes=Magnitudes.of_all([self.magnitudes, other.magnitudes]),
            unscaled_largest=max((largest for largest, _ in pairs if largest is not None), default=None),
            unscaled_smallest=min((smallest for _, smallest in pairs if smallest is not None), default=None),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in plain values, its magnitudes among them."""
        values = asdict(self)
        magnitudes: dict[str, Any] = values.pop("magnitudes")
        return values | {"inputs": list(self.inputs)} | magnitudes

    @classmethod
    def from_dict(cls, values: Any) -> RecordEntry:
        """Read the result of `to_dict`.

        Raises:
            ValueError: If it is anything else; names the first problem.
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
        entry: dict[str, Any] = {name: values[name] for name in own} | {"inputs": tuple(values["inputs"])}
        return cls(**entry, magnitudes=magnitudes)


def unscaled(magnitude: float | None, scale: float) -> float | None:
    """Return a magnitude divided by a loss scale, clamped to the finite range."""
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


FORMAT = "halfserve.record"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """The entries of the recorded steps of a run."""

    entries: tuple[RecordEntry, ...] = ()  # the entries, in the order of their first occurrence
    steps: int = 0  # the number of recorded steps

    def risky(self) -> tuple[RecordEntry, ...]:
        """Return the entries with values that float16 turns into infinity or zero, worst first.

        Overflow (also infinities and NaNs) comes before mere underflow, each by the share of the elements.
        """
        found = [entry for entry in self.entries if entry.magnitudes.lost_above or entry.magnitudes.lost_below]
        return tuple(sorted(found, key=lambda entry: (entry.magnitudes.lost_above, entry.magnitudes.lost_below), reverse=True))

    def modules(self) -> tuple[str, ...]:
        """Return the paths of all recorded modules, in the order in which they first ran.

        A module with gradients only (a parameter that another module computes with) follows the module around it.
        """
        ran = list(dict.fromkeys(entry.module for entry in self.entries if entry.direction == "forward"))
        for module in dict.fromkeys(entry.module for entry in self.entries if entry.module not in ran):
            around = max((path for path in ran if module.startswith(f"{path}.")), key=len, default=None)
            ran.insert(len(ran) if around is None else ran.index(around) + 1, module)
        return tuple(ran)

    def ranges(self, direction: Direction) -> dict[str, Magnitudes]:
        """Return the magnitudes of all outputs of each module's operations, by the module's path.

        The range of a module excludes those of its children.
        """
        parts: dict[str, list[Magnitudes]] = {}
        for entry in self.entries:
            if entry.direction == direction:
                parts.setdefault(entry.module, []).append(entry.magnitudes)
        return {module: Magnitudes.of_all(of_module) for module, of_module in parts.items()}

    def unscaled_gradients(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest magnitude of each module's backward, divided by the loss scale, by path."""
        found: dict[str, list[float]] = {}
        for entry in self.entries:
            extremes = (entry.unscaled_smallest, entry.unscaled_largest)
            if entry.direction == "backward":
                found.setdefault(entry.module, []).extend(extreme for extreme in extremes if extreme)
        return {module: (min(extremes), max(extremes)) for module, extremes in found.items() if extremes}

    def merged(self, other: Record) -> Record:
        """Return the record of both records' steps."""
        return Record(entries=merge((*self.entries, *other.entries)), steps=self.steps + other.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the record in plain values, for JSON and for a checkpoint that `torch.load(weights_only=True)` reads."""
        entries = [entry.to_dict() for entry in self.entries]
        return {"format": FORMAT, "version": FORMAT_VERSION, "steps": self.steps, "entries": entries}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """Read the result of `to_dict`.

        Raises:
            ValueError: If it is no record, a newer one, or a broken one.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"not a record: expected a dict whose 'format' is {FORMAT!r}, as Recorder.to_dict() returns it")
        if values.get("version") != FORMAT_VERSION:
            raise ValueError(f"the record has version {values.get('version')!r}; this halfserve reads {FORMAT_VERSION}")
        steps, entries = values.get("steps"), values.get("entries")
        if type(steps) is not int or steps < 0 or not isinstance(entries, list | tuple):
            raise ValueError("the record is broken: expected a whole number of 'steps' and a list of 'entries'")
        try:
            return cls(entries=merge(map(RecordEntry.from_dict, entries)), steps=steps)
        except ValueError as error:
            raise ValueError(f"the record is broken: {error}") from error


def merge(entries: Iterable[RecordEntry]) -> tuple[RecordEntry, ...]:
    """Merge entries with equal keys, at the place of the first."""
    found: dict[EntryKey, RecordEntry] = {}
    for entry in entries:
        before = found.get(entry.key)
        found[entry.key] = entry if before is None else before.merged(entry)
    return tuple(found.values())
