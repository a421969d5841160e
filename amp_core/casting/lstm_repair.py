"""Lets LSTM layers run in float16 on a CPU without float16 instructions, where torch's autocast raises.

torch gives a float32 LSTM to oneDNN, and only then casts it to the region's dtype; it asks before whether oneDNN can do the
dtype that the layer has, but not whether it can do the one that it will have: "could not create a primitive descriptor". There
such a layer computes in float32 here, and gives float16, as it does where the instructions are.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch

from amp_core.casting.untraced import untraced

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)
_OURS = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
_CASTABLE = {torch.float16, torch.bfloat16, torch.float32}
_lock = threading.Lock()
_library: Any = None


def repair_lstm() -> None:
    """Put our own step in the place of torch's, once, unless oneDNN can do float16 here or is not there."""
    global _library  # noqa: PLW0603  (registrations are one set per process)
    if _library is not None or not _is_needed():
        return
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        if _library is None:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            library.impl("mkldnn_rnn_layer", _layer, "AutocastCPU")  # type: ignore[no-untyped-call]
            _library = library


def _is_needed() -> bool:
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and not torch.ops.mkldnn._is_mkldnn_fp16_supported())  # noqa: SLF001  (no public way to ask)


@untraced
def _layer(*args: Any) -> tuple[torch.Tensor, ...]:
    dtype = torch.get_autocast_dtype("cpu")
    computed = torch.float32 if dtype is torch.float16 else dtype
    with _C._ExcludeDispatchKeyGuard(_OURS):  # noqa: SLF001  (no public form; torch's own casts use it)
        output, hidden, cell, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*(_cast(arg, computed) for arg in args))
    return output.to(dtype), hidden.to(dtype), cell.to(dtype), workspace


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _CASTABLE and value.is_cpu else value
