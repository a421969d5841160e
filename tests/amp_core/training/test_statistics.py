from __future__ import annotations

import torch
from torch import nn

from amp_core.training.statistics import RunningStatistics


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


def test_a_model_without_any() -> None:
    statistics = RunningStatistics(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)))
    statistics.keep()
    statistics.undo_if_not_finite()
