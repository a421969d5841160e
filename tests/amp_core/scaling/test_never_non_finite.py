"""Whatever the gradients, the settings, the dtypes and the optimizer: no parameter becomes non-finite."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amp_core import GradScaler

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "fused sgd": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "fused adam": (torch.optim.Adam, {"fused": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}
EXTREMES = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4e38, 1e30, 65504.0, 1.0, 6e-8, 1e-38, 1e-45]
GRADIENTS = st.lists(st.lists(st.sampled_from(EXTREMES), min_size=3, max_size=3), min_size=1, max_size=6)


def run(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: list[list[float]], *, clip: bool
) -> None:
    scaler.scale(torch.ones(()))
    for gradient in steps:
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(gradient).to(parameter.dtype)
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([parameter], 1.0)
        scaler.step(optimizer)
        assert torch.isfinite(parameter).all(), (gradient, parameter)
        if scaler.step_was_skipped:
            assert torch.equal(parameter, before)
        scaler.update()


@settings(max_examples=250)
@given(
    steps=GRADIENTS,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([2.0**-14, 2.0**-3, 1.0, 2.0**16, 2.0**100]),
    growth=st.sampled_from([1, 3]),
    hysteresis=st.sampled_from([1, 2]),
    lr=st.sampled_from([1e-8, 1e-2, 1e3]),
    clip=st.booleans(),
)
def test_guarded_no_schedule_writes_a_non_finite_value(
    steps: list[list[float]],
    optimizer: str,
    dtype: torch.dtype,
    scale: float,
    growth: int,
    hysteresis: int,
    lr: float,
    clip: bool,
) -> None:
    kind, options = OPTIMIZERS[optimizer]
    parameter = nn.Parameter(torch.tensor([0.0, 1.0, -1e-7]).to(dtype))
    scaler = GradScaler(
        "cpu",
        scale,
        growth_interval=growth,
        hysteresis=hysteresis,
        on_min_scale="stop",
        allow_fp16_gradients=True,
        guard_parameters=dtype is not torch.float16,  # float16 parameters are guarded anyway
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The step of .* was undone", category=RuntimeWarning)
        run(scaler, kind([parameter], lr=lr, **options), parameter, steps, clip=clip)


@settings(max_examples=250)
@given(
    steps=GRADIENTS,
    optimizer=st.sampled_from(["sgd", "fused sgd", "momentum", "adam", "adamw", "fused adam", "rprop", "adagrad"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([2.0**-14, 2.0**-3, 1.0, 2.0**16, 2.0**100]),
    clip=st.booleans(),
)
def test_unguarded_the_gradients_alone_do_not_either(
    steps: list[list[float]], optimizer: str, dtype: torch.dtype, scale: float, clip: bool
) -> None:
    # With a learning rate at which a sum of finite gradients is finite: beyond that, `guard_parameters` is there.
    kind, options = OPTIMIZERS[optimizer]
    parameter = nn.Parameter(torch.tensor([0.0, 1.0, -1e-7]).to(dtype))
    scaler = GradScaler("cpu", scale, growth_interval=2, on_min_scale="stop")
    run(scaler, kind([parameter], lr=1e-8, **options), parameter, steps, clip=clip)
