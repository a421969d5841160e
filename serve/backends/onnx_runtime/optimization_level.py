"""How far ONNX Runtime may rewrite a model, under our names and Triton's numbers."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.config.parameters import own_parameter
from serve.engine.errors import ModelLoadError

KEY = "halfserve.optimization_level"


class OptimizationLevel(Enum):
    """From all rewrites to none; the values are those of the runtime's GraphOptimizationLevel."""

    ALL = 99
    EXTENDED = 2
    BASIC = 1
    DISABLED = 0

    @property
    def label(self) -> str:
        """As in configurations: "all", "extended", "basic" or "disabled"."""
        return self.name.lower()


# `optimization { graph { level } }` as Triton's ONNX Runtime backend reads it; 0 is also what an absent field reads as.
TRITON_LEVELS = {
    -1: OptimizationLevel.BASIC,
    1: OptimizationLevel.EXTENDED,
    2: OptimizationLevel.DISABLED,
}


def declared_level(config: ModelConfig, path: Path) -> OptimizationLevel | None:
    """The level that a configuration asks for: by our parameter, or else by Triton's field; None where it does not.

    Raises:
        ModelLoadError: there is no such level.
    """
    own = own_parameter(config, KEY, path)
    if own is not None:
        return OptimizationLevel[str(own).upper()]
    level = config.optimization.graph.level
    if level and level not in TRITON_LEVELS:
        raise ModelLoadError(
            f"{path}: optimization.graph.level is {level}, expected 0 (all), 1 (extended), -1 (basic) or 2 (disabled)"
        )
    return TRITON_LEVELS.get(level)
