"""Lets operations that promote mixed dtypes by themselves do so: torch's autocast refuses float16 in a bfloat16 region.

On the CPU torch casts the inputs of `cat` and `stack` to the widest dtype, and raises "Unexpected floating ScalarType" when one
of them has the low-precision dtype that is not the region's. Without that step they give the same dtypes, and no error. Falling
through to them costs nothing, so it is done once per process rather than per region.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

_SELF_PROMOTING_ON_CPU = ("cat", "stack")
_lock = threading.Lock()
_library: Any = None


def repair_promotion() -> None:
    """Take torch's own promotion step away from these operations, unless that is done already."""
    global _library  # noqa: PLW0603  (registrations are one set per process)
    if _library is not None:
        return
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        if _library is None:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            for name in _SELF_PROMOTING_ON_CPU:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")  # type: ignore[no-untyped-call]
            _library = library
