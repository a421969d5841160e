"""Makes the guard of a model version from its configuration and the files beside it."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath

from halfserve.files.cuda_products import TF32
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import Backend, CpuPrecision, DevicePlacement, ModelInterface, Runtime
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import UnchangedFiles, read_certificate
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import Degradation, Tally
from halfserve.serve.engine.precision_guard.twin import Fallback, Fp32Twin, Shadow
from halfserve.serve.engine.tensors import TensorSpec

logger = logging.getLogger(__name__)


# Parameters of the comparison with the fp32 twin, and all parameters that need the twin.
COMPARING = ("halfserve.degraded_not_ready", "halfserve.drift_threshold", "halfserve.shadow_share")
OF_TWIN = (*COMPARING, "halfserve.fp32_twin", "halfserve.shadow_rate")
# Parameters that ask for half precision: halfserve's own, and that of Triton's OpenVINO backend.
OF_HALF_PRECISION = ("halfserve.cpu_precision", "HINT_BF16")
# A certificate's default budget: twenty float16 roundings of the output's size.
DEFAULT_THRESHOLD = 0.01
FLOATING = frozenset({"FP16", "BF16", "FP32", "FP64"})


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Settings of a model's precision guard.

    Attributes:
        policy: off does not check; count passes the values on; reject fails the request; fallback answers from the fp32 twin.
        shadow_rate: share of requests, 0 to 1, that also run on the fp32 twin, if there is one.
        shadow_share: share of one thread's time that these runs may use; further samples are dropped.
        drift_threshold: scaled error that shadow runs may show; None takes the certificate's.
        degraded_not_ready: whether a model whose drift is over the threshold is not ready.
        fp32_twin: path of the twin's file in the version's folder.
    """

    policy: GuardPolicy = GuardPolicy.COUNT
    shadow_rate: float = 0.001
    shadow_share: float = 0.0005
    drift_threshold: float | None = None
    degraded_not_ready: bool = False
    fp32_twin: str = "fp32/model.onnx"


def guard_settings(config: ModelConfig, source: Path | str) -> GuardSettings:
    """Read the guard's settings from a configuration, which is that of the file `source`.

    Raises:
        ModelLoadError: a value is invalid.
    """
    keys = {field.name: f"halfserve.{field.name}" for field in fields(GuardSettings)} | {"policy": "halfserve.precision_guard"}
    given = {name: own_parameter(config, key, source) for name, key in keys.items()}
    settings = {name: value for name, value in given.items() if value is not None}
    if "policy" in settings:
        settings["policy"] = GuardPolicy(settings["policy"])
    return GuardSettings(**settings)


def why_idle(config: ModelConfig, settings: GuardSettings, *, has_twin: bool) -> tuple[list[str], str]:
    """Return the parameters in a configuration that have no effect, and the reason."""
    idle: tuple[str, ...] = COMPARING
    reason = "halfserve.shadow_rate is 0"
    if settings.policy is GuardPolicy.OFF:
        idle, reason = OF_TWIN, "halfserve.precision_guard is 'off'"
    elif not has_twin:
        idle, reason = OF_TWIN, f"there is no fp32 twin, {settings.fp32_twin!r} in the version's folder"
    elif settings.shadow_rate:
        return [], ""
    return [key for key in idle if key in config.parameters], reason


def make_guard(
    model: Path,
    runtime: Runtime,
    placement: DevicePlacement,
    *,
    label: str,
    interface: ModelInterface,
    config: ModelConfig,
    source: Path,
) -> PrecisionGuard | None:
    """Make the guard that a model version asks for; None if its policy is "off".

    The twin of a model with the policy "fallback" is loaded here; for shadow runs alone it is loaded by the first of them, so
    that it costs no time at the start, and no memory if no request is ever sampled.

    `model`: path of the model file, whose interface `interface` is; `source`: the configuration's file, for error texts.

    Raises:
        ModelLoadError: a setting is invalid, or the policy needs a twin and the model has none.
    """
    settings = guard_settings(config, source)
    path = None if settings.policy is GuardPolicy.OFF else _twin_path(settings, model.parent, source)
    idle, reason = why_idle(config, settings, has_twin=path is not None)
    if idle:
        logger.warning("%s: no effect here, as %s: %s", source, reason, ", ".join(f"parameters.{key}" for key in idle))
    if settings.policy is GuardPolicy.OFF:
        return None
    twin = None
    if path is not None:
        twin = Fp32Twin(UnchangedFiles.look(path).guarded(lambda: _load(path, runtime, placement, interface, config)))
    if settings.policy is GuardPolicy.FALLBACK:
        if twin is None:
            raise ModelLoadError(
                f"{source}: the precision guard is to fall back on the fp32 model, but there is no "
                f"{model.parent / settings.fp32_twin}; export again with --fp32-twin, or set halfserve.precision_guard to "
                "'reject' or 'count'"
            )
        twin.prepare()
    shadowed = twin is not None and settings.shadow_rate > 0
    threshold = settings.drift_threshold or error_budget(model)
    batched = config.max_batch_size > 0
    outputs = [spec.name for spec in interface.outputs]
    tally = Tally(label, str(settings.policy), outputs, Degradation(threshold) if shadowed else None)
    return PrecisionGuard(
        interface.outputs,
        tally,
        policy=settings.policy,
        batched=batched,
        fallback=Fallback(twin) if twin is not None and settings.policy is GuardPolicy.FALLBACK else None,
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


def _load(path: Path, runtime: Runtime, placement: DevicePlacement, interface: ModelInterface, config: ModelConfig) -> Backend:
    own = runtime.describe(path)
    for kind, ours, theirs in (("input", interface.inputs, own.inputs), ("output", interface.outputs, own.outputs)):
        wanted, found = _kinds(ours), _kinds(theirs)
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise ModelLoadError(
                    f"{path}: is no fp32 twin of the model: its {kind} {name!r} is {found.get(name, 'absent')}, the model's is "
                    f"{wanted.get(name, 'absent')}; export both again with --fp32-twin"
                )
    # The configuration is copied because the runtime writes its decisions into it, and clients see the model's, not its twin's.
    scratch = ModelConfig()
    scratch.CopyFrom(config)
    # The twin computes few batches, of any size: no sessions or recordings by batch size are made for it.
    for key, value in (("halfserve.pad_to_preferred", "off"), ("halfserve.cuda_ways", "none")):
        scratch.parameters[key].string_value = value
    for key in OF_HALF_PRECISION:
        scratch.parameters.pop(key, None)
    for accelerator in scratch.optimization.execution_accelerators.gpu_execution_accelerator:
        accelerator.parameters.pop(TF32, None)
    return runtime.load(path, own, replace(placement, cpu_precision=CpuPrecision.FLOAT32), scratch)


def _kinds(specs: tuple[TensorSpec, ...]) -> dict[str, str]:
    return {spec.name: "floating" if spec.datatype.wire in FLOATING else spec.datatype.wire for spec in specs}


def error_budget(model: Path) -> float:
    """Return the scaled error that a model file's certificate allows its answers, or the default if it has none."""
    return _certified(model) or DEFAULT_THRESHOLD


def _certified(model: Path) -> float | None:
    try:
        found = read_certificate(model)
        allowed = json.loads(b"" if found is None else found.content)["budget"]["max_scaled_error"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # model_control/certificate_check.py judges the certificate
    return float(allowed) if isinstance(allowed, int | float) and allowed > 0 else None
