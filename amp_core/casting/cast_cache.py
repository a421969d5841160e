"""Who may use torch's cache of cast weights, so that nobody reads another's entry.

torch keeps one cache for the whole process: float32 leaf -> its low-precision copy, whatever the dtype and the thread, with no
check that the leaf has not changed. Here it belongs to one thread at a time, the first to open an outermost region. The others
cast afresh, which costs a thread nothing as long as it uses each weight once per region. So no thread empties another's cache,
reads its float16 copy in a bfloat16 region, or finds one that a finished region left behind.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Thread(threading.local):
    """Lives as long as its thread, so that a thread which ends inside a region does not keep the cache for ever."""

    def __init__(self) -> None:
        self.token = _Token()


class _Token:
    pass


_lock = threading.Lock()
_thread = _Thread()
_owner: weakref.ref[_Token] | None = None
_dtypes: dict[str, torch.dtype] = {}
_watching_optimizers = False


def acquire() -> bool:
    """Take the cache for this thread's outermost region, if no other thread has it."""
    global _owner, _watching_optimizers  # noqa: PLW0603  (torch's cache is one per process, so is its owner)
    with _lock:
        if not _watching_optimizers:
            # Fused optimizers and writes through .data do not bump a tensor's version: the step itself is the reliable sign.
            register_optimizer_step_post_hook(lambda *_: invalidate())
            _watching_optimizers = True
        if _owner is None or _owner() is None:
            torch.clear_autocast_cache()  # of what torch's own regions may have left
            _owner = weakref.ref(_thread.token)
        return _owner() is _thread.token


def use(device_type: str, dtype: torch.dtype) -> None:
    """Empty the cache, which this thread has, if it was last used with another dtype: it does not tell them apart itself."""
    if _dtypes.get(device_type) is not dtype:
        torch.clear_autocast_cache()
        _dtypes[device_type] = dtype


def release() -> None:
    """Empty the cache and leave it to the next thread."""
    global _owner  # noqa: PLW0603  (see acquire)
    with _lock:
        torch.clear_autocast_cache()
        _owner = None


def invalidate() -> None:
    """Empty the cache because weights have changed, whoever has it, torch's own regions included."""
    torch.clear_autocast_cache()
