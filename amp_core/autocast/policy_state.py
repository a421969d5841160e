"""The policies in force in a thread, kept in torch's own autocast state."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.compiler.config
from torch._C._dynamo import eval_frame

from halfserve.amp_core.policy import Policy, Rule

Function = TypeVar("Function", bound="Callable[..., Any]")

_SKIP = eval_frame._FrameAction.SKIP  # noqa: SLF001  (torch.compiler.disable is the public form; it loads the whole compiler)
_SKIP_WITH_CALLEES = eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # noqa: SLF001  (see above)


def untraced(function: Function) -> Function:
    """Mark a function that changes torch's state: torch.compile compiles neither it nor its callees.

    Does what torch.compiler.disable does for code that is called from untraceable code, without loading the compiler.
    """
    eval_frame.set_code_exec_strategy(cast("Any", function).__code__, _SKIP_WITH_CALLEES)
    return function


# torch keeps an autocast flag and dtype per thread for every device type, also for missing ones. A policy uses two of them: the
# flags make the kernels of `policy_kernels` reachable (see there), the dtypes are the digits of a number that identifies the
# policies in force. So no state is needed beside torch's, and torch.compile, which guards its code with that state, recompiles
# for another policy. Its disk cache distinguishes policies by `cache_key_tag`, since the numbers are valid in one process only.

# AutocastPrivateUse1 has precedence over the autocast of all other devices, so a policy's casts come before torch's own.
_FIRST, _SECOND = "privateuseone", "ipu"
KEY_NAME = "AutocastPrivateUse1"
KEY = torch._C._dispatch_key_parse(KEY_NAME)  # noqa: SLF001  (dispatch keys have no public face)
_DIGITS = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MARK = "halfserve:"

Number = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, eq=False, slots=True)
class Policies:
    """The policies in force, one for each device type whose policy differs from torch's own rules; one object for each set."""

    by_device: Mapping[str, Policy]  # device type -> policy
    rules: tuple[tuple[str, Mapping[str, Rule]], ...]  # pairs (device type, the rules by qualified overload name)
    tag: str  # identifies these rules, also in other processes
    number: Number | None  # identifies these policies in this process
    _successors: dict[tuple[str, Policy], Policies] = field(default_factory=dict, repr=False)

    def of(self, device_type: str) -> Policy:
        """Return the policy of a device type; the native one by default."""
        return self.by_device.get(device_type) or Policy()

    def with_policy(self, device_type: str, policy: Policy) -> Policies:
        """Return these policies with another one for a device type; this object itself if that changes nothing.

        Raises:
            RuntimeError: If the process has seen too many different policies, or a custom backend uses their dispatch key.
        """
        known = self._successors.get((device_type, policy))
        if known is None:
            changed = {**self.by_device, device_type: policy}
            differing = {device: changed[device] for device in sorted(changed) if changed[device].difference(device)}
            known = self._successors[device_type, policy] = _numbered(differing)
        return known


@dataclass(frozen=True, slots=True)
class Saved:
    """The state that `put_in_force` changes: torch's state of the two devices, and the tag."""

    is_active: bool
    number: Number
    tag: str


NO_POLICIES = Policies({}, (), "", None)
_lock = threading.Lock()
_all: dict[Number, Policies] = {}


def policies_in_force() -> Policies:
    """Return the policies of this thread's innermost region."""
    if not torch._C._dispatch_tls_is_dispatch_key_included(KEY):  # noqa: SLF001  (dispatch keys have no public face)
        return NO_POLICIES
    return _all.get((torch.get_autocast_dtype(_FIRST), torch.get_autocast_dtype(_SECOND)), NO_POLICIES)


@untraced
def put_in_force(policies: Policies) -> Saved:
    """Set this thread's policies; returns the argument of `restore`."""
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
