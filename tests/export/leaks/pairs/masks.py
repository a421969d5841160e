"""Masks whose numbers float16 does not have."""

from __future__ import annotations

import torch
from torch import Tensor

from export.inheritance.dtype_inheritance import finfo, mask_value
from tests.export.leaks.pairs.projected import Case, Projected


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


CASES: dict[str, Case] = {
    "masked_fill": (MaskedFill, MaskedFillMended, "constant", "error", "mask_value(x)", "-1e+09 does not fit float16"),
    "mask by product": (MultipliedMask, MultipliedMaskMended, "constant", "error", "mask_value(x)", "0 * -inf is NaN"),
    "mask that is rounded": (RoundedMask, RoundedMaskMended, "constant", "error", "mask_value(x)", "+38, become -inf"),
}  # fmt: skip
