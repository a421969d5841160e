from __future__ import annotations

import pytest
import torch
from torch import nn

from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session

VOLUME = torch.rand(2, 4, 6, 7, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "conv3d": (nn.Conv3d(4, 6, 3, padding=1, bias=False), VOLUME),
    "conv3d that keeps the size": (nn.Conv3d(4, 8, 3, padding="same", groups=2, bias=False), VOLUME),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_answers_are_torchs_with_another_batch_too(name: str) -> None:
    module, example = LAYERS[name]
    opened = session(export_onnx(module.eval(), {"input": example}))
    assert difference(module, opened, {"input": torch.cat([example, example[:1].neg()])}) < 1e-6


@pytest.mark.parametrize("name", ["conv3d"])
def test_the_same_in_half(name: str) -> None:
    module, example = LAYERS[name]
    opened = session(export_onnx(to_half(module.eval()).module, {"input": example.half()}))
    assert difference(module, opened, {"input": example}, half=True) < 2e-3
