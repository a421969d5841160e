"""Which parameters are concerned, and what to call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amp_core.scaling.gradients import is_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every parameter of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def with_non_finite_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The parameters whose gradients hold an infinity or a NaN. Waits for the device."""
    return [p for p in parameters_of(optimizer) if p.grad is not None and not is_finite(p.grad)]


def names_of(parameters: Iterable[Tensor], optimizer: Optimizer, model: nn.Module | None = None) -> list[str]:
    """Names for parameters: the model's if given, else the optimizer's own, else their places in the parameter groups."""
    names = {id(parameter): name for parameter, name in _names_in(optimizer)}
    if model is not None:
        names |= {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "a parameter that the optimizer no longer has") for parameter in parameters]


def listed(names: list[str], most: int = 3) -> str:
    """The first few names for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _names_in(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    for index, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        # An optimizer that was given named_parameters() keeps the names beside the parameters. Whoever takes parameters out, as
        # to freeze them, may leave the names: then nobody knows whose they are.
        names = group.get("param_names") or []
        if len(names) != len(parameters):
            names = [f"group {index}, parameter {place}" for place in range(len(parameters))]
        yield from zip(parameters, names, strict=True)
