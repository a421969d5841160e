"""Mixed-precision training: autocast with policies, a gradient scaler that says what it did, and a training loop."""

from __future__ import annotations

from amp_core.casting.autocast import autocast
from amp_core.casting.custom_function import custom_bwd, custom_fwd
from amp_core.policy import Policy
from amp_core.scaling.grad_scaler import GradScaler

__all__ = ["GradScaler", "Policy", "autocast", "custom_bwd", "custom_fwd"]
