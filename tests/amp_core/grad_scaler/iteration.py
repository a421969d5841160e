"""Pieces of a training iteration that the tests of this folder share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from halfserve import GradScaler


def model_and_optimizer(*, fused: bool = False, named: bool = False) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    parameters: Any = model.named_parameters() if named else model.parameters()
    return model, torch.optim.SGD(parameters, lr=0.1, fused=fused)


def backward(scaler: GradScaler, model: nn.Sequential, *, overflow_in: str | None = None, by: float = math.inf) -> None:
    model.zero_grad()
    torch.autograd.backward(scaler.scale(model(torch.ones(1, 2)).sum()))
    if overflow_in is not None:
        gradient = model.get_parameter(overflow_in).grad
        assert gradient is not None
        gradient.view(-1)[0] = by


def train_step(scaler: GradScaler, model: nn.Sequential, optimizer: torch.optim.Optimizer, overflow_in: str | None) -> None:
    backward(scaler, model, overflow_in=overflow_in)
    scaler.step(optimizer)
    scaler.update()


def parameter_with(gradient: list[float], *, fused: bool = False) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter, torch.optim.SGD([parameter], lr=1e-3, fused=fused)


def ready(**settings: Any) -> GradScaler:
    scaler = GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))
    return scaler


def iterate(scaler: Any, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: float) -> None:
    """One iteration in which every element of the scaled gradient is `gradient`."""
    parameter.grad = torch.full_like(parameter, gradient)
    scaler.step(optimizer)
    scaler.update()
