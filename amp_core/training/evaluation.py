"""How good a model is on data that it was not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn


def evaluate(
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    region: AbstractContextManager[Any],
) -> dict[str, float]:
    """Run a model over held-out data, without gradients, and leave it in the mode it was in.

    Args:
        model: In whatever mode.
        loss_function: (output, target) -> mean loss of the batch.
        batches: Pairs (inputs, targets) on the model's device; the first dimension of both is the batch.
        region: What forward and loss run in, such as an `autocast`; entered once per batch.

    Returns:
        `loss`, the mean over all items; and for a classifier (outputs of shape (n, classes), integer targets of shape (n,))
        `accuracy`, the share of items whose largest output is the target's.
    """
    was_training = model.training
    model.eval()
    items, correct, loss_sum, is_classifier = 0, 0, 0.0, True
    with torch.no_grad():
        for inputs, targets in batches:
            with region:
                outputs = model(inputs)
                loss = loss_function(outputs, targets)
            items += len(targets)
            loss_sum += loss.item() * len(targets)
            is_classifier = is_classifier and _is_classification(outputs, targets)
            correct += int((outputs.argmax(1) == targets).sum()) if is_classifier else 0
    model.train(was_training)
    metrics = {"loss": loss_sum / items}
    return metrics | {"accuracy": correct / items} if is_classifier else metrics


def _is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
