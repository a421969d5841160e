"""A training step, running statistics, an evaluation, and the end of a diverged run."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.training.divergence import diagnose, is_finite
from halfserve.amp_core.training.run import TrainingRun
from halfserve.amp_core.training.step import ALONE, RunningStatistics, evaluate
from halfserve.amp_core.training.train import train
from halfserve.amp_core.training.training_settings import TrainingError
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import assert_same_weights, settings, steps

PLAIN = {"model": f"{HERE}:plain", "dtype": "float32"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / "checkpoint.pt").weights


@pytest.mark.parametrize(("batch_size", "accumulate"), [(16, 2), (8, 4), (32, 1)])
def test_accumulated_batches_are_one_large_batch(tmp_path: Path, batch_size: int, accumulate: int) -> None:
    train(settings(tmp_path / "large", **PLAIN, batch_size=32, seed=3))
    result = train(settings(tmp_path / "small", **PLAIN, batch_size=batch_size, accumulate=accumulate, seed=3))
    assert result.steps == 16
    torch.testing.assert_close(weights(tmp_path / "small"), weights(tmp_path / "large"), rtol=1e-4, atol=1e-6)
    for small, large in zip(steps(tmp_path / "small"), steps(tmp_path / "large"), strict=True):
        assert small == pytest.approx(large, rel=1e-4)


def test_the_rest_of_an_epoch_counts_as_what_it_is(tmp_path: Path) -> None:
    """Five batches by three: a step of three and one of two, each following the mean of its own."""
    # A plain step of SGD without clipping: a tail divided by 3 would move the weights by two thirds.
    same = PLAIN | {"optimizer": f"{HERE}:sgd", "clip": 0.0, "epochs": 1, "batch_size": 24}
    result = train(settings(tmp_path / "by_three", **same, accumulate=3))
    assert result.steps == 2
    by_three, one_by_one = steps(tmp_path / "by_three"), []
    train(settings(tmp_path / "all", **same, accumulate=5), on_step=lambda progress: one_by_one.append(progress.record))
    assert len(one_by_one) == 1
    mean = (3 * by_three[0]["loss"] + 2 * by_three[1]["loss"]) / 5
    assert one_by_one[0].loss == pytest.approx(mean, rel=0.05)
    # The gradient's norm is that of a mean: two fifths of the data do not give two thirds of the norm.
    assert by_three[1]["gradient_norm"] == pytest.approx(one_by_one[0].gradient_norm, rel=0.25)


def test_skipped_steps_shrink_the_scale_and_do_not_move_the_schedule(tmp_path: Path) -> None:
    result = train(settings(tmp_path, model=f"{HERE}:Overflowing"))
    lines = steps(tmp_path)
    skipped = [record for record in lines if record["skipped"]]
    assert 1 <= len(skipped) == result.skipped_steps < len(lines)
    assert result.scale == 65536.0 / 2 ** len(skipped)
    for before, after in itertools.pairwise(lines):
        assert after["scale"] == before["scale"] / (2 if before["skipped"] else 1)
        if before["skipped"]:
            assert after["learning_rate"] == before["learning_rate"]
    assert load_checkpoint(result.checkpoint).scheduler["last_epoch"] == len(lines) - len(skipped)
    assert all(record["gradient_norm"] is None for record in skipped)


def test_an_optimizer_that_leaves_parameters_out(tmp_path: Path) -> None:
    """Is the same as freezing them: their gradients, which nobody unscales, count for no norm."""
    left_out = settings(tmp_path / "left_out", model=f"{HERE}:plain", optimizer=f"{HERE}:sgd_of_the_last_layer")
    frozen = settings(tmp_path / "frozen", model=f"{HERE}:plain_with_a_frozen_layer", optimizer=f"{HERE}:sgd")
    train(left_out)
    train(frozen)
    assert steps(tmp_path / "left_out") == steps(tmp_path / "frozen")
    assert_same_weights(tmp_path / "left_out", tmp_path / "frozen")


def test_a_learning_rate_in_a_tensor(tmp_path: Path) -> None:
    for name, optimizer in (("tensor", f"{HERE}:rate_in_a_tensor"), ("number", "torch.optim:Adam")):
        train(settings(tmp_path / name, **PLAIN, optimizer=optimizer))
    rates = [[step["learning_rate"] for step in steps(tmp_path / name)] for name in ("tensor", "number")]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sparse_gradients_are_as_dense_ones(tmp_path: Path, dtype: str, clip: float) -> None:
    same = {"data": f"{HERE}:sentences", "optimizer": "torch.optim:SGD", "learning_rate": 0.5, "dtype": dtype, "clip": clip}
    for kind in ("sparse", "dense"):
        train(settings(tmp_path / kind, model=f"{HERE}:{kind}_words", **same))
    torch.testing.assert_close(weights(tmp_path / "sparse"), weights(tmp_path / "dense"), rtol=1e-4, atol=1e-6)
    for sparse, dense in zip(steps(tmp_path / "sparse"), steps(tmp_path / "dense"), strict=True):
        assert sparse == pytest.approx(dense, rel=1e-4)
        assert not sparse["skipped"]
        assert sparse["gradient_norm"] > clip


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (f"{HERE}:no_optimizer", r"':no_optimizer|returned a float; expected a torch.optim.Optimizer"),
        ("torch.optim:Optimizer", r"'torch.optim:Optimizer' raised TypeError: .* when called with the parameters and lr=0.003"),
    ],
)
def test_what_is_no_optimizer(tmp_path: Path, optimizer: str, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        train(settings(tmp_path, optimizer=optimizer))


def test_streams(tmp_path: Path) -> None:
    options = {"data": f"{HERE}:streams", "batch_size": 16, "accumulate": 2}
    result = train(settings(tmp_path / "a", **options, steps_per_epoch=3, epochs=2))
    assert (result.steps, set(result.metrics)) == (6, {"loss", "accuracy"})
    # The stream has four steps, and ends before the five that were announced.
    assert train(settings(tmp_path / "b", **options, steps_per_epoch=5, epochs=2)).steps == 8
    with pytest.raises(TrainingError, match=r"a stream; say with steps_per_epoch \(--steps-per-epoch\) how many steps"):
        train(settings(tmp_path / "c", **options))


def test_an_epoch_may_be_shorter_than_the_data(tmp_path: Path) -> None:
    assert train(settings(tmp_path, steps_per_epoch=3, epochs=2)).steps == 6
    assert [record["epoch"] for record in steps(tmp_path)] == [1, 1, 1, 2, 2, 2]


def test_an_infinite_batch_leaves_no_trace_and_a_good_one_does() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    statistics = RunningStatistics(model)
    model(torch.randn(4, 2))
    before = {name: value.clone() for name, value in model.named_buffers()}
    statistics.keep()
    model(torch.full((4, 2), float("inf")))
    assert not all(torch.isfinite(value).all() for value in model.buffers())
    statistics.undo_if_not_finite()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    model(torch.randn(4, 2))
    after = {name: value.clone() for name, value in model.named_buffers()}
    statistics.undo_if_not_finite()
    assert all(torch.equal(value, after[name]) for name, value in model.named_buffers())
    assert not torch.equal(after["1.running_mean"], before["1.running_mean"])


class Shown(nn.Module):
    """Gives its input back, and notes in which mode it did."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return x


