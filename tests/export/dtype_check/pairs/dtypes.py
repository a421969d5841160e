"""A dtype that is written out, or that torch chooses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.export.dtype_check.pairs.projected import Case, Projected, projected


class HardCoded(Projected):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(4, dtype=torch.float32)  # here
        return self.project(x) * scale


HardCodedMended = projected(lambda net, x: net.project(x) * torch.ones(4, dtype=x.dtype))


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


IntegersMended = projected(lambda net, x: net.project(x) + (torch.arange(4) / 4).to(x.dtype))


class Numbers(Projected):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x) * torch.where(x > 0, 1.0, 0.5)  # here


NumbersMended = projected(lambda net, x: net.project(x) * torch.where(x > 0, 1.0, 0.5).to(x.dtype))


class Autocast(Projected):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):  # here
            return self.project(x).to(x.dtype)


class AutocastMended(Projected):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.project(x)


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


CASES: dict[str, Case] = {
    "dtype=torch.float32": (HardCoded, HardCodedMended, "hard_coded_dtype", "warning", "dtype=x.dtype", "dtype=float32 makes"),
    "upcast": (Upcast, UpcastMended, "upcast", "error", ".to(x.dtype)", "float raises float16 to float32[2, 4]; linear"),
    "softmax in float32": (UpcastSoftmax, UpcastSoftmaxMended, "upcast", "warning", ".to(x.dtype)", "softmax raises float16"),
    "whole numbers": (Integers, IntegersMended, "integer_promotion", "warning", ".to(x.dtype)", "turns int64 into float32[4]"),
    "numbers alone": (Numbers, NumbersMended, "numbers", "warning", ".to(x.dtype)", "where makes float32"),
    "autocast": (Autocast, AutocastMended, "autocast", "warning", "to_half", "autocast inside forward"),
    "exported only": (ExportOnly, None, "export_dtype", "warning", "dtype=x.dtype", "in float32, which eager mode does not do"),
    "another exception": (Picky, None, "crash", "error", "dtype=x.dtype", "ValueError: float32 only"),
}  # fmt: skip
