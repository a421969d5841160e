"""What a model's config.pbtxt says of its precision guard."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.own_parameters import own_parameter

# Parameters that say how answers are compared with the fp32 twin's, and those that need the twin itself.
COMPARING = ("halfserve.degraded_not_ready", "halfserve.drift_threshold", "halfserve.shadow_share")
OF_TWIN = (*COMPARING, "halfserve.fp32_twin", "halfserve.shadow_rate")


class Policy(StrEnum):
    """What happens to a request with outputs that are not finite although its inputs are."""

    OFF = "off"
    COUNT = "count"
    REJECT = "reject"
    FALLBACK = "fallback"


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How a model is guarded.

    Attributes:
        policy: off does not look; count passes the values on; reject fails the request; fallback answers from the fp32 twin.
        shadow_rate: the share of requests that run on the fp32 twin as well, 0 to 1, where there is one.
        shadow_share: the share of one thread's time that these runs may use; samples beyond it are dropped.
        drift_threshold: the scaled error that shadow runs may show; None takes the certificate's.
        degraded_not_ready: a model whose drift is over the threshold is not ready.
        fp32_twin: the twin's file, as a path in the version's folder.
    """

    policy: Policy = Policy.COUNT
    shadow_rate: float = 0.001
    shadow_share: float = 0.0005
    drift_threshold: float | None = None
    degraded_not_ready: bool = False
    fp32_twin: str = "fp32/model.onnx"


def guard_settings(config: ModelConfig, source: Path | str) -> GuardSettings:
    """The settings in a configuration.

    Args:
        config: a model's.
        source: its file, for error texts.

    Raises:
        ModelLoadError: a value is not what it should be.
    """
    given = {
        "policy": own_parameter(config, "halfserve.precision_guard", source),
        "shadow_rate": own_parameter(config, "halfserve.shadow_rate", source),
        "shadow_share": own_parameter(config, "halfserve.shadow_share", source),
        "drift_threshold": own_parameter(config, "halfserve.drift_threshold", source),
        "degraded_not_ready": own_parameter(config, "halfserve.degraded_not_ready", source),
        "fp32_twin": own_parameter(config, "halfserve.fp32_twin", source),
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if "policy" in settings:
        settings["policy"] = Policy(settings["policy"])
    return GuardSettings(**settings)


def why_idle(config: ModelConfig, settings: GuardSettings, *, has_twin: bool) -> tuple[list[str], str]:
    """The parameters in a configuration that have no effect, and why.

    Args:
        config: a model's.
        settings: in it.
        has_twin: the fp32 twin is there.
    """
    idle: tuple[str, ...] = COMPARING
    reason = "halfserve.shadow_rate is 0"
    if settings.policy is Policy.OFF:
        idle, reason = OF_TWIN, "halfserve.precision_guard is 'off'"
    elif not has_twin:
        idle, reason = OF_TWIN, f"there is no fp32 twin, {settings.fp32_twin!r} in the version's folder"
    elif settings.shadow_rate:
        return [], ""
    return [key for key in idle if key in config.parameters], reason
