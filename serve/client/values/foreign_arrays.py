"""Arrays of other libraries as numpy's, without importing those libraries and without a copy where they share memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def as_numpy(value: Any) -> Array:
    """A numpy array of the same elements.

    A tensor of torch is detached and brought to the CPU if it is elsewhere; bfloat16, which torch cannot hand to numpy, comes
    as `ml_dtypes.bfloat16`. Other objects are asked for `__array__`, or for `__dlpack__`.

    Raises:
        ValueError, TypeError, RuntimeError or BufferError: it cannot be read as an array, or has masked values; the text is the
            other library's, mostly.
    """
    if isinstance(value, np.ma.MaskedArray) and (masked := np.count_nonzero(value.mask)):
        # numpy would hand out whatever lies below the mask.
        raise ValueError(f"{masked} of its values are masked; fill them, with .filled(VALUE)")
    torch = sys.modules.get("torch")  # whoever holds a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(torch, value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        return np.from_dlpack(value)
    return np.asarray(value)


def _of_torch(torch: Any, tensor: Any) -> Array:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor)
    import ml_dtypes  # noqa: PLC0415  (only bfloat16 tensors need it)

    return np.asarray(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
