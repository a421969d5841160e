"""ONNX files: which runtime computes them, and on the CPU in which precision.

On a CUDA device ONNX Runtime does. On the CPU a model is computed in half precision by OpenVINO where its certificate has a
passed verdict for that precision and the processor has the arithmetic; otherwise in float32 by ONNX Runtime, which takes every
model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime as ort

from halfserve.protos.certificates import CERTIFICATE, NAME, certificate_sha256
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.cpu_trials import TrialCache, TrialResult, compared, describe
from halfserve.serve.backends.onnx_runtime.backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.crash_probe import verdict_key
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.session import why_no_device
from halfserve.serve.backends.onnx_runtime.session_settings import SessionSettings, read_settings
from halfserve.serve.backends.onnx_runtime.upcast import HALF_TYPES, half_types
from halfserve.serve.backends.openvino.onnx_fitness import why_unfit
from halfserve.serve.backends.openvino.processor import computed_halves, fast_halves, processor_name
from halfserve.serve.backends.recorded_samples import RecordedSamples, read_samples
from halfserve.serve.engine.backend import (
    OPENVINO_BACKEND,
    Backend,
    CpuPrecision,
    DevicePlacement,
    ModelInterface,
    OnnxOnOpenVino,
)
from halfserve.serve.engine.config.parameters import MEASURED, own_parameter
from halfserve.serve.engine.disk_files import read_regular
from halfserve.serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

PARAMETER = "halfserve.cpu_precision"
SHORT = {CpuPrecision.BFLOAT16: "bf16", CpuPrecision.FLOAT16: "fp16"}
PACKAGE = "openvino"
INSTALL = f"in a checkout of halfserve, pip install '.[{PACKAGE}]'"
USUAL_ERROR = 0.04  # bfloat16's budget where a certificate has none
# Made-up inputs are no more like the model's own than a certificate's adversarial samples, for which it allows as much.
TRIAL_FACTOR = 5.0


def passed_precisions(model: Path, named: str | None) -> frozenset[str]:
    """The half precisions, such as "bfloat16", in which the certificate beside a model file found it accurate enough.

    A certificate's own verdict is about its `precision` ("float16" where it has none). `precisions` may hold further ones: a
    mapping from a precision to an object with `passed`. model_control/certificate_check.py compares the files with it.

    Args:
        model: the file.
        named: the hash of the certificate that the model names in its metadata; another one proves nothing.
    """
    verdicts = _verdicts(_named(model, named))
    return frozenset(name for name, verdict in verdicts.items() if verdict.get("passed") is True)


def _named(model: Path, named: str | None) -> Mapping[str, Any]:
    """The certificate beside a model file, where the model names its hash; otherwise empty."""
    certificate = _read(model)
    return certificate if named == certificate_sha256(certificate) else {}


def _read(model: Path) -> Mapping[str, Any]:
    """The certificate beside a model file; empty where there is none, or none that can be read."""
    try:
        certificate = json.loads(read_regular(model.parent / CERTIFICATE))
    except (OSError, ValueError, RecursionError):
        return {}
    return certificate if isinstance(certificate, dict) else {}


def _verdicts(certificate: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The verdicts of a certificate by precision; the certificate itself is the one in its own."""
    further: Any = certificate.get("precisions")
    named = further.items() if isinstance(further, Mapping) else ()
    found = {name: verdict for name, verdict in named if isinstance(verdict, Mapping)}
    return {**found, str(certificate.get("precision", "float16")): certificate}


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What the choice of a precision depends on.

    Attributes:
        path: the model file.
        named: the hash of the certificate that the model names in its metadata, if any.
        written: the half-precision types in it, such as "fp16".
        unfit: why OpenVINO is not to compute it; None where it may.
    """

    path: Path
    named: str | None
    written: frozenset[str]
    unfit: str | None

    def answer(self, asked: CpuPrecision) -> CpuPrecision:
        """The precision to compute in; `asked` may leave it open.

        Raises:
            ModelLoadError: the precision that is asked for is not proved, or cannot be computed here.
        """
        if asked is CpuPrecision.FLOAT32:
            return asked
        chosen = self._best() if asked is CpuPrecision.AUTO else self._required(asked)
        if chosen is not CpuPrecision.FLOAT32 and self.unfit is not None:
            logger.warning("%s: is computed in float32 by ONNX Runtime: %s", self.path, self.unfit)
            return CpuPrecision.FLOAT32
        return chosen

    def _best(self) -> CpuPrecision:
        if not self.written:
            return CpuPrecision.FLOAT32
        able = [precision for precision, short in SHORT.items() if short in fast_halves()]
        passed = passed_precisions(self.path, self.named)
        found = next((precision for precision in able if precision in passed), CpuPrecision.FLOAT32)
        if find_spec(PACKAGE) is None:
            if found is not CpuPrecision.FLOAT32:
                logger.info(
                    "%s: is computed in float32; this processor computes it faster in %s, which its verdict allows, with "
                    "the package %r, which is not installed; %s",
                    *(self.path, found, PACKAGE, INSTALL),
                )
            return CpuPrecision.FLOAT32
        if able and found is CpuPrecision.FLOAT32:
            logger.info(
                "%s: is computed in float32, as no verdict says that %s is accurate enough, which this processor computes "
                "faster; %s would find out",
                *(self.path, able[0], self._command(able[0])),
            )
        return found

    def _required(self, asked: CpuPrecision) -> CpuPrecision:
        where = f"{self.path}: is to be computed in {asked} on the CPU (--cpu-precision or {PARAMETER})"
        if asked not in passed_precisions(self.path, self.named):
            raise ModelLoadError(
                f"{where}, and no verdict says that this is accurate enough; {self._command(asked)} finds out, "
                "or ask for 'auto'"
            )
        if SHORT[asked] not in computed_halves():
            raise ModelLoadError(f"{where}, and this processor has no arithmetic in {asked}; ask for 'auto' or 'float32'")
        if find_spec(PACKAGE) is None:
            raise ModelLoadError(f"{where}, and the package {PACKAGE!r} is not installed; {INSTALL}")
        return asked

    def _command(self, wanted: CpuPrecision) -> str:
        """The command that proves the precision: for a file of another half-precision type, beside that."""
        own = [precision for precision, short in SHORT.items() if short in self.written]
        types = f"--dtype {wanted}" if wanted in own or not own else f"--dtype {own[0]} --precisions {wanted}"
        return f"`halfserve convert FP32_MODEL --repository REPOSITORY --name NAME {types}`"


def _largest_error(path: Path, precision: CpuPrecision) -> float:
    """The scaled error that the certificate's budget for a precision allows."""
    try:
        allowed = _verdicts(_read(path))[precision]["budget"]["max_scaled_error"]
    except (KeyError, TypeError):
        return USUAL_ERROR
    return float(allowed) if isinstance(allowed, int | float) and allowed > 0 else USUAL_ERROR


