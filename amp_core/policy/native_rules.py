"""What torch's own autocast does on a device, so that a policy overrides only where it differs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from amp_core.policy import op_lists
from amp_core.policy.op_names import overloads_of, qualified_name, qualified_names
from amp_core.policy.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload

_CUDA_LISTS = {
    Rule.LOW: op_lists.CUDA_LOW,
    Rule.FP32: op_lists.CUDA_FP32,
    Rule.WIDEST: op_lists.CUDA_WIDEST,
    Rule.BAN: op_lists.CUDA_BAN,
}


@cache
def autocast_key(device_type: str) -> str:
    """The dispatch key of a device's autocast: `AutocastCPU`, `AutocastCUDA`."""
    custom = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (no public way to ask)
    return "AutocastPrivateUse1" if device_type == custom else f"Autocast{device_type.upper()}"


def has_autocast(device_type: str) -> bool:
    """Whether torch has an autocast for a kind of device, such as `cpu`."""
    if not isinstance(device_type, str) or ":" in device_type:
        return False
    try:
        return bool(torch.amp.is_autocast_available(device_type))
    except RuntimeError:  # not even a device type
        return False


def difference(rules: Mapping[str, Rule], device_type: str) -> Mapping[str, Rule]:
    """The overloads whose rule is not torch's own on a device.

    Args:
        rules: By operation, such as `aten::softmax`.
        device_type: Such as `cpu`.

    Returns:
        A rule by qualified overload name (`aten::softmax.int`); empty where torch already does all that the rules say.
        torch's own form of `widest` is never taken for ours: it raises where two low-precision dtypes meet.
    """
    return {
        qualified_name(overload): rule
        for name, rule in rules.items()
        for overload in overloads_of(name)
        if native_rule(overload, device_type) is not rule
        or (rule is Rule.WIDEST and _bare(name) not in op_lists.PROMOTE_BY_THEMSELVES)
    }


def native_rule(overload: OpOverload, device_type: str) -> Rule | None:
    """What torch does with an overload in an autocast region of a device; None if it leaves the inputs as they are."""
    qualified = qualified_name(overload)
    name = _bare(qualified)
    if not qualified.startswith("aten::"):
        return None  # a custom operation may have a rule of its own (`register_autocast`), which torch does not tell
    if name in op_lists.PROMOTE_BY_THEMSELVES:
        return Rule.WIDEST
    if device_type == "cuda":
        return _cuda_rules().get(name)
    if device_type != "cpu" or qualified not in _registered(device_type):
        return None
    if name in op_lists.CPU_LOW:
        return Rule.LOW
    return Rule.WIDEST if name in op_lists.CPU_WIDEST else Rule.FP32


def explain(name: str, rule: Rule | None, policy: str, device_type: str) -> str:
    """Say in one line which rule is in force for an operation on a device, and whose it is.

    Args:
        name: Such as `aten::softmax`.
        rule: The policy's, None if it leaves the operation to torch.
        policy: The policy's string form.
        device_type: Such as `cpu`.
    """
    native = {native_rule(overload, device_type) for overload in overloads_of(name)} - {None}
    by_torch = "/".join(sorted(str(own) for own in native)) or "its inputs' dtypes"
    shown = name.removeprefix("aten::")
    if rule is None or native == {rule}:
        return f"{shown} on {device_type}: {by_torch} (torch's own rule)"
    return f"{shown} on {device_type}: {rule} (by the policy {policy}; torch's own rule: {by_torch})"


def _bare(qualified: str) -> str:
    return qualified.partition("::")[2].partition(".")[0]


@cache
def _registered(device_type: str) -> frozenset[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key(device_type))  # noqa: SLF001  (no public list)
    return frozenset(names)


@cache
def _cuda_rules() -> Mapping[str, Rule]:
    # Overloads without a registration of their own (conv1d.padding) are made of ones that have: the rule is the operation's.
    known = {_bare(name) for name in _registered("cuda")} | set(op_lists.CUDA_BY_PARTS)
    listed = ((op, rule) for rule, ops in _CUDA_LISTS.items() for op in ops)
    rules = {_bare(name): rule for op, rule in listed for name in qualified_names(op)}
    return {name: rule for name, rule in rules.items() if name in known}
