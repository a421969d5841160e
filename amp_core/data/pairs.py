"""Pairs (inputs, targets): checked where they are made, moved where they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from amp_core.data.errors import DataError, no_shared_memory, one_line

_EXPECTED = "the data's items must be pairs (input, target) of tensors or numbers"


def make_batch(items: list[Any], collate: Callable[[list[Any]], Any] | None, name: str) -> tuple[Any, Any]:
    """Put items together to a batch.

    Args:
        items: At least one; pairs, unless the data set brings its own `collate`.
        collate: From a list of items to a pair (inputs, targets); None stacks tensors and numbers, also
            those in tuples, lists and dicts.
        name: Of the data set, for messages.

    Returns:
        (inputs, targets), each a tensor or tuples, lists and dicts of tensors.

    Raises:
        DataError: If the items are no pairs, do not go together, or hold anything but tensors and numbers.
    """
    if collate is None:
        for item in items:
            _require_pair(item, name)
    try:
        batch = (collate or default_collate)(items)
    except Exception as error:
        raise no_shared_memory(error, name) or DataError(
            f"the items of {name} do not make a batch, {one_line(error)}; expected the same shapes in all"
        ) from error
    _require_pair(batch, name)
    inputs, targets = batch
    _require_tensors(inputs, name)
    _require_tensors(targets, name)
    return inputs, targets


def _require_pair(value: Any, name: str) -> None:
    if not isinstance(value, (tuple, list)):
        raise DataError(f"{_EXPECTED}, but {name} gives {type(value).__name__}")
    if len(value) != 2:
        raise DataError(f"{_EXPECTED}, but {name} gives {len(value)} things at a time")


def _require_tensors(value: Any, name: str) -> None:
    if isinstance(value, Tensor):
        return
    if isinstance(value, (tuple, list)):
        parts: list[Any] = list(value)
    elif isinstance(value, Mapping):
        parts = list(value.values())
    else:
        raise DataError(f"{_EXPECTED}, but {name} has {type(value).__name__} among them")
    for part in parts:
        _require_tensors(part, name)


def share(value: Any, name: str) -> None:
    """Put a tensor, or all tensors in tuples, lists and dicts, where other processes can read them.

    A worker's queue would do so in a thread of its own, which prints what goes wrong, and leaves the batch awaited for ever.

    Raises:
        DataError: If there is no room.
    """
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            try:
                value.share_memory_()  # type: ignore[no-untyped-call]  # (torch leaves it without types)
            except RuntimeError as error:
                raise no_shared_memory(error, name) or error from error
        return
    for part in value.values() if isinstance(value, Mapping) else value:
        share(part, name)


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or all tensors in tuples, lists and dicts, without waiting for copies from pinned memory."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        moved = [to_device(part, device) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(part, device) for part in value]
    return {key: to_device(part, device) for key, part in value.items()}
