"""A policy's kernels at the dispatcher's autocast key, there only while some region needs them.

`Autocast<Device>` is where torch keeps its own casts, above autograd, so casts made there are differentiated like torch's and
reach operations inside C++ composites. While a region with a policy is open, each operation that the policy changes has one
Python kernel at that key; the kernel asks which rules are in force in its own thread. The last region to leave takes them away,
because a kernel in place costs every autocast region of the process a few microseconds per call.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from amp_core.casting.override_kernel import make_kernel
from amp_core.casting.pause_compile import pause_compile, resume_compile
from amp_core.policy.native_rules import autocast_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._ops import OpOverload

    from amp_core.policy import Rule


class _Kernels:
    """The kernels of all devices, and how many open regions need them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.regions = 0
        self.library: Any = None
        self.installed: set[tuple[str, str]] = set()
        self.stance: Any = None

    def require(self, device_type: str, rules: Mapping[str, Rule]) -> None:
        with self.lock:
            if self.library is None:
                self.stance = pause_compile()
                self.library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            self.regions += 1
            for name in rules:
                if (device_type, name) not in self.installed:
                    self._install(device_type, name)

    def _install(self, device_type: str, name: str) -> None:
        # Straight to the dispatcher: Library.impl's own bookkeeping would double what opening a region costs.
        self.library.m.impl(name.removeprefix("aten::"), autocast_key(device_type), _kernel(device_type, name), True)
        self.installed.add((device_type, name))

    def release(self) -> None:
        with self.lock:
            self.regions -= 1
            if self.regions == 0:
                self.library._destroy()  # noqa: SLF001  (nothing else takes kernels away before the interpreter ends)
                self.library = None
                self.installed.clear()
                resume_compile(self.stance)


_kernels = _Kernels()


def require_kernels(device_type: str, rules: Mapping[str, Rule]) -> None:
    """Install those of these rules' kernels that are not there yet; to be paired with `release_kernels`."""
    _kernels.require(device_type, rules)


def release_kernels() -> None:
    """Undo one `require_kernels`; the last one puts torch's own registrations back."""
    _kernels.release()


@cache
def _kernel(device_type: str, name: str) -> Callable[..., Any]:
    # Made once, before the first installation, when what is registered is still torch's own.
    key = autocast_key(device_type)
    has_native = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001  (no public way to ask)
    return make_kernel(_overload(name), device_type, torch.library.get_kernel(name, key) if has_native else None)


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found
