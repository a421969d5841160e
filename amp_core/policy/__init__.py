"""Which operation runs in which dtype: a value that users edit, print and store."""

from amp_core.policy.policy import Policy, PolicyError
from amp_core.policy.rule import Rule

__all__ = ["Policy", "PolicyError", "Rule"]
