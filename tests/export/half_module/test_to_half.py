from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfserve.amp_core.policy import Policy
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.half_report import TensorDecision
from halfserve.export.half_module.module_tensors import ledger_of
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import WeightLedger
from tests.export import models


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4) / 4))

    def forward(self, positions: Tensor) -> Tensor:
        return torch.cos(positions[..., None].float() * self.get_buffer("inv_freq"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]  # (nn.Module's call is untyped)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))  # type: ignore[no-any-return]  # (see above)


def buffered(**buffers: Tensor) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    for name, buffer in buffers.items():
        module[1].register_buffer(name, buffer)
    return module


def decision(module: nn.Module, name: str) -> TensorDecision:
    return next(tensor for tensor in to_half(module).report.tensors if tensor.name == name)


@pytest.mark.parametrize("factory", [models.mlp, models.cnn, models.lstm, models.transformer])
def test_sound_models_are_halved_whole_and_the_original_stays(factory: Callable[[], nn.Module]) -> None:
    original = factory()
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    result = to_half(original)
    assert result.report.fp32_modules == ()
    assert set(result.report.actions) <= {"halved", "untouched"}
    assert {tensor.dtype for tensor in result.module.parameters()} == {torch.float16}
    assert all(torch.equal(before[name], tensor) for name, tensor in original.state_dict().items())


def test_a_variance_over_65504_without_a_convolution_keeps_its_batch_norm_in_float32() -> None:
    original = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    original.get_buffer("1.running_var").fill_(9.8e7)
    rows = torch.rand(4, 4)
    result = to_half(original)
    assert result.report.fp32_modules == ("1",)
    output = result.module(rows.half())
    assert output.dtype == torch.float16
    assert torch.allclose(output.float(), original(rows), atol=2e-3)
    found = decision(original, "1.running_var")
    assert (found.action, found.reason) == ("kept", "4 of 4 values over 65504 (largest 9.8e+07)")


def test_the_ledger_counts_what_rounding_does() -> None:
    values = torch.tensor([7e4, float("inf"), 2.0**-25, -1e-9, 2.0**-24, -(2.0**-15), 2.0**-14, 0.0, 1.0])
    assert ledger_of(values) == WeightLedger(overflow=1, flushed=2, subnormal=2)


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1))
def test_the_ledger_agrees_with_rounding(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    rounded, ledger = values.half().float(), ledger_of(values)
    assert ledger.overflow == 0
    assert ledger.flushed == int(((rounded == 0) & (values != 0)).sum())
    assert ledger.flushed + ledger.subnormal == int(((values != 0) & (values.abs() < 2.0**-14)).sum())


def test_subnormal_weights_are_halved_and_reported() -> None:
    linear = nn.Linear(2, 2)
    linear.weight.data = torch.tensor([[1.0, 1e-6], [1e-9, 0.0]])
    report = to_half(nn.Sequential(linear)).report
    assert report.ledger == WeightLedger(flushed=1, subnormal=1)
    assert json.loads(json.dumps(report.to_json()))["tensors"][0]["name"] == "0.weight"


def test_a_tensor_that_would_vanish_is_kept() -> None:
    assert "would become 0" in decision(buffered(scale=torch.tensor([1e-9, 0.0])), "1.scale").reason


def test_frequency_tables_compute_in_float32() -> None:
    result = to_half(nn.Sequential(Rotary(), nn.Linear(4, 4)))
    positions = torch.tensor([[1000.0]])
    assert result.report.fp32_modules == ("0",)
    rotary = result.module.get_submodule("0")
    assert torch.allclose(rotary(positions.half()).float(), Rotary()(positions), atol=1e-3)


@pytest.mark.parametrize("name", ["inv_freq", "rotary_freqs", "timescale"])
def test_frequency_tables_are_known_by_name(name: str) -> None:
    assert decision(buffered(**{name: torch.tensor([0.5])}), f"1.{name}").action == "kept"


def test_counters_over_2048_are_kept() -> None:
    assert "whole numbers over 2048" in decision(buffered(steps=torch.tensor([1.0, 2049.0])), "1.steps").reason
    assert decision(buffered(steps=torch.tensor([1.0, 2048.0])), "1.steps").action == "halved"


def test_masks_saturate_and_keep_infinity() -> None:
    module = buffered(mask=torch.tensor([0.0, -1e9, float("-inf")]))
    assert decision(module, "1.mask").action == "saturated"
    assert to_half(module).module.get_buffer("1.mask").tolist() == [0, -65504, float("-inf")]


def test_integers_and_complex_numbers_are_left_alone() -> None:
    module = buffered(ids=torch.tensor([70000]), rotation=torch.tensor([1j]))
    half = to_half(module).module
    assert half.get_buffer("1.ids").dtype == torch.int64
    assert half.get_buffer("1.rotation").dtype == torch.complex64
    assert decision(module, "1.ids").action == "untouched"
    assert to_half(module).report.fp32_modules == ("1",)  # what works with complex numbers gives float32, whatever it is given


def test_fractions_that_float16_has_not_are_rounded() -> None:
    made = decision(buffered(mean=torch.tensor([0.1, 2049.5])), "1.mean")
    assert (made.action, made.reason) == ("halved", "within float16's range")


def test_patterns_keep_tensors_and_submodules() -> None:
    result = to_half(models.mlp(), keep_fp32=["2.bias"])
    assert result.report.fp32_modules == ("2",)
    assert result.module(torch.rand(2, 8).half()).dtype == torch.float16
    assert to_half(models.mlp(), keep_fp32=["*"]).report.fp32_modules == ("0", "1", "2")


def test_ties_hold_across_the_border() -> None:
    result = to_half(Tied(), keep_fp32=["head"])
    assert result.report.fp32_modules == ("embedding", "head")
    assert result.module.get_parameter("embedding.weight") is result.module.get_parameter("head.weight")
    assert result.module(torch.rand(2, 4).half()).dtype == torch.float16


def test_a_module_that_reads_its_children_is_kept_whole() -> None:
    result = to_half(Attention(), keep_fp32=["attention.out_proj.bias"])
    assert result.report.fp32_modules == ("attention",)
    assert result.module(torch.rand(2, 3, 8).half()).dtype == torch.float16


def test_what_the_policy_adds_to_float32_stays_there() -> None:
    policy = Policy.parse("cuda+fp32:layer_norm")
    assert to_half(models.transformer(), policy=policy).report.fp32_modules == ("norm1", "norm2")
    assert to_half(models.transformer(), policy=Policy.cuda()).report.fp32_modules == ()


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ExportError, match=r"keep_fp32 'nope' matches no parameter, buffer or submodule; names look like \['0.weight'"
    ):
        to_half(models.mlp(), keep_fp32=["nope"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    module = models.mlp()
    next(module.parameters()).data[0, 0] = value
    with pytest.raises(ExportError, match="parameter '0.weight' holds NaN or infinity"):
        to_half(module)


def test_a_tensor_that_would_keep_the_whole_model_is_refused() -> None:
    module = Tied()
    module.scale = nn.Parameter(torch.tensor(1e5))
    with pytest.raises(ExportError, match=r"'scale' must stay float32 .* move it into a submodule of its own"):
        to_half(module)