class OnnxModels:
    """ONNX files, each in the runtime and precision that suit it."""

    def __init__(self, onnx: OnnxRuntime, openvino: Callable[[Path], OnnxOnOpenVino], trials: TrialCache | None = None) -> None:
        """`openvino` gives the second runtime for a model file, or raises a ModelLoadError where it is not installed.

        `trials` remembers what was measured; without it each load measures.
        """
        self._onnx = onnx
        self._openvino = openvino
        self._trials = trials or TrialCache(None)

    def describe(self, path: Path) -> ModelInterface:
        """See `OnnxRuntime`."""
        return self._onnx.describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy.

        Raises:
            ModelLoadError: see the runtimes; or a precision is asked for that has no verdict, or that this machine cannot
                compute.
        """
        forced = config.backend == OPENVINO_BACKEND
        if not forced and (placement.require_gpu or (placement.use_gpu and why_no_device(placement) is None)):
            return self._onnx.load(path, interface, placement, config)
        own = own_parameter(config, PARAMETER, path)
        asked = placement.cpu_precision if own is None else CpuPrecision(own)
        precision, named = asked, None
        if asked is not CpuPrecision.FLOAT32:
            with open_onnx(path) as file:
                written = frozenset(HALF_TYPES[number] for number in half_types(file.model))
                unfit = None if forced else why_unfit(file.model) or _why_tied(config, path)
                named = next((entry.value for entry in file.model.metadata_props if entry.key == NAME), None)
            precision = _Question(path=path, named=named, written=written, unfit=unfit).answer(asked)
        if forced:
            return self._openvino(path).load_onnx(path, interface, placement, config, precision)
        if precision is CpuPrecision.FLOAT32:
            return self._onnx.load(path, interface, placement, config)
        try:
            samples = read_samples(path, _named(path, named), interface)
            return self._tried(path, interface, placement, config, precision, samples, measure=asked is CpuPrecision.AUTO)
        except _NotInHalfError as reason:
            logger.log(reason.level, "%s: is computed in float32 by ONNX Runtime: %s", path, reason)
        return self._onnx.load(path, interface, placement, config)

    def _tried(
        self,
        path: Path,
        interface: ModelInterface,
        placement: DevicePlacement,
        config: ModelConfig,
        precision: CpuPrecision,
        samples: RecordedSamples | None,
        *,
        measure: bool,
    ) -> Backend:
        """The model in half precision, where a trial has not shown that it is slower so, or that its answers are wrong.

        `samples` are tried, or else a made-up batch. `measure`: whether the faster one is wanted.

        Raises:
            _NotInHalfError: it is to be computed in float32.
        """
        circumstances = [version("halfserve"), ort.__version__, version(PACKAGE), processor_name()]
        settings = [str(precision), str(placement.threads), str(config.max_batch_size)]
        key = verdict_key(path, [*circumstances, *settings])
        result = self._trials.find(key)
        if result is not None:
            said = _judged(result, path, config, precision, measure=measure)
        try:
            half = self._openvino(path).load_onnx(path, interface, placement, config, precision)
        except ModelLoadError as error:
            raise _NotInHalfError(str(error), logging.WARNING) from None
        if result is None:
            scratch = ModelConfig()
            scratch.CopyFrom(config)
            float32 = self._onnx.load(path, interface, placement, scratch)
            result = compared(half, float32, interface, config.max_batch_size, samples)
            if result is None:
                logger.info("%s: is computed in %s; no batch could be made up to measure it", path, precision)
                return half
            self._trials.keep(key, result)
            said = _judged(result, path, config, precision, measure=measure)
        logger.info("%s: is computed in %s (%s)", path, precision, said)
        return half


class _NotInHalfError(Exception):
    """Why a model is computed in float32; `level` is the log's."""

    def __init__(self, reason: str, level: int) -> None:
        super().__init__(reason)
        self.level = level


def _judged(result: TrialResult, path: Path, config: ModelConfig, precision: CpuPrecision, *, measure: bool) -> str:
    """What was measured, in words; the configuration's parameters get it too.

    Raises:
        _NotInHalfError: the answers in half precision are wrong, or slower where the faster ones are wanted.
    """
    allowed = _largest_error(path, precision) * (1 if result.recorded else TRIAL_FACTOR)
    config.parameters[MEASURED].string_value = said = describe(result, precision, config.max_batch_size)
    if result.error > allowed:
        raise _NotInHalfError(f"OpenVINO's answers are wrong here ({said}, {allowed:.2g} allowed)", logging.WARNING)
    if measure and result.float32_ms < result.half_ms:
        raise _NotInHalfError(f"it is faster ({said})", logging.INFO)
    return said


def _why_tied(config: ModelConfig, path: Path) -> str | None:
    """Why only ONNX Runtime can honour a configuration; None where another runtime can too."""
    if config.model_operations.op_library_filename:
        return "its configuration names operators in model_operations"
    settings = read_settings(config, path)
    usual = SessionSettings(intra_op_threads=settings.intra_op_threads, accelerators=settings.accelerators)
    return None if settings == usual else "its configuration has settings of ONNX Runtime"
