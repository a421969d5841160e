"""Chooses the runtime of an ONNX file, and on the CPU its precision.

On a CUDA device, ONNX Runtime computes it. On the CPU, OpenVINO computes it in half precision if its certificate has a passed
verdict for that precision and the processor has the arithmetic; otherwise ONNX Runtime, which takes every model, computes it in
float32.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnxruntime as ort

from halfserve.installation import install_hint
from halfserve.protos.certificates import NAME, certificate_sha256
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.cpu_trials import (
    RecordedSamples,
    TrialCache,
    TrialResult,
    compared,
    describe,
    read_samples,
    recorded_error,
)
from halfserve.serve.backends.cuda_trials import CudaTrials, DeviceModel
from halfserve.serve.backends.onnx_runtime.crash_probe import verdict_key
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import HALF_TYPES, half_types
from halfserve.serve.backends.onnx_runtime.session import why_no_device
from halfserve.serve.backends.onnx_runtime.session_settings import SessionSettings, read_settings
from halfserve.serve.backends.openvino.fitness import computed_halves, fast_halves, processor_name, why_unfit
from halfserve.serve.engine.backend import (
    OPENVINO_BACKEND,
    Backend,
    CpuPrecision,
    DevicePlacement,
    ModelInterface,
    OnnxOnOpenVino,
)
from halfserve.serve.engine.config.parameters import MEASURED, PREFIX, own_parameter
from halfserve.serve.engine.disk_files import read_certificate
from halfserve.serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

PARAMETER = "halfserve.cpu_precision"
SHORT = {CpuPrecision.BFLOAT16: "bf16", CpuPrecision.FLOAT16: "fp16"}
PACKAGE = "openvino"
INSTALL = install_hint(PACKAGE)
USUAL_ERROR = 0.04  # bfloat16's budget if a certificate has none
# Made-up inputs resemble the model's own no more than a certificate's adversarial samples, for which it allows this factor.
TRIAL_FACTOR = 5.0
UNMEASURED = "; no batch could be made up to measure it"


def passed_precisions(model: Path, named: str | None) -> frozenset[str]:
    """Return the half precisions, such as "bfloat16", that the certificate of a model file found accurate enough.

    A certificate's own verdict is about its `precision` ("float16" by default). `precisions` may hold further verdicts, as a
    mapping from a precision to an object with `passed`. model_control/certificate_check.py compares the files with the
    certificate. A certificate of another hash than `named`, which the model has in its metadata, proves nothing.
    """
    verdicts = _verdicts(_named(model, named))
    return frozenset(name for name, verdict in verdicts.items() if verdict.get("passed") is True)


def _named(model: Path, named: str | None) -> Mapping[str, Any]:
    """Return the certificate of a model file, if the model names its hash; otherwise an empty one."""
    certificate = _read(model)
    return certificate if named == certificate_sha256(certificate) else {}


def _read(model: Path) -> Mapping[str, Any]:
    """Return the certificate in or beside a model file; empty if there is none, or none that can be read."""
    try:
        found = read_certificate(model)
        certificate = json.loads(b"" if found is None else found.content)
    except (OSError, ValueError, RecursionError):
        return {}
    return certificate if isinstance(certificate, dict) else {}


def _verdicts(certificate: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the verdicts of a certificate by precision; the certificate itself is the verdict for its own precision."""
    further: Any = certificate.get("precisions")
    named = further.items() if isinstance(further, Mapping) else ()
    found = {name: verdict for name, verdict in named if isinstance(verdict, Mapping)}
    return {**found, str(certificate.get("precision", "float16")): certificate}


