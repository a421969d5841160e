"""A transformer from torch, one of whose norms is written by hand and squares numbers that are too large for that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from export.certificate.budget import Budget
from export.onnx_fp16.convert import convert
from export.search.smallest_fp32_set import find_fp32_nodes
from export.to_onnx.export_onnx import export_onnx

DIM = 32


class HandwrittenNorm(nn.Module):
    def forward(self, x_btd: Tensor) -> Tensor:
        scaled = x_btd * 1e4
        return scaled * torch.rsqrt((scaled * scaled).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.after = norm, nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x_btd: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x_btd)).chunk(3, dim=-1)
        attended = torch.softmax(q @ k.transpose(-1, -2) / DIM**0.5, -1) @ v
        x_btd = x_btd + self.out(attended)
        result: Tensor = x_btd + self.mlp(self.after(x_btd))
        return result


class Transformer(nn.Module):
    def __init__(self, blocks: int, poisoned: int) -> None:
        super().__init__()
        norms = [HandwrittenNorm() if index == poisoned else nn.LayerNorm(DIM) for index in range(blocks)]
        self.blocks = nn.ModuleList(map(Block, norms))

    def forward(self, x_btd: Tensor) -> Tensor:
        for block in self.blocks:
            x_btd = block(x_btd)
        return x_btd


@pytest.fixture(scope="module")
def x_btd() -> Tensor:
    return torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(0))


def test_the_poisoned_norm_is_found_with_its_module_and_line(x_btd: Tensor) -> None:
    torch.manual_seed(0)
    model = export_onnx(Transformer(3, 1).eval(), (x_btd,))
    found = find_fp32_nodes(model, [x_btd.numpy()], budget=Budget(), repair=False)
    assert found.passed
    assert found.minimal
    assert {kept.module for kept in found.kept} == {"blocks.1.norm"}
    assert all(kept.source is not None and "test_transformer.py:" in kept.source for kept in found.kept)
    assert len(found.node_block_list) <= 6
    assert found.runs <= len(found.node_block_list) + 8


def test_the_repaired_model_is_what_is_searched(x_btd: Tensor) -> None:
    import onnx_ir  # noqa: PLC0415  (only this test needs it)

    torch.manual_seed(0)
    model = export_onnx(Transformer(2, 0).eval(), (x_btd,))
    found = find_fp32_nodes(model, [x_btd.numpy()], budget=Budget())
    assert found.passed
    converted = convert(onnx_ir.from_proto(model), node_block_list=found.node_block_list)
    kept = {node.name for node in converted.report.kept}
    assert set(found.node_block_list) <= kept
