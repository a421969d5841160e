"""`HalfserveAccelerator`: our autocast, policies and GradScaler in Hugging Face accelerate.

Example:
    from halfserve.amp_core.integrations.accelerate import HalfserveAccelerator

    accelerator = HalfserveAccelerator(mixed_precision="fp16", policy="cuda")
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfserve.amp_core.autocast.autocast import autocast as region_of
from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler
from halfserve.amp_core.integrations import not_installed
from halfserve.amp_core.integrations.late_update import LateUpdate, check_scaler, given_policy
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder.beside_weights import read_policy, write_policy

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import GradScalerKwargs
except ModuleNotFoundError as error:
    raise not_installed(error, "accelerate", "1.15") from error


class ScaledOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate ships no types
    """An `AcceleratedOptimizer` that asks the scaler, which knows the steps that a fused optimizer skipped in its kernel."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return self.scaler is not None and bool(self.scaler.skipped(self.optimizer))


def compare_policy(folder: Path | str, policy: Policy) -> None:
    """Warn if a state was trained with another policy. A folder without the file is fine.

    Raises:
        PolicyError: If the file is there and cannot be read.
    """
    saved = read_policy(folder)
    if saved is not None and saved != policy:
        warnings.warn(
            f"the state in {folder} was trained with the policy '{saved}'; training goes on with '{policy}'. "
            f"To go on as before, make the accelerator or trainer with policy='{saved}'",
            stacklevel=2,
        )


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# These shard a model's gradients over processes, which would find different infinities; or have their own scaler.
SHARDED = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


class HalfserveAccelerator(Accelerator):  # type: ignore[misc]  # accelerate ships no types
    """An `Accelerator` whose mixed precision is ours; everything else is accelerate's own.

    Beyond accelerate: float16 on the CPU too (where accelerate silently trains in float32); a policy; the scale stays within
    limits; `scaler.overflowed_parameters(model)`; several optimizers may share one backward's scale, clipped or not;
    `optimizer_step_was_skipped` is right for fused optimizers. States are exchangeable with accelerate's own; loading one that
    was trained with another policy warns.

    Example:
        accelerator = HalfserveAccelerator(mixed_precision="fp16", policy="cuda+fp32:einsum")

    Args:
        *args: Arguments of `Accelerator`.
        mixed_precision: `fp16`, `bf16` or `no`; by default the setting of `accelerate launch`, else `no`.
        policy: The dtype of each operation, a `Policy` or its string form; by default torch's rules for the device.
        scaler: A scaler with other settings: `GradScaler(min_scale=1.0)`; or else give accelerate's `GradScalerKwargs`.
        **kwargs: Arguments of `Accelerator`.

    Raises:
        ValueError: If the mixed precision is another, such as fp8, or does not use the given policy or scaler; if there are a
            scaler and `GradScalerKwargs`; if the model is to be sharded over processes.
        TypeError: If `scaler` is not ours.
        PolicyError: If a policy's string form cannot be read.
    """

    def __init__(
        self,
        *args: Any,
        mixed_precision: str | None = None,
        policy: Policy | str | None = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        self.policy = given_policy(policy)
        # Before accelerate's own constructor, which fixes the precision for the whole process.
        wanted = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION") or None
        _check(wanted, policy_is_given=policy is not None, scaler=scaler)
        if scaler is not None and any(isinstance(handler, GradScalerKwargs) for handler in kwargs.get("kwargs_handlers") or ()):
            raise ValueError("got both a scaler and GradScalerKwargs; choose one")
        super().__init__(*args, mixed_precision=mixed_precision, **kwargs)
        _check(self.mixed_precision, policy_is_given=policy is not None, scaler=scaler)
        if self.mixed_precision != "no" and self.distributed_type in SHARDED:
            raise ValueError(
                f"HalfserveAccelerator trains on one device or with DDP, not with {self.distributed_type.value}; "
                "use accelerate's own Accelerator there"
            )
        self.scaler: LateUpdate | None = None
        if self.mixed_precision == "fp16":
            settings = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.scaler = LateUpdate(scaler or GradScaler(self.device.type, **settings))
            self.native_amp = True  # on the CPU too
        self.register_save_state_pre_hook(self._save_policy)
        self.register_load_state_pre_hook(self._compare_policy)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Prepare a model as accelerate does, with its forward in our region."""
        if self.native_amp and not getattr(model, "_is_accelerate_prepared", False):
            # accelerate wraps the forward in torch.autocast and casts outputs to float32; our inner region takes precedence.
            region = self._region(self.autocast_handler)
            method = getattr(model.forward, "__func__", None)
            model.forward = region(model.forward) if method is None else MethodType(region(method), model)
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as accelerate does, with the scaler's own answer to whether a step was skipped.

        A closure for its step, as LBFGS needs one, returns the loss and leaves backward to the scaler; see `GradScaler.step`.
        """
        if self.scaler is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        placement = self.device_placement if device_placement is None else device_placement
        prepared = ScaledOptimizer(optimizer, device_placement=placement, scaler=self.scaler)
        self._optimizers.append(prepared)
        self.scaler.expect(entry.optimizer for entry in self._optimizers)
        return prepared

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Generator[None, None, None]:
        """Our region for a block, such as a loss outside the model, with accelerate's `AutocastKwargs` for this block alone.

        Does nothing without mixed precision.
        """
        region: AbstractContextManager[Any] = nullcontext()
        if self.native_amp:
            region = self._region(autocast_handler or self.autocast_handler)
        with region:
            yield

    def _region(self, handler: Any) -> region_of:
        settings = handler.to_kwargs() if handler else {}
        made: region_of = region_of(self.device.type, DTYPES[self.mixed_precision], policy=self.policy, **settings)
        return made

    def _save_policy(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:  # noqa: ARG002  (accelerate's hook)
        if self.native_amp and self.is_main_process:
            write_policy(folder, self.policy)

    def _compare_policy(self, models: list[nn.Module], folder: str) -> None:  # noqa: ARG002  (see above)
        if self.native_amp:
            compare_policy(folder, self.policy)


def _check(mixed_precision: str | None, *, policy_is_given: bool, scaler: GradScaler | None) -> None:
    """Refuse settings that do not fit together; `mixed_precision` is None while it is not known."""
    check_scaler(scaler)
    if mixed_precision not in {None, "no", *DTYPES}:
        raise ValueError(f"mixed_precision must be 'fp16', 'bf16' or 'no', got {mixed_precision!r}")
    if mixed_precision == "no" and (policy_is_given or scaler is not None):
        raise ValueError("a policy or scaler needs mixed_precision='fp16' or 'bf16', got 'no'")
    if mixed_precision == "bf16" and scaler is not None:
        raise ValueError("mixed_precision 'bf16' needs no scaler: bfloat16 has float32's range; leave the scaler out")