@dataclass(frozen=True, kw_only=True)
class _Question:
    """The facts that decide in which precision a model is computed."""

    path: Path  # path of the model file
    named: str | None  # hash of the certificate that the model names in its metadata, if any
    written: frozenset[str]  # half-precision types in the file, such as "fp16"
    unfit: str | None  # reason why OpenVINO must not compute it; None if it may

    def answer(self, asked: CpuPrecision) -> Sequence[CpuPrecision]:
        """Return the half precisions in which the model may be computed here; none for float32. `asked` may be AUTO.
        Raises ModelLoadError: the requested precision is not proved, or cannot be computed here.
        """
        if asked is CpuPrecision.FLOAT32:
            return ()
        allowed = self._proved() if asked is CpuPrecision.AUTO else [self._required(asked)]
        if allowed and self.unfit is not None:
            logger.warning("%s: is computed in float32 by ONNX Runtime: %s", self.path, self.unfit)
            return ()
        return allowed

    def _proved(self) -> Sequence[CpuPrecision]:
        if not self.written:
            return ()
        able = [precision for precision, short in SHORT.items() if short in fast_halves()]
        passed = passed_precisions(self.path, self.named)
        found = [precision for precision in able if precision in passed]
        if find_spec(PACKAGE) is None:
            if found:
                logger.info(
                    "%s: is computed in float32; this processor computes it faster in %s, which its verdict allows, with "
                    "the package %r, which is not installed; %s",
                    *(self.path, " or ".join(found), PACKAGE, INSTALL),
                )
            return ()
        if able and not found:
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
        """Return the command that proves the precision: for a file of another half-precision type, in addition to that type."""
        own = [precision for precision, short in SHORT.items() if short in self.written]
        types = f"--dtype {wanted}" if wanted in own or not own else f"--dtype {own[0]} --precisions {wanted}"
        in_repository = self.path.parent.name.isdigit()  # the folder of a version
        place = "--repository REPOSITORY --name NAME" if in_repository else "MODEL.onnx"
        return f"`halfserve convert FP32_MODEL {place} {types}`"


