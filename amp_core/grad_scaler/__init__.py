"""The gradient scaler: scale the loss, unscale and check the gradients, step or skip, adapt the scale."""

from __future__ import annotations
