from __future__ import annotations

import pytest
import torch
from torch import nn

from export.errors import ExportError
from export.halving.to_half import to_half
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session

PICTURE = torch.rand(2, 4, 6, 7, generator=torch.Generator().manual_seed(0))
VOLUME = torch.rand(2, 4, 6, 7, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "conv3d": (nn.Conv3d(4, 6, 3, padding=1, bias=False), VOLUME),
    "conv3d that keeps the size": (nn.Conv3d(4, 8, 3, padding="same", groups=2, bias=False), VOLUME),
    "sums of a picture": (nn.AvgPool2d(2, divisor_override=1), PICTURE),
    "oblong windows": (nn.AvgPool2d((3, 2), (2, 1), (1, 0), count_include_pad=False, divisor_override=4), PICTURE),
    "sums of a volume": (nn.AvgPool3d(2, padding=1, divisor_override=3), VOLUME),
    "averages as they are": (nn.AvgPool3d(3, 2, padding=1, ceil_mode=True, count_include_pad=False), VOLUME),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_answers_are_torchs_with_another_batch_too(name: str) -> None:
    module, example = LAYERS[name]
    opened = session(export_onnx(module.eval(), {"input": example}))
    assert difference(module, opened, {"input": torch.cat([example, example[:1].neg()])}) < 1e-6


@pytest.mark.parametrize("name", ["conv3d", "sums of a picture"])
def test_the_same_in_half(name: str) -> None:
    module, example = LAYERS[name]
    opened = session(export_onnx(to_half(module.eval()).module, {"input": example.half()}))
    assert difference(module, opened, {"input": example}, half=True) < 2e-3


def test_a_divisor_that_windows_beyond_the_edge_share_is_refused() -> None:
    with pytest.raises(ExportError, match="ceil_mode and divisor_override has no form in ONNX"):
        export_onnx(nn.AvgPool2d(3, ceil_mode=True, divisor_override=2).eval(), PICTURE)
