"""Samples derived from the user's, at the edge of what these show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from halfserve.export.export_errors import ExportError
from halfserve.export.verification.samples import Array, Feed, Input

ROWS = 2
TINY = 2.0**-12
FACTORS = (4.0, 16.0, 64.0)
SEED = 0


@dataclass(frozen=True, kw_only=True)
class AdversarialCase:
    """One adversarial batch.

    Attributes:
        name: Name of the case, such as "zeros".
        feed: An array for every input, by name.
        factor: How many times the case's floats exceed the user's; such a case measures headroom. None for other cases, which
            lie within the user's range.
    """

    name: str
    feed: Feed
    factor: float | None = None


def adversarial_cases(
    wanted: Sequence[Input], feeds: Sequence[Feed], *, resizable: bool, longest: Mapping[str, int] | None = None
) -> list[AdversarialCase]:
    """Derive adversarial batches, which break fp16 models first, from the user's.

    Floating inputs become zeros, ones (where the user's reach 1), tiny, constant in every row, or the user's largest magnitude
    with random signs where the user's have both; then 4, 16 and 64 times the user's. Masks (see `is_mask`) get their first row
    masked. Other integers take the largest value seen.

    Args:
        wanted: The model's inputs.
        feeds: The user's batches.
        resizable: Whether batches of any size can run; then there are also a batch of one and one of duplicates, and other
            cases have one or two rows.
        longest: Sizes of dynamic dimensions, by the keys of `Input.keys`, up to which samples are repeated along them.

    Raises:
        ExportError: The longest batch does not fit in memory.
    """
    if not feeds or not feeds[0]:
        return []
    resizable = resizable and all(array.ndim for array in feeds[0].values())
    base = {name: array[:ROWS] if resizable else array for name, array in feeds[0].items()}
    ranges = {value.name: _Range.of([feed[value.name] for feed in feeds]) for value in wanted}
    masks = {value.name for value in wanted if is_mask(value, feeds)}
    floats = [value.name for value in wanted if value.floating and value.name not in masks]
    first = {name: array[:1] for name, array in base.items()} if resizable else base
    cases = [case for case in _float_cases(first, floats, ranges) if floats]  # many, so one row each
    cases += _integer_cases(wanted, base, masks, ranges)
    if resizable:
        cases.append(AdversarialCase(name="batch of one", feed=first))
        cases.append(
            AdversarialCase(name="duplicates", feed={name: np.repeat(array, ROWS, axis=0) for name, array in first.items()})
        )
    if longest and (feed := lengthened(wanted, base, longest)) is not None:
        cases.append(AdversarialCase(name="longest", feed=feed))
    seen: list[AdversarialCase] = []
    for case in cases:
        fitting = replace(case, feed={value.name: _as_given(case.feed[value.name], base[value.name]) for value in wanted})
        if not any(_same(fitting.feed, other.feed) for other in seen):
            seen.append(fitting)
    return seen


def is_mask(value: Input, feeds: Sequence[Feed]) -> bool:
    """Return whether an input is a mask: booleans, integers of 0 and 1, or floats up to 0 or 1 named "mask"; never a scalar."""
    arrays = [feed[value.name] for feed in feeds]
    if not all(array.ndim for array in arrays):
        return False
    if value.dtype == np.bool_:
        return True
    if np.issubdtype(value.dtype, np.integer):
        return all(np.isin(array, (0, 1)).all() for array in arrays)
    return "mask" in value.name.lower() and all(np.isin(array.max(initial=0), (0, 1)) for array in arrays)


def lengthened(wanted: Sequence[Input], feed: Feed, longest: Mapping[str, int]) -> Feed | None:
    """Return the batch repeated along dimensions up to their longest size, by the keys of `Input.keys`; None where none has
    that size.

    Raises:
        ExportError: The batch does not fit in memory.
    """
    longer = dict(feed)
    for value in wanted:
        for axis in range(len(value.dims or ())):
            key = next((key for key in value.keys(axis) if key in longest), None)
            if key is not None and longer[value.name].shape[axis]:
                dim, size = key, longest[key]
                try:
                    longer[value.name] = _lengthened(value.name, longer[value.name], axis, size)
                except (MemoryError, OverflowError, ValueError) as error:  # numpy raises ValueError for too many elements
                    raise ExportError(
                        f"input {value.name!r} with {size} along {dim!r} does not fit in memory; ask for a smaller size"
                    ) from error
    return None if _same(longer, feed) else longer


@dataclass(frozen=True, kw_only=True)
class _Range:
    low: float
    high: float

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    @staticmethod
    def of(arrays: Sequence[Array]) -> _Range:
        numeric = [array[np.isfinite(array)] for array in arrays if array.dtype.kind in "biuf"]
        lows, highs = ([float(edge(a)) for a in numeric if a.size] for edge in (np.min, np.max))
        return _Range(low=min(lows, default=0.0), high=max(highs, default=0.0))


def _float_cases(base: Feed, floats: list[str], ranges: Mapping[str, _Range]) -> Iterator[AdversarialCase]:
    def case(name: str, make: Callable[[str, Array], Array]) -> AdversarialCase:
        return AdversarialCase(name=name, feed={**base, **{key: make(key, base[key]) for key in floats}})

    yield case("zeros", lambda _, array: np.zeros_like(array))
    if all(ranges[name].high >= 1 for name in floats):
        yield case("ones", lambda _, array: np.ones_like(array))
    yield case("tiny", lambda _, array: array * TINY)
    yield case("constant rows", lambda _, array: _constant_rows(array))
    yield case("largest", lambda name, array: _extreme(array, ranges[name]))
    for factor in FACTORS:
        with np.errstate(over="ignore"):  # may exceed float32's range
            larger = {name: base[name] * factor for name in floats}
        yield AdversarialCase(name=f"{factor:g} times larger", feed={**base, **larger}, factor=factor)


def _integer_cases(
    wanted: Sequence[Input], base: Feed, masks: set[str], ranges: Mapping[str, _Range]
) -> Iterator[AdversarialCase]:
    if masks:
        lowest = {name: ranges[name].low if base[name].dtype.kind == "f" else 0 for name in masks}
        yield AdversarialCase(
            name="masked row", feed={**base, **{name: _first_row(base[name], lowest[name]) for name in masks}}
        )
    integers = [v.name for v in wanted if np.issubdtype(v.dtype, np.integer) and v.name not in masks and base[v.name].ndim]
    if integers:
        largest = {name: np.full_like(base[name], ranges[name].high) for name in integers}
        yield AdversarialCase(name="largest integers", feed={**base, **largest})


def _constant_rows(array: Array) -> Array:
    if array.ndim < 2 or not array.size:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        mean = array.mean(axis=-1, keepdims=True)  # rounding or overflow may exceed the row's range
        within = np.clip(mean, array.min(axis=-1, keepdims=True), array.max(axis=-1, keepdims=True))
    return np.broadcast_to(within, array.shape)


def _extreme(array: Array, extent: _Range) -> Array:
    signs = np.ones(array.shape)
    if extent.low < 0 < extent.high:
        signs = np.random.default_rng(SEED).choice([-1.0, 1.0], array.shape)
    elif extent.high <= 0:
        signs = -signs
    largest: Array = signs * extent.largest
    return largest


def _first_row(array: Array, value: float) -> Array:
    masked = array.copy()
    masked[:1] = value
    return masked


def _lengthened(name: str, array: Array, axis: int, size: int) -> Array:
    steps = np.diff(array, axis=axis) if np.issubdtype(array.dtype, np.integer) else np.zeros(0)
    if "position" in name.lower() and steps.size and (steps == 1).all():
        first = np.take(array, [0], axis=axis)
        shape = [size if index == axis else 1 for index in range(array.ndim)]
        counted: Array = (first + np.arange(size).reshape(shape)).astype(array.dtype)
        return counted
    longer: Array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return longer


def _as_given(array: Array, like: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.array(array, like.dtype, order="C")  # np.ascontiguousarray adds a dimension to a scalar


def _same(one: Feed, other: Feed) -> bool:
    return all(np.array_equal(one[name], other[name], equal_nan=one[name].dtype.kind == "f") for name in one)