def absolute(outputs: Tensor, targets: Any) -> Tensor:
    wanted: Tensor = targets["far"][0] if isinstance(targets, dict) else targets
    return (outputs.mean() - wanted.double().mean()).abs()


@pytest.mark.parametrize("training", [True, False])
def test_the_mean_is_over_items_and_the_mode_stays(training: bool) -> None:
    model = Shown().train(training)
    batches = [(torch.full((3, 1), 2.0), torch.zeros(3, 1)), (torch.full((1, 1), 10.0), torch.zeros(1, 1))]
    assert evaluate(model, absolute, batches, nullcontext()) == {"loss": (3 * 2.0 + 10.0) / 4}
    assert (model.modes, model.training) == ([False, False], training)


def test_a_classifier_has_its_share_of_hits() -> None:
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    batches = [(outputs[:3], torch.tensor([1, 0, 1])), (outputs[3:], torch.tensor([1]))]
    figures = evaluate(Shown(), nn.CrossEntropyLoss(), batches, nullcontext())
    assert figures["accuracy"] == 3 / 4
    mixed = [*batches, (outputs[3:], torch.ones(1, 2))]
    assert set(evaluate(Shown(), nn.CrossEntropyLoss(), mixed, nullcontext())) == {"loss"}


def test_targets_may_lie_deep_and_there_may_be_none() -> None:
    batches = [(torch.full((3, 1), 2.0), {"far": (torch.zeros(3),)}), (torch.full((1, 1), 6.0), {"far": [torch.zeros(1)]})]
    assert evaluate(Shown(), absolute, batches, nullcontext()) == {"loss": 3.0}
    assert evaluate(Shown(), absolute, [], nullcontext()) == {}


@pytest.mark.parametrize("targets", [(), {}, [{}], torch.tensor(5.0)], ids=["tuple", "dict", "nested", "scalar"])
def test_where_no_target_counts_the_items_the_inputs_do(targets: Any) -> None:
    batches = [(torch.full((3, 1), 2.0), targets), (torch.full((1, 1), 10.0), targets)]
    assert evaluate(Shown(), lambda outputs, _: outputs.mean(), batches, nullcontext()) == {"loss": 4.0}


