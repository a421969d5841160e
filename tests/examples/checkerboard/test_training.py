"""The same network learns the same picture in every precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from amp_core import autocast
from examples.checkerboard.image import checkerboard, coordinate_grid
from examples.checkerboard.network import network
from examples.checkerboard.settings import CheckerboardError, Settings, device_named
from examples.checkerboard.training import Outcome, train

SMALL = Settings(device=torch.device("cpu"), steps=40, size=16, squares=2, width=48)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {dtype: train(SMALL, dtype) for dtype in ("float32", "float16", "bfloat16")}


def test_the_network_has_the_layers_that_it_is_known_for() -> None:
    layers = list(network())
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size) for c in convolutions] == [
        (2, 256, (1, 1)), (256, 256, (1, 1)), (256, 256, (1, 1)), (256, 1, (1, 1))
    ]  # fmt: skip
    assert [type(layer) for layer in layers[:-1]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_mixed_precision_the_convolutions_are_low_and_the_weights_are_not(dtype: torch.dtype) -> None:
    model = network(8)
    with autocast("cpu", dtype):
        assert model(coordinate_grid(4)).dtype is dtype
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_every_precision_learns_the_picture(outcomes: dict[str, Outcome]) -> None:
    board = checkerboard(16, 2)[0, 0]
    grey = float((board - board.mean()).square().mean())
    for dtype, outcome in outcomes.items():
        assert outcome.loss < 0.2 * grey, f"{dtype} is no better than a grey image"
        assert outcome.loss == pytest.approx(float((outcome.image - board).square().mean()))
        assert ((outcome.image > 0.5) == (board > 0.5)).float().mean() > 0.95
        assert (outcome.image.shape, outcome.image.dtype) == ((16, 16), torch.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_ends_near_float32(outcomes: dict[str, Outcome], dtype: str) -> None:
    assert outcomes[dtype].loss == pytest.approx(outcomes["float32"].loss, abs=0.02)


def test_only_float16_is_scaled(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["float16"].scale == 2.0 ** (16 - outcomes["float16"].skipped_steps)
    assert [(outcomes[dtype].scale, outcomes[dtype].skipped_steps) for dtype in ("float32", "bfloat16")] == [(1.0, 0)] * 2


def test_on_the_cpu_there_is_time_but_no_device_memory_to_report(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        assert outcome.peak_bytes is None
        assert outcome.milliseconds_per_step > 0
        assert outcome.seconds > 0


def test_the_same_seed_gives_the_same_picture_and_leaves_the_random_state_alone() -> None:
    before, calls = torch.get_rng_state(), list[int]()
    short = dataclasses.replace(SMALL, steps=3)
    first, second = (train(short, "bfloat16", lambda: calls.append(1)) for _ in range(2))
    other = train(dataclasses.replace(short, seed=1), "bfloat16")
    assert torch.equal(first.image, second.image)
    assert not torch.equal(first.image, other.image)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_mixed_precision_takes_less_memory() -> None:
    settings = dataclasses.replace(SMALL, device=torch.device("cuda"), size=256, steps=20, width=256)
    full, half = (train(settings, dtype) for dtype in ("float32", "float16"))
    assert full.peak_bytes is not None
    assert half.peak_bytes is not None
    assert half.peak_bytes < 0.8 * full.peak_bytes
    assert half.loss == pytest.approx(full.loss, abs=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"size": 1, "squares": 1}, "size must be at least 2 pixels, got 1"),
        ({"squares": 17}, "an image of 16 pixels has no room for 17 squares a side"),
        ({"learning_rate": float("nan")}, "learning_rate must be between 0 and 1, got nan"),
        ({"seed": -1}, "seed must be between 0"),
        ({"policy": "cudda"}, "unknown policy 'cudda'"),
    ],
)
def test_a_setting_out_of_range_is_refused(change: dict[str, object], message: str) -> None:
    replace: Callable[..., Settings] = dataclasses.replace
    with pytest.raises(CheckerboardError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize("name", ["no-such", "cpu:x", "meta"])
def test_a_device_that_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(CheckerboardError, match=f"device '{name}' cannot be used here .*; try 'cpu' or 'auto'"):
        device_named(name)
