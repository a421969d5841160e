"""`train`: runs, resumed runs, restored states, models with several inputs."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve.amp_core.checkpoint import CheckpointError, load_checkpoint
from halfserve.amp_core.data import DataError
from halfserve.amp_core.factory import FactoryError
from halfserve.amp_core.policy import PolicyError
from halfserve.amp_core.training.components import warmup_and_cosine
from halfserve.amp_core.training.train import TrainingResult, train
from halfserve.amp_core.training.training_settings import TrainingError
from tests.amp_core.several_inputs import HERE as SEVERAL
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import assert_same_run, assert_same_weights, killed_in, log, settings, together


class LoadsLater(nn.Linear):
    """Imports in forward what is not installed."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (the name is torch's)
        import_module("a_package_that_nobody_has")
        return super().forward(input)


def loads_later() -> nn.Module:
    return LoadsLater(2, 2)


def without_values() -> nn.Module:
    return nn.Linear(2, 2, device="meta")


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def number_loss(outputs: Tensor, _: Tensor) -> float:
    return outputs.float().mean().item()


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


@pytest.mark.parametrize(("step", "every"), [(3, 0), (6, 0), (15, 0), (7, 2), (5, 4), (11, 1)])
def test_a_resumed_run_ends_as_an_uninterrupted_one_bit_for_bit(tmp_path: Path, step: int, every: int) -> None:
    more = {"accumulate": 2, "batch_size": 16, "checkpoint_every": every}
    train(settings(tmp_path / "whole", **more | {"checkpoint_every": 0}))
    killed_in(settings(tmp_path / "resumed", **more), step)
    with (tmp_path / "resumed" / "train.jsonl").open("a") as file:
        file.write('{"step": 99, "epo')  # a line that the kill has torn
    result = train(settings(tmp_path / "resumed", **more), resume=True)
    assert (result.epochs, result.steps) == (4, 16)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


@pytest.mark.parametrize("line", ["5", "null", '["step"]', '"step"', '{"step": null}', '{"epoch": "one"}', "", "\0\0"])
def test_a_line_of_the_log_that_no_run_has_written_is_dropped(tmp_path: Path, line: str) -> None:
    train(settings(tmp_path / "whole", epochs=2))
    killed_in(settings(tmp_path / "resumed", epochs=2), 6)
    path = tmp_path / "resumed" / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:], ""]))
    train(settings(tmp_path / "resumed", epochs=2), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")


def test_what_a_module_keeps_as_extra_state_is_resumed_and_handed_on(tmp_path: Path) -> None:
    run = settings(tmp_path, model=f"{HERE}:Counting", checkpoint_every=1)
    killed_in(run, 7)
    train(run, resume=True)
    assert load_checkpoint(tmp_path / "checkpoint.pt").build_model().get_extra_state() == {"calls": 16}


def test_resuming_what_is_complete_changes_nothing(tmp_path: Path) -> None:
    first = train(settings(tmp_path))
    before = (tmp_path / "checkpoint.pt").read_bytes()
    again = train(settings(tmp_path), resume=True)
    assert (again.metrics, again.steps, again.skipped_steps) == (first.metrics, first.steps, first.skipped_steps)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("batch_size", 16),
        ("accumulate", 2),
        ("dtype", "bfloat16"),
        ("epochs", 5),
        ("policy", "cuda"),
        ("optimizer", f"{HERE}:sgd"),
    ],
)
def test_resuming_another_run_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    train(settings(tmp_path, epochs=1))
    with pytest.raises(TrainingError, match=f"the checkpoint was trained with {name} .*, this run has {value!r}"):
        train(settings(tmp_path, **({"epochs": 1} | {name: value})), resume=True)


def test_a_model_whose_first_batch_gives_it_its_width(tmp_path: Path) -> None:
    run = settings(tmp_path, model=f"{__name__}:lazy", checkpoint_every=1)
    killed_in(run, 2)
    assert train(run, resume=True).steps == 16


def test_a_regression_has_a_loss_and_no_accuracy(tmp_path: Path) -> None:
    names = {"model": f"{HERE}:line", "data": f"{HERE}:regression_data", "loss": "torch.nn:MSELoss"}
    result = train(settings(tmp_path, **names, epochs=30, learning_rate=0.1, batch_size=8))
    assert result.metrics.keys() == {"loss"}
    assert result.metrics["loss"] < 0.1
    assert log(tmp_path)[-1]["accuracy"] is None


