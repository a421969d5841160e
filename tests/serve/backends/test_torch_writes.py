"""Programs that write into their buffers: what one client sends must not be in another's answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from protos.model_config_pb2 import ModelConfig
from serve.backends.torch_backend import TorchBackend, TorchRuntime
from serve.backends.torch_writes import written
from serve.engine.backend import DevicePlacement
from tests.serve.backends.torch_programs import BATCH, Mlp, Outputs, save_program

HALF = torch.float16


class Keeping(nn.Module):
    """x [batch, 4] -> y: what `kept` held before, which x goes into."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 4, dtype=dtype))
        self.register_buffer("constant", torch.zeros(1, 4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> Outputs:
        before = self.get_buffer("kept") + 0 * x + self.get_buffer("constant")
        return {"y": before + 0 * self.keep(x.sum(0, keepdim=True))}

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_buffer("kept").copy_(x)


class KeepingInAView(Keeping):
    def keep(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_buffer("kept").view(4)[1:3].unbind()[0].add_(x.view(4)[0])


class KeepingWithoutGradient(Keeping):
    def keep(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.get_buffer("kept").mul_(0.5).add_(x)


class KeepingStatistics(Keeping):
    """As a normalization that was exported while it trained."""

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.get_buffer("kept").view(4)
        return torch.batch_norm(x.expand(2, 4), None, None, kept, kept, True, 0.5, 1e-5, False).sum()


class Normalizing(nn.Module):
    """x [batch, 4] -> y, as it was learned; writes into what it has just made, and not into what it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Outputs:
        return {"y": self.norm(x).mul_(2).relu_()}


def loaded(path: Path) -> TorchBackend:
    runtime = TorchRuntime()
    return runtime.load(path, runtime.describe(path), DevicePlacement(use_gpu=False), ModelConfig())


@pytest.mark.parametrize("module", [Keeping(), Keeping(HALF), KeepingInAView(), KeepingWithoutGradient(), KeepingStatistics()])
def test_a_request_leaves_nothing_for_the_next_one(tmp_path: Path, module: Keeping) -> None:
    dtype = module.get_buffer("kept").dtype
    path = save_program(tmp_path / "m.pt2", module, torch.ones(3, 4, dtype=dtype), dynamic_shapes=BATCH)
    assert [name.removeprefix("b_") for name in written(torch.export.load(path).graph_module)] == ["kept"]
    backend = loaded(path)
    secret = np.full((2, 4), 7, dtype=str(dtype).removeprefix("torch."))
    for _ in range(2):
        assert not backend.run({"x": secret})["y"].any()


@pytest.mark.parametrize(("module", "columns"), [(Mlp(), 64), (Normalizing(), 4)])
def test_a_program_that_writes_into_nothing_that_it_keeps_is_run_as_it_is(module: nn.Module, columns: int) -> None:
    dtype = next(module.parameters()).dtype
    program = torch.export.export(module.eval(), (torch.ones(3, columns, dtype=dtype),), dynamic_shapes=BATCH)
    assert not written(program.graph_module)


def test_a_constant_that_goes_into_a_subgraph_is_no_graph() -> None:
    inner, outer = torch.fx.Graph(), torch.fx.Graph()
    inner.output((inner.call_function(torch.ops.aten.add.Tensor, (inner.placeholder("a"), inner.placeholder("b"))),))
    x, constant, graph = outer.placeholder("x"), outer.get_attr("constant"), outer.get_attr("inner")
    outer.output(outer.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, graph, x, constant)))
    root = nn.Module()
    root.register_buffer("constant", torch.ones(1))
    root.add_module("inner", torch.fx.GraphModule(nn.Module(), inner))
    assert not written(torch.fx.GraphModule(root, outer))
