"""`LateUpdate`: a scaler whose scale changes between iterations only, however often a framework calls `update`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amp_core.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.optim import Optimizer

    from amp_core.scaling.grad_scaler import Outputs


class LateUpdate:
    """A GradScaler for frameworks that call `update` after each optimizer's step instead of once per iteration.

    In the middle of an iteration, `update` changes the scale under gradients that were made with the old one, and forgets which
    of them are unscaled already: the second optimizer then steps with gradients that are too large or too small. Here the
    scale is updated when all expected optimizers have stepped, or else before the next loss is scaled. With one optimizer that
    is the moment when `update` is called.

    Everything that is not here is the scaler's own, for example `get_growth_factor`.

    Attributes:
        scaler: The scaler that does the work.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._known: set[int] = set()
        self._knows_all = False
        self._stepped: dict[int, Optimizer] = {}  # by id; the optimizers are held so that no id is used twice
        self._unscaled: set[int] = set()
        self._is_due = False

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """Name all the optimizers of a training, so that the scale is updated as soon as they have stepped."""
        self._known, self._knows_all = {id(optimizer) for optimizer in optimizers}, True

    def scale(self, outputs: Outputs) -> Outputs:
        """Begin an iteration or go on with it; see `GradScaler.scale`."""
        self.finish()
        # From here on there are scaled gradients again, so that unscaling once more would be a mistake worth an error.
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
        """The scale of the next loss, or while optimizers are still to step in this iteration, of their gradients."""
        self._finish_after_all()
        return self.scaler.get_scale()

    def is_enabled(self) -> bool:
        """See `GradScaler.is_enabled`."""
        return self.scaler.is_enabled()

    @property
    def step_was_skipped(self) -> bool:
        """See `GradScaler.step_was_skipped`."""
        return self.scaler.step_was_skipped

    def skipped(self, optimizer: Optimizer) -> bool:
        """See `GradScaler.skipped`."""
        return self.scaler.skipped(optimizer)

    @property
    def should_stop(self) -> bool:
        """See `GradScaler.should_stop`."""
        return self.scaler.should_stop

    def overflowed_parameters(self, model: nn.Module | None = None) -> list[str]:
        """See `GradScaler.overflowed_parameters`."""
        return self.scaler.overflowed_parameters(model)

    def state_dict(self) -> dict[str, Any]:
        """See `GradScaler.state_dict`; ends the iteration."""
        self.finish()
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `GradScaler.load_state_dict`; what the iteration had noted is dropped."""
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
