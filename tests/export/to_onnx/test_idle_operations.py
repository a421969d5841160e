from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import session


class Guarded(nn.Module):
    """Divisions that an epsilon guards, and a factor next to 1."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return 1 / (x + self.epsilon), 1 / (x - self.epsilon), x * (1 + 1e-6), x / (1 + 1e-6)


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu((x + 0.0 - 0.0) * 1.0 / 1.0)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-12, 1e-30])
def test_the_smallest_epsilon_stays(epsilon: float) -> None:
    module, x = Guarded(epsilon).eval(), torch.tensor([[0.0, 1.0, -3.0]])
    found = session(export_onnx(module, x)).run(None, {"x": x.numpy()})
    for wanted, answer in zip(module(x), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(answer), wanted, rtol=1e-7, atol=0)


def test_what_changes_nothing_goes() -> None:
    model = export_onnx(Idle().eval(), torch.randn(2, 3))
    assert [node.op_type for node in model.graph.node] == ["Relu"]
