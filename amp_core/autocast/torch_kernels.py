"""Kernels that repair torch's own autocast: mixed dtypes, LSTMs on the CPU, overwritten weights."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from halfserve.amp_core.autocast.policy_kernels import cast_all, eligible_tensors, widest_dtype
from halfserve.amp_core.autocast.policy_state import untraced
from halfserve.amp_core.policy.operations import autocast_key, qualified_name

# If the inputs include the low-precision dtype that is not the region's, torch's promotion step raises "Unexpected floating
# ScalarType". Operations that promote by themselves give the same dtypes without that step: let them fall through. The others
# get a promotion step of ours. Both are installed once per process rather than per region.

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)
_SELF_PROMOTING = {"cpu": ("cat", "stack"), "cuda": ("addcdiv", "addcmul", "atan2")}
_PROMOTED = {"cuda": ("bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot")}
_promotion_lock = threading.Lock()
_promotion_libraries: dict[str, Any] = {}


def repair_promotion(device_type: str) -> None:
    """Replace torch's own promotion step of a device's operations, once per process."""
    if device_type in _promotion_libraries or device_type not in _SELF_PROMOTING:
        return
    with _promotion_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        if device_type not in _promotion_libraries:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            key = autocast_key(device_type)
            for name in _SELF_PROMOTING[device_type]:
                library.impl(name, torch.library.fallthrough_kernel, key)  # type: ignore[no-untyped-call]
            for name in _PROMOTED.get(device_type, ()):
                library.impl(name, _widest(name, device_type), key)  # type: ignore[no-untyped-call]
            _promotion_libraries[device_type] = library


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


# torch passes a float32 LSTM to oneDNN, which casts it to the region's dtype even where oneDNN has no such layer: "could not
# create a primitive descriptor". Which layers it has depends on the processor and on whether gradients are needed: float16 for
# inference only, with AVX512-FP16; bfloat16 from AVX-512 on. So oneDNN itself is asked, once for each case. A layer that it
# does not have computes in float32 here, and returns the region's dtype.

_OURS = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
_lstm_lock = threading.Lock()
_lstm_library: Any = None


def repair_lstm() -> None:
    """Replace torch's kernel for CPU LSTMs, once per process, unless oneDNN is missing."""
    global _lstm_library  # noqa: PLW0603  (registrations are one set per process)
    if _lstm_library is not None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    with _lstm_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        if _lstm_library is None:
            torchs = torch.library.get_kernel("aten::mkldnn_rnn_layer", "AutocastCPU")
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            library.impl("mkldnn_rnn_layer", _layer_kernel(torchs), "AutocastCPU", with_keyset=True)  # type: ignore[no-untyped-call]
            _lstm_library = library


def _layer_kernel(torchs: Any) -> Callable[..., Any]:
    @untraced
    def kernel(keyset: Any, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        # torch takes the kernel for training wherever gradients are enabled, also if no tensor requires one.
        if has_lstm(dtype, torch.is_grad_enabled()):
            return torchs.call_boxed(keyset, *args)
        with _C._ExcludeDispatchKeyGuard(_OURS):  # noqa: SLF001  (no public form; torch's own casts use it)
            in_full = cast_all(args, "cpu", torch.float32)
            output, hidden, cell, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*in_full)
        return output.to(dtype), hidden.to(dtype), cell.to(dtype), workspace

    return kernel


@functools.cache
def has_lstm(dtype: torch.dtype, trains: bool) -> bool:
    """Return whether oneDNN has LSTMs of a dtype on this processor, with gradients if `trains`, and else without."""
    # A thread of its own has none of the modes that the caller may be in: fake tensors, transforms, autocast.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_runs_lstm, dtype, trains).result()


def _runs_lstm(dtype: torch.dtype, trains: bool) -> bool:
    size, mode_of_lstms = 8, 2
    x = torch.zeros(1, 1, size, dtype=dtype, requires_grad=trains)
    state, weight, bias = (torch.zeros(shape, dtype=dtype) for shape in ((1, size), (4 * size, size), (4 * size,)))
    settings: tuple[Any, ...] = (False, [], mode_of_lstms, size, 1, True, False, False, trains)
    try:
        with torch.set_grad_enabled(trains):
            output, *_ = torch.ops.aten.mkldnn_rnn_layer(x, weight, weight, bias, bias, state, state, *settings)
            if trains:
                torch.autograd.grad(output.sum(), x)
    except RuntimeError:
        return False
    return True


# torch keeps a weight's low-precision copy until the region ends, even if the weight changes. Optimizers report their steps
# (see `region`); averaged or loaded weights arrive through `copy_`, a number that is assigned to a whole weight through
# `fill_`. torch has no kernels for these at the autocast keys, so a kernel there sees every call inside a region, at a cost of
# 3 us each. A weight that is written through `.data` looks like any other tensor, so any such write to a float32 tensor empties
# the cache. The copies that torch's operations make into tensors of their own, below autograd, do not empty it: otherwise a
# weight used before and after such a copy would be cast twice, and its gradients rounded in another order than torch's.

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default, torch.ops.aten.fill_.Tensor)
_AUTOGRAD = _C.DispatchKey.AutogradFunctionality
_writes_lock = threading.Lock()
_watched: set[str] = set()
_writes_library: Any = None


def watch_weight_writes(device_type: str) -> None:
    """Install the kernels for a device, once."""
    global _writes_library  # noqa: PLW0603  (registrations are one set per process)
    with _writes_lock:
        if device_type in _watched:
            return
        if _writes_library is None:
            _writes_library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for write in _WRITES:
            # Straight to the dispatcher: Library.impl would warn about overriding a kernel that does not exist.
            name = qualified_name(write).removeprefix("aten::")
            _writes_library.m.impl(name, autocast_key(device_type), _write_kernel(write, device_type), True)
        _watched.add(device_type)


def _write_kernel(write: Any, device_type: str) -> Callable[..., Any]:
    key = torch._C._dispatch_key_parse(autocast_key(device_type))  # noqa: SLF001  (dispatch keys have no public face)
    below, this_key = torch._C._dispatch_keyset_full_after(key), torch._C.DispatchKeySet(key)  # noqa: SLF001  (see above)

    @untraced
    def kernel(keyset: Any, target: Any, source: Any, *flags: Any) -> Any:
        # In inference mode nothing passes autograd, so that a user's write looks like an operation's copy.
        if keyset.has(_AUTOGRAD) or torch.is_inference_mode_enabled():
            first = target[0] if isinstance(target, list) else target
            if first.dtype is torch.float32:
                torch.clear_autocast_cache()
        if isinstance(source, (torch.Tensor, list)):
            return write.redispatch(keyset & below, target, source, *flags)
        # A redispatch does not accept a number in place of a 0-dimensional tensor.
        with torch._C._ExcludeDispatchKeyGuard(this_key):  # noqa: SLF001  (no public form; torch's own casts use it)
            return write(target, source, *flags)

    return kernel
