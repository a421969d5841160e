"""The policy beside a training state that another framework saves in a folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from amp_core.atomic_file import atomic_file
from amp_core.policy import Policy, PolicyError

POLICY_FILE = "halfserve_policy.json"


def write_policy(folder: Path | str, policy: Policy) -> None:
    """Write the policy that a state was trained with into its folder."""
    with atomic_file(Path(folder) / POLICY_FILE) as file:
        file.write(json.dumps({"policy": str(policy)}).encode())


def compare_policy(folder: Path | str, policy: Policy) -> None:
    """Warn if a state that is about to be loaded was trained with another policy. A folder without the file is fine.

    Raises:
        PolicyError: If the file is there and cannot be read.
    """
    path = Path(folder) / POLICY_FILE
    if not path.exists():
        return
    try:
        saved = Policy.parse(json.loads(path.read_text(encoding="utf-8"))["policy"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"cannot read the policy in {path}; delete the file to load the rest without it: {error}") from error
    if saved != policy:
        warnings.warn(
            f"the state in {folder} was trained with the policy '{saved}'; training goes on with '{policy}'. "
            f"To go on as before, make the accelerator with policy='{saved}'",
            stacklevel=2,
        )
