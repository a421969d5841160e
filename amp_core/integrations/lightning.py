"""Precision plugins for Lightning: `TrainerPrecision` for its Trainer, `FabricPrecision` for Fabric.

Example:
    from amp_core.integrations.lightning import TrainerPrecision

    Trainer(plugins=[TrainerPrecision("16-mixed", policy="cuda")])
"""

from __future__ import annotations

from amp_core.integrations.requirement import not_installed

try:
    from amp_core.integrations.fabric_precision import FabricPrecision
    from amp_core.integrations.trainer_precision import TrainerPrecision
except ModuleNotFoundError as error:
    raise not_installed(error, "lightning", "2.6") from error

__all__ = ["FabricPrecision", "TrainerPrecision"]
