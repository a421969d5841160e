"""What torch's own autocast does on a device, so that a policy overrides only where it differs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from amp_core.policy import op_lists
from amp_core.policy.op_names import aten_names, overloads_of, qualified_name
from amp_core.policy.policy import Policy, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload


@cache
def autocast_key(device_type: str) -> str:
    """The dispatch key of a device's autocast: `AutocastCPU`, `AutocastCUDA`."""
    custom = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (no public way to ask)
    return "AutocastPrivateUse1" if device_type == custom else f"Autocast{device_type.upper()}"


@cache
def difference(policy: Policy, device_type: str) -> Mapping[str, Rule]:
    """The overloads whose rule under a policy is not torch's own on a device.

    Returns:
        A rule by qualified overload name (`aten::softmax.int`); empty where torch already does all that the policy says.
        torch's own form of `widest` is never taken for ours: it raises where two low-precision dtypes meet.
    """
    return {
        qualified_name(overload): rule
        for name, rule in policy.rules().items()
        for overload in overloads_of(name)
        if native_rule(overload, device_type) is not rule
        or (rule is Rule.WIDEST and name not in op_lists.PROMOTE_BY_THEMSELVES)
    }


def native_rule(overload: OpOverload, device_type: str) -> Rule | None:
    """What torch does with an overload in an autocast region of a device; None if it leaves the inputs as they are."""
    name = qualified_name(overload).removeprefix("aten::").partition(".")[0]
    if name in op_lists.PROMOTE_BY_THEMSELVES:
        return Rule.WIDEST
    if device_type == "cuda":
        return _cuda_rules().get(name)
    if device_type != "cpu" or qualified_name(overload) not in _registered(device_type):
        return None
    if name in op_lists.CPU_LOW:
        return Rule.LOW
    return Rule.WIDEST if name in op_lists.CPU_WIDEST else Rule.FP32


def explain(policy: Policy, op: str, device_type: str) -> str:
    """One line per aten operation behind a name: the rule in force on a device, and whose it is.

    Raises:
        ValueError: If there is no such operation.
    """
    return "\n".join(_explain_one(policy, name, device_type) for name in aten_names(op) if overloads_of(name))


def _explain_one(policy: Policy, name: str, device_type: str) -> str:
    native = {native_rule(overload, device_type) for overload in overloads_of(name)} - {None}
    by_torch = "/".join(sorted(str(rule) for rule in native)) or "its inputs' dtypes"
    rule = policy.rules().get(name)
    if rule is None or native == {rule}:
        return f"{name} on {device_type}: {by_torch} (torch's own rule)"
    return f"{name} on {device_type}: {rule} (by the policy {policy}; torch's own rule: {by_torch})"


@cache
def _registered(device_type: str) -> frozenset[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key(device_type))  # noqa: SLF001  (no public list)
    return frozenset(names)


@cache
def _cuda_rules() -> Mapping[str, Rule]:
    # Overloads without a registration of their own (conv1d.padding) are made of ones that have: the rule is the operation's.
    registered = {name.removeprefix("aten::").partition(".")[0] for name in _registered("cuda")}
    known = registered | set(op_lists.CUDA_BY_PARTS)
    return {name: rule for name, rule in Policy.cuda().rules().items() if name in known}
