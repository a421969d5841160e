"""`HalfserveAccelerator`: our autocast, policies and GradScaler in Hugging Face accelerate.

Example:
    from amp_core.integrations.accelerate import HalfserveAccelerator

    accelerator = HalfserveAccelerator(mixed_precision="fp16", policy="cuda")
"""

from __future__ import annotations

from amp_core.integrations.requirement import not_installed

try:
    from amp_core.integrations.halfserve_accelerator import HalfserveAccelerator
except ModuleNotFoundError as error:
    raise not_installed(error, "accelerate", "1.15") from error

__all__ = ["HalfserveAccelerator"]
