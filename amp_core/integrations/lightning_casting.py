"""What both of Lightning's precision plugins are made of: a dtype, a policy and a scaler, checked, saved and restored."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from amp_core.casting.autocast import autocast
from amp_core.integrations.given_policy import given_policy
from amp_core.integrations.late_update import LateUpdate
from amp_core.policy import Policy
from amp_core.scaling.grad_scaler import GradScaler

if TYPE_CHECKING:
    from torch import Tensor

MixedName = Literal["16-mixed", "bf16-mixed"]
POLICY = "policy"  # beside the scaler's own keys in a saved state, where torch's scaler ignores it


class LightningCasting:
    """The part of a plugin that knows nothing of Lightning.

    Args:
        precision: `16-mixed` or `bf16-mixed`.
        device: The kind of device; by default the accelerator in use, else the CPU.
        policy: Which operation runs in which dtype; None takes over a checkpoint's, or else leaves it to torch.
        scaler: Of one's own, for float16 only; by default one with the default settings.

    Attributes:
        device: The kind of device.
        dtype: float16 or bfloat16.
        scaler: None for bfloat16, whose gradients need no scale.
    """

    def __init__(
        self, precision: MixedName, device: str | None, policy: Policy | str | None, scaler: GradScaler | None
    ) -> None:
        if precision not in get_args(MixedName):
            raise ValueError(f"precision must be '16-mixed' or 'bf16-mixed', got {precision!r}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be an amp_core.GradScaler, got a {type(scaler).__module__}.{type(scaler).__name__}")
        if scaler is not None and precision == "bf16-mixed":
            raise ValueError("precision 'bf16-mixed' needs no scaler: bfloat16 has float32's range; leave the scaler out")
        self.dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
        self.device = device or _device_in_use()
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
            ValueError: If the loss is on another kind of device.
        """
        if loss.device.type != self.device:
            raise ValueError(
                f"the loss is on {loss.device.type}, but the precision plugin is for {self.device}, so nothing was cast; "
                f"make the plugin with device={loss.device.type!r}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state under torch's keys, if there is a scaler, and the policy."""
        return {**(self.scaler.state_dict() if self.scaler else {}), POLICY: str(self._policy)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class, or Lightning's own MixedPrecision, has saved.

        A policy is taken over if none was given here; a given one stays, with a warning if the saved one differs. A bfloat16
        training's state leaves the scaler as it is.

        Raises:
            RuntimeError: If the scaler's part lacks a key.
            PolicyError: If the policy cannot be read, here.
        """
        scaling = {key: value for key, value in state_dict.items() if key != POLICY}
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


def _device_in_use() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
