"""The policy and the record of a training, in files beside weights that another framework wrote."""

from __future__ import annotations

import json
from pathlib import Path

from halfserve.amp_core.policy import Policy, PolicyError
from halfserve.amp_core.recorder.record import Record
from halfserve.protos.atomic_files import atomic_file

POLICY_FILE = "halfserve_policy.json"
RECORD_FILE = "halfserve_record.json"


def write_policy(folder: Path | str, policy: Policy) -> None:
    """Write a policy into a folder."""
    with atomic_file(Path(folder) / POLICY_FILE) as file:
        file.write(json.dumps({"policy": str(policy)}).encode())


def read_policy(folder: Path | str) -> Policy | None:
    """The policy in a folder; None where there is none.

    Raises:
        PolicyError: If the file is there and cannot be read.
    """
    path = Path(folder) / POLICY_FILE
    if not path.exists():
        return None
    try:
        return Policy.parse(json.loads(path.read_text(encoding="utf-8"))["policy"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"cannot read the policy in {path}; delete the file to load the rest without it: {error}") from error


def write_record(folder: Path | str, record: Record) -> None:
    """Write a record into a folder."""
    with atomic_file(Path(folder) / RECORD_FILE) as file:
        file.write(json.dumps(record.to_dict()).encode())


def read_record(folder: Path | str) -> Record | None:
    """The record in a folder; None where there is none.

    Raises:
        ValueError: If the file is there and cannot be read.
    """
    path = Path(folder) / RECORD_FILE
    if not path.exists():
        return None
    try:
        return Record.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the record in {path}; delete the file to load the rest without it: {error}") from error
