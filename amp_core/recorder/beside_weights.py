"""The policy and record of a training, stored with weights that another framework wrote: in files or in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from halfserve.amp_core.checkpoint import UNREADABLE
from halfserve.amp_core.policy import Policy, PolicyError
from halfserve.amp_core.recorder.record import Record
from halfserve.amp_core.weights.file_kinds import FileKind, kind_of
from halfserve.files.atomic_files import atomic_file

# Key under which Lightning's Trainer keeps the state of our precision plugin.
LIGHTNINGS_KEY = "TrainerPrecision"
POLICY_FILE = "halfserve_policy.json"
RECORD_FILE = "halfserve_record.json"


def write_policy(folder: Path | str, policy: Policy) -> None:
    """Write a policy into a folder."""
    with atomic_file(Path(folder) / POLICY_FILE) as file:
        file.write(json.dumps({"policy": str(policy)}).encode())


def read_policy(folder: Path | str) -> Policy | None:
    """Return the policy in a folder; None where there is none.

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
    """Return the record in a folder; None where there is none.

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


def read_training(weights: Path) -> tuple[Policy | None, Record | None]:
    """Return the policy and the record of the training that made weights; None where there is none.

    `weights` is a folder with the files of this module, a file beside them, or a checkpoint of Lightning's Trainer with our
    plugin.

    Raises:
        ValueError: If they are there and cannot be read.
    """
    if weights.is_dir():
        return read_policy(weights), read_record(weights)
    state = _plugin_state(weights)
    if state is None:
        return read_policy(weights.parent), read_record(weights.parent)
    try:
        policy, record = state.get("policy"), state.get("record")
        return None if policy is None else Policy.parse(policy), None if record is None else Record.from_dict(record)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read the policy and record in the checkpoint {weights}: {error}") from error


def _plugin_state(file: Path) -> dict[str, Any] | None:
    """Return the state of our precision plugin in a checkpoint of Lightning; None in any other file."""
    if kind_of(file) not in (FileKind.TORCH_ARCHIVE, FileKind.PICKLE):
        return None
    try:
        content = torch.load(file, map_location="meta", weights_only=True)
    except UNREADABLE:
        return None
    state = content.get(LIGHTNINGS_KEY) if isinstance(content, dict) else None
    return state if isinstance(state, dict) else None
