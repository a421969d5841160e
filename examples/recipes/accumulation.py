"""Gradient accumulation: one step for the gradients of many small batches, as if they had been one large batch.

    python -m halfserve.examples.recipes.accumulation

Every small batch's loss is scaled and run backward, and the gradients add up; unscaling, clipping, step and update come once,
after the last one. The scale must stay the same in between, or gradients of different scales would add up. If one of the small
batches overflows, so does the sum, and the whole step is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from halfserve.examples.recipes.precision import DTYPES, Figures, Precision, network, regression, report

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def accumulated_step(
    precision: Precision,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    clip: float = math.inf,
) -> float:
    """Return one optimizer step for several batches, pairs (inputs, targets) that may differ in size.

    Returns the mean squared error over all samples, before the step. `clip` bounds the norm of all batches' gradients together.
    """
    samples = sum(len(inputs) for inputs, _ in batches)
    optimizer.zero_grad()
    mean = 0.0
    for inputs, targets in batches:
        with precision.region:
            # Weighed by its share of the samples, so that the sum is the mean over all of them.
            loss = nn.functional.mse_loss(model(inputs), targets) * (len(inputs) / samples)
        precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        mean += loss.item()
    precision.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    precision.scaler.step(optimizer)
    precision.scaler.update()
    return mean


def train(dtype: torch.dtype, steps: int, batches: int) -> Figures:
    """Fit the regression on all samples, cut into batches."""
    inputs, targets = regression()
    pairs = list(zip(inputs.tensor_split(batches), targets.tensor_split(batches), strict=True))
    model, precision = network(), Precision.of(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss, skipped = math.nan, 0
    for _ in range(steps):
        loss = accumulated_step(precision, model, optimizer, pairs, clip=1.0)
        skipped += precision.scaler.step_was_skipped
    return {"loss": loss, "skipped steps": skipped}


@app.command()
def run(
    steps: Annotated[int, typer.Option(min=1)] = 100,
    batches: Annotated[int, typer.Option(min=1, max=256, help="That the 256 samples of a step are cut into.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train with accumulated gradients in float32 and in float16, beside float32 with the whole batch at once."""
    figures = {"float32 at once": train(torch.float32, steps, 1)}
    report(figures | {name: train(dtype, steps, batches) for name, dtype in DTYPES.items()}, as_json=as_json)


if __name__ == "__main__":
    app(prog_name="python -m halfserve.examples.recipes.accumulation")
