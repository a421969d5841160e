"""`halfserve`'s commands as users give them, and checkpoints for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfserve import cli
from halfserve.amp_core.checkpoint import Checkpoint, save_checkpoint
from halfserve.amp_core.factory import call_factory


def command(*arguments: object) -> int:
    """Run `halfserve` with these arguments; its exit code."""
    with pytest.raises(SystemExit) as exited:
        cli.main([str(argument) for argument in arguments])
    return exited.value.code if isinstance(exited.value.code, int) else 0


def untrained(path: Path, model: str, data: str, *, policy: str = "native") -> Path:
    """Write a checkpoint of a model, by its factory, that was not trained."""
    empty: dict[str, dict[str, object]] = {n: {} for n in ("optimizer", "scheduler", "scaler", "rng", "metrics", "versions")}
    checkpoint = Checkpoint(
        model=model,
        data=data,
        weights=call_factory(model).state_dict(),
        policy=policy,
        dtype="float16",
        epoch=1,
        step=1,
        **empty,  # type: ignore[arg-type]  # (empty dicts of any value type)
    )
    save_checkpoint(path, checkpoint)
    return path
