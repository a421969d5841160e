"""Functions of torch that want one dtype for all that they take."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.inheritance.dtype_inheritance import new_eye, new_zeros
from tests.export.leaks.pairs.projected import Case


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


CASES: dict[str, Case] = {
    "attention mask": (AttentionMask, AttentionMaskMended, "factory", "error", "new_zeros(x, ...)", "want one dtype"),
    "attention keys": (AttentionKeys, None, "factory", "error", "new_zeros(x, ...)", "to have the same dtype"),
    "grid_sample": (Grid, GridMended, "factory", "error", "new_eye(x, ...)", "expected scalar type Half but found Float"),
}  # fmt: skip
