from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session

LOAD = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"


class TimeFirst(nn.Module):
    """(batch, time, 8) -> (time, batch, 8), multiplied twice; the transposed tensor may be an output too."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__()
        self.first, self.second, self.shown = nn.Linear(8, 4), nn.Linear(8, 6), shown

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(0, 1)
        results = (self.first(turned), self.second(turned))
        return (*results, turned) if self.shown else results


@pytest.mark.parametrize("shown", [False, True])
def test_time_first_products_load_at_every_level_and_answer_the_same(shown: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TimeFirst(shown=shown).eval()
    path = tmp_path / "model.onnx"
    sizes = ({0: "batch", 1: "time"},)
    model = export_onnx(module.half(), torch.rand(2, 3, 8).half(), path, dynamic_shapes=sizes)
    subprocess.run([sys.executable, "-c", LOAD, str(path)], check=True, capture_output=True)
    assert len([node for node in model.graph.node if node.op_type == "Transpose"]) == 2 + shown
    assert difference(module.float(), session(model), {"x": torch.rand(5, 4, 8)}, half=True) < 2e-3


def test_float32_is_left_as_it_is() -> None:
    model = export_onnx(TimeFirst(shown=False).eval(), torch.rand(2, 3, 8))
    assert next(node.op_type for node in model.graph.node) == "Transpose"
