"""The dtype of each operation: a value that users edit, print and store."""

from halfserve.amp_core.policy.operations import Rule
from halfserve.amp_core.policy.policy import Policy, PolicyError

__all__ = ["Policy", "PolicyError", "Rule"]
