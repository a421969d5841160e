"""How good a model is on data that it was not trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amp_core.calling import call, without_fast_path
from amp_core.training.distributed import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

ALONE = World()


def evaluate(
    model: nn.Module,
    loss_function: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    region: AbstractContextManager[Any],
    *,
    world: World = ALONE,
) -> dict[str, float]:
    """Run a model over held-out data, without gradients, and leave it in the mode it was in.

    Attention layers compute what they compute in training (see `without_fast_path`).

    Args:
        model: In whatever mode.
        loss_function: (output, target) -> mean loss of the batch.
        batches: Pairs (inputs, targets) on the model's device; the first dimension of all tensors is the batch.
        region: What forward and loss run in, such as an `autocast`; entered once per batch.
        world: Processes that have a share of the data each.

    Returns:
        `loss`, the mean over all processes' items; and for a classifier (outputs of shape (n, classes), integer targets of
        shape (n,)) `accuracy`, the share of items whose largest output is the target's. Nothing if there are no items.
    """
    was_training = model.training
    model.eval()
    items, correct, others, loss_sum = 0, 0, 0, 0.0
    with torch.no_grad(), without_fast_path():
        for inputs, targets in batches:
            with region:
                outputs = call(model, inputs)
                loss = loss_function(outputs, targets)
            count = _count((targets, inputs))
            if count is None:
                raise ValueError("no tensor among targets and inputs has a dimension, to count the items by")
            items += count
            loss_sum += loss.item() * count
            if _is_classification(outputs, targets):
                correct += int((outputs.argmax(1) == targets).sum())
            else:
                others += 1
    model.train(was_training)
    return _metrics(world.sum(torch.tensor([items, correct, others, loss_sum], dtype=torch.float64)).tolist())


def _metrics(sums: list[float]) -> dict[str, float]:
    items, correct, others, loss = sums
    if items == 0:
        return {}
    metrics = {"loss": loss / items}
    return metrics if others else metrics | {"accuracy": correct / items}


def _count(value: Any) -> int | None:
    """How many items a batch has, by the first of its tensors that has a dimension; None if none has."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.ndim else None
    parts = value.values() if isinstance(value, dict) else value
    return next((count for part in parts if (count := _count(part)) is not None), None)


def _is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )
