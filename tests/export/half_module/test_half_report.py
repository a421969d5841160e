from __future__ import annotations

from dataclasses import replace

import torch
from rich.console import Group
from torch import nn

from halfserve.export.half_module.half_report import half_table
from halfserve.export.half_module.to_half import to_half
from tests.export import models
from tests.whole_words import printed


def text(module: nn.Module, *, limit: int = 40, keep_fp32: tuple[str, ...] = ()) -> str:
    return printed(half_table(to_half(module, keep_fp32=keep_fp32).report, limit=limit), 200)


def test_it_shows_what_is_remarkable_and_counts_the_rest() -> None:
    module = models.cnn()
    module.get_parameter("4.weight").data[0, 0] = 1e-6
    shown = text(module, keep_fp32=("4.bias",))
    assert "tensors: 2 halved, 2 kept" in shown
    assert "1 folded into 0, in float64" in shown
    assert "keep_fp32 '4.bias'" in shown
    assert "computes in float32 (2 subnormal)" in shown


def test_a_result_prints_as_its_table() -> None:
    assert printed(to_half(models.cnn()), 200) == text(models.cnn())


def test_it_has_an_end() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for parameter in module.parameters():
        parameter.data.fill_(1e-6)
    assert "8 rows more" in text(module, limit=2)


def test_masks_are_shown() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("mask", torch.tensor([0.0, -1e9]))
    assert "an additive mask" in text(module)


def test_what_cannot_be_kept_is_shown_before_all_else() -> None:
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Softmax(-1)).eval()
    report = replace(to_half(module, keep_fp32=["2"]).report, warnings=("the model itself overflows",))
    short, whole = printed(Group(half_table(report, limit=1), half_table(report)), 200).split("rows more")
    assert "the model itself overflows" in short
    assert "folded" not in short
    assert "keep_fp32 '2'" in whole
