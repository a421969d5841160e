"""Tensors made inside forward: by factories, for functions that want one dtype, from arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfserve.export.dtype_check.dtype_inheritance import new_eye, new_tensor, new_zeros
from halfserve.export.dtype_check.inherit_dtype import inherit_dtype
from tests.export.dtype_check.pairs.projected import Case, Projected, projected


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


FactoryRoundedBack = projected(lambda net, x: net.project(x + torch.ones(4).to(x.dtype)))


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


FACTORIES: dict[str, Case] = {
    "factory": (Factory, FactoryMended, "factory", "error", "new_zeros(x, ...)", "linear at PROJECTED:"),
    "factory under inherit_dtype": (Factory, FactoryInherited, "factory", "error", "new_zeros(x, ...)", "float32[2, 4]"),
    "factory that reaches the output": (
        FactoryAtTheEnd, FactoryRoundedBack, "factory", "warning", "new_ones(x, ...)", "meets float16 in add"
    ),
    "LSTM state": (Recurrent, RecurrentMended, "factory", "error", "new_zeros(x, ...)", "lstm at PLACE:"),
    "GRU cell": (Cell, CellMended, "factory", "error", "new_zeros(x, ...)", "gru_cell at PLACE:"),
}  # fmt: skip


class AttentionMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(len(x), len(x))  # here
        return functional.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)


class AttentionMaskMended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = new_zeros(x, len(x), len(x))
        return functional.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=mask)


class AttentionKeys(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        keys = torch.zeros(1, len(x), 4)  # here
        return functional.scaled_dot_product_attention(x[None], keys, x[None])


class Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        identity = torch.eye(2, 3)  # here
        grid = functional.affine_grid(identity[None], [1, 1, 2, 4], align_corners=False)
        return functional.grid_sample(x[None, None], grid, align_corners=False)


class GridMended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        grid = functional.affine_grid(new_eye(x, 2, 3)[None], [1, 1, 2, 4], align_corners=False)
        return functional.grid_sample(x[None, None], grid, align_corners=False)


FUNCTIONS: dict[str, Case] = {
    "attention mask": (AttentionMask, AttentionMaskMended, "factory", "error", "new_zeros(x, ...)", "want one dtype"),
    "attention keys": (AttentionKeys, None, "factory", "error", "new_zeros(x, ...)", "to have the same dtype"),
    "grid_sample": (Grid, GridMended, "factory", "error", "new_eye(x, ...)", "expected scalar type Half but found Float"),
}  # fmt: skip


class Array(Projected):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.from_numpy(np.arange(4, dtype=np.float32))  # here
        return self.project(x) + steps


ArrayMended = projected(lambda net, x: net.project(x) + new_tensor(x, [0, 1, 2, 3]))


class DoubleArray(Projected):
    def forward(self, x: Tensor) -> Tensor:
        window = torch.from_numpy(np.hanning(4))  # here
        return self.project(x) * window


class RoundedDoubleArray(Projected):
    def forward(self, x: Tensor) -> Tensor:
        window = torch.tensor(np.hanning(4))  # here
        return self.project((x * window).to(x.dtype))


class DoubleArrayInPlace(Projected):
    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        x += torch.as_tensor(np.hanning(4))  # here
        return x


class DoubleFactory(Projected):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.ones(4, dtype=torch.float64)  # here
        return self.project(x) + steps


class RoundTrip(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.tensor(x.numpy() * 2))  # here


RoundTripMended = projected(lambda net, x: net.project(x * 2))


ARRAYS: dict[str, Case] = {
    "array": (Array, ArrayMended, "numpy", "warning", "new_tensor(x, ...)", "an array enters as float32[4]"),
    "float64 array": (
        DoubleArray, ArrayMended, "numpy", "warning", "new_tensor(x, ...)",
        "an array enters as float64[4]; it meets float16 in mul at PLACE",
    ),
    "float64 array, rounded back": (
        RoundedDoubleArray, ArrayMended, "numpy", "warning", "new_tensor(x, ...)", "on this is computed in float64, until it",
    ),
    "float64 array in place": (
        DoubleArrayInPlace, ArrayMended, "numpy", "warning", "new_tensor(x, ...)", "computes in float64 and rounds into a",
    ),
    "float64 factory": (
        DoubleFactory, FactoryMended, "hard_coded_dtype", "warning", "dtype=x.dtype",
        "and everything from there to the output is float64",
    ),
    "round trip": (RoundTrip, RoundTripMended, "round_trip", "warning", "torch", ".numpy() leaves torch"),
}  # fmt: skip


# Factories for the command line.


def leaking() -> nn.Module:
    torch.manual_seed(0)
    return Factory()


def mended() -> nn.Module:
    torch.manual_seed(0)
    return FactoryMended()


def not_a_module() -> Any:
    return math.pi


def failing() -> nn.Module:
    raise KeyError("weights")
