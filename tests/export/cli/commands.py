"""`halfserve`'s commands as users give them, and checkpoints for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
from typer.testing import Result

from halfserve import cli
from halfserve.amp_core.checkpoint import Checkpoint, save_checkpoint
from halfserve.amp_core.factory import call_factory


class Outcome(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Shell: TypeAlias = Callable[..., Outcome]


def command(*arguments: object) -> int:
    """Run `halfserve` with these arguments; its exit code."""
    with pytest.raises(SystemExit) as exited:
        cli.main([str(argument) for argument in arguments])
    return exited.value.code if isinstance(exited.value.code, int) else 0


def passed(result: Result) -> Result:
    """A command's result, after it succeeded."""
    assert result.exit_code == 0, result.output
    return result


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
