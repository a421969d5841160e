"""The program that trains in each precision, on one small task."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
import typer
from torch import nn
from torch.nn import functional

from benchmarks import training_precisions
from benchmarks.training_precisions import Task, trained

SMALL = Task(
    network=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
    batch=lambda step: (x := torch.randn(32, 8, generator=torch.Generator().manual_seed(step)), x.sum(1, keepdim=True)),
    loss=functional.mse_loss,
    learning_rate=3e-2,
)


def test_every_precision_learns_as_float32_does() -> None:
    variants = trained(SMALL, 40)
    assert list(variants) == [
        "float32",
        *(f"{dtype}, {whose}" for dtype in ("bfloat16", "float16") for whose in ("halfserve", "torch.autocast")),
    ]
    final = {name: statistics.mean(run.losses[-10:]) for name, run in variants.items()}
    assert all(loss < variants["float32"].losses[0] / 4 for loss in final.values()), final
    assert math.isclose(final["bfloat16, halfserve"], final["float32"], rel_tol=0.2)
    assert variants["float16, halfserve"].skipped, "the first loss scale overflows"
    assert variants["bfloat16, halfserve"].losses == variants["bfloat16, torch.autocast"].losses


def test_a_task_that_does_not_exist_is_named() -> None:
    with pytest.raises(typer.BadParameter, match="there is no cooking; expected some of transformer,"):
        training_precisions.main(only="cooking")


def test_a_table_of_every_variant_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(training_precisions, "TASKS", {"small": SMALL})
    threads = torch.get_num_threads()
    try:
        training_precisions.main(steps=3, only="small")
    finally:
        torch.set_num_threads(threads)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| small")]
    assert [row.split(" | ")[1] for row in rows] == list(trained(SMALL, 1))
