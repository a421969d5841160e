"""The user's samples, cut into batches that a model takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from export.errors import ExportError
from export.verification.children import Feed
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


def as_array(values: Any) -> Array:
    """A torch tensor, an array, or what numpy makes one of, as an array."""
    torch = sys.modules.get("torch")  # whoever holds a tensor has loaded it; nobody else needs to
    if torch is not None and isinstance(values, torch.Tensor):
        array: Array = values.detach().cpu().numpy()
        return array
    array = np.asarray(values)
    return array.astype(np.str_) if array.dtype == object else array


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
