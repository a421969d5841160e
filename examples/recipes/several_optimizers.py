"""Two losses and two optimizers with one GradScaler: where one overflows, the other still steps.

    python -m halfserve.examples.recipes.several_optimizers

A network learns to predict; a probe learns to read the input back out of the network's hidden features, which tells how much
of it is left there. The probe's loss is a sum and large: in float16 its first gradients overflow. One scaler scales both
losses, steps both optimizers, and is updated once at the end of the iteration. For each optimizer it answers whether its step
was skipped, so that only the schedule of the one that stepped moves on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from halfserve.examples.recipes.precision import DTYPES, INPUTS, Figures, Precision, device_in_use, network, regression, report

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
HIDDEN = 64


@dataclass
class Learner:
    """A module with an optimizer and a schedule of its own."""

    module: nn.Module  # its parameters are in float32
    learning_rate: float  # at first
    losses: list[float] = field(default_factory=list)  # of each step, unscaled
    skipped_steps: int = 0  # how often its own gradients overflowed

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=self.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.99)


def train_step(precision: Precision, predictor: Learner, probe: Learner, inputs: Tensor, targets: Tensor) -> None:
    """Run one iteration: two backwards, two steps of which each may be skipped on its own, one update of the scale.

    The predictor is a `nn.Sequential` whose last layer reads the features, of shape (n, 64), from which the probe tells inputs.
    """
    body, head = predictor.module[:-1], predictor.module[-1]  # type: ignore[index]
    with precision.region:
        features = body(inputs)
        error = nn.functional.mse_loss(head(features), targets)
        # Detached: the probe looks at the features and does not shape them.
        unread = nn.functional.mse_loss(probe.module(features.detach()), inputs, reduction="sum")
    both = ((predictor, error), (probe, unread))
    for learner, loss in both:
        learner.optimizer.zero_grad()
        precision.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        learner.losses.append(loss.item())
    for learner, _ in both:
        precision.scaler.step(learner.optimizer)
        if precision.scaler.skipped(learner.optimizer):
            learner.skipped_steps += 1
        else:
            learner.scheduler.step()
    precision.scaler.update()


def train(dtype: torch.dtype, steps: int) -> Figures:
    """Train both for a number of steps; losses per sample."""
    inputs, targets = regression()
    predictor = Learner(network(), learning_rate=1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        probe = Learner(nn.Linear(HIDDEN, INPUTS).to(device_in_use()), learning_rate=1e-2)
    precision = Precision.of(dtype)
    for _ in range(steps):
        train_step(precision, predictor, probe, inputs, targets)
    return {
        "predictor's loss": predictor.losses[-1],
        "skipped": predictor.skipped_steps,
        "probe's loss": probe.losses[-1] / inputs.numel(),
        "skipped by the probe": probe.skipped_steps,
        "scale": precision.scaler.get_scale(),
    }


@app.command()
def run(
    steps: Annotated[int, typer.Option(min=1)] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train two modules with one scaler in float32 and in float16."""
    report({name: train(dtype, steps) for name, dtype in DTYPES.items()}, as_json=as_json)


if __name__ == "__main__":
    app(prog_name="python -m halfserve.examples.recipes.several_optimizers")
