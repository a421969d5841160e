"""The models of tests/models.py once more, as exported torch programs: the same names, shapes, dtypes and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from tests.models import mlp_weights

Outputs = dict[str, torch.Tensor]
BATCH = {"x": {0: Dim("batch")}}


class Mlp(nn.Module):
    """x [batch, 64] -> y [batch, 10]: two products with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.from_numpy(w)) for w in mlp_weights())

    def forward(self, x: torch.Tensor) -> Outputs:
        return {"y": (x @ self.first).relu() @ self.second}


class Twice(nn.Module):
    """x [batch, 1] -> y: x + x, in x's dtype."""

    def forward(self, x: torch.Tensor) -> Outputs:
        return {"y": x + x}


class Same(nn.Module):
    """x [batch, 1] -> y: x itself."""

    def forward(self, x: torch.Tensor) -> Outputs:
        return {"y": x}


class Picky(nn.Module):
    """i INT64 [batch, 1] -> y FP32 [batch, 1]: two rows to choose from, by an index that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([10.0, 20.0]))

    def forward(self, i: torch.Tensor) -> Outputs:
        return {"y": torch.embedding(self.get_buffer("table")[:, None], i + 0)[..., 0]}


def save_program(path: Path, module: nn.Module, *inputs: torch.Tensor, dynamic_shapes: Any = None) -> Path:
    """Export and write a module."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(torch.export.export(module.eval(), inputs, dynamic_shapes=dynamic_shapes), path)
    return path


def save_torch_mlp(path: Path) -> Path:
    return save_program(path, Mlp(), torch.zeros(2, 64, dtype=torch.float16), dynamic_shapes=BATCH)


def save_torch_twice(path: Path, dtype: torch.dtype) -> Path:
    return save_program(path, Twice(), torch.zeros(2, 1, dtype=dtype), dynamic_shapes=BATCH)


def save_torch_same(path: Path) -> Path:
    return save_program(path, Same(), torch.zeros(2, 1), dynamic_shapes=BATCH)


def save_torch_picky(path: Path) -> Path:
    return save_program(path, Picky(), torch.zeros(2, 1, dtype=torch.int64), dynamic_shapes={"i": {0: Dim("batch")}})


def save_torch_unbatched(path: Path) -> Path:
    return save_program(path, Twice(), torch.zeros(3))
