"""What the recipes share: a regression task, the precisions that they compare, and the report.

    python -m halfserve.examples.recipes.accumulation         one step for the gradients of many small batches
    python -m halfserve.examples.recipes.gradient_penalty     a loss that contains its own gradient: backward twice
    python -m halfserve.examples.recipes.several_optimizers   two losses, two optimizers, one GradScaler

Each recipe is one file to copy from. It trains a small network in float32 and in float16, on the accelerator if there is one,
and prints how the two compare.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from halfserve import GradScaler, autocast

INPUTS = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16}  # that are compared


def device_in_use() -> torch.device:
    """Return the accelerator if there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def regression(count: int = 256) -> tuple[Tensor, Tensor]:
    """Return inputs of shape (count, 8) and targets of shape (count, 1), float32, always the same."""
    inputs = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(0))
    targets = torch.sin(inputs[:, :4].sum(1)) + inputs[:, 4] * inputs[:, 5]
    return inputs.to(device_in_use()), targets[:, None].to(device_in_use())


def network(outputs: int = 1, width: int = 64) -> nn.Sequential:
    """8 -> width -> width -> outputs, with equal weights each time; smooth, so that its gradient is differentiable."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(INPUTS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
    return nn.Sequential(*layers).to(device_in_use())


Figures = Mapping[str, float]


@dataclass(frozen=True)
class Precision:
    """An autocast region for forward and loss, and a scaler for backward and step; both do nothing in float32."""

    region: autocast
    scaler: GradScaler

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """Return the pair for float32, float16 (scaled) or bfloat16 (not scaled: its range is that of float32)."""
        device, low = device_in_use().type, dtype is not torch.float32
        region = autocast(device, dtype if low else None, enabled=low)
        return cls(region, GradScaler(device, enabled=dtype is torch.float16))


def report(figures: Mapping[str, Figures], *, as_json: bool) -> None:
    """Print figures by precision and name, as a table or as one JSON object with null for non-finite figures."""
    if as_json:
        typer.echo(json.dumps({p: {n: v if math.isfinite(v) else None for n, v in row.items()} for p, row in figures.items()}))
        return
    names = next(iter(figures.values()))
    table = Table("dtype", *names, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for precision, row in figures.items():
        table.add_row(precision, *(f"{row[name]:.6g}" for name in names))
    Console(highlight=False, soft_wrap=True).print(table)
