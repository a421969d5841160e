"""Make the guard of a model version from its configuration and the files beside it."""

from __future__ import annotations

import json
import logging
from pathlib import Path, PurePosixPath

from protos.model_config_pb2 import ModelConfig
from serve.engine.as_loaded import AsLoaded
from serve.engine.backend import Backend, ModelInterface, Placement, Runtime
from serve.engine.errors import ModelLoadError
from serve.engine.precision_guard.degradation import Degradation
from serve.engine.precision_guard.fallback import Fallback
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.precision_guard.settings import GuardSettings, Policy, guard_settings, why_idle
from serve.engine.precision_guard.shadow import Shadow
from serve.engine.precision_guard.tally import Tally
from serve.engine.precision_guard.twin import Fp32Twin
from serve.engine.regular_files import read_regular
from serve.engine.tensors import TensorSpec

logger = logging.getLogger(__name__)

CERTIFICATE = "certificate.json"
# What a certificate's budget allows where it says nothing else: twenty float16 roundings of the output's size.
DEFAULT_THRESHOLD = 0.01
FLOATING = frozenset({"FP16", "BF16", "FP32", "FP64"})


def make_guard(
    model: Path,
    runtime: Runtime,
    placement: Placement,
    *,
    label: str,
    interface: ModelInterface,
    config: ModelConfig,
    source: Path,
) -> PrecisionGuard | None:
    """The guard that a model version asks for.

    The twin of a model with the policy "fallback" is loaded here; for shadow runs alone it is loaded with the first of them, so
    that it costs neither time at the start nor memory where nothing is ever sampled.

    Args:
        model: the model file.
        runtime: loads the twin.
        placement: of the model, and of its twin.
        label: "name/version".
        interface: of the model file.
        config: completed.
        source: the configuration's file, for error texts.

    Returns:
        None where the policy is "off".

    Raises:
        ModelLoadError: a setting is not what it should be, or there is no twin, or none of this model, where one is needed.
    """
    settings = guard_settings(config, source)
    path = None if settings.policy is Policy.OFF else _twin_path(settings, model.parent, source)
    idle, reason = why_idle(config, settings, has_twin=path is not None)
    if idle:
        logger.warning("%s: no effect here, as %s: %s", source, reason, ", ".join(f"parameters.{key}" for key in idle))
    if settings.policy is Policy.OFF:
        return None
    twin = None
    if path is not None:
        twin = Fp32Twin(AsLoaded.look(path).guarded(lambda: _load(path, runtime, placement, interface, config)))
    if settings.policy is Policy.FALLBACK:
        if twin is None:
            raise ModelLoadError(
                f"{source}: the precision guard is to fall back on the fp32 model, but there is no "
                f"{model.parent / settings.fp32_twin}; export again with --fp32-twin, or set halfserve.precision_guard to "
                "'reject' or 'count'"
            )
        twin.prepare()
    shadowed = twin is not None and settings.shadow_rate > 0
    threshold = settings.drift_threshold or _certified(model.parent / CERTIFICATE) or DEFAULT_THRESHOLD
    batched = config.max_batch_size > 0
    outputs = [spec.name for spec in interface.outputs]
    tally = Tally(label, settings.policy, outputs, Degradation(threshold) if shadowed else None)
    return PrecisionGuard(
        interface.outputs,
        tally,
        policy=settings.policy,
        batched=batched,
        fallback=Fallback(twin) if twin is not None and settings.policy is Policy.FALLBACK else None,
        shadow=Shadow(twin, tally, rate=settings.shadow_rate, share=settings.shadow_share, batched=batched)
        if twin is not None and shadowed
        else None,
        degraded_not_ready=settings.degraded_not_ready,
    )


def _twin_path(settings: GuardSettings, folder: Path, source: Path) -> Path | None:
    named = PurePosixPath(settings.fp32_twin)
    path = folder / named
    if named.is_absolute() or ".." in named.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise ModelLoadError(
            f"{source}: parameter 'halfserve.fp32_twin' is {settings.fp32_twin!r}, expected a path in the version's folder"
        )
    return path if path.is_file() else None


def _load(path: Path, runtime: Runtime, placement: Placement, interface: ModelInterface, config: ModelConfig) -> Backend:
    own = runtime.describe(path)
    for kind, ours, theirs in (("input", interface.inputs, own.inputs), ("output", interface.outputs, own.outputs)):
        wanted, found = _kinds(ours), _kinds(theirs)
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ModelLoadError(
                    f"{path}: is no fp32 twin of the model: its {kind} {name!r} is {found.get(name, 'absent')}, the model's is "
                    f"{wanted.get(name, 'absent')}; export both again with --fp32-twin"
                )
    # A copy: the runtime writes into it what it decided, and clients are told that of the model, not of its twin.
    scratch = ModelConfig()
    scratch.CopyFrom(config)
    return runtime.load(path, own, placement, scratch)


def _kinds(specs: tuple[TensorSpec, ...]) -> dict[str, str]:
    return {spec.name: "floating" if spec.datatype.wire in FLOATING else spec.datatype.wire for spec in specs}


def _certified(path: Path) -> float | None:
    """The scaled error that a certificate's budget allows; None where there is no such figure."""
    try:
        allowed = json.loads(read_regular(path))["budget"]["max_scaled_error"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whether the certificate is sound is for others to judge
    return float(allowed) if isinstance(allowed, int | float) and allowed > 0 else None
