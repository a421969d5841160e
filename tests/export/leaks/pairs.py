"""One leaking model and its mended twin for each failure mode; `# here` marks the line that a finding must name.

Every model takes (2, 4) -> any shape.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.dtype_inheritance import finfo, mask_value, new_arange, new_eye, new_tensor, new_zeros
from export.inherit_dtype_mode import inherit_dtype


class Projected(nn.Module):
    """A model with one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def project(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


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


class HardCoded(Projected):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(4, dtype=torch.float32)  # here
        return self.project(x) * scale


class HardCodedMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * torch.ones(4, dtype=x.dtype)


class Upcast(Projected):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # here
        return self.project(wide * 2)


class UpcastMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.project((wide * 2).to(x.dtype))


class UpcastSoftmax(Projected):
    def forward(self, x: Tensor) -> Tensor:
        weights = functional.softmax(self.project(x), -1, dtype=torch.float32)  # here
        return self.project(x) * weights


class UpcastSoftmaxMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * functional.softmax(self.project(x), -1, dtype=torch.float32).type_as(x)


class Integers(Projected):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(4) / 4  # here
        return self.project(x) + steps


class IntegersMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + (torch.arange(4) / 4).to(x.dtype)


class Numbers(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * torch.where(x > 0, 1.0, 0.5)  # here


class NumbersMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * torch.where(x > 0, 1.0, 0.5).to(x.dtype)


class MaskedFill(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).masked_fill(x > 0, -1e9).softmax(-1)  # here


class MaskedFillMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).masked_fill(x > 0, mask_value(x)).softmax(-1)


class MultipliedMask(Projected):
    def forward(self, x: Tensor) -> Tensor:
        hidden = (x > 0).to(x.dtype) * -1e12  # here
        return (self.project(x) + hidden).softmax(-1)


class MultipliedMaskMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        hidden = (x > 0).to(x.dtype) * mask_value(x)
        return self.project(x).where(hidden == 0, hidden).softmax(-1)


class RoundedMask(Projected):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((2, 4), torch.finfo(torch.float32).min)
        mask = mask.triu(1).to(x.dtype)  # here
        return (self.project(x) + mask).softmax(-1)


class RoundedMaskMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((2, 4), finfo(x).min, dtype=x.dtype).triu(1)
        return self.project(x).where(mask == 0, mask).softmax(-1)


class FlushedEpsilon(Projected):
    def forward(self, x: Tensor) -> Tensor:
        length = self.project(x).abs().amax(-1, keepdim=True)
        return x / (length + 1e-8)  # here


class FlushedEpsilonMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        length = self.project(x).abs().amax(-1, keepdim=True)
        return x / (length + finfo(x).tiny)


class SubnormalEpsilon(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return x / self.project(x).abs().clamp(min=1e-6)  # here


class SubnormalEpsilonMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return x / self.project(x).abs().clamp(min=finfo(x).tiny)


class HiddenEpsilon(Projected):
    def forward(self, x: Tensor) -> Tensor:
        unit: Tensor = functional.normalize(self.project(x))  # here
        return unit


class HiddenEpsilonMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        unit: Tensor = functional.normalize(self.project(x), eps=finfo(x).tiny)
        return unit


class TensorEpsilon(Projected):
    def forward(self, x: Tensor) -> Tensor:
        least = torch.tensor(1e-9)
        return x / torch.maximum(self.project(x).abs(), least)  # here


class TensorEpsilonMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return x / torch.maximum(self.project(x).abs(), new_tensor(x, finfo(x).tiny))


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


class Variance(Projected):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.project(x).mean(-1, keepdim=True)
        square = self.project(x).pow(2).mean(-1, keepdim=True)
        variance = square - mean * mean  # here
        return (x - mean) * torch.rsqrt(variance + 0.001)


class VarianceMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.project(x), -1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 0.001)


class Squares(Projected):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.project(x).square().mean(-1, keepdim=True)  # here
        return x * torch.rsqrt(mean + 0.001)


class SquaresMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        mean = self.project(x).float().square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 0.001).to(x.dtype)


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


class Turn(nn.Module):
    """Multiplies pairs of numbers by complex ones."""

    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.ones(2)))  # here

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(-1, 2, 2))
        return torch.view_as_real(pairs * self.turn).flatten(1).to(x.dtype)


class Complex(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.turn(x))


class ComplexMended(Projected):
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(2).cos())
        self.register_buffer("sin", torch.ones(2).sin())

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, ::2], x[:, 1::2]
        return self.project(torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1))


class Attribute(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4) / 3  # here

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x * self.scale)


class AttributeMended(Projected):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x * self.scale)


class AttributeList(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.tables = {"scale": [torch.ones(4) / 3]}  # here

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * self.tables["scale"][0]


GLOBAL = torch.ones(4) / 3


class Global(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * GLOBAL  # here


class Array(Projected):
    def forward(self, x: Tensor) -> Tensor:
        steps = torch.from_numpy(np.arange(4, dtype=np.float32))  # here
        return self.project(x) + steps


class ArrayMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) + new_tensor(x, [0, 1, 2, 3])


class RoundTrip(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.tensor(x.numpy() * 2))  # here


class RoundTripMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x * 2)


class Autocast(Projected):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # here
            return self.project(x).to(x.dtype)


class AutocastMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.project(x)


class Overflow(Projected):
    def forward(self, x: Tensor) -> Tensor:
        large = x * 60000 + 60000  # here
        return self.project(large / 60000 - 1)


class OverflowMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        large = x.float() * 60000 + 60000
        return self.project((large / 60000 - 1).to(x.dtype))


