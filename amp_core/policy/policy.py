"""The dtype of each operation, as a frozen value with a one-line string form."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from halfserve.amp_core.policy.operations import (
    CUDA_RULES,
    Rule,
    explain_rule,
    has_autocast,
    qualified_names,
    rules_beyond_native,
)


class PolicyError(ValueError):
    """A policy with an unknown operation, rule or preset."""


class _Native:
    """`Policy.native()` is the empty policy; `policy.native("gelu")` leaves those operations to torch again.

    Both raise PolicyError if there is no such operation.
    """

    def __get__(self, policy: Policy | None, owner: type[Policy]) -> Callable[..., Policy]:
        start = owner() if policy is None else policy
        return lambda *ops: start._with(Rule.NATIVE, ops)  # noqa: SLF001  (part of Policy, which stands below)


@dataclass(frozen=True)
class Policy:
    """An immutable difference to torch's autocast of the device; empty, it is exactly torch's behaviour.

    `Policy.cuda().fp32("einsum").native("gelu")` reads from left to right; a later change of the same operation replaces an
    earlier one. Names are the public ones (`softmax`, `LSTMCell`, `__pow__`), aten's, or `NAMESPACE::OP` for a registered
    custom operation.

    torch.func's transforms decompose composite operations before autocast sees them: name their parts too (`matmul,mm,mv`).

    Attributes:
        preset: `native` (no difference) or `cuda` (the documented CUDA lists, on any device).
        changes: Pairs (operation, rule) on top of the preset, the latest last.

    Raises:
        PolicyError: If a preset, rule or operation is unknown; a ValueError.
    """

    preset: str = "native"
    changes: tuple[tuple[str, Rule], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    native = _Native()

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str):
            raise PolicyError(f"a policy starts with the name of a preset, {' or '.join(_PRESETS)}; got {self.preset!r}")
        if self.preset not in _PRESETS:
            hint = _nearest(self.preset, _PRESETS)
            raise PolicyError(f"unknown policy {self.preset!r}{hint}; a policy starts with {' or '.join(_PRESETS)}")
        object.__setattr__(self, "changes", tuple(_checked_changes(self.changes)))
        object.__setattr__(self, "_hash", hash((self.preset, self.changes)))

    def __hash__(self) -> int:
        return self._hash  # computed once, because regions look policies up

    @classmethod
    def cuda(cls) -> Policy:
        """Return the documented CUDA lists, for any device."""
        return cls("cuda")

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read the string form: `PRESET[+RULE:OP[,OP...]]...`, for example `cuda+fp32:einsum,matmul+native:gelu`.

        Raises:
            PolicyError: If a preset, rule or operation in it is unknown.
        """
        if not isinstance(text, str):
            raise PolicyError(f"expected a policy's string form, such as 'cuda+fp32:einsum'; got {text!r}")
        return _parsed(text)

    @classmethod
    def of(cls, policy: object) -> Policy:
        """Accept a policy or its string form, as arguments named `policy` do.

        Raises:
            PolicyError: If it is neither, or cannot be read.
        """
        if isinstance(policy, Policy):
            return policy
        if isinstance(policy, str):
            return cls.parse(policy)
        raise PolicyError(f"policy must be a Policy or its string form, such as 'cuda+fp32:einsum'; got {policy!r}")

    def __str__(self) -> str:
        parts = [self.preset]
        previous: Rule | None = None
        for op, rule in self.changes:
            if rule is previous:
                parts[-1] += f",{op}"
            else:
                parts.append(f"{rule}:{op}")
            previous = rule
        return "+".join(parts)

    def low(self, *ops: str) -> Policy:
        """Run these in the region's dtype (float16 or bfloat16).

        Raises:
            PolicyError: If there is no such operation.
        """
        return self._with(Rule.LOW, ops)

    def fp32(self, *ops: str) -> Policy:
        """Run these in float32.

        Raises:
            PolicyError: If there is no such operation.
        """
        return self._with(Rule.FP32, ops)

    def widest(self, *ops: str) -> Policy:
        """Run these in the widest dtype among their inputs.

        Raises:
            PolicyError: If there is no such operation.
        """
        return self._with(Rule.WIDEST, ops)

    def ban(self, *ops: str) -> Policy:
        """Make these raise RuntimeError inside the region.

        Raises:
            PolicyError: If there is no such operation.
        """
        return self._with(Rule.BAN, ops)

    def rules(self) -> Mapping[str, Rule]:
        """Return the difference in full: the rule of each operation (`aten::softmax`, not its overloads) that is not left to
        torch.
        """
        return _rules(self)

    def difference(self, device_type: str) -> Mapping[str, Rule]:
        """Return the rules by overload (`aten::softmax.int`) that torch does not follow itself on a device.

        Empty if torch's own autocast of the device does all that the policy says.
        """
        return _difference(self, device_type)

    def explain(self, op: str, device_type: str) -> str:
        """Return one line per operation behind a name: the rule in force on a device, and whose rule it is.

        Raises:
            PolicyError: If there is no such operation or device.
        """
        if not has_autocast(device_type):
            raise PolicyError(
                f"torch has no autocast for the device type {device_type!r}; expected one such as 'cuda' or 'cpu'"
            )
        names = _known(op)
        return "\n".join(explain_rule(name, self.rules().get(name), str(self), device_type) for name in names)

    def _with(self, rule: Rule, ops: Iterable[str]) -> Policy:
        return Policy(self.preset, (*self.changes, *((op, rule) for op in ops)))


_PRESETS: dict[str, Mapping[Rule, Iterable[str]]] = {"native": {}, "cuda": CUDA_RULES}


@cache
def _parsed(text: str) -> Policy:
    preset, *parts = (part.strip() for part in text.split("+"))
    policy = Policy(preset)
    for part in parts:
        rule, colon, ops = part.partition(":")
        if not colon or rule not in set(Rule):
            hint = _nearest(rule, map(str, Rule))
            raise PolicyError(f"cannot read {part!r} in the policy {text!r}{hint}; expected {'|'.join(Rule)}:OP,OP")
        policy = policy._with(Rule(rule), [op.strip() for op in ops.split(",")])  # noqa: SLF001  (this module's own)
    return policy


def _checked_changes(changes: Iterable[tuple[str, Rule]]) -> Iterable[tuple[str, Rule]]:
    seen: dict[str, Rule] = {}
    for change in changes:
        if not isinstance(change, tuple) or len(change) != 2 or change[1] not in set(Rule):
            raise PolicyError(f"expected changes as pairs (operation, rule), a rule being {'|'.join(Rule)}; got {change!r}")
        _known(change[0])
        seen.pop(change[0], None)
        seen[change[0]] = Rule(change[1])
    return seen.items()


def _known(op: str) -> tuple[str, ...]:
    try:
        return qualified_names(op)
    except ValueError as error:
        raise PolicyError(str(error)) from error


@cache
def _rules(policy: Policy) -> Mapping[str, Rule]:
    preset = ((op, rule) for rule, ops in _PRESETS[policy.preset].items() for op in ops)
    rules = {name: rule for op, rule in (*preset, *policy.changes) for name in qualified_names(op)}
    return {name: rule for name, rule in rules.items() if rule is not Rule.NATIVE}


@cache
def _difference(policy: Policy, device_type: str) -> Mapping[str, Rule]:
    return rules_beyond_native(_rules(policy), device_type)


def _nearest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
