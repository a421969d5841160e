"""Samples of a data set as arrays: what a model is verified on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from export.errors import ExportError

if TYPE_CHECKING:
    from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Stacked samples.

    Attributes:
        inputs: One tensor per model input; the first dimension counts the samples.
        labels: int64, shape (samples,), where the targets are single whole numbers; else None.
    """

    inputs: tuple[Tensor, ...]
    labels: Tensor | None


def take_samples(data: Dataset[Any], count: int) -> Samples:
    """Stack the first `count` items (input or tuple of inputs, target) of a data set with a length.

    Raises:
        ExportError: The items are no such pairs, or their inputs differ in shape and cannot be stacked.
    """
    if count < 1:
        raise ExportError(f"samples is {count}; expected at least 1")
    items = [data[index] for index in range(min(count, len(data)))]  # type: ignore[arg-type]  # (checked when it was built)
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise ExportError("the held-out set must hold pairs (input, target)")
    columns = zip(*(item[0] if isinstance(item[0], tuple | list) else (item[0],) for item in items), strict=True)
    try:
        inputs = tuple(torch.stack([torch.as_tensor(value) for value in column]) for column in columns)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"the held-out inputs cannot be stacked: {str(error).splitlines()[0]}") from error
    return Samples(inputs=inputs, labels=_labels([item[1] for item in items]))


def _labels(targets: list[Any]) -> Tensor | None:
    tensors = [torch.as_tensor(target) for target in targets if isinstance(target, int | Tensor)]
    whole = all(tensor.dim() == 0 and not tensor.is_floating_point() and not tensor.is_complex() for tensor in tensors)
    return torch.stack(tensors).long() if whole and len(tensors) == len(targets) else None
