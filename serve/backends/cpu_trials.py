"""Trials of half precisions on this processor, in speed and answers, beside float32."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.openvino.fitness import processor_name
from halfserve.serve.engine.backend import Backend, CpuPrecision, DevicePlacement, ModelInterface
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.parameters import MEASURED, PREFIX
from halfserve.serve.engine.errors import InferenceError, InstanceLostError, ModelLoadError
from halfserve.serve.engine.tensors import Array
from halfserve.serve.trials.decisions import Decision, Decisions, Trial, decision_key
from halfserve.serve.trials.recorded_samples import BUDGET_S, FREE_SIZES, RUNS, RecordedSamples, largest_error, made_up

if TYPE_CHECKING:
    from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime

logger = logging.getLogger(__name__)

PACKAGE = "openvino"
SHORT_MS = 999.5  # below this time, three digits are shown
MOST_ROWS = 8  # most rows of a trial's batch
# Made-up inputs resemble the model's own no more than a certificate's adversarial samples, for which it allows this factor.
TRIAL_FACTOR = 5.0
UNMEASURED = "; no batch could be made up to measure it"


@dataclass(frozen=True)
class TrialResult(Decision):
    """Speed and answers of a half precision, beside float32.

    Attributes:
        half_ms: milliseconds of the shortest run in half precision.
        float32_ms: milliseconds of the shortest run in float32.
        error: the largest difference of the answers, divided by the output's largest value; infinite if one is not finite.
        recorded: whether the answers were compared with recorded samples, computed in float32, and not for a made-up batch.
    """

    half_ms: float
    float32_ms: float
    error: float
    recorded: bool = False

    FOLDER = "cpu_precision"

    @classmethod
    def from_json(cls, known: Any) -> TrialResult:
        half_ms, float32_ms, error = (float(known[name]) for name in ("half_ms", "float32_ms", "error"))
        return cls(half_ms, float32_ms, error, known["recorded"] is True)

    def to_json(self) -> Any:
        return asdict(self)


def compared(
    half: Backend, float32: Backend, interface: ModelInterface, rows: int, samples: RecordedSamples | None = None
) -> TrialResult | None:
    """Run both backends in turns on the same batch; None if the model cannot compute a made-up one.

    `rows` is the largest batch, 0 for a model without a batch dimension. With `samples`, the answers in half precision are
    compared with the recorded ones; otherwise a batch is made up.
    """
    batches: Iterable[tuple[Mapping[str, Array], Mapping[str, Array] | None]]
    if samples is None:
        guessed = ({spec.name: made_up(spec, min(rows, MOST_ROWS), size) for spec in interface.inputs} for size in FREE_SIZES)
        batches = ((batch, None) for batch in guessed)
    else:
        batches = [(samples.inputs, samples.answers)]
    for batch, recorded in batches:
        try:
            answers, computed = _run(half, batch)[1], _run(float32, batch)[1]
            error = largest_error(answers, computed if recorded is None else recorded)
            times = _timed(half, float32, batch if recorded is None else _repeated(batch, min(rows, MOST_ROWS)))
        except (InferenceError, InstanceLostError) as failure:
            if isinstance(failure, InstanceLostError) or recorded is not None:
                return TrialResult(math.inf, math.inf, math.inf, recorded is not None)
            continue  # the model may refuse made-up sizes and values
        return TrialResult(*times, error, recorded is not None)
    return None


def _timed(half: Backend, float32: Backend, batch: Mapping[str, Array]) -> tuple[float, float]:
    """Return the milliseconds of the shortest run of each backend."""
    in_half, in_float32 = [], []
    until = time.monotonic() + BUDGET_S
    for _ in range(RUNS):  # in turns, so that other load on the machine affects both
        in_half.append(_run(half, batch)[0])
        in_float32.append(_run(float32, batch)[0])
        pause()
        if time.monotonic() > until:
            break
    return 1e3 * min(in_half), 1e3 * min(in_float32)


def _repeated(batch: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
    """Repeat the batch to `rows` rows; unchanged if `rows` is 0, because a model without rows may have several sizes."""
    return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()} if rows else batch


def _run(backend: Backend, batch: Mapping[str, Array]) -> tuple[float, Mapping[str, Array]]:
    inputs = {name: array.astype(backend.compute_dtype(name)) for name, array in batch.items()}
    started = time.perf_counter()
    answers = backend.run(inputs)
    return time.perf_counter() - started, answers


def recorded_error(backend: Backend, samples: RecordedSamples) -> float:
    """Return the largest difference to recorded answers, divided by the output's largest value; infinite if the model fails."""
    try:
        return largest_error(_run(backend, samples.inputs)[1], samples.answers)
    except (InferenceError, InstanceLostError):
        return math.inf


def describe(result: TrialResult, precision: Any, rows: int, float32_runtime: str) -> str:
    """Describe a measurement in words; `rows` is the model's largest batch, 0 for a model without a batch dimension."""
    batch = f"for a batch of {min(rows, MOST_ROWS)}" if rows else "for a request"
    half, float32 = (f"{ms:.3g}" if ms < SHORT_MS else f"{ms:,.0f}" for ms in (result.half_ms, result.float32_ms))
    times = f"OpenVINO in {precision} {half} ms, {float32_runtime} in float32 {float32} ms {batch}"
    answers = "the answers to recorded samples" if result.recorded else "they"
    return f"{times}; {answers} differ by {result.error:.2g} of the largest value"