class FailsInEvaluation(nn.Module):
    """Its parts do not go together in evaluation mode: from the first time on, or later."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.good = nn.Linear(2, 2), first - 1

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training:
            self.good -= 1
            if self.good < 0:
                raise KeyError("logits")
        return self.linear(x)


def fails_in_first_evaluation() -> nn.Module:
    return FailsInEvaluation(1)


def fails_in_second_evaluation() -> nn.Module:
    return FailsInEvaluation(2)


def test_what_fails_in_the_first_evaluation_is_told_in_one_line(tmp_path: Path) -> None:
    told = (
        f"^{__name__}:fails_in_first_evaluation, {HERE}:data and torch.nn.functional:cross_entropy do not fit together: "
        r"the first evaluation raised KeyError: 'logits' \(at test_train.py:\d+\)$"
    )
    with pytest.raises(TrainingError, match=told):
        train(settings(tmp_path, model=f"{__name__}:fails_in_first_evaluation"))


def test_what_fails_in_a_later_evaluation_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="logits"):
        train(settings(tmp_path, model=f"{__name__}:fails_in_second_evaluation"))
    assert load_checkpoint(tmp_path / "checkpoint.pt").epoch == 1


def test_a_policy_is_trained_with_and_handed_on(tmp_path: Path) -> None:
    train(settings(tmp_path, policy="cuda+fp32:linear", epochs=1))
    assert load_checkpoint(tmp_path / "checkpoint.pt").policy == "cuda+fp32:linear"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"model": f"{HERE}:wrong_width"},
            TrainingError,
            "wrong_width, .*:data, .*:cross_entropy and .*:AdamW do not fit together: .* mat1 and mat2 shapes",
        ),
        (
            {"model": f"{__name__}:loads_later"},
            TrainingError,
            r"raised ModuleNotFoundError: No module named 'a_package_that_nobody_has' \(at test_train.py:\d+\)",
        ),
        (
            {"loss": f"{__name__}:number_loss", "dtype": "float32"},
            TrainingError,
            "number_loss and .*AdamW do not fit together: .* 'float' object has no attribute 'backward'$",
        ),
        (
            {"optimizer": "torch.optim:LBFGS"},
            TrainingError,
            "and torch.optim:LBFGS do not fit together: .* argument: 'closure'",
        ),
        ({"model": "torch.nn:ReLU"}, TrainingError, "has no parameter to train"),
        (
            {"model": f"{HERE}:halved"},
            TrainingError,
            "the parameter '0.weight' of .* is in half precision; build it in float32",
        ),
        ({"model": f"{HERE}:data"}, TrainingError, "returned a tuple; expected a torch.nn.Module"),
        ({"model": f"{HERE}:modell"}, FactoryError, "has no 'modell'; did you mean 'model'"),
        ({"data": f"{HERE}:model"}, CheckpointError, "returned a Sequential; expected a pair of torch data sets"),
        ({"data": f"{HERE}:triples"}, DataError, r"the data's items must be pairs \(input, target\)"),
        ({"policy": "cuda+low:softmx"}, PolicyError, "did you mean 'softmax'"),
        ({"device": "cdua"}, TrainingError, "device 'cdua' cannot be used here .*; try 'cpu' or 'auto'"),
        (
            {"model": f"{__name__}:without_values"},
            TrainingError,
            "the parameter 'weight' of '.*:without_values' is on .* 'meta'",
        ),
        ({"device": "meta"}, TrainingError, r"device 'meta' cannot be used here \(torch has no autocast for it\); try 'cpu'"),
        ({"device": "privateuseone"}, TrainingError, "device 'privateuseone' cannot be used here .*; try 'cpu' or 'auto'"),
        ({"device": "meta:x"}, TrainingError, "device 'meta:x' cannot be used here"),
        ({"dtype": "fp16"}, TrainingError, "dtype must be one of float16, bfloat16, float32, got 'fp16'"),
        ({"learning_rate": 0.0}, TrainingError, "learning_rate must be above 0 and finite, got 0.0"),
        ({"learning_rate": math.nan}, TrainingError, "learning_rate must be above 0"),
        ({"epochs": 0}, TrainingError, "epochs must be at least 1"),
        ({"batch_size": 0}, TrainingError, "batch_size must be at least 1"),
        ({"accumulate": 0}, TrainingError, "accumulate must be at least 1, got 0"),
        ({"patience": 0}, TrainingError, "patience must be at least 1, got 0"),
        ({"workers": -1}, TrainingError, r"workers must be 0 \(batches are made in this process\) or above, got -1"),
        ({"checkpoint_every": -1}, TrainingError, r"checkpoint_every must be 0 \(at the end of each epoch only\) or above"),
        ({"steps_per_epoch": -1}, TrainingError, r"steps_per_epoch must be 0 \(as many as there are\) or above"),
        ({"record_every": 0}, TrainingError, "record_every must be at least 1, got 0"),
        ({"data": f"{HERE}:empty_streams", "steps_per_epoch": 2}, DataError, "the data set Stream has no items"),
        ({"data": f"{HERE}:broken"}, DataError, "item 77 of .*: OSError: the disk has a hole"),
        (
            {"optimizer": f"{HERE}:sgd_with_a_number_of_numpy"},
            CheckpointError,
            "no checkpoint can hold optimizer.param_groups.0.weight_decay, a numpy.float64: it would not be read back",
        ),
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


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    shares = [warmup_and_cosine(step, 100) for step in range(101)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5] == 1.0
    assert shares[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(shares[5:]))


Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was killed in its second epoch."""
    path = tmp_path_factory.mktemp("killed")
    killed_in(settings(path, checkpoint_every=6), 7)
    return path


