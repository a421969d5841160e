"""The outcomes beside each other: a table for people, an object for programs, and what to make of the times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.table import Table

from examples.checkerboard.settings import Settings
from examples.checkerboard.training import Outcome


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row for each precision, compared with the first, which is float32."""
    first = outcomes[0]
    with_memory = first.peak_bytes is not None
    headings = ["dtype", "final loss", "seconds", "ms a step", "speed", "skipped steps"]
    result = Table(*headings, *(["peak memory"] if with_memory else []), box=None, pad_edge=False)
    for column in result.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        speed = first.milliseconds_per_step / outcome.milliseconds_per_step
        cells = [outcome.dtype, f"{outcome.loss:.5f}", f"{outcome.seconds:.2f}", f"{outcome.milliseconds_per_step:.2f}"]
        cells += [f"{speed:.2f}x", str(outcome.skipped_steps)]
        result.add_row(*cells, *([f"{(outcome.peak_bytes or 0) / 2**20:.0f} MiB"] if with_memory else []))
    return result


def remarks(outcomes: Sequence[Outcome], device: torch.device) -> list[str]:
    """A sentence for each precision that took longer than float32, and why that is so."""
    first = outcomes[0]
    ratios = {o.dtype: o.milliseconds_per_step / first.milliseconds_per_step for o in outcomes[1:]}
    reason = (
        "a CPU without instructions for it has to convert all the time; compare the losses, not the times"
        if device.type == "cpu"
        else "the image is too small to fill the device; try a larger --size"
    )
    return [f"{dtype} took {ratio:.1f} times as long as float32: {reason}" for dtype, ratio in ratios.items() if ratio > 1.05]


def summary(settings: Settings, outcomes: Sequence[Outcome], picture: str) -> dict[str, object]:
    """The same for `--json`; a loss that is not finite is null."""
    return {
        "device": str(settings.device),
        "steps": settings.steps,
        "size": settings.size,
        "policy": settings.policy,
        "picture": picture,
        "outcomes": [
            {
                "dtype": outcome.dtype,
                "loss": outcome.loss if math.isfinite(outcome.loss) else None,
                "seconds": round(outcome.seconds, 4),
                "milliseconds_per_step": round(outcome.milliseconds_per_step, 4),
                "skipped_steps": outcome.skipped_steps,
                "scale": outcome.scale,
                "peak_bytes": outcome.peak_bytes,
            }
            for outcome in outcomes
        ],
    }
