"""A compiled model: recorded steps look into it, and leave it compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._higher_order_ops import map as map_rows

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


class TakesFunctions(nn.Module):
    """Uses weights in functions that torch captures by itself, whether anything is compiled or not."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.operation = nn.Linear(4, 4), nn.Linear(4, 4), operation

    def forward(self, x: Tensor) -> Tensor:
        if self.operation == "cond":
            taken = torch.cond(x.sum() > 0, self.inner, lambda x: 2 * self.inner(x), (x,))
        else:
            taken = map_rows(lambda row, *_: 2 * self.inner(row), x)
        total: Tensor = (taken + self.outer(x)).square().sum()
        return total


@pytest.mark.parametrize("operation", ["cond", "map"])
def test_weights_in_functions_that_operations_take_keep_their_gradients(operation: str) -> None:
    gradients = []
    for turn in (1, 2):  # only the first is recorded
        torch._dynamo.reset()
        model = TakesFunctions(operation)
        recorder = Recorder(model, every=2)
        with recorder.step(turn):
            model(X).backward()
        assert model.inner.weight.grad is not None
        gradients.append(model.inner.weight.grad)
        assert {entry.module for entry in recorder.record().entries} >= ({"outer"} if turn == 1 else set())
    assert torch.equal(*gradients)
