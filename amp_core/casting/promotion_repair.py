"""Lets operations that promote mixed dtypes do so: torch's autocast refuses float16 in a bfloat16 region, and the reverse.

Where the low-precision dtype that is not the region's is among the inputs, torch's promotion step raises "Unexpected floating
ScalarType". Operations that promote by themselves give the same dtypes, and no error, without that step. Falling through to
them costs nothing; the others have a step of ours. Either is done once per process rather than per region.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from amp_core.casting.policy_kernel import cast_all, eligible_tensors, widest_dtype
from amp_core.casting.untraced import untraced
from amp_core.policy.native_rules import autocast_key

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)
_SELF_PROMOTING = {"cpu": ("cat", "stack"), "cuda": ("addcdiv", "addcmul", "atan2")}
_PROMOTED = {"cuda": ("bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot")}
_lock = threading.Lock()
_libraries: dict[str, Any] = {}


def repair_promotion(device_type: str) -> None:
    """Take torch's own promotion step away from a device's operations, unless that is done already."""
    if device_type in _libraries or device_type not in _SELF_PROMOTING:
        return
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        if device_type not in _libraries:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            key = autocast_key(device_type)
            for name in _SELF_PROMOTING[device_type]:
                library.impl(name, torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
            for name in _PROMOTED.get(device_type, ()):
                library.impl(name, _widest(name, device_type), key)  # type: ignore[no-untyped-call]
            _libraries[device_type] = library


def _widest(name: str, device_type: str) -> Callable[..., Any]:
    overload = getattr(torch.ops.aten, name).default
    key = _C.DispatchKeySet(getattr(_C.DispatchKey, autocast_key(device_type)))

    @untraced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        eligible = eligible_tensors((*args, *kwargs.values()), device_type)
        with _C._ExcludeDispatchKeyGuard(key):  # noqa: SLF001  (no public form; torch's own casts use it)
            if len({tensor.dtype for tensor in eligible}) > 1:
                dtype = widest_dtype(eligible)
                args = tuple(cast_all(value, device_type, dtype) for value in args)
                kwargs = {name: cast_all(value, device_type, dtype) for name, value in kwargs.items()}
            return overload(*args, **kwargs)

    return kernel
