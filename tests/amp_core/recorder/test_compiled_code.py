"""A compiled model: recorded steps look into it, and leave it compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from amp_core.recorder import Recorder
from tests.amp_core.recorder.recording import Block, ops

X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("warm", [True, False])
def test_a_recorded_step_looks_into_it_and_leaves_it_compiled(warm: bool) -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 1))
    forward = compiled(lambda x: model(x).sum())
    if warm:
        forward(X).backward()  # type: ignore[no-untyped-call]
    recorder = Recorder(model)
    with recorder.step(1):
        forward(X).backward()  # type: ignore[no-untyped-call]
    assert ops(recorder.record(), "0", "forward") == ["tanh", "add"]
    assert ops(recorder.record(), "0", "backward") == ["tanh_backward"]
    assert counters["stats"]["unique_graphs"] == int(warm)
    for step in (2, 3):
        with recorder.step(step):
            forward(X).backward()  # type: ignore[no-untyped-call]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_is_warned_of_once_and_has_its_own_paths() -> None:
    model = torch.compile(nn.Sequential(Block(), nn.Linear(4, 1)), backend="aot_eager")
    recorder = Recorder(model, every=1)  # type: ignore[arg-type]
    with (
        pytest.warns(UserWarning, match="compiled code cannot be looked into: recorded steps run it uncompiled"),
        recorder.step(1),
    ):
        model(X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with recorder.step(2):
            model(X).sum().backward()
    assert {entry.module for entry in recorder.record().entries} == {"", "0", "0.linear", "1"}


def test_a_part_that_is_compiled_keeps_its_path() -> None:
    block: Any = torch.compile(Block(), backend="aot_eager")
    model = nn.Sequential(block, nn.Linear(4, 1))
    recorder = Recorder(model)
    with pytest.warns(UserWarning, match="the model is compiled"), recorder.step(1):
        model(X).sum().backward()
    assert {entry.module for entry in recorder.record().entries} == {"", "0", "0.linear", "1"}
