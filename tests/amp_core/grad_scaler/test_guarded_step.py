"""Steps that are undone: guarded parameters and closures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve import GradScaler, autocast
from tests.amp_core.grad_scaler.iteration import parameter_with, ready


def half_parameter(gradient: list[float]) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(len(gradient), dtype=torch.float16))
    parameter.grad = torch.tensor(gradient, dtype=torch.float16)
    return parameter


@pytest.mark.parametrize("fused", [False, True])
def test_float16_gradients_are_refused_unless_allowed_and_nothing_changes(fused: bool) -> None:
    parameter = half_parameter([4.0])
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1, fused=fused), ready(init_scale=2.0)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\. Keep the.*allow_fp16_gradients=True"):
            call(optimizer)
    assert parameter.grad is not None
    assert (parameter.item(), parameter.grad.item(), len(scaler._per_optimizer_states)) == (1.0, 4.0, 0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("explicitly", [False, True])
def test_allowed_they_are_unscaled_in_place(fused: bool, explicitly: bool) -> None:
    parameter = half_parameter([4.0, -2048.0])
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=fused)
    scaler = ready(init_scale=1024.0, allow_fp16_gradients=True)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert parameter.tolist() == torch.tensor([1.0 - 2.0 / 1024, 2.0], dtype=torch.float16).tolist()


@pytest.mark.parametrize("gradient", [math.inf, math.nan, 65504.0])
def test_what_overflows_or_overflows_by_unscaling_is_skipped(gradient: float) -> None:
    parameter = half_parameter([gradient])
    scaler = ready(init_scale=0.5, allow_fp16_gradients=True)
    scaler.step(torch.optim.SGD([parameter], lr=1e-6))
    assert (scaler.step_was_skipped, parameter.item()) == (True, 1.0)
    scaler.update()
    assert scaler.get_scale() == 0.25


@pytest.mark.parametrize("overflows", [None, 0, 1, 2])
def test_gradients_of_several_dtypes_are_unscaled_together_or_skipped_together(overflows: int | None) -> None:
    # As of a halved model whose norms stay float32.
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float16, torch.float32)]
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, math.inf if place == overflows else 4.0)
    scaler = ready(init_scale=4.0, allow_fp16_gradients=True)
    scaler.step(torch.optim.SGD(parameters, lr=0.25))
    skipped = overflows is not None
    assert scaler.step_was_skipped is skipped
    assert [parameter.tolist() for parameter in parameters] == [[1.0 if skipped else 0.75] * 2] * 3


def test_an_eps_that_is_zero_in_float16_is_caught() -> None:
    parameter = half_parameter([0.0])
    optimizer = torch.optim.Adam([("w", parameter)], lr=0.1, foreach=False)  # 0 / (sqrt(0) + 1e-8) is 0 / 0 in float16
    scaler = ready(allow_fp16_gradients=True)
    with pytest.warns(
        RuntimeWarning, match=r"The step of Adam made w non-finite out of finite gradients, so it was undone"
    ) as told:
        scaler.step(optimizer)
    assert told[0].filename == __file__
    assert (parameter.item(), scaler.step_was_skipped, scaler.overflowed_parameters()) == (1.0, True, ["w"])
    scaler.update()
    assert scaler.get_scale() == 2.0**16  # the scale is not to blame
    assert (scaler.history[0].skipped, scaler.history[0].overflowed) == (True, ("w",))


@pytest.mark.parametrize("fused", [False, True])
def test_a_guarded_step_is_undone_with_the_optimizers_state(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=10.0, momentum=0.9, fused=fused)
    scaler = ready(init_scale=1.0, guard_parameters=True)
    for step, gradient in enumerate((1.0, 3e38, 1.0)):
        before = copy.deepcopy(optimizer.state_dict()["state"])
        value = parameter.detach().clone()
        parameter.grad = torch.full((2,), gradient)
        if step == 1:
            with pytest.warns(RuntimeWarning, match="Lower the learning rate or clip the gradients"):
                scaler.step(optimizer)
            torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)
            assert torch.equal(parameter, value)
        else:
            scaler.step(optimizer)
        assert scaler.skipped(optimizer) is (step == 1)
        scaler.update()
    assert torch.isfinite(parameter).all()


def test_what_an_optimizer_keeps_in_its_groups_is_undone_too() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["steps"] += 1  # as schedule-free optimizers do
            return super().step(closure)

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), 3e38)
    optimizer = Counts([{"params": [parameter], "steps": 7}], lr=10.0)
    with pytest.warns(RuntimeWarning, match="so it was undone"):
        ready(init_scale=1.0, guard_parameters=True).step(optimizer)
    assert (parameter.item(), optimizer.param_groups[0]["steps"]) == (1.0, 7)


def test_unguarded_a_step_is_torchs() -> None:
    ours, optimizer = parameter_with([3e38])
    optimizer.param_groups[0]["lr"] = 10.0
    ready(init_scale=1.0).step(optimizer)
    assert ours.item() == -math.inf


def test_a_parameter_that_was_broken_before_is_not_blamed_on_the_step() -> None:
    parameter, optimizer = parameter_with([1.0])
    with torch.no_grad():
        parameter.fill_(math.nan)
    scaler = ready(guard_parameters=True)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped


def test_an_optimizer_that_fails_leaves_a_guarded_step_undone() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise OSError("disk")

    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with pytest.raises(OSError, match="disk"):
        ready(guard_parameters=True).step(Fails([parameter], lr=0.5))
    assert parameter.item() == 1.0


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


@pytest.mark.long
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
