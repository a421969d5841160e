"""What the host knows of a scale on an accelerator is never too high, and is refreshed without waiting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amp_core.scaling.loss_scale import LossScale
from amp_core.scaling.scale_bound import READ_BELOW, Reading, ScaleBound

FLOOR = 2.0**-14


class SlowDevice:
    """Answers a reading a number of questions later, and counts the readings."""

    def __init__(self, delay: int) -> None:
        self.delay, self.readings = delay, 0

    def begin(self, scalar: Tensor) -> Reading:
        value, left, self.readings = scalar.item(), self.delay, self.readings + 1

        def ask() -> float | None:
            nonlocal left
            left -= 1
            return value if left < 0 else None

        return ask


@given(st.integers(0, 5), st.lists(st.sampled_from(["overflow", "clean", "growth"]), max_size=80), st.booleans())
def test_it_is_never_above_the_scale(delay: int, steps: list[str], host_knows: bool) -> None:
    scale = torch.tensor(2.0**16)
    bound = ScaleBound(2.0**16, SlowDevice(delay).begin)
    for step in steps:
        scale.mul_({"overflow": 0.5, "clean": 1.0, "growth": 2.0}[step]).clamp_(min=FLOOR)
        bound.follow(scale, shrink=1.0 if host_knows and step != "overflow" else 0.5, floor=FLOOR)
        assert FLOOR <= bound.at_least <= scale.item()


def test_a_steady_scale_is_read_once_in_eight_steps_and_never_taken_for_small() -> None:
    device, scale = SlowDevice(delay=2), torch.tensor(2.0**16)
    bound = ScaleBound(2.0**16, device.begin)
    for _ in range(160):
        bound.follow(scale, shrink=0.5, floor=FLOOR)
        assert bound.at_least >= 1.0
    assert 0 < device.readings <= 20


def test_where_the_host_knows_of_each_step_nothing_is_read() -> None:
    device, scale = SlowDevice(delay=0), torch.tensor(2.0**16)
    bound = ScaleBound(2.0**16, device.begin)
    for _ in range(100):
        bound.follow(scale, shrink=1.0, floor=FLOOR)
    assert (device.readings, bound.at_least) == (0, 2.0**16)


def test_a_scale_that_is_small_is_known_to_be() -> None:
    scale = torch.tensor(READ_BELOW / 512)
    bound = ScaleBound(READ_BELOW)
    for _ in range(20):
        bound.follow(scale, shrink=0.5, floor=FLOOR)
    assert bound.at_least <= scale.item()


class OutOfReach(LossScale):
    """A scale that the host takes for one on an accelerator, and that counts how often it is waited for."""

    waits = 0

    def _is_at_hand(self) -> bool:
        return False

    def get(self) -> float:
        self.waits += 1
        return super().get()


@pytest.mark.parametrize("known", [False, None])
def test_a_loss_scale_out_of_reach_is_not_waited_for_until_someone_else_writes_to_it(known: bool | None) -> None:
    scale = OutOfReach(
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        min_scale=FLOOR,
        max_scale=2.0**24,
        hysteresis=1,
    )
    tensor = scale.on(torch.device("cpu"))
    for _ in range(64):
        scale.adapt(torch.zeros(()), overflowed=known)
        assert not scale.may_be_below_one()
        assert not scale.is_smallest()
    assert scale.waits == 0
    tensor.fill_(0.5)
    assert scale.may_be_below_one()
    assert scale.waits == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("known", [False, None])
def test_on_cuda_a_steady_scale_stays_known_and_a_foreign_write_is_noticed(known: bool | None) -> None:
    settings = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    scale = LossScale(**settings, min_scale=FLOOR, max_scale=2.0**24, hysteresis=1)  # type: ignore[arg-type]
    tensor = scale.on(torch.device("cuda"))
    for _ in range(64):
        scale.adapt(torch.zeros((), device="cuda"), overflowed=known)
        torch.cuda.synchronize()
        assert not scale.may_be_below_one()
    tensor.fill_(0.5)
    assert scale.may_be_below_one()
    assert not scale.is_smallest()
