"""Samples of a data set, stacked: what a model is verified on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from export.errors import ExportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Stacked samples.

    Attributes:
        inputs: A tensor, or tensors in tuples, lists and dicts, as the items have them; the first dimension counts the samples.
        labels: int64, shape (samples,), where the targets are single whole numbers; else None.
        note: What is to be said of them beside the verdict.
    """

    inputs: Any
    labels: Tensor | None
    note: str = ""


def take_samples(data: Dataset[Any], count: int) -> Samples:
    """Stack the first `count` items (input, target) of a data set with a length, by its own `collate_fn` where it has one.

    Raises:
        UsageError: Fewer than one is asked for.
        ExportError: The items are no such pairs, or their inputs differ in shape and cannot be stacked.
    """
    if count < 1:
        raise UsageError(f"samples is {count}; expected at least 1")
    items = [data[index] for index in range(min(count, len(data)))]  # type: ignore[arg-type]  # (checked when it was built)
    collate = getattr(data, "collate_fn", None)
    if collate is not None:
        return _collated(collate, items)
    if not all(_is_pair(item) for item in items):
        raise ExportError("the held-out set must hold pairs (input, target)")
    return Samples(inputs=_stacked([item[0] for item in items]), labels=_labels([item[1] for item in items]))


def _collated(collate: Callable[[list[Any]], Any], items: list[Any]) -> Samples:
    try:
        batch = collate(items)
    except Exception as error:
        raise ExportError(f"the held-out set's collate_fn raised {type(error).__name__}: {_first_line(error)}") from error
    if not _is_pair(batch):
        raise ExportError("the held-out set's collate_fn must return a pair (inputs, targets)")
    inputs, targets = batch
    if not all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inputs)):
        raise ExportError(
            "the held-out set's collate_fn must return inputs that are tensors, or tuples, lists and dicts of them"
        )
    return Samples(inputs=inputs, labels=_labels(list(targets)) if isinstance(targets, Tensor) and targets.dim() else None)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _stacked(inputs: list[Any]) -> Any:
    flat = [pytree.tree_flatten(entry) for entry in inputs]
    _, spec = flat[0]
    for place, (_, other) in enumerate(flat):
        if other != spec:
            raise ExportError(
                f"the held-out inputs cannot be stacked: that of item {place} has other parts than the first one's"
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    try:
        stacked = [torch.stack([torch.as_tensor(value) for value in column]) for column in columns]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"the held-out inputs cannot be stacked: {_first_line(error)}") from error
    return pytree.tree_unflatten(stacked, spec)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


def _labels(targets: list[Any]) -> Tensor | None:
    tensors = [torch.as_tensor(target) for target in targets if isinstance(target, int | Tensor)]
    whole = all(tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex() for tensor in tensors)
    return torch.stack(tensors).long() if whole and len(tensors) == len(targets) else None
