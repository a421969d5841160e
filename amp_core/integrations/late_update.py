"""`LateUpdate`: a scaler whose scale changes only between iterations; `SkipAwareScheduler`; checked arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler, Outputs
from halfserve.amp_core.policy import Policy


def given_policy(policy: Policy | str | None) -> Policy:
    """Return an integration's argument `policy`; None is the empty policy."""
    return Policy() if policy is None else Policy.of(policy)


def check_scaler(scaler: object) -> None:
    """Raise TypeError unless an integration's argument `scaler` is None or ours."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be an amp_core.GradScaler, got a {type(scaler).__module__}.{type(scaler).__name__}")


class LateUpdate:
    """A GradScaler for frameworks that call `update` after each optimizer's step instead of once per iteration.

    In the middle of an iteration, `update` would change the scale under gradients of the old one, and forget which of them are
    unscaled: the second optimizer would step with wrong gradients. Here the scale is updated when all expected optimizers have
    stepped, or else before the next loss is scaled. With one optimizer that is when `update` is called.

    All other attributes are the scaler's own, for example `step_was_skipped` and `get_growth_factor`.

    Attributes:
        scaler: The scaler that does the work.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._known: set[int] = set()
        self._knows_all = False
        self._stepped: dict[int, Optimizer] = {}  # keyed by id; holding the optimizers prevents reuse of an id
        self._unscaled: set[int] = set()
        self._is_due = False

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """Name all optimizers of a training, so that the scale is updated as soon as they have stepped."""
        self._known, self._knows_all = {id(optimizer) for optimizer in optimizers}, True

    def scale(self, outputs: Outputs) -> Outputs:
        """Begin or continue an iteration; see `GradScaler.scale`."""
        self.finish()
        # New scaled gradients follow, so unscaling is allowed again once per optimizer.
        self._unscaled.clear()
        return self.scaler.scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """See `GradScaler.unscale_`; unscaling again before the next loss (to clip twice, for example) does nothing."""
        if id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See `GradScaler.step`."""
        if id(optimizer) in self._stepped:
            self.finish()
        result = self.scaler.step(optimizer, *args, **kwargs)
        self._stepped[id(optimizer)] = optimizer
        self._known.add(id(optimizer))
        return result

    def update(self) -> None:
        """Update the scale, now or later in the iteration; see the class."""
        self._is_due = True
        if self._knows_all:
            self._finish_after_all()

    def finish(self) -> None:
        """Update the scale now if that is due."""
        if self._is_due:
            self._stepped, self._is_due = {}, False
            self._unscaled.clear()
            self.scaler.update()

    def get_scale(self) -> float:
        """Return the scale of the next loss or, while optimizers are still to step, of the current gradients."""
        self._finish_after_all()
        return self.scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """See `GradScaler.state_dict`; ends the iteration."""
        self.finish()
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `GradScaler.load_state_dict`; the state of the iteration is dropped."""
        self.finish()
        self.scaler.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        self.finish()
        return self.__dict__ | {"_known": set(), "_knows_all": False}  # ids mean nothing in another process

    def _finish_after_all(self) -> None:
        if self._known <= self._stepped.keys():
            self.finish()

    def __getattr__(self, name: str) -> Any:
        if name == "scaler":  # not set yet, while this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scaler, name)


class SkipAwareScheduler:
    """A learning-rate scheduler whose `step` does nothing after a skipped optimizer step.

    Otherwise a warm-up would run ahead of the training while the scale is being found, and torch would warn that the scheduler
    was stepped before the optimizer. Attributes are the wrapped scheduler's, and `isinstance` checks for its class pass.
    """

    def __init__(self, scheduler: Any, step_was_skipped: Callable[[], bool]) -> None:
        self._scheduler = scheduler
        self._step_was_skipped = step_was_skipped

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler unless the optimizer's step was skipped."""
        if not self._step_was_skipped():
            self._scheduler.step(*args, **kwargs)

    @property  # type: ignore[misc]  # isinstance asks a property too
    def __class__(self) -> type:
        return type(self._scheduler)

    def __getattr__(self, name: str) -> Any:
        if name == "_scheduler":  # not set yet, while this object is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._scheduler, name)
