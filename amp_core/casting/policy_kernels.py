"""Installs the kernels through which policies act, at a dispatch key of their own.

torch keeps its casts at the dispatch key `Autocast<Device>`, above autograd: casts made there are differentiated and reach
operations inside C++ composites. A policy's kernels do the same one key above, at `AutocastPrivateUse1`, which no tensor of
this process has. A region with a policy lets its thread's calls pass through that key; to all other code, regions without a
policy and torch's own included, the kernels do not exist and cost nothing. So they are installed with the first region that
needs them, and there is no need to take them away.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import _ops

from amp_core.casting.policy_kernel import make_kernel
from amp_core.casting.policy_state import KEY, KEY_NAME
from amp_core.casting.recomputation import recompute_under_policies
from amp_core.policy.op_names import find_overload

if TYPE_CHECKING:
    from amp_core.casting.policy_state import Policies


class _Kernels:
    """What is installed, in libraries by namespace: a library takes its kernels away when it is collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.libraries: dict[str, Any] = {}
        self.installed: set[str] = set()
        self.served: set[Policies] = set()

    def require(self, policies: Policies) -> None:
        with self.lock:
            for name in {name for _, rules in policies.rules for name in rules} - self.installed:
                namespace, _, overload = name.partition("::")
                # Straight to the dispatcher: Library.impl would warn that a kernel of another's may be replaced.
                self._library(namespace).m.impl(overload, KEY_NAME, make_kernel(find_overload(name)), True)
                self.installed.add(name)
            self.served.add(policies)

    def _library(self, namespace: str) -> Any:
        if not self.libraries:
            # Operations without a kernel of ours pass by; for the keys of its own devices torch has said so itself.
            self.libraries["_"] = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
            self.libraries["_"].fallback(torch.library.fallthrough_kernel, KEY_NAME)
            _let_higher_order_ops_pass()
        if namespace not in self.libraries:
            self.libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
        return self.libraries[namespace]


def _let_higher_order_ops_pass() -> None:
    # Operations that take functions (cond, scan, flex_attention) have tables of their own, which no fallback is part of: those
    # that there are, and those that are still to be made. The operations in their functions come by the kernels.
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(KEY)  # noqa: SLF001  (the only place)
    for operation in _ops._higher_order_ops.values():  # noqa: SLF001  (see above)
        operation.fallthrough(KEY)  # type: ignore[no-untyped-call]


_kernels = _Kernels()


def require_kernels(policies: Policies) -> None:
    """Install those of these policies' kernels that are not there yet."""
    if policies not in _kernels.served:
        recompute_under_policies()
        _kernels.require(policies)
