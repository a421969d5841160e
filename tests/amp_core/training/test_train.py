from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from amp_core.checkpoint import CheckpointError, load_checkpoint
from amp_core.factory import FactoryError
from amp_core.policy import PolicyError
from amp_core.training.loop import warmup_and_cosine
from amp_core.training.settings import TrainingError, TrainingSettings
from amp_core.training.train import TrainingResult, train
from tests.amp_core.tiny_task import HERE

if TYPE_CHECKING:
    from pathlib import Path


def settings(out: Path, **changes: Any) -> TrainingSettings:
    values: dict[str, Any] = {"model": f"{HERE}:model", "data": f"{HERE}:data", "out": out, "device": "cpu"}
    return TrainingSettings(**(values | {"epochs": 4, "batch_size": 32} | changes))


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = load_checkpoint(a / "checkpoint.pt"), load_checkpoint(b / "checkpoint.pt")
    for name, value in first.weights.items():
        assert torch.equal(value, second.weights[name]), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_learns_and_leaves_a_checkpoint_and_a_log(tmp_path: Path, dtype: str) -> None:
    result = train(settings(tmp_path / "new" / "folder", dtype=dtype, epochs=12, learning_rate=0.05))
    assert result.metrics["accuracy"] > 0.9
    assert (result.epochs, result.steps, result.skipped_steps) == (12, 48, 0)
    assert result.scale == (65536.0 if dtype == "float16" else 1.0)
    checkpoint = load_checkpoint(result.checkpoint)
    assert (checkpoint.epoch, checkpoint.step, checkpoint.dtype, checkpoint.policy) == (12, 48, dtype, "native")
    assert bool(checkpoint.scaler) is (dtype == "float16")
    assert {value.dtype for value in checkpoint.weights.values()} == {torch.float32, torch.int64}
    train_set, held_out = checkpoint.build_data()
    assert (len(train_set), len(held_out)) == (128, 32)  # type: ignore[arg-type]
    points, sides = held_out[:]
    accuracy = (checkpoint.build_model()(points).argmax(1) == sides).float().mean().item()
    assert accuracy == pytest.approx(result.metrics["accuracy"], abs=0.05)


def test_the_log_has_a_line_per_step_and_one_per_epoch(tmp_path: Path) -> None:
    result = train(settings(tmp_path, epochs=2))
    steps = [record for record in log(tmp_path) if "step" in record]
    epochs = [record for record in log(tmp_path) if "accuracy" in record]
    assert [set(record) for record in steps] == [
        {"step", "epoch", "loss", "scale", "skipped", "gradient_norm", "learning_rate"}
    ] * 8
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert [record["epoch"] for record in steps] == [1] * 4 + [2] * 4
    assert epochs[-1] == {"epoch": 2, "evaluation_loss": result.metrics["loss"], "accuracy": result.metrics["accuracy"]}
    assert [record["epoch"] for record in epochs] == [1, 2]
    assert max(record["learning_rate"] for record in steps) == 3e-3


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_same_run_twice_is_the_same_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(1)
    train(settings(tmp_path / "a", dtype=dtype))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    train(settings(tmp_path / "b", dtype=dtype))
    assert torch.equal(before, torch.get_rng_state())
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "train.jsonl").read_bytes() == (tmp_path / "b" / "train.jsonl").read_bytes()
    train(settings(tmp_path / "c", dtype=dtype, seed=1))
    assert log(tmp_path / "a") != log(tmp_path / "c")


class KilledError(Exception):
    """In place of a signal: nothing after it runs."""


def killed_in(folder: Path, step: int) -> None:
    def kill(record: Any) -> None:
        if record.step == step:
            raise KilledError

    with pytest.raises(KilledError):
        train(settings(folder), on_step=kill)


@pytest.mark.parametrize("step", [3, 6, 15])
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(tmp_path: Path, step: int) -> None:
    train(settings(tmp_path / "whole"))
    killed_in(tmp_path / "resumed", step)
    with (tmp_path / "resumed" / "train.jsonl").open("a") as file:
        file.write('{"step": 99, "epo')  # a line that the kill has torn
    result = train(settings(tmp_path / "resumed"), resume=True)
    assert (result.epochs, result.steps) == (4, 16)
    assert_same_weights(tmp_path / "whole", tmp_path / "resumed")
    assert (tmp_path / "whole" / "train.jsonl").read_bytes() == (tmp_path / "resumed" / "train.jsonl").read_bytes()


def test_resuming_what_is_complete_changes_nothing(tmp_path: Path) -> None:
    first = train(settings(tmp_path))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    again = train(settings(tmp_path), resume=True)
    assert (again.metrics, again.steps, again.skipped_steps) == (first.metrics, first.steps, first.skipped_steps)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"), [("seed", 1), ("batch_size", 16), ("dtype", "bfloat16"), ("epochs", 5), ("policy", "cuda")]
)
def test_resuming_another_run_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    train(settings(tmp_path, epochs=1))
    with pytest.raises(TrainingError, match=f"the checkpoint was trained with {name} .*, this run has {value!r}"):
        train(settings(tmp_path, **({"epochs": 1} | {name: value})), resume=True)


