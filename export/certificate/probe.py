"""How ONNX Runtime opened a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a model was opened.

    Attributes:
        level: The graph optimisation level that works, by its name in `onnxruntime.GraphOptimizationLevel`.
        crashes: What happened at the higher levels, such as "ORT_ENABLE_ALL: killed by SIGSEGV".
    """

    level: str
    crashes: tuple[str, ...] = ()
