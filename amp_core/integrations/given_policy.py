"""The policy that a user gives to an integration."""

from __future__ import annotations

from amp_core.policy import Policy, PolicyError


def given_policy(policy: Policy | str | None) -> Policy:
    """Read the argument `policy`; None is the empty policy.

    Raises:
        PolicyError: If it is neither a policy nor the string form of one.
    """
    if policy is None:
        return Policy()
    if isinstance(policy, str):
        return Policy.parse(policy)
    checked: object = policy
    if not isinstance(checked, Policy):
        raise PolicyError(f"policy must be a Policy or its string form, such as 'cuda+fp32:einsum'; got {policy!r}")
    return checked
