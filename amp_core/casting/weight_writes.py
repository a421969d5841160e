"""Notices weights that are overwritten inside a region, so that no cast of their old values is used again.

torch keeps a weight's low-precision copy until the region ends, whatever happens to the weight. Optimizers report their steps
(see `cast_cache`); averaged or loaded weights arrive through `copy_`. torch has no kernel of its own for it at the autocast
keys, so one there sees every copy made inside a region, at a cost of 2 us each. A weight that is written through `.data` cannot
be told from another tensor, so any copy into a float32 tensor empties the cache.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from amp_core.casting import cast_cache
from amp_core.casting.untraced import untraced
from amp_core.policy.native_rules import autocast_key
from amp_core.policy.op_names import qualified_name

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
_lock = threading.Lock()
_watched: set[str] = set()
_library: Any = None


def watch_weight_writes(device_type: str) -> None:
    """Install the kernels for a device, unless they are there."""
    global _library  # noqa: PLW0603  (registrations are one set per process)
    with _lock:
        if device_type in _watched:
            return
        if _library is None:
            _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for write in _WRITES:
            # Straight to the dispatcher: Library.impl would warn of a kernel that it overrides, and there is none.
            name = qualified_name(write).removeprefix("aten::")
            _library.m.impl(name, autocast_key(device_type), _kernel(write, device_type), True)
        _watched.add(device_type)


def _kernel(write: Any, device_type: str) -> Callable[..., Any]:
    key = torch._C._dispatch_key_parse(autocast_key(device_type))  # noqa: SLF001  (dispatch keys have no public face)
    below, this_key = torch._C._dispatch_keyset_full_after(key), torch._C.DispatchKeySet(key)  # noqa: SLF001  (see above)

    @untraced
    def kernel(keyset: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
        first = target[0] if isinstance(target, list) else target
        if first.dtype is torch.float32:
            cast_cache.invalidate()
        if isinstance(source, (torch.Tensor, list)):
            return write.redispatch(keyset & below, target, source, non_blocking)
        # A number stands for a tensor of no dimensions, which a redispatch does not take.
        with torch._C._ExcludeDispatchKeyGuard(this_key):  # noqa: SLF001  (no public form; torch's own casts use it)
            return write(target, source, non_blocking)

    return kernel
