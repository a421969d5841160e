"""Precision plugins for Lightning: `TrainerPrecision` for its Trainer, `FabricPrecision` for Fabric.

Example:
    from halfserve.amp_core.integrations.lightning import TrainerPrecision

    Trainer(plugins=[TrainerPrecision("16-mixed", policy="cuda")])
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfserve.amp_core.autocast.autocast import autocast
from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler, device_type
from halfserve.amp_core.integrations import not_installed
from halfserve.amp_core.integrations.late_update import LateUpdate, SkipAwareScheduler, check_scaler, given_policy
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.amp_core.recorder.recorder import BatchRecorder

try:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning_utilities.core.apply_func import apply_to_collection
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning", "2.6") from error

MixedName = Literal["16-mixed", "bf16-mixed"]
POLICY, RECORD = "policy", "record"  # beside the scaler's own keys in a saved state, where torch's scaler ignores them


class LightningCasting:
    """The part of both plugins that does not depend on Lightning: dtype, policy and scaler, checked, saved and restored.

    Attributes:
        device: The device type.
        dtype: float16 or bfloat16.
        scaler: None for bfloat16, whose gradients need no scale.
    """

    def __init__(
        self, precision: MixedName, device: str | None, policy: Policy | str | None, scaler: GradScaler | None
    ) -> None:
        if precision not in get_args(MixedName):
            raise ValueError(f"precision must be '16-mixed' or 'bf16-mixed', got {precision!r}")
        check_scaler(scaler)
        if scaler is not None and precision == "bf16-mixed":
            raise ValueError("precision 'bf16-mixed' needs no scaler: bfloat16 has float32's range; leave the scaler out")
        self.dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        self.device = device or device_type(None)
        self._policy_is_given = policy is not None
        self._policy = given_policy(policy)
        self._region = self._make_region()
        self.scaler = None if precision == "bf16-mixed" else LateUpdate(scaler or GradScaler(self.device))

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def region(self) -> autocast:
        """The region for forward passes and losses."""
        return self._region

    def check_device(self, loss: Tensor) -> None:
        """Refuse to train on a device whose operations are not cast.

        Raises:
            ValueError: If the loss is on another type of device.
        """
        if loss.device.type != self.device:
            raise ValueError(
                f"the loss is on {loss.device.type}, but the precision plugin is for {self.device}, so nothing was cast; "
                f"make the plugin with device={loss.device.type!r}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state under torch's keys, if there is a scaler, and the policy."""
        return {**(self.scaler.state_dict() if self.scaler else {}), POLICY: str(self._policy)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class, or Lightning's own MixedPrecision, has saved.

        The saved policy is used if none was given here; a given one stays, with a warning if the saved one differs. A bfloat16
        training's state leaves the scaler as it is.

        Raises:
            RuntimeError: If the scaler's part lacks a key.
            PolicyError: If the policy cannot be read here.
        """
        scaling = {key: value for key, value in state_dict.items() if key not in {POLICY, RECORD}}
        saved = state_dict.get(POLICY)
        policy = self._policy if saved is None else Policy.parse(saved)
        if self.scaler and scaling:
            self.scaler.load_state_dict(scaling)
        if not self._policy_is_given:
            self._policy, self._region = policy, self._make_region(policy)
        elif policy != self._policy:
            warnings.warn(
                f"the checkpoint was trained with the policy '{policy}'; training goes on with '{self._policy}', as given. "
                "Leave the policy out to take over the checkpoint's",
                stacklevel=2,
            )

    def _make_region(self, policy: Policy | None = None) -> autocast:
        made: autocast = autocast(self.device, self.dtype, policy=policy or self._policy)
        return made


class FabricPrecision(FabricMixedPrecision):
    """Mixed precision with our autocast, policies and GradScaler in `lightning.fabric.Fabric`.

    Beyond Lightning's own plugin: float16 on the CPU too; a policy; the scale stays within limits; `scaler.step_was_skipped`
    and `scaler.overflowed_parameters(model)`; several optimizers may share one backward's scale; fused optimizers can be
    clipped, and any optimizer twice. Inputs are not rounded to half precision before the model: operations cast what they need;
    outputs in half precision come back in float32.

    Save it with the rest, which keeps the scale and the policy: `fabric.save(path, {"model": model, "precision": plugin})`.

    Example:
        Fabric(plugins=[FabricPrecision("16-mixed", policy="cuda+fp32:einsum")])

    Args:
        precision: `16-mixed` (float16, with a scaler) or `bf16-mixed` (bfloat16, without).
        policy: The dtype of each operation, a `Policy` or its string form; by default that of a loaded state, else torch's
            rules.
        scaler: A scaler with other settings: `GradScaler(min_scale=1.0)`.
        device: The device type, such as `cuda`; by default the accelerator in use, else the CPU.

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
        # Lightning's attribute, narrowed to this class's type.
        scaler: LateUpdate | None  # type: ignore[assignment]

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._casting.policy

    def forward_context(self) -> autocast:
        """Return the region around a model's forward, and of `fabric.autocast()`."""
        return self._casting.region

    def convert_input(self, data: Any) -> Any:
        """Leave a model's inputs as they are: operations cast them by the policy."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Cast half-precision outputs, in any nesting, to float32, for losses outside the region."""
        return apply_to_collection(data, function=_to_float32, dtype=Tensor)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run its backward.

        Raises:
            ValueError: If the loss is on another type of device than this plugin.
        """
        self._casting.check_device(tensor)
        super().backward(tensor, model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale before clipping; a second time before the step does nothing."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step unless a gradient is not finite.

        Returns:
            The result of the optimizer's step; None if it was skipped.

        Raises:
            TypeError: If given a closure, as LBFGS needs one, in float16.
        """
        if self.scaler is not None and (isinstance(optimizer, LBFGS) or kwargs.get("closure") is not None):
            raise TypeError(
                "a closure, which LBFGS needs, runs Fabric's backward inside of the step, where gradients are neither unscaled "
                "nor checked; use FabricPrecision('bf16-mixed'), or call fabric.backward(loss) before a step without closure"
            )
        return super().optimizer_step(optimizer, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state and the policy."""
        return self._casting.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or of Lightning's own plugin; see `LightningCasting.load_state_dict`."""
        self._casting.load_state_dict(state_dict)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor


LIGHTNINGS_OWN = MixedPrecision.__qualname__  # key of the scaler's state in Lightning's checkpoints


class TrainerPrecision(MixedPrecision):
    """Mixed precision with our autocast, policies and GradScaler in `lightning.pytorch.Trainer`.

    Beyond Lightning's own plugin: float16 on the CPU too; a policy; the scale stays within limits; `scaler.step_was_skipped`
    and `scaler.overflowed_parameters(model)` from any hook after the step; a scheduler with interval "step" and frequency 1
    does not advance after a skipped step (in automatic optimization; `trainer.global_step` counts attempts, as ever); several
    optimizers may share one backward's scale; fused optimizers can be clipped. Checkpoints are exchangeable with Lightning's
    own plugin. They also hold the policy and a record of the ranges that training saw, which `halfserve export MODULE:FACTORY
    --weights FILE.ckpt` reads.

    A scaler with `on_min_scale="stop"` stops the Trainer when no scale can help.

    Example:
        Trainer(plugins=[TrainerPrecision("16-mixed", policy="cuda+fp32:einsum")])

    Args:
        precision: `16-mixed` (float16, with a scaler) or `bf16-mixed` (bfloat16, without).
        policy: The dtype of each operation, a `Policy` or its string form; by default that of the checkpoint resumed from, else
            torch's rules.
        scaler: A scaler with other settings: `GradScaler(min_scale=1.0)`.
        device: The device type, such as `cuda`; by default the accelerator in use, else the CPU.
        record_every: In automatic optimization, one step in `record_every` is recorded (with gradients accumulated, its last
            batch); 0 records none.

    Raises:
        ValueError: If `precision` is unknown, a scaler is given for bfloat16, or `record_every` is negative.
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
        record_every: int = 200,
    ) -> None:
        self._batches = BatchRecorder(record_every)
        self._casting = LightningCasting(precision, device, policy, scaler)
        super().__init__(precision, self._casting.device, cast("Any", self._casting.scaler))

    if TYPE_CHECKING:
        # Lightning's attribute, narrowed to this class's type.
        scaler: LateUpdate | None  # type: ignore[assignment]

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._casting.policy

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Register the optimizers and make their schedulers skip-aware.

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
        """Return the region of training, validation, test and prediction steps."""
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
            ValueError: If the loss is on another type of device than this plugin.
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
            The result of the optimizer's step; None if it was skipped or the training step returned no loss.
        """
        closure = self._recorded(closure, model)
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        _refuse_lbfgs(optimizer)
        loss = closure()
        # A training_step that returns None skips backward; in manual optimization the closure always returns None.
        if loss is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return None
        # Unscale fused optimizers, too: the following hooks and the clipping need true gradients.
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        if self.scaler.should_stop:
            model.trainer.should_stop = True
        return result

    def _recorded(self, closure: Callable[[], Any], model: pl.LightningModule) -> Callable[[], Any]:
        if not model.automatic_optimization:
            return closure  # the closure is empty: the batch was computed before

        def run() -> Any:
            with self._batches.batch(model, self._scale()):
                return closure()

        return run

    def _scale(self) -> float:
        return self.scaler.get_scale() if self.scaler else 1.0

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of any optimizer, a fused one too: they are unscaled by now."""
        # Not super(): Lightning's MixedPrecision refuses fused optimizers, because they unscale in their own kernel.
        Precision.clip_gradients(self, optimizer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, the policy, and the record of the training where it has one."""
        record = self._batches.record
        return {**self._casting.state_dict(), **({RECORD: record.to_dict()} if record.steps else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or of Lightning's own plugin; see `LightningCasting.load_state_dict`."""
        self._casting.load_state_dict(state_dict)
        self._batches.record = Record.from_dict(state_dict[RECORD]) if RECORD in state_dict else Record()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the scaler's state where Lightning's own plugin finds it as well."""
        if self.scaler is not None:
            checkpoint[LIGHTNINGS_OWN] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint of Lightning's own plugin."""
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
