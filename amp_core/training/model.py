"""What is trained, with what: built from factories, and checked."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_core.factory import call_factory, load_factory
from amp_core.training.errors import TrainingError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable


def build_model(spec: str) -> nn.Module:
    """Call a model factory and check that what it returns can be trained.

    Raises:
        FactoryError: If the factory cannot be imported or called.
        TrainingError: If it returns no module, or one without parameters, or with parameters without values or in half
            precision.
    """
    model = call_factory(spec)
    if not isinstance(model, nn.Module):
        raise TrainingError(f"{spec!r} returned a {type(model).__name__}; expected a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"the model that {spec!r} builds has no parameter to train")
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise TrainingError(f"the parameter {empty[0]!r} of {spec!r} is on the device 'meta', where there are no values")
    halves = [name for name, parameter in model.named_parameters() if parameter.dtype in {torch.float16, torch.bfloat16}]
    if halves:
        raise TrainingError(
            f"the parameter {halves[0]!r} of {spec!r} is in half precision; build it in float32, autocast casts it"
        )
    return model


def load_loss(spec: str) -> Callable[[Any, Any], Tensor]:
    """Load a function (output, target) -> scalar, or make an object of a class whose objects are one."""
    loss = load_factory(spec)
    return cast("Callable[[Any, Any], Tensor]", call_factory(spec) if inspect.isclass(loss) else loss)


def build_optimizer(spec: str, model: nn.Module, learning_rate: float) -> Optimizer:
    """Call an optimizer factory with the parameters to train and `lr`.

    Raises:
        FactoryError: If the factory cannot be imported.
        TrainingError: If it cannot be called so, or returns no optimizer.
    """
    factory = load_factory(spec)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = factory(parameters, lr=learning_rate)
    except Exception as error:
        raise TrainingError(
            f"{spec!r} raised {one_line(error)} when called with the parameters and lr={learning_rate:g}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise TrainingError(f"{spec!r} returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    return optimizer
