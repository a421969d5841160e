"""What a checkpoint can hold: whatever is read back from it without running code of the file."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator

# What torch.load raises for bytes that are no archive, a truncated archive, or an archive with other things than data in it.
UNREADABLE = (
    OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError,
    TypeError,
)  # fmt: skip
_KNOWN = {type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size}


def first_unreadable(value: Any, place: str) -> str | None:
    """Look for what could be written, if at all, but not read back, such as a number of numpy's.

    Args:
        value: A state; may be large, its tensors are not copied.
        place: What to call it.

    Returns:
        The first such thing's place and kind; None if there is none.
    """
    if type(value) in _KNOWN:
        return None
    if type(value) not in {dict, OrderedDict, list, tuple}:
        return None if _is_readable(value) else f"{place}, a {type(value).__module__}.{type(value).__qualname__}"
    return next(filter(None, (first_unreadable(part, where) for part, where in _parts(value, place))), None)


def _parts(value: Any, place: str) -> Iterator[tuple[Any, str]]:
    if not isinstance(value, dict):
        yield from ((part, f"{place}.{index}") for index, part in enumerate(value))
        return
    for key, part in value.items():
        yield key, f"a key of {place}"
        yield part, f"{place}.{key}"


def _is_readable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (*UNREADABLE, pickle.PicklingError):
        return False
    return True