def changed(folder: Path, copy: Path, change: Change) -> Path:
    shutil.copytree(folder, copy)
    content = torch.load(copy / "checkpoint.pt", weights_only=True)
    change(content)
    torch.save(content, copy / "checkpoint.pt")
    return copy


def put(*path: Any, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return change


def drop(*path: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("epoch", value=-1), "has epoch -1, expected 0 or above"),
        (put("step", value="five"), "has step as str, expected int"),
        (put("batch", value=True), "has batch as bool, expected int"),
        (put("batch", value=99), "cannot skip 99 batches of TensorDataset: an epoch has 4; has the data changed?"),
        (put("weights", value={1: torch.ones(2)}), "the weights do not fit the model that .*:model' builds"),
        (put("optimizer", "state", value=5), "optimizer state does not fit this run: AttributeError"),
        (put("optimizer", "param_groups", value=3), "optimizer state does not fit this run: TypeError"),
        (drop("optimizer", "param_groups"), "optimizer state does not fit this run: KeyError: 'param_groups'"),
        (put("optimizer", "state", 0, "exp_avg", value=torch.ones(3)), "do not fit together: the first step raised RuntimeErr"),
        (put("optimizer", "param_groups", 0, "lr", value="x"), "do not fit together: the first step raised ValueError"),
        (put("scheduler", "last_epoch", value="x"), "scheduler state .*: ValueError: last_epoch is 'x', expected such as 0"),
        (put("scheduler", "last_epoch", value=7), "last_epoch is 7, expected 0 to 6, the steps attempted"),
        (put("scheduler", "base_lrs", value=["a"]), r"base_lrs is \['a'\], expected such as \[0.003\]"),
        (put("scheduler", "base_lrs", value=[]), r"base_lrs is \[\], expected such as"),
        (put("scheduler", "lr_lambdas", value=5), "lr_lambdas is 5, expected such as"),
        (drop("scheduler", "last_epoch"), "scheduler state does not fit this run: KeyError: 'last_epoch'"),
        (
            put("scaler", "scale", value=float("nan")),
            "scaler state does not fit this run: ValueError: the loaded scale must be",
        ),
        (put("rng", value={}), "random state does not fit this run: KeyError: 'cpu'"),
        (put("rng", "cpu", value=torch.zeros(5056, dtype=torch.uint8)), "random state .*: Invalid mt19937 state"),
        (put("rng", "numpy", "key", value=torch.zeros(3)), "random state does not fit this run: IndexError"),
        (put("rng", "python", value={}), "random state does not fit this run: KeyError: 'version'"),
        (put("settings", "world_size", value="many"), "the checkpoint was trained in many processes, this run has 1 process"),
        (put("record", value={"a": 1}), "cannot go on with the checkpoint's record: not a record"),
    ],
)
def test_it_is_refused_in_one_line(killed: Path, tmp_path: Path, change: Change, message: str) -> None:
    folder = changed(killed, tmp_path / "run", change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises((CheckpointError, TrainingError, DataError), match=message) as error:
        train(settings(folder), resume=True)
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_scheduler_keeps_its_methods(killed: Path, tmp_path: Path) -> None:
    """torch's takes over whatever a state names, `step` too."""
    folder = changed(killed, tmp_path / "run", put("scheduler", "step", value=5))
    assert train(settings(folder), resume=True).steps == 16


@pytest.mark.parametrize(
    ("model", "data"), [("reader", "by_name"), ("reader", "in_order"), ("together", "by_name"), ("reader", "padding")]
)
def test_they_are_trained_whichever_way_the_data_set_gives_them(tmp_path: Path, model: str, data: str) -> None:
    result = train(settings(tmp_path, model=f"{SEVERAL}:{model}", data=f"{SEVERAL}:{data}", epochs=20, learning_rate=0.1))
    assert result.metrics["accuracy"] > 0.7
    assert result.skipped_steps == 0


def test_by_name_and_in_order_are_the_same_run(tmp_path: Path) -> None:
    for data in ("by_name", "in_order"):
        train(settings(tmp_path / data, model=f"{SEVERAL}:reader", data=f"{SEVERAL}:{data}", epochs=1))
    assert_same_weights(tmp_path / "by_name", tmp_path / "in_order")


@pytest.mark.long
def test_two_processes_get_them_by_name(tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "both"), "--device", "cpu")
    words = ["train", f"{SEVERAL}:reader", "--data", f"{SEVERAL}:by_name", *where, "--epochs", "1", "--batch-size", "16"]
    assert [run.ended().code for run in together(tmp_path / "processes", words)] == [0, 0]


def test_a_forward_that_takes_others_is_told_what_it_got(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"forward takes \(batch\) and got the inputs all in one, a list of 2"):
        train(settings(tmp_path, model=f"{SEVERAL}:together", data=f"{SEVERAL}:in_order"))
