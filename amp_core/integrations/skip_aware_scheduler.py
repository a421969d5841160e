"""A learning-rate scheduler that stands still when the optimizer's step was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class SkipAwareScheduler:
    """Another scheduler in all but one thing: `step` does nothing after a skipped optimizer step.

    Otherwise a warm-up would run ahead of the training while the scale is being found, and torch would warn that the scheduler
    was stepped before the optimizer.

    Args:
        scheduler: What to stand for; attributes are its own, and it passes `isinstance` checks for its class.
        step_was_skipped: Says whether the optimizer's last step was skipped.
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
