"""The two precisions that the recipes compare: what they take from amp_core, and how they print what came out."""

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

from amp_core import GradScaler, autocast
from examples.recipes.task import device_in_use

Figures = Mapping[str, float]


@dataclass(frozen=True)
class Precision:
    """An autocast region for forward and loss, and a scaler for what comes after; both do nothing in float32."""

    region: autocast
    scaler: GradScaler

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """The pair for float32, float16 (scaled) or bfloat16 (not scaled: its range is that of float32)."""
        device, low = device_in_use().type, dtype is not torch.float32
        region = autocast(device, dtype if low else None, enabled=low)
        return cls(region, GradScaler(device, enabled=dtype is torch.float16))


def report(figures: Mapping[str, Figures], *, as_json: bool) -> None:
    """Print figures by precision and name, as a table or as one JSON object, where what is not finite is null."""
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
