"""Models that take more than one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from amp_core.training.errors import TrainingError
from amp_core.training.train import train
from tests.amp_core.several_inputs import HERE
from tests.amp_core.training.runs import assert_same_weights, settings, together

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("model", "data"), [("reader", "by_name"), ("reader", "in_order"), ("together", "by_name"), ("reader", "padding")]
)
def test_they_are_trained_whichever_way_the_data_set_gives_them(tmp_path: Path, model: str, data: str) -> None:
    result = train(settings(tmp_path, model=f"{HERE}:{model}", data=f"{HERE}:{data}", epochs=20, learning_rate=0.1))
    assert result.metrics["accuracy"] > 0.7
    assert result.skipped_steps == 0


def test_by_name_and_in_order_are_the_same_run(tmp_path: Path) -> None:
    for data in ("by_name", "in_order"):
        train(settings(tmp_path / data, model=f"{HERE}:reader", data=f"{HERE}:{data}", epochs=1))
    assert_same_weights(tmp_path / "by_name", tmp_path / "in_order")


def test_two_processes_get_them_by_name(tmp_path: Path) -> None:
    where = ("--out", str(tmp_path / "both"), "--device", "cpu")
    words = ["train", f"{HERE}:reader", "--data", f"{HERE}:by_name", *where, "--epochs", "1", "--batch-size", "16"]
    assert [run.ended().code for run in together(tmp_path / "processes", words)] == [0, 0]


def test_a_forward_that_takes_others_is_told_what_it_got(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"forward takes \(batch\) and got the inputs all in one, a list of 2"):
        train(settings(tmp_path, model=f"{HERE}:together", data=f"{HERE}:in_order"))
