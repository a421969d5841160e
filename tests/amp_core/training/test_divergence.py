"""A run that is lost ends early, and says what went wrong first."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_core.checkpoint import load_checkpoint
from amp_core.training.diagnosis import diagnose, is_finite
from amp_core.training.errors import TrainingError
from amp_core.training.evaluation import ALONE
from amp_core.training.run import TrainingRun
from amp_core.training.train import train
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import settings, steps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": f"{HERE}:lost_in_the_middle"},
            (
                r"steps 1 to 4 were all skipped or without a finite loss \(now loss nan, scale 8192, .*\): in forward the "
                r"output of divide \(Divide\) is the first that is not finite; it is not finite in float32 either: try a lower"
            ),
        ),
        (
            {"model": f"{HERE}:too_large_for_float16"},
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
        ({"patience": 3, "model": f"{HERE}:lost_in_the_middle"}, "steps 1 to 3 were all skipped"),
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
    patient = settings(tmp_path / "patient", model=f"{HERE}:overflowing", epochs=6, patience=100)
    impatient = settings(tmp_path / "impatient", model=f"{HERE}:overflowing", epochs=6, patience=2)
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
        train(settings(tmp_path, model=f"{HERE}:lost_in_the_middle", epochs=1))
    with pytest.raises(TrainingError, match="nothing was learned: all 4 steps were skipped, because gradients overflowed"):
        train(settings(tmp_path, model=f"{HERE}:overflowing", epochs=1))
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
