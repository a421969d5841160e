"""The curves, read back as TensorBoard reads them."""

from __future__ import annotations

import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from amp_core.training.errors import TrainingError
from amp_core.training.tensorboard import Curves
from amp_core.training.train import train
from tests.amp_core.tiny_task import HERE
from tests.amp_core.training.runs import killed_in, log, settings

if TYPE_CHECKING:
    from pathlib import Path


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events: Any = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def expected(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """What the log says, in TensorBoard's terms."""
    lines, found, skipped, step = log(folder), dict[str, list[tuple[int, Any]]](), 0, 0
    for line in lines:
        if "step" in line:
            step, skipped = line["step"], skipped + line["skipped"]
            values = {
                "loss/training": line["loss"],
                "scale": line["scale"],
                "skipped_steps": skipped,
                "gradient_norm": line["gradient_norm"],
                "learning_rate": line["learning_rate"],
            }
        else:
            values = {"loss/held_out": line["evaluation_loss"], "accuracy/held_out": line["accuracy"]}
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((step, pytest.approx(value)))
    return found


@pytest.mark.parametrize("model", ["model", "overflowing"])
def test_the_curves_are_what_the_log_says(tmp_path: Path, model: str) -> None:
    train(settings(tmp_path, model=f"{HERE}:{model}", tensorboard=True))
    found = curves(tmp_path)
    assert found == expected(tmp_path)
    assert found["skipped_steps"][-1][1] == (0 if model == "model" else 6)


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path) -> None:
    run = settings(tmp_path, model=f"{HERE}:overflowing", tensorboard=True, checkpoint_every=3)
    killed_in(run, 8)
    killed_in(run, 11, resume=True)
    train(run, resume=True)
    assert [step for step, _ in curves(tmp_path)["scale"]] == list(range(1, 17))
    assert curves(tmp_path) == expected(tmp_path)


def test_a_folder_that_is_taken_away_is_an_error_and_no_stack_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    hook = printed.append
    monkeypatch.setattr(threading, "excepthook", hook)

    def write() -> None:
        with Curves(tmp_path / "gone", steps_done=0, skipped_steps=0) as written:
            written.sync()
            shutil.rmtree(tmp_path / "gone")
            for step in range(100):
                written.write_evaluation({"loss": 1.0}, step)
                written.sync()

    with pytest.raises(FileNotFoundError):
        write()
    assert (printed, threading.excepthook) == ([], hook)
    other = threading.Thread(target=lambda: 1 / 0)
    with Curves(tmp_path / "there", steps_done=0, skipped_steps=0):
        other.start()
        other.join()
    assert [arguments.exc_type for arguments in printed] == [ZeroDivisionError]


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TrainingError, match="the curves need the package tensorboard; run: pip install tensorboard"):
        train(settings(tmp_path / "out", tensorboard=True))
    assert not (tmp_path / "out").exists()
