from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from export.errors import ExportError
from export.halving.to_half import to_half
from export.onnx_fp16.convert import convert_float_to_float16
from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session


class Resized(nn.Module):
    """A picture of another size, without aliasing."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (what nn.Upsample calls it)
        return functional.interpolate(input, **self.how, antialias=True)


class OfTheBatch(nn.BatchNorm2d):
    """Normalizes by the batch's own statistics, whatever its mode, and keeps those that it has."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (what the layer calls it)
        mean, variance = self.running_mean, self.running_var
        return functional.batch_norm(input, mean, variance, self.weight, self.bias, training=True, momentum=0.0)


PICTURE = torch.rand(2, 4, 6, 7, generator=torch.Generator().manual_seed(0))
VOLUME = torch.rand(2, 4, 6, 7, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "conv3d": (nn.Conv3d(4, 6, 3, padding=1, bias=False), VOLUME),
    "conv3d that keeps the size": (nn.Conv3d(4, 8, 3, padding="same", groups=2, bias=False), VOLUME),
    "sums of a picture": (nn.AvgPool2d(2, divisor_override=1), PICTURE),
    "oblong windows": (nn.AvgPool2d((3, 2), (2, 1), (1, 0), count_include_pad=False, divisor_override=4), PICTURE),
    "sums of a volume": (nn.AvgPool3d(2, padding=1, divisor_override=3), VOLUME),
    "smaller without aliasing": (Resized(scale_factor=0.55, mode="bilinear"), PICTURE),
    "larger without aliasing": (Resized(scale_factor=(0.75, 1.7), mode="bicubic"), PICTURE),
    "to a size without aliasing": (Resized(size=(4, 9), mode="bicubic"), PICTURE),
    "statistics of the batch": (OfTheBatch(4), PICTURE),
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


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_corners_aligned_without_aliasing_are_refused(mode: str) -> None:
    with pytest.raises(ExportError, match="both antialias and align_corners has no form in ONNX"):
        export_onnx(Resized(size=(4, 9), mode=mode, align_corners=True).eval(), PICTURE)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Upsample(scale_factor=0.7, mode="bilinear"), nn.Conv2d(4, 2, 1)),
        nn.Sequential(nn.MaxPool2d(2, 2, 1, ceil_mode=True), nn.Upsample(scale_factor=2)),
        nn.AvgPool2d(4, 3, 2, ceil_mode=True),
    ],
    ids=["resized", "largest", "averaged"],
)
def test_a_size_that_the_checker_rounds_otherwise_is_the_runtimes(module: nn.Module) -> None:
    picture = torch.rand(2, 4, 9, 10, generator=torch.Generator().manual_seed(0))
    model = export_onnx(module.eval(), {"input": picture})
    with pytest.raises(onnx.shape_inference.InferenceError, match="Inferred shape and existing shape differ"):
        onnx.checker.check_model(model, full_check=True)
    wanted = {"input": torch.cat([picture, picture[:1].neg()])}
    assert difference(module, session(model), wanted) < 1e-5
    half = convert_float_to_float16(model, keep_io_types=False)
    assert difference(module, session(half), wanted, half=True) < 3e-3
