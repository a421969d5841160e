"""Ways out of torch and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from export.inheritance.dtype_inheritance import new_tensor
from tests.export.leaks.pairs.projected import Case, Projected


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


CASES: dict[str, Case] = {
    "array": (Array, ArrayMended, "numpy", "warning", "new_tensor(x, ...)", "an array enters as float32[4]"),
    "round trip": (RoundTrip, RoundTripMended, "round_trip", "warning", "torch", ".numpy() leaves torch"),
}  # fmt: skip
