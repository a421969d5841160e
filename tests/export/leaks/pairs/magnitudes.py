"""Numbers that leave float16's range or cancel in it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.export.leaks.pairs.projected import Case, Projected


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


class ScaleMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x / 3e4 / 10)


CASES: dict[str, Case] = {
    "manual variance": (Variance, VarianceMended, "variance", "warning", "torch.var", "E[x^2] - E[x]^2 in float16 cancels"),
    "sum of squares": (Squares, SquaresMended, "squares", "warning", "x.float()", "from 256 on its square is inf"),
    "overflow": (Overflow, OverflowMended, "overflow", "error", ".float()", "and float16 ends at 65504"),
    "scale": (Scale, ScaleMended, "constant", "error", "rescale", "300000 is inf in a float16 graph"),
}  # fmt: skip
