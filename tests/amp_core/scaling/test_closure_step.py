"""A step with a closure is fp32's, bit for bit; it happens as a whole or not at all; a closure that scales is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import GradScaler, autocast
from tests.amp_core.scaling.iteration import ready

Closure = Callable[[], Any]


class Problem:
    """A small regression whose loss may turn bad at some evaluations."""

    def __init__(self, bad: dict[int, float] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.x, self.y = torch.randn(32, 4), torch.randn(32, 1)
        self.bad, self.evaluations = bad or {}, 0

    def loss(self) -> Tensor:
        self.evaluations += 1
        return nn.functional.mse_loss(self.model(self.x), self.y) * self.bad.get(self.evaluations, 1.0)


def state_of(problem: Problem, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], Any]:
    return [p.detach().clone() for p in problem.model.parameters()], copy.deepcopy(optimizer.state_dict()["state"])


def assert_same(one: tuple[list[Tensor], Any], other: tuple[list[Tensor], Any]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def make(name: str, problem: Problem) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(problem.model.parameters(), lr=0.05)
    if name == "fused-sgd":
        return torch.optim.SGD(problem.model.parameters(), lr=0.05, momentum=0.9, fused=True)
    return torch.optim.LBFGS(problem.model.parameters(), lr=0.3, line_search_fn="strong_wolfe" if name == "wolfe" else None)


@pytest.mark.parametrize("passed_as", ["position", "keyword"])
@pytest.mark.parametrize("name", ["lbfgs", "wolfe", "adam", "fused-sgd"])
def test_it_takes_the_steps_of_float32_bit_for_bit(name: str, passed_as: str) -> None:
    scaled, plain = Problem(), Problem()
    optimizer, plain_optimizer = make(name, scaled), make(name, plain)
    scaler = GradScaler("cpu")

    def plain_closure() -> Any:
        plain_optimizer.zero_grad()
        loss = plain.loss()
        torch.autograd.backward(loss)
        return loss.detach()

    for _ in range(8):
        mine = scaler.step(optimizer, scaled.loss) if passed_as == "position" else scaler.step(optimizer, closure=scaled.loss)
        assert mine == plain_optimizer.step(plain_closure)
        scaler.update()
        assert_same(state_of(scaled, optimizer), state_of(plain, plain_optimizer))
    assert scaled.evaluations == plain.evaluations


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e36])
@pytest.mark.parametrize("name", ["lbfgs", "wolfe", "adam"])
def test_an_evaluation_that_is_not_finite_undoes_the_whole_step(name: str, bad: float) -> None:
    problem = Problem()
    optimizer, scaler = make(name, problem), GradScaler("cpu")
    scaler.step(optimizer, problem.loss)
    scaler.update()
    before = state_of(problem, optimizer)
    # Bad in the middle of the line search, where there is one; 1e36 is finite, but overflows when scaled.
    problem.bad = {problem.evaluations + (1 if name == "adam" else 4): bad}
    assert scaler.step(optimizer, problem.loss) is None
    assert scaler.step_was_skipped
    assert_same(before, state_of(problem, optimizer))
    scaler.update()
    assert scaler.get_scale() == 2.0**15
    assert scaler.step(optimizer, problem.loss) is not None
    assert not scaler.step_was_skipped


def test_a_loss_that_is_not_finite_undoes_the_step_though_its_gradients_are() -> None:
    problem = Problem()
    optimizer, scaler = make("lbfgs", problem), GradScaler("cpu")
    before = state_of(problem, optimizer)
    assert scaler.step(optimizer, lambda: problem.loss() + math.inf) is None
    assert scaler.step_was_skipped
    assert_same(before, state_of(problem, optimizer))
    scaler.update()
    assert (scaler.get_scale(), scaler.history[0].skipped) == (2.0**15, True)


def test_autocast_belongs_into_the_closure() -> None:
    problem = Problem()
    optimizer, scaler = make("lbfgs", problem), GradScaler("cpu")

    def closure() -> Tensor:
        with autocast("cpu", dtype=torch.float16):
            return problem.loss()

    losses = []
    for _ in range(6):
        losses.append(scaler.step(optimizer, closure))
        scaler.update()
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0] / 2


def wrong_closures(problem: Problem, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> dict[str, tuple[Closure, str]]:
    def runs_backward() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        torch.autograd.backward(loss)
        return loss

    def scales() -> Tensor:
        return scaler.scale(problem.loss())

    return {
        "runs backward": (runs_backward, r"The closure ran backward by itself, on a loss that is not scaled\. With an enabled"),
        "scales": (
            scales,
            r"The closure called scale\(\) by itself\. With an enabled GradScaler a closure computes the loss in",
        ),
        "returns a number": (lambda: problem.loss().item(), "The closure returned no loss to run backward on, but a float"),
        "returns nothing": (lambda: None, "The closure returned no loss to run backward on, but a NoneType"),
        "drops the graph": (lambda: problem.loss().detach(), r"but a tensor of shape \(\) without a graph"),
        "returns many": (lambda: problem.loss().expand(2), r"but a tensor of shape \(2,\) with a graph"),
        "is about others": (lambda: torch.ones((), requires_grad=True) * 2, "loss depends on no parameter of this optimizer"),
    }


@pytest.mark.parametrize("name", ["lbfgs", "adam"])
@pytest.mark.parametrize("wrong", wrong_closures(Problem(), torch.optim.Adam([torch.ones(1)]), GradScaler("cpu")))
def test_defect_8_a_closure_that_keeps_no_contract_is_refused_and_nothing_changes(wrong: str, name: str) -> None:
    problem = Problem()
    optimizer, scaler = make(name, problem), ready()
    closure, message = wrong_closures(problem, optimizer, scaler)[wrong]
    before, scaler_before = state_of(problem, optimizer), scaler.state_dict()
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer, closure)
    assert_same(before, state_of(problem, optimizer))
    assert scaler.state_dict() == scaler_before
    assert scaler.step(optimizer, problem.loss) is not None  # as if nothing had been


def test_what_a_closure_raises_comes_out_and_nothing_changes() -> None:
    problem = Problem()
    optimizer, scaler = make("wolfe", problem), ready()

    def fails_later() -> Tensor:
        if problem.evaluations == 3:
            raise KeyError("data")
        return problem.loss()

    before = state_of(problem, optimizer)
    with pytest.raises(KeyError, match="data"):
        scaler.step(optimizer, fails_later)
    assert_same(before, state_of(problem, optimizer))
    assert torch.equal(scaler.scale(torch.ones(())), torch.tensor(2.0**16))  # scaling is no longer refused


def test_other_misuse_is_an_error() -> None:
    problem = Problem()
    optimizer, scaler = make("adam", problem), ready()
    torch.autograd.backward(scaler.scale(problem.loss()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is of no use before a step with a closure"):
        scaler.step(optimizer, problem.loss)
    scaler.step(optimizer, None)  # no closure after all
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer, problem.loss)
    scaler.update()
    with pytest.raises(RuntimeError, match="A closure must be the first argument after the optimizer, or be passed as closure"):
        scaler.step(optimizer, 1.0, problem.loss)


def test_an_optimizer_that_ignores_its_closure_is_an_error() -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    problem = Problem()
    with pytest.raises(RuntimeError, match="Deaf stepped without calling the closure"):
        ready().step(Deaf(problem.model.parameters()), problem.loss)


def test_disabled_a_closure_is_the_optimizers_own() -> None:
    problem = Problem()
    optimizer = make("lbfgs", problem)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss()
        torch.autograd.backward(loss)
        return loss.detach()

    assert GradScaler("cpu", enabled=False).step(optimizer, closure) is not None