class Scale(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x / 3e5)  # here


class ScaleMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x / 3e4 / 10)


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


class Table(Projected):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01, 0.001]))  # here

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * self.inv_freq


class ExportOnly(Projected):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            x = x.float().relu().to(x.dtype)  # here
        return self.project(x)


class Picky(Projected):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise ValueError("float32 only")  # here
        return self.project(x)


# Name: (leaking, mended or None, kind, severity, fix, a piece of the symptom)
CASES: dict[str, tuple[type[nn.Module], type[nn.Module] | None, str, str, str, str]] = {
    "factory": (Factory, FactoryMended, "factory", "error", "new_zeros(x, ...)", "linear at PLACE:"),
    "factory under inherit_dtype": (Factory, FactoryInherited, "factory", "error", "new_zeros(x, ...)", "float32[2, 4]"),
    "factory that reaches the output": (
        FactoryAtTheEnd, FactoryRoundedBack, "factory", "warning", "new_ones(x, ...)", "meets float16 in add"
    ),
    "dtype=torch.float32": (HardCoded, HardCodedMended, "hard_coded_dtype", "warning", "dtype=x.dtype", "is told to make"),
    "upcast": (Upcast, UpcastMended, "upcast", "error", ".to(x.dtype)", "float raises float16 to float32[2, 4]; linear"),
    "softmax in float32": (UpcastSoftmax, UpcastSoftmaxMended, "upcast", "warning", ".to(x.dtype)", "softmax raises float16"),
    "whole numbers": (Integers, IntegersMended, "integer_promotion", "warning", ".to(x.dtype)", "turns int64 into float32[4]"),
    "numbers alone": (Numbers, NumbersMended, "numbers", "warning", ".to(x.dtype)", "where makes float32"),
    "masked_fill": (MaskedFill, MaskedFillMended, "constant", "error", "mask_value(x)", "-1e+09 does not fit float16"),
    "mask by product": (MultipliedMask, MultipliedMaskMended, "constant", "error", "mask_value(x)", "0 * -inf is NaN"),
    "mask that is rounded": (RoundedMask, RoundedMaskMended, "constant", "error", "mask_value(x)", "+38, become -inf"),
    "epsilon that vanishes": (FlushedEpsilon, FlushedEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-08 is 0"),
    "subnormal epsilon": (SubnormalEpsilon, SubnormalEpsilonMended, "epsilon", "warning", "finfo(x).tiny", "off by 1.33%"),
    "epsilon inside torch": (HiddenEpsilon, HiddenEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-12 is 0"),
    "epsilon as a tensor": (TensorEpsilon, TensorEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-09 is 0 in float16"),
    "positions": (Positions, PositionsMended, "position", "warning", ".float()", "2049 becomes 2048"),
    "rotary angles": (Rotary, RotaryMended, "position", "warning", ".float()", "angles up to 3 are float16"),
    "manual variance": (Variance, VarianceMended, "variance", "warning", "torch.var", "E[x^2] - E[x]^2 in float16 cancels"),
    "sum of squares": (Squares, SquaresMended, "squares", "warning", "x.float()", "from 256 on its square is inf"),
    "LSTM state": (Recurrent, RecurrentMended, "factory", "error", "new_zeros(x, ...)", "lstm at PLACE:"),
    "GRU cell": (Cell, CellMended, "factory", "error", "new_zeros(x, ...)", "gru_cell at PLACE:"),
    "complex buffer": (Complex, ComplexMended, "complex", "warning", "view_as_real", "complex64"),
    "attribute": (Attribute, AttributeMended, "attribute", "error", "register_buffer", "the attribute 'scale' is float32[4]"),
    "attribute in a list": (AttributeList, AttributeMended, "attribute", "warning", "register_buffer", "'tables.scale.0'"),
    "global tensor": (Global, AttributeMended, "outside", "warning", "register_buffer", "from outside of forward"),
    "array": (Array, ArrayMended, "numpy", "warning", "new_tensor(x, ...)", "an array enters as float32[4]"),
    "round trip": (RoundTrip, RoundTripMended, "round_trip", "warning", "torch", ".numpy() leaves torch"),
    "autocast": (Autocast, AutocastMended, "autocast", "warning", "to_half", "autocast inside forward"),
    "overflow": (Overflow, OverflowMended, "overflow", "error", ".float()", "and float16 ends at 65504"),
    "scale": (Scale, ScaleMended, "constant", "error", "rescale", "300000 is inf in a float16 graph"),
    "attention mask": (AttentionMask, AttentionMaskMended, "factory", "error", "new_zeros(x, ...)", "want one dtype"),
    "attention keys": (AttentionKeys, None, "factory", "error", "new_zeros(x, ...)", "to have the same dtype"),
    "grid_sample": (Grid, GridMended, "factory", "error", "new_eye(x, ...)", "expected scalar type Half but found Float"),
    "table in the outermost module": (Table, None, "outermost_table", "warning", "submodule", "a frequency table"),
    "exported only": (ExportOnly, None, "export_dtype", "warning", "dtype=x.dtype", "in float32, which eager mode does not do"),
    "another exception": (Picky, None, "crash", "error", "dtype=x.dtype", "ValueError: float32 only"),
}  # fmt: skip


def leaking() -> nn.Module:
    """A factory for the command line."""
    torch.manual_seed(0)
    return Factory()


def mended() -> nn.Module:
    """A factory for the command line."""
    torch.manual_seed(0)
    return FactoryMended()


def not_a_module() -> Any:
    """A factory for the command line."""
    return math.pi


def failing() -> nn.Module:
    """A factory for the command line."""
    raise KeyError("weights")
