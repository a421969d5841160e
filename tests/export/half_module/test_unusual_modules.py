from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record, Recorder
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.to_half import to_half
from tests.export import models


class Plain(nn.Module):
    """Tensors that are only assigned: `.half()` passes over them, and the output would be float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = torch.full((4,), 2.0)
        self.shifts = [torch.ones(4), {"last": torch.zeros(4)}]
        self.ids = torch.arange(4)

    def forward(self, x: Tensor) -> Tensor:
        shift, more = self.shifts
        assert isinstance(shift, Tensor)
        assert isinstance(more, dict)
        result: Tensor = self.linear(x) * self.scale + shift + more["last"]
        return result


class Large(nn.Module):
    """Numbers over 65504 inside, small ones outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x) * 1e5 / 1e5)
        return result


def old_weight_norm(linear: nn.Linear) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normed: nn.Module = nn.utils.weight_norm(linear)
    return normed


def close(module: nn.Module, x: Tensor, tolerance: float = 4e-3) -> None:
    wanted, found = module(x), to_half(module).module(x.half())
    assert found.dtype == torch.float16
    assert ((found.float() - wanted).abs().max() / wanted.abs().max()).item() < tolerance


@pytest.mark.parametrize(
    "wrap", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal, old_weight_norm]
)
def test_weights_that_are_computed_are_computed_once(wrap: Callable[[nn.Linear], nn.Module]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(wrap(nn.Linear(4, 4))).eval()
    module(torch.rand(2, 4))  # the old ones keep a result with a history, which cannot be copied
    result = to_half(module)
    assert [repair.pass_name for repair in result.report.repairs] == ["bake_parametrization"]
    assert {name for name, _ in result.module.named_parameters()} == {"0.weight", "0.bias"}
    close(module, torch.rand(3, 4))


def test_the_original_keeps_its_parametrization() -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))).eval()
    twin = copy.deepcopy(module)
    to_half(module)
    x = torch.rand(2, 4)
    assert torch.equal(module(x), twin(x))
    assert "0.parametrizations.weight.original0" in dict(module.named_parameters())


def test_max_norm_of_an_embedding_is_applied_once() -> None:
    embedding = nn.Embedding(5, 4, max_norm=0.5).eval()
    ids = torch.arange(5)
    result = to_half(nn.Sequential(embedding))
    assert embedding.weight.norm(dim=1).max() > 0.5
    assert torch.allclose(result.module(ids).float(), embedding(ids), atol=1e-3)
    assert result.report.repairs[0].text == "rows scaled down to max_norm 0.5 once, instead of at each look-up"


def test_plain_tensors_are_found_converted_and_named() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Plain()).eval()
    close(module, torch.rand(3, 4))
    report = to_half(module).report
    found = {tensor.name: tensor for tensor in report.tensors if tensor.kind == "attribute"}
    assert set(found) == {"0.scale", "0.shifts.0", "0.shifts.1.last", "0.ids"}
    assert found["0.ids"].action == "untouched"
    assert "a plain attribute, no buffer" in json.dumps(report.to_json())


def test_a_plain_tensor_that_float16_cannot_hold_keeps_its_module() -> None:
    module = nn.Sequential(Plain()).eval()
    module[0].scale = torch.full((4,), 1e5)
    assert to_half(module).report.fp32_modules == ("0",)


def test_recurrent_layers_keep_one_set_of_weights() -> None:
    result = to_half(nn.LSTM(4, 4, batch_first=True))
    assert {tensor.kind for tensor in result.report.tensors} == {"parameter"}
    assert result.module(torch.rand(2, 3, 4).half())[0].dtype == torch.float16


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(ExportError, match=r"'0.weight' has no size yet \(a lazy module\); run the model once on an example"):
        to_half(nn.Sequential(nn.LazyLinear(3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_modules_of_every_dtype_are_taken(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(4, 4)).to(dtype)
    result = to_half(module).module
    assert {tensor.dtype for tensor in result.parameters()} == {torch.float16}
    assert torch.equal(result.get_parameter("0.weight"), module.get_parameter("0.weight").half())


def test_a_shared_module_in_float32_has_one_border() -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(4)
    module = nn.Sequential(norm, nn.Linear(4, 4), nn.Sequential(norm))
    result = to_half(module, policy=Policy.parse("cuda+fp32:layer_norm"))
    assert result.report.fp32_modules == ("0", "2.0")
    assert len(result.module.get_submodule("0")._forward_hooks) == 1
    close(module.eval(), torch.tensor([[1.0, -2.0, 3.0, 0.5]]), 1e-2)


def test_hooks_are_kept() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4)).eval()
    module[0].register_forward_hook(lambda _module, _inputs, output: output * 3)
    close(module, torch.rand(3, 4))


def test_a_module_without_tensors_can_be_kept() -> None:
    result = to_half(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), keep_fp32=["1"])
    assert (result.report.fp32_modules, result.report.fp32_reasons) == (("1",), (("1", "keep_fp32 '1'"),))


def test_what_a_transformers_model_wants_in_float32_stays() -> None:
    module = nn.Sequential(Large(), Large())
    module._keep_in_fp32_modules = ["second"]  # type: ignore[assignment]  # (as transformers writes it)
    assert to_half(module).report.fp32_modules == ("0.second", "1.second")


def recorded(module: nn.Module) -> Record:
    recorder = Recorder(module, every=1)
    with recorder.step(1):
        module(torch.ones(2, 4)).sum().backward()
    return recorder.record()


