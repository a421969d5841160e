"""The rules that this thread's innermost autocast region asked for, where the kernels find them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amp_core.policy import Rule

_NO_RULES: Mapping[str, Rule] = {}


class _InForce(threading.local):
    """The rules in force in this thread, by device type."""

    def __init__(self) -> None:
        self.rules: dict[str, Mapping[str, Rule]] = {}


_in_force = _InForce()


def rules_in_force(device_type: str) -> Mapping[str, Rule]:
    """The rules in force in this thread, by qualified overload name; empty where torch's own apply."""
    return _in_force.rules.get(device_type, _NO_RULES)


def put_in_force(device_type: str, rules: Mapping[str, Rule]) -> None:
    """Set this thread's rules. Their kernels must be installed."""
    _in_force.rules[device_type] = rules
