"""Chooses the runtime of an ONNX file, and on the CPU its precision.

On a CUDA device, ONNX Runtime computes it. On the CPU, OpenVINO computes it in half precision if its certificate has a passed
verdict for that precision and the processor has the arithmetic; otherwise ONNX Runtime, which takes every model, computes it in
float32.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfserve.installation import install_hint
from halfserve.protos.certificates import NAME, certificate_sha256
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.cpu_trials import PACKAGE, CpuModel, in_best_half, recorded_error
from halfserve.serve.backends.cuda_trials import DeviceModel, load_in_best_ways
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import HALF_TYPES, half_types
from halfserve.serve.backends.onnx_runtime.session import why_no_device
from halfserve.serve.backends.onnx_runtime.session_settings import SessionSettings, read_settings
from halfserve.serve.backends.openvino.fitness import computed_halves, fast_halves, why_unfit
from halfserve.serve.engine.backend import (
    OPENVINO_BACKEND,
    Backend,
    CpuPrecision,
    DevicePlacement,
    ModelInterface,
)
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import read_certificate
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.trials.decisions import Decisions
from halfserve.serve.trials.recorded_samples import read_samples

if TYPE_CHECKING:
    from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime

logger = logging.getLogger(__name__)

PARAMETER = "halfserve.cpu_precision"
SHORT = {CpuPrecision.BFLOAT16: "bf16", CpuPrecision.FLOAT16: "fp16"}
INSTALL = install_hint(PACKAGE)
USUAL_ERROR = 0.04  # bfloat16's budget if a certificate has none


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
                "%s: is computed in float32. This processor is faster in %s, but no certificate says that the model is "
                "accurate enough in it; to check that, run %s",
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
        place = [str(self.path)]
        if self.path.parent.name.isdigit():  # the folder of a version
            folder = self.path.parent.parent
            place = ["--repository", str(folder.parent), "--name", folder.name]
        return f"`halfserve convert FP32_MODEL {shlex.join(place)} {types}` (FP32_MODEL: the file it was converted from)"


def _allowed_errors(path: Path) -> dict[CpuPrecision, float]:
    """Return the scaled error that the certificate allows for each precision; for float32 that of its own precision."""
    certificate = _read(path)
    verdicts = {**_verdicts(certificate), CpuPrecision.FLOAT32: certificate}
    return {precision: _allowed_error(verdicts.get(precision, {})) for precision in (CpuPrecision.FLOAT32, *SHORT)}


def _allowed_error(verdict: Mapping[str, Any]) -> float:
    try:
        allowed = verdict["budget"]["max_scaled_error"]
    except (KeyError, TypeError):
        return USUAL_ERROR
    return float(allowed) if isinstance(allowed, int | float) and allowed > 0 else USUAL_ERROR


class OnnxModels:
    """Runs each ONNX file in the runtime and precision that suit it."""

    def __init__(
        self,
        onnx: OnnxRuntime,
        openvino: Callable[[Path], OpenVinoRuntime],
        decisions: Decisions,
    ) -> None:
        """`openvino` returns the second runtime for a model file, or raises a ModelLoadError if it is not installed.

        `decisions` remembers in which precision, or way on CUDA, a model is fastest.
        """
        self._onnx = onnx
        self._openvino = openvino
        self._decisions = decisions

    def describe(self, path: Path) -> ModelInterface:
        return self._onnx.describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        """Load one copy.
        Raises ModelLoadError: see the runtimes; or the requested precision has no verdict, or this machine cannot compute it.
        """
        forced = config.backend == OPENVINO_BACKEND
        if not forced and (placement.require_gpu or (placement.use_gpu and why_no_device(placement) is None)):
            on_device = DeviceModel(path=path, interface=interface, placement=placement, config=config, onnx=self._onnx)
            return load_in_best_ways(on_device, self._decisions)
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
        model = CpuModel(
            path=path,
            interface=interface,
            placement=placement,
            config=config,
            onnx=self._onnx,
            openvino=self._openvino(path),
            asks_for_openvino=forced,
            samples=read_samples(path, _named(path, named), interface),
            allowed=_allowed_errors(path),
        )
        backend = in_best_half(model, halves, self._decisions, measure=asked is CpuPrecision.AUTO)
        if backend is None:
            backend = model.in_float32(config)
            if forced:
                _require_right(backend, model)
        return backend


def _require_right(backend: Backend, model: CpuModel) -> None:
    """Check OpenVINO's answers in float32 to recorded samples, if the configuration leaves no other runtime.
    Raises ModelLoadError: the answers are wrong.
    """
    if model.samples is None:
        return
    error, allowed = recorded_error(backend, model.samples), model.allowed[CpuPrecision.FLOAT32]
    if error > allowed:
        raise ModelLoadError(
            f"{model.path}: OpenVINO's answers to recorded samples are wrong here: computed in {backend.precision}, they "
            f"differ by {error:.2g} of the largest value, {allowed:.2g} allowed; remove backend: {OPENVINO_BACKEND!r} from its "
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