def _largest_error(path: Path, precision: CpuPrecision) -> float:
    """Return the scaled error that the certificate allows for a precision; for float32 that of its own precision."""
    certificate = _read(path)
    verdict = certificate if precision is CpuPrecision.FLOAT32 else _verdicts(certificate).get(precision, {})
    try:
        allowed = verdict["budget"]["max_scaled_error"]
    except (KeyError, TypeError):
        return USUAL_ERROR
    return float(allowed) if isinstance(allowed, int | float) and allowed > 0 else USUAL_ERROR


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A copy of a model to load on the CPU."""

    path: Path  # path of the model file
    interface: ModelInterface  # interface of the file
    placement: DevicePlacement  # device and CPU settings of the copy
    config: ModelConfig  # configuration of the model, to which the measurements are added
    in_half: Callable[[ModelConfig, CpuPrecision], Backend]  # loads the model in a half precision
    in_float32: Callable[[ModelConfig], Backend]  # loads the model in float32
    float32_runtime: str  # name of the runtime that computes it in float32
    samples: RecordedSamples | None  # recorded samples; None if there are none to use

    @cached_property
    def reference(self) -> Backend:
        """The model in float32, for comparison."""
        return self.in_float32(self.scratch())

    def key(self, precision: CpuPrecision) -> str:
        """Return a key that is equal for trials with equal results."""
        circumstances = [version("halfserve"), ort.__version__, version(PACKAGE), processor_name(), self.float32_runtime]
        given = self.config.parameters.items()
        parameters = sorted((key, value.string_value) for key, value in given if not key.startswith(PREFIX))
        settings = [str(precision), str(self.placement.threads), str(self.config.max_batch_size), repr(parameters)]
        return verdict_key(self.path, [*circumstances, *settings])

    def scratch(self) -> ModelConfig:
        """Copy the configuration, for a backend that may not be used."""
        config = ModelConfig()
        config.CopyFrom(self.config)
        return config


@dataclass(eq=False)
class _Candidate:
    """A half precision in which a model may be computed."""

    precision: CpuPrecision  # the precision
    config: ModelConfig  # the configuration with which the backend is loaded
    backend: Backend | None = None  # the model in this precision; None if it is not loaded
    gain: float = 0.0  # the time in float32 divided by the time in this precision; 0 without a measurement
    said: str = ""  # the measurement in words; "" if nothing could be measured
    refusal: str | None = None  # reason why it is not computed in this precision; None if it may be
    level: int = logging.WARNING  # log level of the refusal

    def load(self, copy: _Copy) -> Backend | None:
        """Load the model; None if it is refused."""
        try:
            self.backend = copy.in_half(self.config, self.precision)
        except ModelLoadError as error:
            self.refusal = str(error)
        return self.backend

    def judge(self, result: TrialResult, copy: _Copy, *, measure: bool) -> None:
        """Judge the precision by a trial. `measure`: whether float32 is preferred if it is faster."""
        self.gain = result.float32_ms / result.half_ms
        self.said = describe(result, self.precision, copy.config.max_batch_size, copy.float32_runtime)
        allowed = _largest_error(copy.path, self.precision) * (1 if result.recorded else TRIAL_FACTOR)
        if result.error > allowed:
            self.refusal = f"OpenVINO's answers are wrong here ({self.said}, {allowed:.2g} allowed)"
        elif measure and result.float32_ms < result.half_ms:
            self.refusal, self.level = f"float32 is faster ({self.said})", logging.INFO


def _gain(candidate: _Candidate) -> tuple[bool, float]:
    """Return the sort key of candidates: refused ones come first, then the others by their gain."""
    return candidate.refusal is None, candidate.gain


class OnnxModels:
    """Runs each ONNX file in the runtime and precision that suit it."""

    def __init__(
        self,
        onnx: OnnxRuntime,
        openvino: Callable[[Path], OnnxOnOpenVino],
        trials: TrialCache | None = None,
        cuda: CudaTrials | None = None,
    ) -> None:
        """`openvino` returns the second runtime for a model file, or raises a ModelLoadError if it is not installed.

        `trials` caches measurements on the CPU; without it each load measures again. `cuda` does the same on CUDA devices.
        """
        self._cuda = cuda or CudaTrials()
        self._onnx = onnx
        self._openvino = openvino
        self._trials = trials or TrialCache(None)

    def describe(self, path: Path) -> ModelInterface:
        return self._onnx.describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy.
        Raises ModelLoadError: see the runtimes; or the requested precision has no verdict, or this machine cannot compute it.
        """
        forced = config.backend == OPENVINO_BACKEND
        if not forced and (placement.require_gpu or (placement.use_gpu and why_no_device(placement) is None)):
            model = DeviceModel(
                path=path,
                interface=interface,
                placement=placement,
                config=config,
                load=lambda config, placement: self._onnx.load(path, interface, placement, config),
            )
            return self._cuda.load(model)
        forced = forced or _is_accelerated(config, path)
        own = own_parameter(config, PARAMETER, path)
        asked = placement.cpu_precision if own is None else CpuPrecision(own)
        if not forced and asked is CpuPrecision.FLOAT32:
            return self._onnx.load(path, interface, placement, config)
        with open_onnx(path) as file:
            written = frozenset(HALF_TYPES[number] for number in half_types(file.model))
            unfit = None if forced else why_unfit(file.model) or _why_tied(config, path)
            named = next((entry.value for entry in file.model.metadata_props if entry.key == NAME), None)
        halves = _Question(path=path, named=named, written=written, unfit=unfit).answer(asked)
        if not forced and not halves:
            return self._onnx.load(path, interface, placement, config)
        openvino = self._openvino(path)
        copy = _Copy(
            path=path,
            interface=interface,
            placement=placement,
            config=config,
            in_half=lambda config, precision: openvino.load_onnx(path, interface, placement, config, precision),
            in_float32=lambda config: (
                openvino.load_onnx(path, interface, placement, config, CpuPrecision.FLOAT32)
                if forced
                else self._onnx.load(path, interface, placement, config)
            ),
            float32_runtime="OpenVINO" if forced else "ONNX Runtime",
            samples=read_samples(path, _named(path, named), interface),
        )
        backend = self._in_half(copy, halves, measure=asked is CpuPrecision.AUTO)
        if backend is None:
            backend = copy.in_float32(config)
            if forced:
                _require_right(backend, copy)
        return backend

    def _in_half(self, copy: _Copy, precisions: Sequence[CpuPrecision], *, measure: bool) -> Backend | None:
        """Return the model in the fastest of these half precisions; None if no trial shows one that is right and pays.

        The configuration's parameters get the measurements in words. `measure`: whether float32 is preferred if it is faster.
        """
        tried: list[_Candidate] = []
        for precision in precisions:
            tried.append(self._tried(copy, precision, measure=measure))
            # Only the fastest one so far is kept in memory.
            for slower in sorted(tried, key=_gain)[:-1]:
                slower.backend = None
        best = max(tried, key=_gain, default=None)
        if best is not None and best.refusal is None and best.backend is None:
            best.load(copy)
        measured = "; ".join(candidate.said for candidate in tried if candidate.said)
        chosen = None if best is None or best.refusal is not None else best
        if chosen is not None:
            copy.config.CopyFrom(chosen.config)
        if measured:
            copy.config.parameters[MEASURED].string_value = measured
        computed = f"float32 by {copy.float32_runtime}" if chosen is None else chosen.precision
        for candidate in tried:
            if candidate.refusal is not None:
                logger.log(candidate.level, "%s: is computed in %s: %s", copy.path, computed, candidate.refusal)
        if chosen is None:
            return None
        logger.info("%s: is computed in %s%s", copy.path, computed, f" ({chosen.said})" if chosen.said else UNMEASURED)
        return chosen.backend

    def _tried(self, copy: _Copy, precision: CpuPrecision, *, measure: bool) -> _Candidate:
        """Return a half precision with its trial, which may be cached from an earlier load."""
        candidate = _Candidate(precision, copy.scratch())
        key = copy.key(precision)
        result = self._trials.find(key)
        if result is None and (half := candidate.load(copy)) is not None:
            result = compared(half, copy.reference, copy.interface, copy.config.max_batch_size, copy.samples)
            if result is not None:
                self._trials.keep(key, result)
        if result is not None:
            candidate.judge(result, copy, measure=measure)
        return candidate