def test_a_batch_without_anything_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="no tensor among targets and inputs has a dimension"):
        evaluate(Shown(), lambda outputs, _: outputs, [(torch.tensor(1.0), ())], nullcontext())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": f"{HERE}:LostInTheMiddle"},
            (
                r"steps 1 to 4 were all skipped or without a finite loss \(now loss nan, scale 8192, .*\): in forward the "
                r"output of divide \(Divide\) is the first that is not finite; it is not finite in float32 either: try a lower"
            ),
        ),
        (
            {"model": f"{HERE}:Squares"},
            (
                r"the output of scaled \(Times1e6\) is the first that is not finite; "
                "in float32 it is finite: try bfloat16, or a policy that keeps the operation in float32"
            ),
        ),
        ({"loss": f"{HERE}:nan_loss"}, "all layers' outputs are finite, and the loss function returns nan"),
        (
            {"loss": f"{HERE}:root_loss"},
            (
                r"steps 1 to 10 .*: forward is finite, but the gradients of 0.weight, 0.bias, 1.weight and 3 more are not "
                "even at the smallest scale, 6.10352e-05; try a lower learning rate, another loss function, or float32 for"
            ),
        ),
        ({"data": f"{HERE}:one_infinite"}, "the inputs of the batch hold inf or NaN; look at the data"),
        ({"learning_rate": 1e30}, r"the output of . \(\w+\), whose weights reach .*e\+\d\d, is the first"),
        ({"patience": 3, "model": f"{HERE}:LostInTheMiddle"}, "steps 1 to 3 were all skipped"),
    ],
)
def test_it_names_what_went_wrong_first(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match="training diverged: .*" + message) as error:
        train(settings(tmp_path, epochs=8, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_without_a_scale_the_first_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, dtype: str) -> None:
    message = (
        r"step 1 \(loss 0, learning rate 0.003\): forward is finite, but the gradients of 0.weight, .* are not; try a lower"
    )
    with pytest.raises(TrainingError, match=message):
        train(settings(tmp_path, loss=f"{HERE}:root_loss", dtype=dtype))
    assert not (tmp_path / "checkpoint.pt").exists()
    assert not (tmp_path / "train.jsonl").exists()


def test_a_scale_on_its_way_down_is_waited_for(tmp_path: Path) -> None:
    """It has to fall below 2**10, which takes longer than the patience; looking for the cause changes nothing."""
    patient = settings(tmp_path / "patient", model=f"{HERE}:Overflowing", epochs=6, patience=100)
    impatient = settings(tmp_path / "impatient", model=f"{HERE}:Overflowing", epochs=6, patience=2)
    assert train(patient).skipped_steps == train(impatient).skipped_steps > 2
    assert (tmp_path / "patient" / "train.jsonl").read_bytes() == (tmp_path / "impatient" / "train.jsonl").read_bytes()
    first, second = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("patient", "impatient"))
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())


def test_one_bad_item_is_skipped(tmp_path: Path) -> None:
    result = train(settings(tmp_path, data=f"{HERE}:one_poisoned", epochs=12, learning_rate=0.05))
    assert result.skipped_steps == 12
    assert result.metrics["accuracy"] > 0.9


def test_a_run_too_short_for_patience_does_not_pass_for_a_success(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="steps 1 to 4 were all skipped .*: in forward the output of divide"):
        train(settings(tmp_path, model=f"{HERE}:LostInTheMiddle", epochs=1))
    with pytest.raises(TrainingError, match="nothing was learned: all 4 steps were skipped, because gradients overflowed"):
        train(settings(tmp_path, model=f"{HERE}:Overflowing", epochs=1))
    assert len(steps(tmp_path)) == 4
    assert not (tmp_path / "checkpoint.pt").exists()


def test_looking_for_the_cause_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with TrainingRun(settings(tmp_path), torch.device("cpu"), ALONE, None) as run:
        training = run.training
        training.model.train()
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        states = torch.get_rng_state(), random.getstate()
        assert diagnose(training, [(torch.randn(8, 2, generator=torch.Generator()), torch.zeros(8, dtype=torch.long))]) is None
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        for name, value in training.model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(parameter.grad is None for parameter in training.model.parameters())
        assert not any(module._forward_hooks for module in training.model.modules())


def test_is_finite_looks_into_everything() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    assert is_finite([good, {"a": (good, 3, None)}, torch.ones(2, dtype=torch.int64), good.to_sparse()])
    for value in (bad, [good, bad], {"a": {"b": (good, bad)}}, {"a": good, "b": bad}, bad.to_sparse(), torch.fft.rfft(bad)):
        assert not is_finite(value)
