"""The table of exceptions in docs/guides/training.md: each public call raises what it names."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfserve import GradScaler, Policy, autocast, custom_bwd, custom_fwd
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.data import tar_shards
from halfserve.amp_core.factory import call_factory
from halfserve.amp_core.recorder import Recorder
from halfserve.amp_core.training.train import train
from halfserve.amp_core.training.training_settings import TrainingSettings
from tests.amp_core.grad_scaler.iteration import model_and_optimizer, parameter_with, ready

ANYTHING: Any = 3
MISSING = Path("/nonexistent/folder/file")


def banned() -> None:
    with autocast("cpu", torch.float16, policy="native+ban:softmax"):
        torch.softmax(torch.ones(2), dim=0)


def stepped_without_gradient() -> None:
    ready().step(model_and_optimizer()[1])


def unscaled_float16() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    ready().unscale_(torch.optim.SGD([parameter]))


def exhausted() -> None:
    _, optimizer = parameter_with([float("inf")])
    scaler = ready(init_scale=1.0, min_scale=1.0, on_min_scale="raise")
    scaler.step(optimizer)
    scaler.update()


def pickled_halfway() -> None:
    scaler = ready()
    scaler.unscale_(parameter_with([1.0])[1])
    pickle.dumps(scaler)


def recorded_within() -> None:
    recorder = Recorder(nn.Linear(1, 1), every=1)
    with recorder.step(1), recorder.step(2):
        pass


CASES: list[tuple[str, str, Callable[[], Any]]] = [
    ("autocast(...)", "TypeError", lambda: autocast("cpu", enabled=ANYTHING)),
    ("autocast(...)", "TypeError", lambda: autocast("cpu")(ANYTHING)),
    ("autocast(...)", "ValueError", lambda: autocast("cpu", torch.int32)),
    ("autocast(...)", "RuntimeError", lambda: autocast("gpu")),
    ("autocast(...)", "RuntimeError", banned),
    ("autocast(...)", "PolicyError", lambda: autocast("cpu", policy="fast")),
    ("custom_fwd", "ValueError", lambda: custom_fwd(lambda ctx: None, device_type=ANYTHING)),
    ("custom_fwd", "RuntimeError", lambda: custom_bwd(lambda ctx: None, device_type="cpu")(nn.Module())),
    ("Policy(...)", "PolicyError", lambda: Policy("fast")),
    ("Policy(...)", "PolicyError", lambda: Policy.parse("cuda+fp32:sofmax")),
    ("Policy(...)", "PolicyError", lambda: Policy().low("sofmax")),
    ("Policy(...)", "PolicyError", lambda: Policy.cuda().native("sofmax")),
    ("Policy(...)", "PolicyError", lambda: Policy().explain("softmax", "gpu")),
    ("GradScaler(...)", "ValueError", lambda: GradScaler("cpu", init_scale=-1.0)),
    ("GradScaler(...)", "ValueError", lambda: GradScaler("cpu").set_growth_interval(0)),
    (".scale", "ValueError", lambda: GradScaler("cpu").scale(ANYTHING)),
    (".unscale_", "RuntimeError", lambda: GradScaler("cpu").unscale_(parameter_with([1.0])[1])),
    (".unscale_", "RuntimeError", stepped_without_gradient),
    (".unscale_", "ValueError", unscaled_float16),
    (".update", "ValueError", lambda: ready().update(0.0)),
    (".update", "RuntimeError", lambda: ready().update()),
    (".update", "FloatingPointError", exhausted),
    (".load_state_dict", "RuntimeError", lambda: GradScaler("cpu").load_state_dict({})),
    (".load_state_dict", "ValueError", lambda: GradScaler("cpu").load_state_dict(ready().state_dict() | {"scale": -1.0})),
    ("pickling", "RuntimeError", pickled_halfway),
    ("Recorder(...)", "ValueError", lambda: Recorder(nn.Linear(1, 1), every=0)),
    ("Recorder(...)", "ValueError", lambda: Recorder(nn.Linear(1, 1)).load_dict({})),
    ("Recorder(...)", "RuntimeError", recorded_within),
    ("load_checkpoint", "CheckpointError", lambda: load_checkpoint(MISSING)),
    ("Checkpoint.build_model", "FactoryError", lambda: call_factory("math:tau_of_nothing")),
    ("tar_shards", "DataError", lambda: tar_shards(str(MISSING), fields=("a", "b"))),
    ("train", "TrainingError", lambda: train(TrainingSettings(model="math:pi", data="math:pi", out=MISSING, device="gpu"))),
    ("train", "FactoryError", lambda: train(TrainingSettings(model="math:pi", data="math:pi", out=MISSING))),
]


def documented() -> set[tuple[str, str]]:
    """Pairs (call, exception) of the table; a row without a call belongs to the row above."""
    section = Path("docs/guides/training.md").read_text(encoding="utf-8").partition("## Errors")[2].partition("\n## ")[0]
    found, calls = set(), ""
    for row in re.findall(r"^\|([^|]*)\|([^|]*)\|", section, re.MULTILINE):
        calls = row[0] if row[0].strip() else calls
        found |= {
            (call, error)
            for call in re.findall(r"`([^`]+)`|(pickling)", calls)
            for error in re.findall(r"`(\w+Error)`", row[1])
        }
    return {("".join(call), error) for call, error in found}


@pytest.mark.parametrize(
    ("call", "error", "program"), CASES, ids=[f"{call}-{error}-{at}" for at, (call, error, _) in enumerate(CASES)]
)
def test_a_call_raises_what_the_table_says(call: str, error: str, program: Callable[[], Any]) -> None:
    assert (call, error) in documented()
    with pytest.raises(Exception) as raised:  # noqa: PT011  (which one is what the table says)
        program()
    assert type(raised.value).__name__ == error