def _require_right(backend: Backend, copy: _Copy) -> None:
    """Check OpenVINO's answers in float32 to recorded samples, if the configuration leaves no other runtime.
    Raises ModelLoadError: the answers are wrong.
    """
    if copy.samples is None:
        return
    error, allowed = recorded_error(backend, copy.samples), _largest_error(copy.path, CpuPrecision.FLOAT32)
    if error > allowed:
        raise ModelLoadError(
            f"{copy.path}: OpenVINO's answers to recorded samples are wrong here: computed in {backend.precision}, they differ "
            f"by {error:.2g} of the largest value, {allowed:.2g} allowed; remove backend: {OPENVINO_BACKEND!r} from its "
            "configuration, and the parameter HINT_BF16 if it is there"
        )


def _is_accelerated(config: ModelConfig, path: Path) -> bool:
    """Return whether Triton's accelerator "openvino" is configured and can take effect; warns of one that has no effect."""
    found = False
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name != PACKAGE:
            reason = f"the one that is known is {PACKAGE!r}"
        elif find_spec(PACKAGE) is None:
            reason = f"the package {PACKAGE!r} is not installed; {INSTALL}"
        else:
            with open_onnx(path) as file:
                reason = why_unfit(file.model) or _why_tied(config, path) or ""
        found = found or not reason
        if reason:
            logger.warning("%s: cpu_execution_accelerator %r has no effect: %s", path, accelerator.name, reason)
    return found


def _why_tied(config: ModelConfig, path: Path) -> str | None:
    """Return why only ONNX Runtime can follow a configuration; None if another runtime can too."""
    if config.model_operations.op_library_filename:
        return "its configuration names operators in model_operations"
    settings = read_settings(config, path)
    usual = SessionSettings(
        intra_op_threads=settings.intra_op_threads, accelerators=settings.accelerators, cuda_ways=settings.cuda_ways
    )
    return None if settings == usual else "its configuration has settings of ONNX Runtime"