def test_skipped_steps_shrink_the_scale_and_do_not_move_the_schedule(tmp_path: Path) -> None:
    result = train(settings(tmp_path, model=f"{HERE}:overflowing", epochs=4))
    steps = [record for record in log(tmp_path) if "step" in record]
    skipped = [record for record in steps if record["skipped"]]
    assert 1 <= len(skipped) == result.skipped_steps < len(steps)
    assert result.scale == 65536.0 / 2 ** len(skipped)
    for before, after in itertools.pairwise(steps):
        assert after["scale"] == before["scale"] / (2 if before["skipped"] else 1)
        if before["skipped"]:
            assert after["learning_rate"] == before["learning_rate"]
    assert load_checkpoint(result.checkpoint).scheduler["last_epoch"] == len(steps) - len(skipped)
    assert all(record["gradient_norm"] is None for record in skipped)


def test_a_loss_that_no_scale_can_save_stops_the_run_and_names_a_parameter(tmp_path: Path) -> None:
    message = (
        r"at step 31 the gradients of 0.weight, 0.bias, 1.weight and 3 more overflow even at the smallest scale, 6.10352e-05"
    )
    with pytest.raises(TrainingError, match=message):
        train(settings(tmp_path, loss=f"{HERE}:infinite_loss", epochs=20))


def test_without_a_scale_the_first_infinite_gradient_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the gradients of step 1 are not finite \(loss .*\); try a lower learning rate"):
        train(settings(tmp_path, loss=f"{HERE}:infinite_loss", dtype="bfloat16"))
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_regression_has_a_loss_and_no_accuracy(tmp_path: Path) -> None:
    names = {"model": f"{HERE}:line", "data": f"{HERE}:regression_data", "loss": "torch.nn:MSELoss"}
    result = train(settings(tmp_path, **names, epochs=30, learning_rate=0.1, batch_size=8))
    assert result.metrics.keys() == {"loss"}
    assert result.metrics["loss"] < 0.1
    assert log(tmp_path)[-1]["accuracy"] is None


def test_a_policy_is_trained_with_and_handed_on(tmp_path: Path) -> None:
    train(settings(tmp_path, policy="cuda+fp32:linear", epochs=1))
    assert load_checkpoint(tmp_path / "checkpoint.pt").policy == "cuda+fp32:linear"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"model": f"{HERE}:wrong_width"},
            TrainingError,
            "wrong_width, .*:data and .*:cross_entropy do not fit together",
        ),
        ({"model": f"{HERE}:without_parameters"}, TrainingError, "has no parameter to train"),
        (
            {"model": f"{HERE}:halved"},
            TrainingError,
            "the parameter '0.weight' of .* is in half precision; build it in float32",
        ),
        ({"model": f"{HERE}:data"}, TrainingError, "returned a tuple; expected a torch.nn.Module"),
        ({"model": f"{HERE}:modell"}, FactoryError, "has no 'modell'; did you mean 'model'"),
        ({"data": f"{HERE}:model"}, CheckpointError, "returned a Sequential; expected a pair of torch data sets"),
        ({"data": f"{HERE}:triples"}, TrainingError, r"the data's items must be pairs \(input, target\)"),
        ({"policy": "cuda+low:softmx"}, PolicyError, "did you mean 'softmax'"),
        ({"device": "cdua"}, TrainingError, "device 'cdua' cannot be used here .*; try 'cpu' or 'auto'"),
        ({"device": "meta:x"}, TrainingError, "device 'meta:x' cannot be used here"),
        ({"dtype": "fp16"}, TrainingError, "dtype must be one of float16, bfloat16, float32, got 'fp16'"),
        ({"learning_rate": 0.0}, TrainingError, "learning_rate must be above 0 and finite, got 0.0"),
        ({"learning_rate": math.nan}, TrainingError, "learning_rate must be above 0"),
        ({"epochs": 0}, TrainingError, "epochs must be at least 1"),
        ({"batch_size": 0}, TrainingError, "batch_size must be at least 1"),
        ({"clip": -1.0}, TrainingError, r"clip must be 0 \(no clipping\) or above"),
        ({"seed": -1}, TrainingError, "seed must be between 0 and"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    def run() -> TrainingResult:
        return train(settings(tmp_path, **changes))

    with pytest.raises(kind, match=message) as error:
        run()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "checkpoint.pt").exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot write into the folder .*file"):
        train(settings(tmp_path / "file"))


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    shares = [warmup_and_cosine(step, 100) for step in range(101)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5] == 1.0
    assert shares[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(shares[5:]))
