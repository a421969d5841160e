from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from torch import Tensor, nn

from halfserve.amp_core.policy import Policy
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.half_module.half_report import TensorDecision, half_table
from halfserve.export.half_module.module_tensors import ledger_of
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import BF16, WeightLedger
from tests.export import models
from tests.whole_words import printed


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


@pytest.mark.parametrize(
    ("name", "values", "action", "reason"),
    [
        ("scale", [1e-9, 0.0], "kept", "would become 0"),
        ("inv_freq", [0.5], "kept", ""),
        ("rotary_freqs", [0.5], "kept", ""),
        ("timescale", [0.5], "kept", ""),
        ("steps", [1.0, 2049.0], "kept", "whole numbers over 2048"),
        ("steps", [1.0, 2048.0], "halved", "within float16's range"),
        ("mean", [0.1, 2049.5], "halved", "within float16's range"),
    ],
)
def test_names_and_numbers_of_a_tensor_decide(name: str, values: list[float], action: str, reason: str) -> None:
    found = decision(buffered(**{name: torch.tensor(values)}), f"1.{name}")
    assert found.action == action
    assert reason in found.reason


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


def text(module: nn.Module, *, limit: int = 40, keep_fp32: tuple[str, ...] = ()) -> str:
    return printed(half_table(to_half(module, keep_fp32=keep_fp32).report, limit=limit), 200)


def test_it_shows_what_is_remarkable_and_counts_the_rest() -> None:
    module = models.cnn()
    module.get_parameter("4.weight").data[0, 0] = 1e-6
    shown = text(module, keep_fp32=("4.bias",))
    assert "tensors: 2 halved, 2 kept" in shown
    assert "1 folded into 0, in float64" in shown
    assert "keep_fp32 '4.bias'" in shown
    assert "computes in float32 (2 subnormal)" in shown


def test_a_result_prints_as_its_table() -> None:
    assert printed(to_half(models.cnn()), 200) == text(models.cnn())


def test_it_has_an_end() -> None:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for parameter in module.parameters():
        parameter.data.fill_(1e-6)
    assert "8 rows more" in text(module, limit=2)


def test_masks_are_shown() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_buffer("mask", torch.tensor([0.0, -1e9]))
    assert "an additive mask" in text(module)


def test_what_cannot_be_kept_is_shown_before_all_else() -> None:
    module = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Softmax(-1)).eval()
    report = replace(to_half(module, keep_fp32=["2"]).report, warnings=("the model itself overflows",))
    short, whole = printed(Group(half_table(report, limit=1), half_table(report)), 200).split("rows more")
    assert "the model itself overflows" in short
    assert "folded" not in short
    assert "keep_fp32 '2'" in whole


# `to_half(dtype="bfloat16")`: what bfloat16 holds and what it does not.


class Table(nn.Module):
    """Buffers that half precision cannot hold, in a submodule."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, values in buffers.items():
            self.register_buffer(name, values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for values in self.buffers():
            x = x + values
        return x


def actions(module: nn.Module) -> dict[str, str]:
    return {tensor.name: tensor.action for tensor in to_half(module, dtype="bfloat16").report.tensors}


def test_a_module_computes_in_bfloat16() -> None:
    module, x = models.cnn(), torch.rand(4, 1, 8, 8)
    half = to_half(module, dtype="bfloat16").module
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    y = half(x.bfloat16())
    expected = module(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - expected).abs().max() <= 0.04 * expected.abs().max()


def test_large_and_tiny_weights_are_rounded_as_any_others() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        module[0].weight.fill_(1e9)  # type: ignore[operator]  # (a Linear's)
        module[1].weight.fill_(1e-20)  # type: ignore[operator]  # (as above)
    assert set(actions(module).values()) == {"halved"}


def test_counters_over_256_stay_float32_and_results_are_bfloat16() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Table(steps=torch.arange(300.0)[-4:])).eval()
    result = to_half(module, dtype="bfloat16")
    (kept,) = [tensor for tensor in result.report.tensors if tensor.action == "kept"]
    assert (kept.name, kept.reason) == ("1.steps", "whole numbers over 256, which bfloat16 cannot tell apart")
    assert result.module(torch.rand(2, 4).bfloat16()).dtype == torch.bfloat16


def test_a_mask_of_the_smallest_float32_stays_finite() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Table(mask=torch.tensor([0.0, torch.finfo(torch.float32).min]))).eval()
    result = to_half(module, dtype="bfloat16")
    assert {tensor.name: tensor.action for tensor in result.report.tensors}["1.mask"] == "saturated"
    assert result.module.get_buffer("1.mask").min().item() == -BF16.largest


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype is 'int8'; expected 'float16' or 'bfloat16'"):
        to_half(nn.Linear(2, 2), dtype="int8")  # type: ignore[arg-type]
