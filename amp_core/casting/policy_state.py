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
_MARK = "halfserve:"

Number = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, eq=False, slots=True)
class Policies:
    """The policies in force, one per kind of device that has one which differs from torch's own rules; one object for each set.

    Attributes:
        by_device: Device type -> policy.
        rules: Pairs (device type, the rules by qualified overload name).
        tag: Tells these rules from all others, also in other processes.
        number: Tells them from all others of this process.
    """

    by_device: Mapping[str, Policy]
    rules: tuple[tuple[str, Mapping[str, Rule]], ...]
    tag: str
    number: Number | None
    _successors: dict[tuple[str, Policy], Policies] = field(default_factory=dict, repr=False)

    def of(self, device_type: str) -> Policy:
        """The policy of a kind of device; the native one where there is no other."""
        return self.by_device.get(device_type) or Policy()

    def with_policy(self, device_type: str, policy: Policy) -> Policies:
        """These policies, with another one for a kind of device; this very object if that changes nothing.

        Raises:
            RuntimeError: If the process has seen too many different policies, or a custom backend has taken their place.
        """
        known = self._successors.get((device_type, policy))
        if known is None:
            changed = {**self.by_device, device_type: policy}
            differing = {device: changed[device] for device in sorted(changed) if changed[device].difference(device)}
            known = self._successors[device_type, policy] = _numbered(differing)
        return known


@dataclass(frozen=True, slots=True)
class Saved:
    """What `put_in_force` changes: torch's state of the two devices, and the tag."""

    is_active: bool
    number: Number
    tag: str


NO_POLICIES = Policies({}, (), "", None)
_lock = threading.Lock()
_all: dict[Number, Policies] = {}


def policies_in_force() -> Policies:
    """The policies of this thread's innermost region."""
    if not torch._C._dispatch_tls_is_dispatch_key_included(KEY):  # noqa: SLF001  (dispatch keys have no public face)
        return NO_POLICIES
    return _all.get((torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)), NO_POLICIES)


@untraced
def put_in_force(policies: Policies) -> Saved:
    """Set this thread's policies.

    Returns:
        What `restore` takes to undo it.
    """
    saved = Saved(
        torch._C._dispatch_tls_is_dispatch_key_included(KEY),  # noqa: SLF001  (dispatch keys have no public face)
        (torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)),
        torch.compiler.config.cache_key_tag,
    )
    tag_of_user = saved.tag.partition(_MARK)[0]
    if policies.number is None:
        _set(False, saved.number, tag_of_user)
    else:
        _set(True, policies.number, tag_of_user + policies.tag)
    return saved


@untraced
def restore(saved: Saved) -> None:
    """Undo one `put_in_force`."""
    _set(saved.is_active, saved.number, saved.tag)


def _set(is_active: bool, number: Number, tag: str) -> None:
    torch.set_autocast_dtype(_FIRST, number[0])
    torch.set_autocast_dtype(_SECOND, number[1])
    torch.set_autocast_enabled(_FIRST, is_active)
    torch.set_autocast_enabled(_SECOND, is_active)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, is_active)  # noqa: SLF001  (dispatch keys have no public face)
    torch.compiler.config.cache_key_tag = tag


def _numbered(by_device: Mapping[str, Policy]) -> Policies:
    if not by_device:
        return NO_POLICIES
    custom = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (no public way to ask)
    if custom != _FIRST:
        raise RuntimeError(f"the backend {custom!r} uses torch's autocast in the place that policies need; leave out policy=")
    rules = tuple((device, policy.difference(device)) for device, policy in by_device.items())
    with _lock:
        known = next((policies for policies in _all.values() if policies.by_device == by_device), None)
        if known is None:
            high, low = divmod(len(_all), len(_DIGITS))
            if high >= len(_DIGITS):
                raise RuntimeError(f"a process can tell {len(_DIGITS) ** 2} different policies apart, and has seen as many")
            number = (_DIGITS[low], _DIGITS[high])
            known = _all[number] = Policies(by_device, rules, _tag(rules), number)
    return known


def _tag(rules: tuple[tuple[str, Mapping[str, Rule]], ...]) -> str:
    listed = [(device, sorted(own.items())) for device, own in rules]
    return _MARK + hashlib.sha256(repr(listed).encode()).hexdigest()
