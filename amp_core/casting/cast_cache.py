"""Who may use torch's cache of cast weights, so that nobody reads another's entry.

torch keeps one cache for the whole process: float32 leaf -> its low-precision copy, whatever the dtype and the thread, with no
check that the leaf has not changed. Here it belongs to one thread at a time, the first to open an outermost region. The others
cast afresh, which costs a thread nothing as long as it uses each weight once per region. So no thread empties another's cache,
reads its float16 copy in a bfloat16 region, or finds one that a finished region left behind.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Held by the thread that has the cache, from entering its outermost region to leaving it.
_cache = threading.Lock()
_owner = 0
_watching = threading.Lock()


def acquire() -> bool:
    """Take the cache for this thread's outermost region, if no other thread has it."""
    global _owner  # noqa: PLW0603  (torch's cache is one per process, so is its owner)
    if not _cache.acquire(blocking=False) and _owner in sys._current_frames():  # noqa: SLF001  (the one list of live threads)
        return False
    # Free, or its owner has ended inside a region.
    _owner = threading.get_ident()
    torch.clear_autocast_cache()  # of what torch's own regions may have left
    return True


def release() -> None:
    """Empty the cache and leave it to the next thread."""
    torch.clear_autocast_cache()
    _cache.release()


def invalidate() -> None:
    """Empty the cache because weights have changed, whoever has it, torch's own regions included."""
    torch.clear_autocast_cache()


def watch_optimizers() -> None:
    """Empty the cache after every optimizer's step, from now on."""
    # Fused optimizers and writes through .data do not bump a tensor's version: the step itself is the reliable sign.
    if _watching.acquire(blocking=False):
        register_optimizer_step_post_hook(lambda *_: invalidate())
