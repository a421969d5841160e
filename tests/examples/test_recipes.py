"""The recipes: accumulation, a gradient penalty, several optimizers."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

from halfserve import GradScaler
from halfserve.examples.recipes.accumulation import accumulated_step
from halfserve.examples.recipes.accumulation import train as train_accumulated
from halfserve.examples.recipes.gradient_penalty import backward_with_penalty
from halfserve.examples.recipes.gradient_penalty import train as train_with_penalty
from halfserve.examples.recipes.precision import INPUTS, Precision, device_in_use, network, regression, report
from halfserve.examples.recipes.several_optimizers import HIDDEN, Learner, train_step
from halfserve.examples.recipes.several_optimizers import train as train_both
from tests.examples.running import run_example

pytestmark = pytest.mark.long


def after_one_step(dtype: torch.dtype, cuts: list[int], clip: float = 1.0) -> tuple[list[Tensor], float]:
    """The weights after a step over 64 samples that are cut into batches at these places, and the loss before it."""
    inputs, targets = regression(64)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = list(zip(inputs.tensor_split(cuts), targets.tensor_split(cuts), strict=True))
    loss = accumulated_step(Precision.of(dtype), model, optimizer, batches, clip)
    return [parameter.detach() for parameter in model.parameters()], loss


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(1, 63), max_size=5).map(sorted), st.sampled_from([0.01, 1e6]))
def test_however_the_samples_are_cut_the_step_is_the_same(cuts: list[int], clip: float) -> None:
    whole, loss = after_one_step(torch.float32, [], clip)
    cut, loss_of_cut = after_one_step(torch.float32, cuts, clip)
    assert loss_of_cut == pytest.approx(loss, rel=1e-5)
    for one, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_an_overflow_in_one_batch_skips_the_whole_step_once() -> None:
    inputs, targets = regression(8)
    targets[5] = 1e30
    model, precision = network(), Precision.of(torch.float16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = list(zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True))
    accumulated_step(precision, model, optimizer, pairs)
    assert precision.scaler.step_was_skipped
    assert precision.scaler.get_scale() == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_training_ends_where_that_with_whole_batches_does() -> None:
    whole, cut, low = (
        train_accumulated(dtype, 40, batches) for dtype, batches in [(torch.float32, 1), (torch.float32, 8), (torch.float16, 8)]
    )
    assert whole["loss"] < 0.3
    assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-2)
    assert low["loss"] == pytest.approx(whole["loss"], rel=0.1)


WEIGHT = 300.0


def gradients(
    dtype: torch.dtype, weight: float, shrink: float = 1.0, *, of_parameters: bool = False, scale: float = 2.0**16
) -> list[Tensor]:
    """Unscaled gradients of the loss, times `shrink`, and its penalty."""
    inputs, targets = regression(32)
    inputs.requires_grad_()
    scaler = GradScaler(init_scale=scale, enabled=dtype is torch.float16)
    model, precision = network(), Precision(Precision.of(dtype).region, scaler)
    sources = list(model.parameters()) if of_parameters else [inputs]
    backward_with_penalty(precision, lambda: shrink * nn.functional.mse_loss(model(inputs), targets), sources, weight)
    precision.scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_near(some: list[Tensor], others: list[Tensor], share: float) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one - other).norm() <= share * other.norm()


def test_in_float32_it_is_the_gradient_of_the_formula() -> None:
    inputs, targets = regression(32)
    inputs.requires_grad_()
    model = network()
    loss = nn.functional.mse_loss(model(inputs), targets)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    by_hand = torch.autograd.grad(loss + WEIGHT * slope.square().sum(), list(model.parameters()), allow_unused=True)
    # The last bias moves every output alike, and so the loss; nothing is unused.
    assert_near(gradients(torch.float32, WEIGHT), [gradient for gradient in by_hand if gradient is not None], 1e-5)


# With these weights the penalty is three to four times, or most, of the gradients that are compared.
@pytest.mark.parametrize(("of_parameters", "weight"), [(False, WEIGHT), (True, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_mixed_precision_it_is_nearly_that_in_float32(dtype: torch.dtype, of_parameters: bool, weight: float) -> None:
    share = 0.02 if dtype is torch.float16 else 0.16  # 20 times the eps of float16, 2^-10, and of bfloat16, 2^-7
    low, full, without = (
        gradients(kind, w, of_parameters=of_parameters)
        for kind, w in [(dtype, weight), (torch.float32, weight), (torch.float32, 0.0)]
    )
    assert_near(low, full, share)
    assert (full[0] - without[0]).norm() > 2 * without[0].norm()


def test_gradients_too_small_for_float16_are_kept_by_the_scale() -> None:
    shrink = 1e-6  # of the loss: its gradients by the inputs are then below the smallest float16, 6e-8
    full = gradients(torch.float32, 1e5, shrink)
    assert_near(gradients(torch.float16, 1e5, shrink), full, 0.02)
    unscaled = gradients(torch.float16, 1e5, shrink, scale=1.0)
    assert (unscaled[0] - full[0]).norm() > 0.5 * full[0].norm()


def test_an_overflow_inside_skips_the_step_and_the_next_goes_on() -> None:
    inputs, targets = regression(32)
    inputs.requires_grad_()
    model = network()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    precision = Precision(Precision.of(torch.float16).region, GradScaler(init_scale=2.0**40, backoff_factor=2.0**-24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for _ in range(2):
        optimizer.zero_grad()
        _, penalty = backward_with_penalty(
            precision, lambda: nn.functional.mse_loss(model(inputs), targets), [inputs], weight=1.0
        )
        precision.scaler.step(optimizer)
        skipped.append(precision.scaler.step_was_skipped)
        assert penalty.isfinite().item() is not skipped[-1]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged is skipped[-1]
        precision.scaler.update()
    assert skipped == [True, False]


def test_both_precisions_learn_alike() -> None:
    low, full = (train_with_penalty(dtype, steps=40, weight=0.01) for dtype in (torch.float16, torch.float32))
    start = train_with_penalty(torch.float32, steps=1, weight=0.01)
    assert full["loss"] < 0.3 * start["loss"]
    assert low["loss"] == pytest.approx(full["loss"], rel=0.05)
    assert low["penalty"] == pytest.approx(full["penalty"], rel=0.1)


def test_a_larger_weight_leaves_a_smaller_penalty() -> None:
    mild, strong = (train_with_penalty(torch.float16, steps=40, weight=weight)["penalty"] for weight in (0.0, 0.5))
    assert strong < 0.5 * mild


def learners() -> tuple[Learner, Learner]:
    return Learner(network(), 0.01), Learner(nn.Linear(HIDDEN, INPUTS).to(device_in_use()), 0.01)


def weights(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.module.parameters()]


def changed(learner: Learner, before: list[Tensor]) -> bool:
    return not all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))


def step(precision: Precision, pair: tuple[Learner, Learner], *, spoil: int | None = None) -> list[bool]:
    """One iteration in which the gradients of one of the two may be spoiled; answers which of them moved."""
    hooks = [
        parameter.register_hook(lambda gradient: gradient * torch.inf)  # type: ignore[no-untyped-call]
        for place, learner in enumerate(pair)
        for parameter in learner.module.parameters()
        if place == spoil
    ]
    before = [weights(learner) for learner in pair]
    train_step(precision, *pair, *regression(16))
    for hook in hooks:
        hook.remove()
    return [changed(learner, was) for learner, was in zip(pair, before, strict=True)]


def small_scale() -> Precision:
    return Precision(Precision.of(torch.float16).region, GradScaler(init_scale=8.0, growth_interval=1000))


@pytest.mark.parametrize(("spoil", "moved"), [(None, [True, True]), (0, [False, True]), (1, [True, False])])
def test_only_the_one_that_overflows_is_kept_back(spoil: int | None, moved: list[bool]) -> None:
    pair, precision = learners(), small_scale()
    assert step(precision, pair, spoil=spoil) == moved
    assert [learner.skipped_steps for learner in pair] == [int(not one) for one in moved]
    # Its learning rate stays too; the scale that they share backs off once for both.
    rates = [learner.optimizer.param_groups[0]["lr"] for learner in pair]
    assert rates == [pytest.approx(0.0099 if one else 0.01) for one in moved]
    assert precision.scaler.get_scale() == (8.0 if spoil is None else 4.0)


def test_after_an_overflow_both_go_on() -> None:
    pair, precision = learners(), small_scale()
    assert step(precision, pair, spoil=1) == [True, False]
    assert step(precision, pair) == [True, True]


def test_the_probe_leaves_the_predictors_gradients_alone() -> None:
    alone = Learner(network(), 0.01)
    inputs, targets = regression(16)
    nn.functional.mse_loss(alone.module(inputs), targets).backward()  # type: ignore[no-untyped-call]
    predictor, probe = learners()
    train_step(Precision.of(torch.float32), predictor, probe, inputs, targets)
    for one, other in zip(alone.module.parameters(), predictor.module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_in_float16_the_large_loss_overflows_first_and_both_learn_as_in_float32() -> None:
    low, full = (train_both(dtype, steps=80) for dtype in (torch.float16, torch.float32))
    assert low["skipped"] == 0
    assert low["skipped by the probe"] >= 3
    assert low["scale"] == 2.0 ** (16 - low["skipped by the probe"])
    assert full["predictor's loss"] < 0.1
    assert low["predictor's loss"] == pytest.approx(full["predictor's loss"], rel=0.1)
    assert low["probe's loss"] == pytest.approx(full["probe's loss"], rel=0.1)
    assert (full["skipped"], full["skipped by the probe"], full["scale"]) == (0, 0, 1)


SMALL = {
    "accumulation": ["--steps", "3", "--batches", "2"],
    "gradient_penalty": ["--steps", "3"],
    "several_optimizers": ["--steps", "3"],
}


@pytest.mark.long
def test_one_of_them_for_real(tmp_path: Path) -> None:
    done = run_example("recipes.several_optimizers", "--steps", "12", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    heading, full, low = done.stdout.splitlines()
    assert heading.split()[0] == "dtype"
    assert (full.split()[0], low.split()[0]) == ("float32", "float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SMALL)
def test_each_prints_one_json_object_with_finite_figures(name: str) -> None:
    app = importlib.import_module(f"halfserve.examples.recipes.{name}").app
    printed = json.loads(CliRunner().invoke(app, [*SMALL[name], "--json"]).stdout)
    assert list(printed)[-2:] == ["float32", "float16"]
    assert all(isinstance(figure, float | int) for row in printed.values() for figure in row.values())
    assert printed["float16"] != printed["float32"]


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_option_is_refused(name: str) -> None:
    app = importlib.import_module(f"halfserve.examples.recipes.{name}").app
    done = CliRunner().invoke(app, ["--steps", "0"])
    assert done.exit_code == 2
    assert "Invalid value for '--steps'" in done.output


def test_what_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    report({"float16": {"loss": math.nan, "scale": 2.0}}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"float16": {"loss": None, "scale": 2.0}}


@pytest.mark.parametrize(
    ("dtype", "inside", "scaled"),
    [(torch.float32, torch.float32, False), (torch.float16, torch.float16, True), (torch.bfloat16, torch.bfloat16, False)],
)
def test_a_precision_is_a_region_and_a_scaler(dtype: torch.dtype, inside: torch.dtype, scaled: bool) -> None:
    precision, square = Precision.of(dtype), torch.ones(2, 2, device=device_in_use())
    with precision.region:
        assert (square @ square).dtype is inside
    assert precision.scaler.is_enabled() is scaled
