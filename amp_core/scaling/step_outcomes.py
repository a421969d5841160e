"""What became of each optimizer's step in an iteration: was it skipped, and because of which parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_core.scaling.optimizer_state import FOUND
from amp_core.scaling.parameter_names import names_of, with_non_finite_gradients

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Outcome:
    """The outcome of one optimizer's step.

    Args:
        optimizer: Whose gradients were checked.
        state: Its state in the scaler, which holds by device a scalar that is not 0 where a gradient is not finite.

    Attributes:
        culprits: The parameters to blame if the step was skipped; None until looked for.
        state: See above.
        undone: Whether the gradients were finite, but the step was not.
    """

    def __init__(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self.culprits: list[Tensor] | None = None
        self.undone = False
        self.state = state
        self._known = False
        self._read: list[tuple[Tensor, int]] | None = None

    def overflowed(self) -> bool:
        """Whether a gradient is not finite. Waits for the device once, and again if what was found has been reduced since."""
        flags = [(flag, flag._version) for flag in self.state[FOUND].values()]  # noqa: SLF001  (the only mark of a write)
        if self._read is None or not _same(flags, self._read):
            self._known, self._read = any(bool(flag.item()) for flag, _ in flags), flags
        return self._known

    def known(self) -> bool | None:
        """The same if that needs no waiting; else None."""
        if self._read is None and any(flag.device.type != "cpu" for flag in self.state[FOUND].values()):
            return None
        return self.overflowed()

    def flag_overflow(self) -> None:
        """Take the step for overflowed though its gradients are finite."""
        for flag in self.state[FOUND].values():
            flag.fill_(1.0)

    def skipped(self) -> bool:
        """Whether the step was skipped, or undone."""
        return self.undone or self.overflowed()

    def names(self, model: nn.Module | None = None) -> list[str]:
        """The names of the parameters to blame."""
        if not self.skipped():
            return []
        if self.culprits is None:
            self.culprits = with_non_finite_gradients(self.optimizer)
        return names_of(self.culprits, self.optimizer, model)


class StepOutcomes:
    """The outcomes of one iteration, kept until the next one's first check."""

    def __init__(self) -> None:
        self._by_optimizer: dict[int, Outcome] = {}
        self._is_over = False

    def note(self, optimizer: Optimizer, state: dict[str, Any], *, look_now: bool) -> Outcome:
        """Remember a check.

        Args:
            optimizer: See `Outcome`.
            state: See `Outcome`.
            look_now: Find out which gradients are not finite before anything else touches them: clipping by a norm that is NaN
                makes all of them NaN. Waits for the device.
        """
        if self._is_over:
            self._by_optimizer, self._is_over = {}, False
        outcome = self._by_optimizer[id(optimizer)] = Outcome(optimizer, state)
        if look_now and outcome.overflowed():
            outcome.culprits = with_non_finite_gradients(optimizer)
        return outcome

    def of(self, optimizer: Optimizer) -> Outcome | None:
        """The outcome of an optimizer, if its gradients were checked."""
        return self._by_optimizer.get(id(optimizer))

    def of_check(self, optimizer: Optimizer, state: dict[str, Any]) -> Outcome:
        """The outcome of a check in this iteration, which a framework may have made without noting it."""
        outcome = self._by_optimizer.get(id(optimizer))
        return (
            outcome if outcome and outcome.state is state and not self._is_over else self.note(optimizer, state, look_now=True)
        )

    def end_iteration(self) -> None:
        """Keep what is known until the next check."""
        self._is_over = True

    def of_this_iteration(self) -> list[Outcome]:
        """The outcomes since the last iteration ended."""
        return [] if self._is_over else list(self._by_optimizer.values())

    def overflow_is_known(self) -> bool | None:
        """Whether any gradient overflowed in this iteration if that needs no waiting; else None."""
        known = [outcome.known() for outcome in self.of_this_iteration()]
        return True if True in known else None if None in known else False

    def skipped(self) -> bool:
        """Whether any optimizer's step was skipped."""
        return any(outcome.skipped() for outcome in self._by_optimizer.values())

    def names(self, model: nn.Module | None = None) -> list[str]:
        """The names of the parameters to blame, over all optimizers."""
        return [name for outcome in self._by_optimizer.values() for name in outcome.names(model)]

    def __getstate__(self) -> dict[str, Any]:
        return {"_by_optimizer": {}, "_is_over": False}


def _same(flags: list[tuple[Tensor, int]], others: list[tuple[Tensor, int]]) -> bool:
    pairs = zip(flags, others, strict=True)
    return len(flags) == len(others) and all(new is old and version == before for (new, version), (old, before) in pairs)
