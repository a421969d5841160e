"""Epsilons that vanish in float16, or nearly."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from export.inheritance.dtype_inheritance import finfo, new_tensor
from tests.export.leaks.pairs.projected import Case, Projected


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


CASES: dict[str, Case] = {
    "epsilon that vanishes": (FlushedEpsilon, FlushedEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-08 is 0"),
    "subnormal epsilon": (SubnormalEpsilon, SubnormalEpsilonMended, "epsilon", "warning", "finfo(x).tiny", "off by 1.33%"),
    "epsilon inside torch": (HiddenEpsilon, HiddenEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-12 is 0"),
    "epsilon as a tensor": (TensorEpsilon, TensorEpsilonMended, "epsilon", "error", "finfo(x).tiny", "1e-09 is 0 in float16"),
}  # fmt: skip
