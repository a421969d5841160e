"""Tensors that a module holds, or that lie beside it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.export.dtype_check.pairs.projected import Case, Projected


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


CASES: dict[str, Case] = {
    "complex buffer": (Complex, ComplexMended, "complex", "warning", "view_as_real", "complex64"),
    "attribute": (Attribute, AttributeMended, "attribute", "error", "register_buffer", "the attribute 'scale' is float32[4]"),
    "attribute in a list": (AttributeList, AttributeMended, "attribute", "warning", "register_buffer", "'tables.scale.0'"),
    "global tensor": (Global, AttributeMended, "outside", "warning", "register_buffer", "from outside of forward"),
}  # fmt: skip
