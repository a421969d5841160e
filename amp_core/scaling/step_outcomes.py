"""What became of each optimizer's step in an iteration: was it skipped, and because of which parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_core.scaling.gradients import non_finite_parameters, parameter_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer


@dataclass
class _Outcome:
    optimizer: Optimizer
    found_inf: list[Tensor]
    overflowed: list[Tensor] | None = None

    def is_overflow(self) -> bool:
        return any(bool(found.item()) for found in self.found_inf)


class StepOutcomes:
    """The outcomes of one iteration, kept until the next one's first check."""

    def __init__(self) -> None:
        self._by_optimizer: dict[int, _Outcome] = {}
        self._is_over = False

    def note(self, optimizer: Optimizer, found_inf: Iterable[Tensor], *, look_now: bool) -> None:
        """Remember a check.

        Args:
            optimizer: Whose gradients were checked.
            found_inf: Scalars, not 0 where a gradient is not finite.
            look_now: Find out which gradients are not finite before anything else touches them: clipping by a norm that is NaN
                makes all of them NaN. Waits for the device.
        """
        if self._is_over:
            self._by_optimizer, self._is_over = {}, False
        outcome = self._by_optimizer[id(optimizer)] = _Outcome(optimizer, list(found_inf))
        if look_now and outcome.is_overflow():
            outcome.overflowed = non_finite_parameters(optimizer)

    def end_iteration(self) -> None:
        """Keep what is known until the next check."""
        self._is_over = True

    def skipped(self, optimizer: Optimizer | None = None) -> bool:
        """Whether an optimizer's gradients overflowed; without one, whether any's did."""
        outcomes = self._by_optimizer
        chosen = outcomes.values() if optimizer is None else [outcomes[key] for key in (id(optimizer),) if key in outcomes]
        return any(outcome.is_overflow() for outcome in chosen)

    def overflowed_parameters(self, model: nn.Module | None) -> list[str]:
        """The names of the parameters whose gradients were not finite."""
        names = []
        for outcome in self._by_optimizer.values():
            if outcome.is_overflow():
                overflowed = non_finite_parameters(outcome.optimizer) if outcome.overflowed is None else outcome.overflowed
                names += parameter_names(overflowed, outcome.optimizer, model)
        return names
