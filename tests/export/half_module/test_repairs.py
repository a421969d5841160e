from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve.export.half_module.to_half import to_half
from tests.export import models


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
