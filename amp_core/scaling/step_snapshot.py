"""A step that happens as a whole or not at all."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch

from amp_core.scaling.parameter_names import listed, names_of, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


class StepSnapshot:
    """An optimizer's parameters, state and settings, copied before a step, so that the step can be undone.

    The copy takes the memory of the parameters and of the optimizer's state once more.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters_of(optimizer)]
        self._state: list[tuple[Any, Any]] = list(
            zip(optimizer.state, copy.deepcopy(list(optimizer.state.values())), strict=True)
        )
        self._groups = [_settings(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Undo what has been done to the optimizer since."""
        with torch.no_grad():
            for parameter, before in self._parameters:
                parameter.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)

    def became_non_finite(self) -> list[Tensor]:
        """The parameters that hold infinities or NaNs now, and held none before. Waits for the device."""
        broken = [(parameter, before) for parameter, before in self._parameters if not _is_finite(parameter)]
        return [parameter for parameter, before in broken if _is_finite(before)]


def step_or_undo(
    optimizer: Optimizer, step: Callable[[], Any], agree: Callable[[bool], bool]
) -> tuple[float | None, bool, list[Tensor]]:
    """Step, but undo it if it made a parameter non-finite, or failed.

    Args:
        optimizer: The one that is stepped.
        step: Steps it.
        agree: Told whether it made a parameter of this process non-finite; whether it did in any.

    Returns:
        What `step` returns, False and nothing; or None, True, and the parameters of this process that had become non-finite.
    """
    before = StepSnapshot(optimizer)
    try:
        result = step()
    except BaseException:
        before.restore()
        raise
    broken = before.became_non_finite()
    if not agree(bool(broken)):
        return cast("float | None", result), False, []
    before.restore()
    return None, True, broken


def warn_of_undone_step(optimizer: Optimizer, broken: list[Tensor]) -> None:
    """Say that a step was undone, and what may help."""
    names = listed(names_of(broken, optimizer)) or "parameters of another process"
    warnings.warn(
        f"The step of {type(optimizer).__name__} made {names} non-finite out of finite gradients, "
        "so it was undone. Lower the learning rate or clip the gradients; with float16 parameters, raise the optimizer's eps "
        "(below 6e-8 it is 0 in float16) or keep the parameters in float32",
        RuntimeWarning,
        stacklevel=5,
    )


def _is_finite(tensor: Tensor) -> bool:
    finite = torch.isfinite(tensor).all()
    # Of a parameter in shards (torch's fully_shard) that is what this process's shard says.
    whole = getattr(finite, "full_tensor", None)
    return bool(finite if whole is None else whole())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({key: value for key, value in group.items() if key not in {"params", "param_names"}})
