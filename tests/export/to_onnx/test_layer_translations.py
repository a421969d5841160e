from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfserve.amp_core.calling import without_fast_path
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.to_half import to_half
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.to_onnx.export_onnx import export_onnx
from halfserve.export.verification.simulation import round_every_node
from halfserve.export.verification.verify import verify
from tests.export.to_onnx.answers import difference, halved, session


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
SHORT_LANE = {"conv3d", "sums of a picture", "larger without aliasing", "statistics of the batch"}


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT_LANE else pytest.mark.long) for name in LAYERS])
def test_the_answers_are_torchs_with_another_batch_too(name: str) -> None:
    module, example = LAYERS[name]
    opened = session(export_onnx(module.eval(), {"input": example}))
    assert difference(module, opened, {"input": torch.cat([example, example[:1].neg()])}) < 1e-6


@pytest.mark.long
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


@pytest.mark.long
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


TOKENS = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
# The second row sees its first three places only, the third none at all.
MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])
LOWEST = torch.finfo(torch.float32).min
PAIRS = MASK[:, :, None] & MASK[:, None, :]


def added(mask: Tensor) -> Tensor:
    """The mask in the form that is added to the scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


class Attending(nn.Module):
    """Self-attention in two heads, in which places may be hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.turned(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        seen = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return Attending().eval()


@pytest.mark.long
@pytest.mark.parametrize(
    "opset_version", [pytest.param(None, marks=pytest.mark.long), pytest.param(18, marks=pytest.mark.long), 23]
)
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(MASK, id="keys", marks=pytest.mark.long),
        pytest.param(PAIRS, id="pairs"),
        pytest.param(added(MASK), id="keys-added"),
        pytest.param(added(PAIRS), id="pairs-added", marks=pytest.mark.long),
    ],
)
def test_a_row_that_sees_nothing_answers_zero_as_in_torch(module: nn.Module, mask: Tensor, opset_version: int | None) -> None:
    inputs = {"x": TOKENS, "mask": mask}
    model = export_onnx(module, inputs, opset_version=opset_version)
    assert difference(module, session(model), inputs) < 5e-6
    assert not module(**inputs)[2].any()


@pytest.mark.long
@pytest.mark.parametrize("mask", [MASK, added(MASK)], ids=["bools", "added"])
def test_a_hidden_row_answers_zero_in_half(module: nn.Module, mask: Tensor) -> None:
    inputs = {"x": TOKENS, "mask": mask}
    model = export_onnx(to_half(module).module, halved(inputs))
    assert difference(module, session(model), inputs, half=True) < 5e-3


@pytest.mark.long
def test_a_layer_of_torch_answers_a_sequence_of_padding_as_torch_does() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    inputs = {"src": TOKENS, "src_key_padding_mask": ~MASK}
    model = export_onnx(layer, inputs)
    with without_fast_path():  # which answers NaN there
        for candidate in (model, convert_float_to_float16(model, keep_io_types=True)):
            assert difference(layer, session(candidate), inputs) < 5e-3


@pytest.mark.long
def test_a_mask_that_the_adversary_closes_is_no_reason_to_refuse(module: nn.Module) -> None:
    inputs = [TOKENS[:2], MASK[:2]]
    candidate = convert_float_to_float16(export_onnx(module, inputs), keep_io_types=False)
    certificate = verify(module, candidate, [np.asarray(value) for value in inputs])
    assert any(line.case == "masked row" for line in certificate.adversarial)


class Headless(nn.Module):
    """Attention over tensors of two or three axes, causal, masked by each pair, and from one sequence to a longer one."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        attend = functional.scaled_dot_product_attention
        longer = torch.cat([x, x], dim=1)
        return (
            attend(x, x, x, is_causal=True, scale=3.0),
            attend(x, x, x[..., :2], attn_mask=mask[:, :, None] & mask[:, None, :]),
            attend(x, longer, longer),
            attend(x[0], x[1], x[1]),
        )


@pytest.mark.long
@pytest.mark.parametrize("opset_version", [None, 23])
def test_tensors_without_heads_attend_too(opset_version: int | None) -> None:
    opened = session(export_onnx(Headless().eval(), {"x": TOKENS, "mask": MASK}, opset_version=opset_version))
    more = torch.cat([MASK, ~MASK[1:2]])
    assert difference(Headless(), opened, {"x": torch.cat([TOKENS, TOKENS[:1].neg()]), "mask": more}) < 5e-6


class Repeating(nn.Module):
    """Attention in which masks, heads and sequences of the context stand for several."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        attend = functional.scaled_dot_product_attention
        heads = x.view(*x.shape[:2], 4, 2).transpose(1, 2)
        pairs, one = heads[:, ::2], heads[:, :1]
        return (
            attend(heads, heads, heads, attn_mask=mask[:1]),
            attend(heads, heads, heads, attn_mask=added(mask)[:1, None, :, None]),
            attend(heads, pairs, pairs, attn_mask=mask[:, None, None, :], enable_gqa=True),
            attend(heads, heads, heads, enable_gqa=True),
            attend(heads, heads[:1], heads[:1], is_causal=True),
            attend(heads, one, one),
        )


@pytest.mark.long
@pytest.mark.parametrize("opset_version", [None, 23])
def test_what_stands_for_several_is_repeated_as_torch_repeats_it(opset_version: int | None) -> None:
    opened = session(export_onnx(Repeating().eval(), {"x": TOKENS, "mask": MASK}, opset_version=opset_version))
    more = torch.cat([MASK, ~MASK[1:2]])
    assert difference(Repeating(), opened, {"x": torch.cat([TOKENS, TOKENS[:1].neg()]), "mask": more}) < 5e-6


class Padded(Attending):
    """Attention that hides padding by a large number in a mask that is added, as language models do."""

    def __init__(self, lowest: float, way: str) -> None:
        super().__init__()
        self.lowest, self.way = lowest, way
        self.penalties = nn.Embedding(5, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.way == "product":
            return super().forward(x, (1 - mask[:, None, :]) * self.lowest)
        places = torch.arange(x.shape[1])
        penalty = self.penalties((places - places[:, None]).abs())[..., 0]
        penalty = penalty.sigmoid() if self.way == "computed" else penalty
        return super().forward(x, penalty.masked_fill(mask[:, None, :] == 0, self.lowest))


@pytest.mark.long
@pytest.mark.parametrize(
    ("lowest", "way"), [(LOWEST, "product"), (-1e9, "product"), (-1e5, "product"), (LOWEST, "filled"), (LOWEST, "computed")]
)
def test_a_row_that_a_large_number_hides_is_not_answered_zero_in_half(lowest: float, way: str) -> None:
    torch.manual_seed(0)
    module = Padded(lowest, way).eval()
    inputs = {"x": TOKENS, "mask": MASK.float()}
    half = round_every_node(convert_float_to_float16(export_onnx(module, inputs), keep_io_types=False))
    assert difference(module, session(half), inputs, half=True) < 5e-3
    assert module(**inputs)[2].any()
