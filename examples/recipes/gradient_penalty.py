"""A gradient penalty in mixed precision: the loss has the size of its own gradient in it, so backward runs twice.

    python -m halfserve.examples.recipes.gradient_penalty

The inner gradient has to be scaled too, or it vanishes in float16 like any other; but the penalty is about the true gradient.
So: scale the loss, take its gradient with `create_graph=True`, divide by the scale in float32, and compute the penalty in
autocast. If the scaled gradient overflows, the penalty is not finite, nor is the gradient of the whole: the step is skipped.

Source of the penalty: Drucker and LeCun, "Improving generalization performance using double backpropagation", 1992.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from halfserve.examples.recipes.precision import DTYPES, Figures, Precision, network, regression, report

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def backward_with_penalty(
    precision: Precision, loss_of: Callable[[], Tensor], sources: Sequence[Tensor], weight: float
) -> tuple[Tensor, Tensor]:
    """Run backward for loss + weight * |gradient of the loss|^2, leaving scaled gradients for the scaler to step with.

    The gradient is by the float32 `sources`: the inputs here; the parameters work as well. `loss_of` is called inside the
    region. Returns the loss and the penalty (without its weight), float32 scalars.
    """
    scaler = precision.scaler
    with precision.region:
        loss = loss_of()
    scaled_gradients = torch.autograd.grad(scaler.scale(loss), sources, create_graph=True)
    gradients = [gradient / scaler.get_scale() for gradient in scaled_gradients]
    with precision.region:
        penalty = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        total = loss + weight * penalty
    scaler.scale(total).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), penalty.detach()


def train(dtype: torch.dtype, steps: int, weight: float) -> Figures:
    """Fit the regression; the penalty is the mean squared gradient of each sample's error by its input."""
    inputs, targets = regression()
    inputs.requires_grad_()
    model, precision = network(), Precision.of(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    skipped, loss, penalty = 0, torch.tensor(torch.nan), torch.tensor(torch.nan)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, penalty = backward_with_penalty(
            precision, lambda: nn.functional.mse_loss(model(inputs), targets), [inputs], weight * len(inputs)
        )
        precision.scaler.step(optimizer)
        skipped += precision.scaler.step_was_skipped
        precision.scaler.update()
    return {"loss": loss.item(), "penalty": len(inputs) * penalty.item(), "skipped steps": skipped}


@app.command()
def run(
    steps: Annotated[int, typer.Option(min=1)] = 200,
    weight: Annotated[float, typer.Option(min=0.0, help="Of the penalty.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train with a gradient penalty in float32 and in float16."""
    report({name: train(dtype, steps, weight) for name, dtype in DTYPES.items()}, as_json=as_json)


if __name__ == "__main__":
    app(prog_name="python -m halfserve.examples.recipes.gradient_penalty")
