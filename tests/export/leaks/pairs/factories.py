"""Factories that take no dtype from anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from export.inheritance.dtype_inheritance import new_zeros
from export.inheritance.inherit_dtype_mode import inherit_dtype
from tests.export.leaks.pairs.projected import Case, Projected


class Factory(Projected):
    def forward(self, x: Tensor) -> Tensor:
        start = torch.zeros(len(x), 4)  # here
        return self.project(x + start)


class FactoryMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x + new_zeros(x, len(x), 4))


class FactoryInherited(Projected):
    @inherit_dtype
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x + torch.zeros(len(x), 4))


class FactoryAtTheEnd(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + torch.ones(4)  # here


class FactoryRoundedBack(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x + torch.ones(4).to(x.dtype))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 4)  # here
        return self.lstm(x[:, None], (state, state))[0]  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


class RecurrentMended(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        state = new_zeros(x, 1, len(x), 4)
        return self.lstm(x[:, None], (state, state))[0]  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 4)  # here
        for _ in range(3):
            state = self.cell(x, state)
        return state


class CellMended(Cell):
    def forward(self, x: Tensor) -> Tensor:
        state = new_zeros(x, len(x), 4)
        for _ in range(3):
            state = self.cell(x, state)
        return state


CASES: dict[str, Case] = {
    "factory": (Factory, FactoryMended, "factory", "error", "new_zeros(x, ...)", "linear at PROJECTED:"),
    "factory under inherit_dtype": (Factory, FactoryInherited, "factory", "error", "new_zeros(x, ...)", "float32[2, 4]"),
    "factory that reaches the output": (
        FactoryAtTheEnd, FactoryRoundedBack, "factory", "warning", "new_ones(x, ...)", "meets float16 in add"
    ),
    "LSTM state": (Recurrent, RecurrentMended, "factory", "error", "new_zeros(x, ...)", "lstm at PLACE:"),
    "GRU cell": (Cell, CellMended, "factory", "error", "new_zeros(x, ...)", "gru_cell at PLACE:"),
}  # fmt: skip
