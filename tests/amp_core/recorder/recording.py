"""One recorded step, and what was seen in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfserve.amp_core.recorder import Magnitudes, Record, RecordEntry, Recorder


def recorded(body: Callable[[], object], model: nn.Module | None = None, *, scale: float = 1.0) -> Record:
    """The record of one step."""
    recorder = Recorder(model or nn.Identity())
    with recorder.step(1, scale=scale):
        body()
    return recorder.record()


def ops(record: Record, module: str | None = None, direction: str | None = None) -> list[str]:
    """The operations seen, in one place or all."""
    return [
        entry.op.split(".")[1]
        for entry in record.entries
        if module in {None, entry.module} and direction in {None, entry.direction}
    ]


def the(record: Record, op: str, **attributes: Any) -> RecordEntry:
    """The only entry of an operation."""
    (entry,) = (
        entry
        for entry in record.entries
        if entry.op.split(".")[1] == op and all(getattr(entry, name) == value for name, value in attributes.items())
    )
    return entry


def entry(module: str = "layer", op: str = "aten.mm.default", **values: Any) -> RecordEntry:
    """An entry; `values` may be attributes of the entry or of its magnitudes."""
    magnitudes = {name: values.pop(name) for name in tuple(values) if name in Magnitudes.__dataclass_fields__}
    defaults: dict[str, Any] = {
        "direction": "forward",
        "output": 0,
        "inputs": ("float16", "float16"),
        "dtype": "float16",
        "calls": 1,
        "unscaled_largest": None,
        "unscaled_smallest": None,
    }
    return RecordEntry(module=module, op=op, magnitudes=Magnitudes(**magnitudes), **defaults | values)


class Block(nn.Module):
    """A linear layer and a function, around a shortcut."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, width) in and out."""
        return x + torch.tanh(self.linear(x))
