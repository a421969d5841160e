"""Mixed-precision training: autocast with policies, a gradient scaler that says what it did, and a training loop."""

from __future__ import annotations

from amp_core.autocast.autocast import autocast, custom_bwd, custom_fwd
from amp_core.grad_scaler.grad_scaler import GradScaler
from amp_core.policy import Policy

__all__ = ["GradScaler", "Policy", "autocast", "custom_bwd", "custom_fwd"]
