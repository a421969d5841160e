"""`TrainerPrecision`: the precision plugin for Lightning's Trainer."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch.optim import LBFGS

from amp_core.integrations.lightning_casting import LightningCasting, MixedName
from amp_core.integrations.skip_aware_scheduler import SkipAwareScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from amp_core.casting.autocast import autocast
    from amp_core.integrations.late_update import LateUpdate
    from amp_core.policy import Policy
    from amp_core.scaling.grad_scaler import GradScaler

LIGHTNINGS_OWN = MixedPrecision.__qualname__  # under which its checkpoints keep the scaler's state


class TrainerPrecision(MixedPrecision):
    """Mixed precision with our autocast, policies and GradScaler in `lightning.pytorch.Trainer`.

    Beyond Lightning's own plugin: float16 on the CPU too; a policy; the scale keeps within limits; `scaler.step_was_skipped`
    and `scaler.overflowed_parameters(model)` from any hook after the step; a scheduler with interval "step" and frequency 1
    stands still when a step was skipped (in automatic optimization; `trainer.global_step` counts attempts, as ever);
    several optimizers may share one backward's scale; fused optimizers can be clipped. Checkpoints are exchangeable with
    Lightning's own plugin.

    A scaler with `on_min_scale="stop"` stops the Trainer when no scale can help.

    Example:
        Trainer(plugins=[TrainerPrecision("16-mixed", policy="cuda+fp32:einsum")])

    Args:
        precision: `16-mixed` (float16, with a scaler) or `bf16-mixed` (bfloat16, without).
        policy: Which operation runs in which dtype, a `Policy` or its string form; by default that of the
            checkpoint resumed from, else torch's.
        scaler: Of one's own, for other settings: `GradScaler(min_scale=1.0)`.
        device: The kind of device, such as `cuda`; by default the accelerator in use, else the CPU.

    Raises:
        ValueError: If `precision` is unknown, or a scaler is given for bfloat16.
        TypeError: If `scaler` is not ours.
        PolicyError: If a policy's string form cannot be read.
    """

    def __init__(
        self,
        precision: MixedName,
        *,
        policy: Policy | str | None = None,
        scaler: GradScaler | None = None,
        device: str | None = None,
    ) -> None:
        self._casting = LightningCasting(precision, device, policy, scaler)
        super().__init__(precision, self._casting.device, cast("Any", self._casting.scaler))

    if TYPE_CHECKING:
        # Lightning's attribute, narrowed to what this class puts there.
        scaler: LateUpdate | None  # type: ignore[assignment]

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._casting.policy

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Learn the optimizers and make the schedulers that follow them skip-aware.

        Raises:
            MisconfigurationException: If an optimizer needs its loss evaluated several times per step, in float16.
        """
        if self.scaler is None:
            return model, optimizers, lr_schedulers
        for optimizer in optimizers:
            _refuse_lbfgs(optimizer)
        self.scaler.expect(optimizers)
        if isinstance(model, pl.LightningModule) and model.automatic_optimization:
            lr_schedulers = [_skip_aware(config, self.scaler) for config in lr_schedulers]
        return model, optimizers, lr_schedulers

    def autocast_context_manager(self) -> autocast:  # type: ignore[override]  # Lightning only enters it
        """The region in which Lightning runs training, validation, test and prediction steps."""
        return self._casting.region

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """See `autocast_context_manager`."""
        with self._casting.region:
            yield

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]  # as Lightning's
        """Scale a loss, between the step and Lightning's `on_before_backward` hooks.

        Raises:
            MisconfigurationException: If this is not Lightning's Trainer.
            ValueError: If the loss is on another kind of device than this plugin.
        """
        if not isinstance(module, pl.LightningModule):
            raise MisconfigurationException("TrainerPrecision is for lightning's Trainer; give Fabric a FabricPrecision")
        self._casting.check_device(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]  # as Lightning's own
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), unscale, let Lightning clip, and step unless a gradient is not finite.

        Returns:
            What the optimizer's step returns; None if it was skipped; the closure's value if that says there is nothing to do.
        """
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        _refuse_lbfgs(optimizer)
        loss = closure()
        # A training_step that returns None asks for no backward; in manual optimization the closure never returns anything.
        if loss is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return None
        # A fused optimizer's gradients too, so that the hooks and the clipping that follow see true gradients.
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        if self.scaler.should_stop:
            model.trainer.should_stop = True
        return result

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of any optimizer, a fused one too: they are unscaled by now."""
        # Not super(): Lightning's MixedPrecision refuses fused optimizers, because it leaves the unscaling to them.
        Precision.clip_gradients(self, optimizer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state and the policy."""
        return self._casting.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or Lightning's own plugin's; see `LightningCasting.load_state_dict`."""
        self._casting.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the scaler's state where Lightning's own plugin finds it as well."""
        if self.scaler is not None:
            checkpoint[LIGHTNINGS_OWN] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint of Lightning's own plugin."""
        if type(self).__qualname__ not in checkpoint and LIGHTNINGS_OWN in checkpoint:
            self.load_state_dict(checkpoint[LIGHTNINGS_OWN])


def _refuse_lbfgs(optimizer: Any) -> None:
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "LBFGS evaluates its loss several times per step, which a loss scale cannot follow; "
            "use TrainerPrecision('bf16-mixed') or another optimizer"
        )


def _skip_aware(config: Any, scaler: LateUpdate) -> Any:
    if config.interval != "step" or config.frequency != 1 or config.reduce_on_plateau:
        return config
    return replace(config, scheduler=SkipAwareScheduler(config.scheduler, lambda: scaler.step_was_skipped))