def test_what_overflowed_in_training_stays_float32() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Large())
    nn.init.constant_(module.get_parameter("1.first.weight"), 2.0)
    record = recorded(module)
    report = to_half(module, record=record).report
    assert report.fp32_modules == ("1",)
    assert "mul.Tensor reached" in dict(report.fp32_reasons)["1"]
    assert "(largest float16 is 65504)" in dict(report.fp32_reasons)["1"]
    assert to_half(module).report.fp32_modules == ()
    x = torch.ones(2, 4)
    assert torch.allclose(to_half(module, record=record).module(x.half()).float(), module(x), rtol=2e-2)


def test_what_cannot_be_kept_is_a_warning() -> None:
    module = Large()
    nn.init.constant_(module.first.weight, 2.0)
    report = to_half(module, record=recorded(module)).report
    assert report.fp32_modules == ()
    assert "in the outermost module itself: float16 follows it; rescale there" in report.warnings[0]


def test_a_submodule_that_overflowed_is_kept_with_the_leaf_inside_that_did() -> None:
    block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Identity())
    nn.init.constant_(block.get_parameter("0.weight"), 1e5)
    report = to_half(
        nn.Sequential(nn.Sequential(block), nn.Linear(4, 4)), record=recorded(nn.Sequential(nn.Sequential(block)))
    ).report
    assert report.fp32_modules == ("0.0",)
    assert report.warnings == ()
    leaf = nn.Sequential(block.get_submodule("0"))
    report = to_half(leaf, record=recorded(leaf)).report
    assert report.fp32_modules == ("0",)
    (warning,) = report.warnings
    assert "reached 4e+05 in training (largest float16 is 65504) in 0: float16 follows it" in warning


def test_the_record_of_another_model_is_refused() -> None:
    record = recorded(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ExportError, match="the record is of another model: it names '0', which this model does not have"):
        to_half(Large(), record=record)


def test_weights_of_a_class_that_hides_its_numbers_are_refused() -> None:
    module = nn.Linear(4, 2)
    weight = TwoTensor(torch.rand(2, 4), torch.rand(2, 4))  # type: ignore[no-untyped-call]  # (torch's own example)
    module.weight = nn.Parameter(weight)
    with pytest.raises(
        ExportError, match=r"^the parameter 'weight' is of class TwoTensor, whose numbers cannot be read; give the"
    ):
        to_half(module)


class Branching(nn.Module):
    """What a symbolic trace cannot follow, around a block that it can."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6, affine=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x if x.sum() > 0 else -x)
        return result


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        result: Tensor = self.norm(y) + y
        return result


def trained(module: nn.Module, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    for _ in range(3):
        module(torch.randn(8, 4, 6, 6))
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_var is not None:
            part.running_var *= scale
    return module.eval()


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


FOLDED: dict[str, Callable[[], nn.Module]] = {
    "grouped": lambda: sequence(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)),
    "transposed, in a module with branches": Branching,
}
LEFT: dict[str, Callable[[], nn.Module]] = {
    "read twice": ReadTwice,
    "linear": lambda: sequence(nn.Flatten(), nn.Linear(144, 4), nn.BatchNorm1d(4)),
    "activation between": lambda: sequence(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)),
    "no statistics": lambda: sequence(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
}


@pytest.mark.parametrize("scale", [1.0, 1e8])
@pytest.mark.parametrize("name", FOLDED)
def test_it_is_folded_in_float64_and_answers_the_same(name: str, scale: float) -> None:
    module = trained(FOLDED[name](), scale)
    images = torch.randn(4, 4, 6, 6) * scale**0.25
    result = to_half(module)
    assert [repair.pass_name for repair in result.report.repairs] == ["fold_batch_norm"]
    assert result.report.fp32_modules == ()
    assert not any(isinstance(part, nn.BatchNorm2d) or part.training for part in result.module.modules())
    wanted, found = module(images), result.module(images.half())
    assert found.dtype == torch.float16
    assert ((found.float() - wanted).abs().max() / wanted.abs().max()).item() < 4e-3


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_proved_is_left_alone(name: str) -> None:
    module = trained(LEFT[name]())
    result = to_half(module)
    assert result.report.repairs == ()
    images = torch.randn(4, 4, 6, 6)
    assert torch.allclose(result.module(images.half()).float(), module(images), atol=2e-2)


def hooked(module: Any) -> nn.Module:
    module[1].register_forward_hook(lambda _module, _inputs, output: output * 2)
    return trained(module)


def shared(module: Any) -> nn.Module:
    module.append(module[1])
    return trained(module)


def tiny_variance(module: Any) -> nn.Module:
    trained(module)
    module[1].running_var.fill_(0)
    module[1].weight.data.fill_(1e4)
    return module  # type: ignore[no-any-return]  # (an nn.Sequential)


@pytest.mark.parametrize("change", [hooked, shared, tiny_variance])
def test_hooks_sharing_and_overflow_prevent_it(change: Callable[[Any], nn.Module]) -> None:
    module = change(sequence(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)))
    assert to_half(module).report.repairs == ()


def test_what_shall_be_float32_is_not_folded() -> None:
    assert to_half(models.cnn(), keep_fp32=["1"]).report.repairs == ()
    assert to_half(models.cnn(), keep_fp32=["1"]).report.fp32_modules == ("1",)
    assert "fold_batch_norm" in [repair.pass_name for repair in to_half(models.cnn()).report.repairs]
