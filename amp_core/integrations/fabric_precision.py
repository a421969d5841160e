"""`FabricPrecision`: the precision plugin for Lightning Fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.fabric.plugins.precision import MixedPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS

from amp_core.integrations.lightning_casting import LightningCasting, MixedName

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from amp_core.casting.autocast import autocast
    from amp_core.integrations.late_update import LateUpdate
    from amp_core.policy import Policy
    from amp_core.scaling.grad_scaler import GradScaler


class FabricPrecision(MixedPrecision):
    """Mixed precision with our autocast, policies and GradScaler in `lightning.fabric.Fabric`.

    Beyond Lightning's own plugin: float16 on the CPU too; a policy; the scale keeps within limits; `scaler.step_was_skipped`
    and `scaler.overflowed_parameters(model)`; several optimizers may share one backward's scale; fused optimizers can be
    clipped, and any optimizer twice. Inputs are not rounded to half precision before the model, only what operations ask
    for is; outputs that are in half precision come back in float32.

    Save it with the rest, which keeps the scale and the policy: `fabric.save(path, {"model": model, "precision": plugin})`.

    Example:
        Fabric(plugins=[FabricPrecision("16-mixed", policy="cuda+fp32:einsum")])

    Args:
        precision: `16-mixed` (float16, with a scaler) or `bf16-mixed` (bfloat16, without).
        policy: Which operation runs in which dtype, a `Policy` or its string form; by default that of a
            loaded state, else torch's.
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

    def forward_context(self) -> autocast:
        """The region around a model's forward, and of `fabric.autocast()`."""
        return self._casting.region

    def convert_input(self, data: Any) -> Any:
        """Leave a model's inputs as they are: the policy says which operation takes them in half precision."""
        return data

    def convert_output(self, data: Any) -> Any:
        """Bring half-precision outputs, in any nesting, to float32, for losses outside the region."""
        return apply_to_collection(data, function=_to_float32, dtype=Tensor)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Scale the loss and run its backward.

        Raises:
            ValueError: If the loss is on another kind of device than this plugin.
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
            What the optimizer's step returns; None if it was skipped.

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
        """The scaler's state and the policy."""
        return self._casting.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or Lightning's own plugin's; see `LightningCasting.load_state_dict`."""
        self._casting.load_state_dict(state_dict)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
