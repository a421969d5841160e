"""Accumulation, skipped steps and what a step leaves alone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_core.checkpoint import load_checkpoint
from amp_core.training.errors import TrainingError
from amp_core.training.train import train
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import assert_same_weights, settings, steps

if TYPE_CHECKING:
    from pathlib import Path

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
    result = train(settings(tmp_path, model=f"{HERE}:overflowing"))
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


def test_any_optimizer(tmp_path: Path) -> None:
    result = train(settings(tmp_path, optimizer=f"{HERE}:sgd", learning_rate=0.1, epochs=10))
    assert result.metrics["accuracy"] > 0.9
    groups: list[dict[str, Any]] = load_checkpoint(result.checkpoint).optimizer["param_groups"]
    assert groups[0]["momentum"] == 0.9


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
