"""The outcome of each step: whether it was skipped, because of which parameters, and at which scale."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfserve.amp_core.grad_scaler.loss_scale import LossScale, OnMinScale
from halfserve.amp_core.grad_scaler.optimizers import FOUND, listed, names_of, with_non_finite_gradients


class StepOutcome:
    """The outcome of one optimizer's step.

    Attributes:
        culprits: The parameters that caused a skipped step; None until they are looked for.
        undone: Whether the gradients were finite, but the step made a parameter non-finite.
    """

    def __init__(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self.culprits: list[Tensor] | None = None
        self.undone = False
        self.state = state
        self._known = False
        self._read: list[tuple[Tensor, int]] | None = None

    def overflowed(self) -> bool:
        """Return whether a gradient is not finite. Waits for the device once, and again if the flags were reduced since."""
        flags = [(flag, flag._version) for flag in self.state[FOUND].values()]  # noqa: SLF001  (the only mark of a write)
        if self._read is None or not _same(flags, self._read):
            self._known, self._read = any(bool(flag.item()) for flag, _ in flags), flags
        return self._known

    def known(self) -> bool | None:
        """Return whether a gradient is not finite; None if the answer would wait for the device."""
        if self._read is None and any(flag.device.type != "cpu" for flag in self.state[FOUND].values()):
            return None
        return self.overflowed()

    def flag_overflow(self) -> None:
        """Count the step as overflowed although its gradients are finite."""
        for flag in self.state[FOUND].values():
            flag.fill_(1.0)

    def skipped(self) -> bool:
        return self.undone or self.overflowed()

    def names(self, model: nn.Module | None = None) -> list[str]:
        """Return the names of the parameters that caused a skipped step."""
        if not self.skipped():
            return []
        if self.culprits is None:
            self.culprits = with_non_finite_gradients(self.optimizer)
        return names_of(self.culprits, self.optimizer, model)


class StepOutcomes:
    """The outcomes of one iteration, kept until the first check of the next."""

    def __init__(self) -> None:
        self._by_optimizer: dict[int, StepOutcome] = {}
        self._is_over = False

    def note(self, optimizer: Optimizer, state: dict[str, Any], *, look_now: bool) -> StepOutcome:
        """Remember a check; `state` holds its flags.

        With `look_now`, find the non-finite gradients before clipping changes them: a norm that is NaN makes all gradients NaN.
        Waits for the device.
        """
        if self._is_over:
            self._by_optimizer, self._is_over = {}, False
        outcome = self._by_optimizer[id(optimizer)] = StepOutcome(optimizer, state)
        if look_now and outcome.overflowed():
            outcome.culprits = with_non_finite_gradients(optimizer)
        return outcome

    def of(self, optimizer: Optimizer) -> StepOutcome | None:
        return self._by_optimizer.get(id(optimizer))

    def of_check(self, optimizer: Optimizer, state: dict[str, Any]) -> StepOutcome:
        """Return the outcome of a check in this iteration, also of one that a framework made without noting it."""
        outcome = self._by_optimizer.get(id(optimizer))
        return (
            outcome if outcome and outcome.state is state and not self._is_over else self.note(optimizer, state, look_now=True)
        )

    def end_iteration(self) -> None:
        """Keep the outcomes until the next check."""
        self._is_over = True

    def of_this_iteration(self) -> list[StepOutcome]:
        return [] if self._is_over else list(self._by_optimizer.values())

    def overflow_is_known(self) -> bool | None:
        """Return whether any gradient overflowed in this iteration; None if the answer would wait for the device."""
        known = [outcome.known() for outcome in self.of_this_iteration()]
        return True if True in known else None if None in known else False

    def skipped(self) -> bool:
        return any(outcome.skipped() for outcome in self._by_optimizer.values())

    def names(self, model: nn.Module | None = None) -> list[str]:
        return [name for outcome in self._by_optimizer.values() for name in outcome.names(model)]

    def __getstate__(self) -> dict[str, Any]:
        return {"_by_optimizer": {}, "_is_over": False}


def _same(flags: list[tuple[Tensor, int]], others: list[tuple[Tensor, int]]) -> bool:
    pairs = zip(flags, others, strict=True)
    return len(flags) == len(others) and all(new is old and version == before for (new, version), (old, before) in pairs)


@dataclass(frozen=True, kw_only=True)
class ScaleRecord:
    """One iteration, as `GradScaler.update` ended it.

    Attributes:
        step: The number of the iteration, counted from 1 since the scaler was made.
        scale: The factor of its losses.
        skipped: Whether a step was skipped.
        overflowed: The names of the parameters that caused it, as far as the optimizer knows them; empty if no step was
            skipped, and where a fused optimizer on an accelerator skipped in its kernel.
    """

    step: int
    scale: float
    skipped: bool
    overflowed: tuple[str, ...] = ()


@dataclass
class _Note:
    step: int
    scale: float | Tensor
    skipped: bool | Tensor
    overflowed: tuple[str, ...]
    record: ScaleRecord | None = field(default=None)

    def read(self) -> ScaleRecord:
        if self.record is None:
            scale, skipped = float(self.scale), bool(self.skipped)
            self.record = ScaleRecord(step=self.step, scale=scale, skipped=skipped, overflowed=self.overflowed)
            self.scale, self.skipped = scale, skipped  # lets go of the tensors
        return self.record


class ScaleHistory:
    """The last iterations, noted without waiting for the device; reading them waits."""

    def __init__(self, size: int) -> None:
        self._notes: deque[_Note] = deque(maxlen=size)
        self._steps = 0

    def add(self, scale: float | Tensor, outcomes: list[StepOutcome], found_inf: Tensor | None) -> None:
        """Note an iteration; `scale` is not written to later, and `found_inf` (not 0 after an overflow) answers for unknown
        outcomes.
        """
        self._steps += 1
        known = [outcome.undone or outcome.known() for outcome in outcomes]
        skipped: bool | Tensor = True in known
        if not skipped and None in known and found_inf is not None:
            skipped = found_inf
        names = tuple([name for outcome in outcomes for name in outcome.names()]) if skipped is True else ()
        self._notes.append(_Note(self._steps, scale, skipped, names))

    def records(self) -> list[ScaleRecord]:
        return [note.read() for note in self._notes]

    def __getstate__(self) -> dict[str, object]:
        self.records()
        return self.__dict__


class Exhaustion:
    """Detects an overflow at the smallest scale, where no scale can help, and warns, raises or sets a flag.

    Args:
        action: "warn" once, until the scale has grown again; "raise"; or "stop": set the flag.

    Attributes:
        should_stop: The flag.
    """

    def __init__(self, action: OnMinScale) -> None:
        self.should_stop = False
        self._action = action
        self._has_warned = False

    def message(self, loss_scale: LossScale, outcomes: list[StepOutcome]) -> str | None:
        """Return the message about an iteration, before its scale is adapted; None if the scale is not exhausted.

        Waits for an accelerator only if the host does not know a step's outcome and the scale is near its minimum.
        """
        if all(outcome.known() is False for outcome in outcomes):
            return None
        if not loss_scale.is_smallest():
            self._has_warned = False
            return None
        overflowed = [outcome for outcome in outcomes if outcome.overflowed()]
        if not overflowed:
            return None
        names = listed([name for outcome in overflowed for name in outcome.names()]) or "a parameter"
        return (
            f"The gradients of {names} are not finite even at the smallest scale, {loss_scale.get():g}: "
            "no scale can help. Look for NaN in the data and the loss; try bfloat16, a lower learning rate, "
            "or an autocast policy that keeps the overflowing operations in float32"
        )

    def act(self, message: str) -> None:
        """Warn, raise or set the flag.

        Raises:
            FloatingPointError: If the action is "raise".
        """
        if self._action == "raise":
            raise FloatingPointError(message)
        self.should_stop = self._action == "stop"
        if self._action == "warn" and not self._has_warned:
            self._has_warned = True
            warnings.warn(message, RuntimeWarning, stacklevel=3)