@dataclass(frozen=True, kw_only=True)
class CpuModel:
    """A model to load on the CPU.

    Attributes:
        path: path of the model file.
        interface: interface of the file.
        placement: device and CPU settings of the copy.
        config: configuration of the model, to which the measurements are added.
        onnx: loads it in float32, unless its configuration asks for OpenVINO.
        openvino: loads it in half precision.
        asks_for_openvino: whether the configuration leaves no other runtime.
        samples: recorded samples; None if there are none to use.
        allowed: scaled error that the certificate allows for each precision.
    """

    path: Path
    interface: ModelInterface
    placement: DevicePlacement
    config: ModelConfig
    onnx: OnnxRuntime
    openvino: OpenVinoRuntime
    asks_for_openvino: bool
    samples: RecordedSamples | None
    allowed: Mapping[CpuPrecision, float]

    @property
    def float32_runtime(self) -> str:
        """The name of the runtime that computes it in float32."""
        return "OpenVINO" if self.asks_for_openvino else "ONNX Runtime"

    def in_half(self, config: ModelConfig, precision: CpuPrecision) -> Backend:
        return self.openvino.load_onnx(self.path, self.interface, self.placement, config, precision)

    def in_float32(self, config: ModelConfig) -> Backend:
        if self.asks_for_openvino:
            return self.in_half(config, CpuPrecision.FLOAT32)
        return self.onnx.load(self.path, self.interface, self.placement, config)

    @cached_property
    def reference(self) -> Backend:
        """The model in float32, for comparison."""
        return self.in_float32(self.scratch())

    def scratch(self) -> ModelConfig:
        """Copy the configuration, for a backend that may not be used."""
        config = ModelConfig()
        config.CopyFrom(self.config)
        return config


class PrecisionTrial(Trial[TrialResult]):
    """Trial of a half precision: whether its answers are right on this processor, and how fast it is.

    Attributes:
        precision: the precision.
        config: the configuration with which the backend is loaded.
        backend: the model in this precision; None if it is not loaded.
        gain: the time in float32 divided by the time in this precision; 0 without a measurement.
        said: the measurement in words; "" if nothing could be measured.
        refusal: reason why the model is not computed in this precision; None if it may be.
        level: log level of the refusal.
    """

    kind = TrialResult

    def __init__(self, model: CpuModel, precision: CpuPrecision) -> None:
        self._model = model
        self.precision = precision
        self.config = model.scratch()
        self.backend: Backend | None = None
        self.gain = 0.0
        self.said = ""
        self.refusal: str | None = None
        self.level = logging.WARNING

    @property
    def key(self) -> str:
        model = self._model
        circumstances = [ort.__version__, version(PACKAGE), processor_name(), model.float32_runtime]
        given = model.config.parameters.items()
        parameters = sorted((key, value.string_value) for key, value in given if not key.startswith(PREFIX))
        settings = [str(self.precision), str(model.placement.threads), str(model.config.max_batch_size), repr(parameters)]
        return decision_key(model.path, [*circumstances, *settings])

    def decide(self) -> TrialResult | None:
        model = self._model
        half = self.load()
        if half is None:
            return None
        return compared(half, model.reference, model.interface, model.config.max_batch_size, model.samples)

    def load(self) -> Backend | None:
        """Load the model; None if it is refused."""
        try:
            self.backend = self._model.in_half(self.config, self.precision)
        except ModelLoadError as error:
            self.refusal = str(error)
        return self.backend

    def judge(self, result: TrialResult, *, measure: bool) -> None:
        """Judge the precision by a decision. `measure`: whether float32 is preferred if it is faster."""
        model = self._model
        self.gain = result.float32_ms / result.half_ms
        self.said = describe(result, self.precision, model.config.max_batch_size, model.float32_runtime)
        allowed = model.allowed[self.precision] * (1 if result.recorded else TRIAL_FACTOR)
        if result.error > allowed:
            self.refusal = f"OpenVINO's answers are wrong here ({self.said}, {allowed:.2g} allowed)"
        elif measure and result.float32_ms < result.half_ms:
            self.refusal, self.level = f"float32 is faster ({self.said})", logging.INFO

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: refused precisions come first, then the others by their gain."""
        return self.refusal is None, self.gain


def in_best_half(model: CpuModel, precisions: Sequence[CpuPrecision], decisions: Decisions, *, measure: bool) -> Backend | None:
    """Return the model in the fastest of these half precisions; None if no trial shows one that is right and pays.

    The configuration's parameters get the measurements in words. `measure`: whether float32 is preferred if it is faster.
    """
    tried: list[PrecisionTrial] = []
    for precision in precisions:
        trial = PrecisionTrial(model, precision)
        result = decisions.of(trial)
        if result is not None:
            trial.judge(result, measure=measure)
        tried.append(trial)
        # Only the fastest one so far is kept in memory.
        for slower in sorted(tried, key=lambda one: one.rank)[:-1]:
            slower.backend = None
    best = max(tried, key=lambda one: one.rank, default=None)
    if best is not None and best.refusal is None and best.backend is None:
        best.load()
    measured = "; ".join(trial.said for trial in tried if trial.said)
    chosen = None if best is None or best.refusal is not None else best
    if chosen is not None:
        model.config.CopyFrom(chosen.config)
    if measured:
        model.config.parameters[MEASURED].string_value = measured
    computed = f"float32 by {model.float32_runtime}" if chosen is None else chosen.precision
    for trial in tried:
        if trial.refusal is not None:
            logger.log(trial.level, "%s: is computed in %s: %s", model.path, computed, trial.refusal)
    if chosen is None:
        return None
    logger.info("%s: is computed in %s%s", model.path, computed, f" ({chosen.said})" if chosen.said else UNMEASURED)
    return chosen.backend
