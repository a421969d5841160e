"""Factories for the command line."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.export.dtype_check.pairs.factories import Factory, FactoryMended


def leaking() -> nn.Module:
    torch.manual_seed(0)
    return Factory()


def mended() -> nn.Module:
    torch.manual_seed(0)
    return FactoryMended()


def not_a_module() -> Any:
    return math.pi


def failing() -> nn.Module:
    raise KeyError("weights")
