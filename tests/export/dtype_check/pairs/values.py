"""Numbers that float16 cannot hold: masks, epsilons, positions, large values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from halfserve.export.dtype_check.dtype_inheritance import finfo, mask_value, new_arange, new_tensor
from tests.export.dtype_check.pairs.projected import Case, Projected, projected


class MaskedFill(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).masked_fill(x > 0, -1e9).softmax(-1)  # here


MaskedFillMended = projected(lambda net, x: net.project(x).masked_fill(x > 0, mask_value(x)).softmax(-1))


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


MASKS: dict[str, Case] = {
    "masked_fill": (MaskedFill, MaskedFillMended, "constant", "error", "mask_value(x)", "-1e+09 does not fit float16"),
    "mask by product": (MultipliedMask, MultipliedMaskMended, "constant", "error", "mask_value(x)", "0 * -inf is NaN"),
    "mask that is rounded": (RoundedMask, RoundedMaskMended, "constant", "error", "mask_value(x)", "+38, become -inf"),
}  # fmt: skip


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


SubnormalEpsilonMended = projected(lambda net, x: x / net.project(x).abs().clamp(min=finfo(x).tiny))


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


TensorEpsilonMended = projected(lambda net, x: x / torch.maximum(net.project(x).abs(), new_tensor(x, finfo(x).tiny)))


EPSILONS: dict[str, Case] = {
    "epsilon that vanishes": (FlushedEpsilon, FlushedEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-08 is 0"),
    "subnormal epsilon": (SubnormalEpsilon, SubnormalEpsilonMended, "epsilon", "warning", "finfo(x).tiny", "off by 1.33%"),
    "epsilon inside torch": (HiddenEpsilon, HiddenEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-12 is 0"),
    "epsilon as a tensor": (TensorEpsilon, TensorEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-09 is 0 in float16"),
}  # fmt: skip


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


POSITIONS: dict[str, Case] = {
    "positions": (Positions, PositionsMended, "position", "warning", ".float()", "2049 becomes 2048"),
    "rotary angles": (Rotary, RotaryMended, "position", "warning", ".float()", "angles up to 3 are float16"),
    "table in the outermost module": (Table, None, "outermost_table", "warning", "submodule", "a frequency table"),
}  # fmt: skip


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


ScaleMended = projected(lambda net, x: net.project(x / 3e4 / 10))


MAGNITUDES: dict[str, Case] = {
    "manual variance": (Variance, VarianceMended, "variance", "warning", "torch.var", "E[x^2] - E[x]^2 in float16 cancels"),
    "sum of squares": (Squares, SquaresMended, "squares", "warning", "x.float()", "from 256 on its square is inf"),
    "overflow": (Overflow, OverflowMended, "overflow", "error", ".float()", "and float16 ends at 65504"),
    "scale": (Scale, ScaleMended, "constant", "error", "rescale", "300000 is inf in a float16 graph"),
}  # fmt: skip
