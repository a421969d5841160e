"""The user's samples, cut into batches that a model takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from export.errors import ExportError
from export.verification.children import Feed, Value
from export.verification.interface import Input
from export.verification.metrics import Array

if TYPE_CHECKING:
    from torch import Tensor

Values: TypeAlias = "Tensor | Array"
Inputs: TypeAlias = "Values | Mapping[str, Values] | Sequence[Values] | Sequence[Mapping[str, Values]]"


@dataclass(frozen=True, kw_only=True)
class Feeds:
    """Batches for one model.

    Attributes:
        batches: Each an array for every input, by name.
        samples: How many samples they hold together; a batch of a model without a batch dimension is one.
        resizable: Whether the first dimension of every input counts samples and may have any size.
    """

    batches: tuple[Feed, ...]
    samples: int
    resizable: bool


def make_feeds(wanted: Sequence[Input], given: Inputs, batch_size: int) -> Feeds:
    """Cut samples into batches, and check that they fit.

    Args:
        wanted: The model's inputs.
        given: One array, or one for each input in the model's order or by name, whose first dimension counts the samples; or a
            list of such mappings, each a batch that is run as it is.
        batch_size: Largest batch. A fixed batch dimension goes first, and a remainder is left out.

    Raises:
        ExportError: An input is missing or unknown, or its array does not fit; the text names it, what was expected and given.
    """
    if isinstance(given, Sequence) and given and all(isinstance(entry, Mapping) for entry in given):
        batches = tuple(_checked(wanted, _by_name(wanted, batch)) for batch in given)
        counts = [next((len(array) for array in batch.values() if array.ndim), 1) for batch in batches]
        if 0 in counts and _is_batched(wanted):
            raise ExportError(
                f"batch {counts.index(0)} of the samples is empty; expected at least 1 sample in each: leave it out"
            )
        return Feeds(batches=batches, samples=sum(counts), resizable=_is_resizable(wanted))
    arrays = _by_name(wanted, given)
    if not _is_batched(wanted):
        return Feeds(batches=(_checked(wanted, arrays),), samples=1, resizable=False)
    return _cut(wanted, arrays, batch_size)


def require_finite(batches: Sequence[Feed], answers: Sequence[list[Value]]) -> None:
    """Check that every sample with NaN or an infinity in it gets finite numbers from the reference all the same.

    A model may take NaN for a missing value, or -inf in a mask. Where it hands them on, the comparison proves nothing.

    Args:
        batches: The samples.
        answers: The reference's outputs for each batch.

    Raises:
        ExportError: A sample has some, and the answer to it is not finite, or holds no floats; names sample and input.
    """
    found = [
        (before + row, name)
        for before, batch, outputs in zip(_starts(batches), batches, answers, strict=True)
        for name, rows in _with_non_finite(batch)
        for row in rows
        if not _answers_finitely(outputs, row, len(batch[name]) if batch[name].ndim else 0)
    ]
    if found:
        row, name = found[0]
        others = len({row for row, _ in found}) - 1
        more = f"; so do {others} more" if others else ""
        raise ExportError(
            f"sample {row} (counted from 0) holds NaN or infinity in input {name!r}, and float32 does not answer it with "
            f"finite numbers{more}: nothing is proved by such samples; leave them out, or mend them"
        )


def as_array(values: Any) -> Array:
    """A torch tensor, an array, or what numpy makes one of, as an array."""
    torch = sys.modules.get("torch")  # whoever holds a tensor has loaded it; nobody else needs to
    if torch is not None and isinstance(values, torch.Tensor):
        array: Array = values.detach().cpu().numpy()
        return array
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype == object else array


def _starts(batches: Sequence[Feed]) -> Iterator[int]:
    start = 0
    for batch in batches:
        yield start
        start += next((len(array) for array in batch.values() if array.ndim), 1)


def _with_non_finite(batch: Feed) -> Iterator[tuple[str, list[int]]]:
    """Inputs that hold some, and the rows in which they do; row 0 of a scalar."""
    for name, array in batch.items():
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            rows = finite.reshape(len(finite), -1).all(1) if finite.ndim else finite.reshape(1)
            yield name, np.flatnonzero(~rows).tolist()


def _answers_finitely(outputs: Sequence[Value], row: int, rows: int) -> bool:
    """Whether there are floats in the answer to a row, and all are finite; outputs of other sizes are looked at as a whole."""
    arrays = [array for output in outputs for array in (output if isinstance(output, list) else [output])]
    floats = [array for array in arrays if array is not None and array.dtype.kind == "f"]
    parts = [array[row] if array.ndim and len(array) == rows else array for array in floats]
    return bool(parts) and all(bool(np.isfinite(part).all()) for part in parts)


def _by_name(wanted: Sequence[Input], given: Any) -> Feed:
    names = [value.name for value in wanted]
    listed = ", ".join(names) or "none"
    if isinstance(given, Mapping):
        for name in names:
            if name not in given:
                raise ExportError(
                    f"input {name!r} is not among the samples ({', '.join(given) or 'none'}); the model takes {listed}"
                )
        if unknown := sorted(given.keys() - set(names)):
            raise ExportError(f"the samples name {unknown[0]!r}, which is no input of the model; it takes {listed}")
        return {name: as_array(given[name]) for name in names}
    several = isinstance(given, Sequence)
    arrays = [as_array(values) for values in given] if several else [as_array(given)]
    if len(arrays) != len(names):
        raise ExportError(f"the model takes {len(names)} inputs ({listed}), {len(arrays)} were given")
    return dict(zip(names, arrays, strict=True))


def _checked(wanted: Sequence[Input], feed: Feed) -> Feed:
    for value in wanted:
        if misfit := value.misfit(feed[value.name]):
            raise ExportError(misfit)
    return feed


def _is_batched(wanted: Sequence[Input]) -> bool:
    """Whether all first dimensions are one and the same: a name, or a fixed size; unnamed ones may be anything."""
    if not wanted or any(value.dims is not None and not value.dims for value in wanted):
        return False
    firsts = {value.dims[0] for value in wanted if value.dims}
    return len(firsts - {None}) <= 1 and not (None in firsts and any(isinstance(first, int) for first in firsts))


def _is_resizable(wanted: Sequence[Input]) -> bool:
    return _is_batched(wanted) and not any(value.dims and isinstance(value.dims[0], int) for value in wanted)


def _cut(wanted: Sequence[Input], arrays: Feed, batch_size: int) -> Feeds:
    counts = {len(array) for array in arrays.values() if array.ndim}
    if len(counts) != 1 or 0 in counts or any(array.ndim == 0 for array in arrays.values()):
        shapes = ", ".join(str(list(array.shape)) for array in arrays.values())
        raise ExportError(f"inputs: expected arrays with the same number of samples first, at least 1; got {shapes}")
    count = counts.pop()
    fixed = next((value.dims[0] for value in wanted if value.dims and isinstance(value.dims[0], int)), 0)
    size = fixed or min(batch_size, count)
    if count < size:
        raise ExportError(f"the model takes batches of exactly {size}, only {count} samples were given")
    last = count - count % size if fixed else count
    starts = range(0, last, size)
    batches = ({name: array[start : min(start + size, last)] for name, array in arrays.items()} for start in starts)
    return Feeds(batches=tuple(_checked(wanted, batch) for batch in batches), samples=last, resizable=not fixed)
