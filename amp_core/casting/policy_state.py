"""Which policies are in force in a thread, told through torch's own autocast state.

torch keeps an autocast flag and dtype per thread for every kind of device, those that this machine lacks included. A policy
lives in two of them: the flags make the kernels of `policy_kernels` reachable (see there), the dtypes are the digits of a
number that stands for the policies in force. So nothing has to be kept beside torch's state, and torch.compile, which guards
its code with that state, compiles again for another policy. What it caches on disk is told apart by `cache_key_tag`, since the
numbers are those of one process.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.compiler.config

from amp_core.casting.untraced import untraced
from amp_core.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amp_core.policy import Rule

# AutocastPrivateUse1 comes before the autocast of all other devices, so that a policy's casts come before torch's own.
_FIRST, _SECOND = "privateuseone", "ipu"
KEY_NAME = "AutocastPrivateUse1"
KEY = torch._C._dispatch_key_parse(KEY_NAME)  # noqa: SLF001  (dispatch keys have no public face)
_DIGITS = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies in force, one per kind of device that has one which differs from torch's own rules.

    Attributes:
        by_device: Pairs (device type, policy), sorted.
        rules: By device type, the rules by qualified overload name.
        tag: Tells these rules from all others, also in other processes.
    """

    by_device: tuple[tuple[str, Policy], ...]
    rules: tuple[tuple[str, Mapping[str, Rule]], ...] = field(compare=False)
    tag: str

    def of(self, device_type: str) -> Policy:
        """The policy of a kind of device; the native one where there is no other."""
        return dict(self.by_device).get(device_type, Policy())

    def with_policy(self, device_type: str, policy: Policy) -> Policies:
        """These policies, with another one for a kind of device; this very object if that changes nothing."""
        return self if policy == self.of(device_type) else _changed(self, device_type, policy)

    def __bool__(self) -> bool:
        return bool(self.by_device)


@dataclass(frozen=True, slots=True)
class Saved:
    """What `put_in_force` changes: torch's state of the two devices, and the tag."""

    flags: tuple[bool, bool, bool]
    dtypes: tuple[torch.dtype, torch.dtype]
    tag: str


NO_POLICIES = Policies((), (), "")
_lock = threading.Lock()
_numbers: dict[Policies, tuple[torch.dtype, torch.dtype]] = {}
_policies: dict[tuple[torch.dtype, torch.dtype], Policies] = {}


def policies_in_force() -> Policies:
    """The policies of this thread's innermost region."""
    if not torch._C._dispatch_tls_is_dispatch_key_included(KEY):  # noqa: SLF001  (dispatch keys have no public face)
        return NO_POLICIES
    return _policies.get((torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)), NO_POLICIES)


@untraced
def put_in_force(policies: Policies) -> Saved:
    """Set this thread's policies.

    Returns:
        What `restore` takes to undo it.

    Raises:
        RuntimeError: If the process has seen too many different policies, or a custom backend has taken their place.
    """
    numbers = _number(policies) if policies else None
    saved = Saved(
        (
            torch.is_autocast_enabled(_FIRST),
            torch.is_autocast_enabled(_SECOND),
            torch._C._dispatch_tls_is_dispatch_key_included(KEY),  # noqa: SLF001  (dispatch keys have no public face)
        ),
        (torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)),
        torch.compiler.config.cache_key_tag,
    )
    _set((bool(policies),) * 3, numbers or saved.dtypes)
    torch.compiler.config.cache_key_tag = _tag(saved.tag, policies)
    return saved


@untraced
def restore(saved: Saved) -> None:
    """Undo one `put_in_force`."""
    _set(saved.flags, saved.dtypes)
    torch.compiler.config.cache_key_tag = saved.tag


def _set(flags: tuple[bool, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.set_autocast_dtype(_FIRST, dtypes[0])
    torch.set_autocast_dtype(_SECOND, dtypes[1])
    torch.set_autocast_enabled(_FIRST, flags[0])
    torch.set_autocast_enabled(_SECOND, flags[1])
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, flags[2])  # noqa: SLF001  (dispatch keys have no public face)


_MARK = "halfserve:"


def _tag(around: str, policies: Policies) -> str:
    users_own = around.partition(_MARK)[0]
    return users_own + _MARK + policies.tag if policies else users_own


def _number(policies: Policies) -> tuple[torch.dtype, torch.dtype]:
    known = _numbers.get(policies)
    if known is not None:
        return known
    custom = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (no public way to ask)
    if custom != _FIRST:
        raise RuntimeError(f"the backend {custom!r} uses torch's autocast in the place that policies need; leave out policy=")
    with _lock:
        if policies not in _numbers:
            high, low = divmod(len(_numbers), len(_DIGITS))
            if high >= len(_DIGITS):
                raise RuntimeError(f"a process can tell {len(_DIGITS) ** 2} different policies apart, and has seen as many")
            _numbers[policies] = number = (_DIGITS[low], _DIGITS[high])
            _policies[number] = policies
    return _numbers[policies]


@cache
def _changed(policies: Policies, device_type: str, policy: Policy) -> Policies:
    by_device = {**dict(policies.by_device), device_type: policy}
    kept = tuple((device, own) for device, own in sorted(by_device.items(), key=str) if own.difference(device))
    rules = tuple((device, own.difference(device)) for device, own in kept)
    listed = [(device, sorted(own.items())) for device, own in rules]
    return Policies(kept, rules, hashlib.sha256(repr(listed).encode()).hexdigest() if kept else "")
