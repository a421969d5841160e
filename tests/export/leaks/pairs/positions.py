"""Whole numbers and angles that float16 rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from export.inheritance.dtype_inheritance import new_arange, new_tensor
from tests.export.leaks.pairs.projected import Case, Projected


class Positions(Projected):
    def forward(self, x: Tensor) -> Tensor:
        positions = new_arange(x, 4000)  # here
        return self.project(x) + positions[:4] / 4000


class PositionsMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(4000).float() / 4000
        return self.project(x) + positions[:4].to(x.dtype)


class Rotary(Projected):
    def forward(self, x: Tensor) -> Tensor:
        frequencies = new_tensor(x, [1.0, 0.1])
        angles = torch.outer(new_arange(x, 4), frequencies)
        turn = angles.cos()  # here
        return self.project(x)[:, :2] * turn[:2]


class RotaryMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(4).float(), torch.tensor([1.0, 0.1]))
        return self.project(x)[:, :2] * angles.cos()[:2].to(x.dtype)


class Table(Projected):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01, 0.001]))  # here

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * self.inv_freq


CASES: dict[str, Case] = {
    "positions": (Positions, PositionsMended, "position", "warning", ".float()", "2049 becomes 2048"),
    "rotary angles": (Rotary, RotaryMended, "position", "warning", ".float()", "angles up to 3 are float16"),
    "table in the outermost module": (Table, None, "outermost_table", "warning", "submodule", "a frequency table"),
}  # fmt: skip
