"""Trials of ways to compute a model on a CUDA device, in speed and answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnx import TensorProto

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.cuda_errors import reason_of
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime, OnnxRuntimeBackend
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import half_types
from halfserve.serve.backends.onnx_runtime.session_settings import CUDA_WAYS_KEY, PREFER_NHWC, read_settings
from halfserve.serve.backends.onnx_runtime.shared_weights import has_convolutions
from halfserve.serve.engine.backend import Backend, DevicePlacement, ModelInterface
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.batching import few_sizes
from halfserve.serve.engine.config.parameters import MEASURED, REPORTED
from halfserve.serve.engine.cuda_driver import CudaError, cuda_driver
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.tensors import Array
from halfserve.serve.trials.decisions import Decision, Decisions, Trial, decision_key
from halfserve.serve.trials.recorded_samples import BUDGET_S, FREE_SIZES, RUNS, largest_error, made_up

logger = logging.getLogger(__name__)

MOST_ROWS = 32  # most rows of a trial's batch
LOADS_S = 20.0  # no further way is tried after this time, in which each way opens the model once more
GAIN = 0.95  # a way is used that takes at most this part of the time,
# or that keeps the calling thread off the processor: at most so much longer, and at most this part of the processor's time.
AS_FAST, LESS_BUSY = 1.05, 0.8
# The error allowed in answers, as part of an output's largest value; half-precision sums in another order differ by less.
LARGEST_ERROR = 0.05


@dataclass(frozen=True)
class WayCost:
    """The cost of a batch, with its answers.

    Attributes:
        ms: milliseconds of the shortest run.
        busy_ms: milliseconds for which the calling thread kept the processor busy in a run.
    """

    ms: float
    busy_ms: float
    answers: Mapping[str, Array]

    def is_below(self, usual: WayCost) -> bool:
        """Return whether this way is to be used in place of the usual one."""
        frees_processor = self.ms <= AS_FAST * usual.ms and self.busy_ms <= LESS_BUSY * usual.busy_ms
        return self.ms <= GAIN * usual.ms or frees_processor


def measured(backend: Backend, batch: Mapping[str, Array]) -> WayCost:
    """Run a batch RUNS times, or for BUDGET_S: the first runs choose algorithms and record CUDA graphs."""
    inputs = {name: array.astype(backend.compute_dtype(name)) for name, array in batch.items()}
    answers: Mapping[str, Array] = {}
    seconds, busy, until = [], [], time.monotonic() + BUDGET_S
    for _ in range(RUNS):
        began_busy, began = time.thread_time(), time.perf_counter()
        answers = backend.run(inputs)
        seconds.append(time.perf_counter() - began)
        busy.append(time.thread_time() - began_busy)
        pause()
        if time.monotonic() > until:
            break
    return WayCost(1e3 * min(seconds), 1e3 * min(busy), answers)


@dataclass(frozen=True)
class ChosenWays(Decision):
    """The ways that a model is computed in.

    Attributes:
        ways: the ways, in the order of the trials.
        said: the measurements in words.
    """

    ways: tuple[str, ...]
    said: str

    FOLDER = "cuda_ways"

    @classmethod
    def from_json(cls, known: Any) -> ChosenWays:
        return cls(tuple(map(str, known["ways"])), str(known["said"]))

    def to_json(self) -> Any:
        return {"ways": self.ways, "said": self.said}


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """A model to load on a CUDA device."""

    path: Path
    interface: ModelInterface
    placement: DevicePlacement
    config: ModelConfig
    onnx: OnnxRuntime

    def load(self, config: ModelConfig, placement: DevicePlacement) -> Backend:
        """Load a copy as a configuration says, to which the runtime adds its decisions."""
        return self.onnx.load(self.path, self.interface, placement, config)

    def open_ways(self) -> list[str]:
        """Return the ways that the configuration leaves open and that suit the model, in the order in which they are tried."""
        settings = read_settings(self.config, self.path)
        if CUDA_WAYS_KEY in self.config.parameters or settings.accelerators.tensorrt is not None:
            return []
        with open_onnx(self.path) as file:
            convolves, halves = has_convolutions(file.model), half_types(file.model)
        # A model with variable lengths has too many shapes to record. Models with Convs are recorded without a trial.
        batched = self.config.max_batch_size > 0
        may_record = self.interface.is_steady(batched=batched) and not (convolves and few_sizes(self.config))
        suits = {
            "graphs": settings.cuda_graphs is None and may_record,
            "nhwc": convolves and halves == {TensorProto.FLOAT16} and PREFER_NHWC not in settings.accelerators.cuda,
            "copies": settings.cuda_graphs is not False,
            "blocking": not _sleeps(self.placement.device_id),
        }
        return [way for way, does in suits.items() if does]

    def loaded(self, ways: tuple[str, ...]) -> tuple[Backend, ModelConfig]:
        """Load a copy that is computed in these ways on the device; returns it with its own configuration.

        Raises:
            ModelLoadError: the device or the model cannot be used so.
        """
        config = ModelConfig()
        config.CopyFrom(self.config)
        config.parameters[CUDA_WAYS_KEY].string_value = ", ".join(ways) or "none"
        return self.load(config, replace(self.placement, require_gpu=True)), config


class WaysTrial(Trial[ChosenWays]):
    """Trial of the ways that are open: those are chosen that give the usual answers in less time.

    Attributes:
        loaded: the copy in the chosen ways, with its configuration; None before they are chosen.
    """

    kind = ChosenWays

    def __init__(self, model: DeviceModel, ways: Sequence[str]) -> None:
        self._model = model
        self._ways = ways
        self.loaded: tuple[Backend, ModelConfig] | None = None

    @property
    def key(self) -> str:
        config, device_id = self._model.config, self._model.placement.device_id
        given = sorted((key, value.string_value) for key, value in config.parameters.items() if key not in REPORTED)
        optimization = config.optimization.SerializeToString(deterministic=True).hex()
        where = [_device_name(device_id), str(device_id), str(config.max_batch_size)]
        return decision_key(self._model.path, [ort.__version__, *where, repr(given), optimization])

    def decide(self) -> ChosenWays:
        """Try one way after the other on top of the best ones so far. A way that fails, or answers otherwise, is left out."""
        model, until = self._model, time.monotonic() + LOADS_S
        self.loaded = model.loaded(())
        batch, usual = self._usual(self.loaded[0])
        if usual is None:
            return ChosenWays((), "no batch could be made up to measure it")
        chosen: tuple[str, ...] = ()
        said = [f"on CUDA {_in_words(usual)}{_for_batch(model)}"]
        for way in self._ways:
            if time.monotonic() > until:
                said.append(f"{way} not tried in {LOADS_S:g} s")
                continue
            self.loaded = None  # the device need not hold two copies
            try:
                self.loaded = model.loaded((*chosen, way))
                cost = measured(self.loaded[0], batch)
                reason = _why_not(way, self.loaded[0], cost, usual)
            except Exception as error:  # noqa: BLE001  (runtimes have no common exception; the model is computed without this way)
                self.loaded, reason = None, f"fails: {reason_of(error)}"
            said.append(f"{way} {_in_words(cost) if reason is None else reason}")
            if reason is None and cost.is_below(usual):
                usual, chosen = cost, (*chosen, way)
            else:
                self.loaded = None
        if "blocking" in self._ways and "blocking" not in chosen:
            _wake(model.placement.device_id)
        return ChosenWays(chosen, "; ".join(said))

    def _usual(self, backend: Backend) -> tuple[Mapping[str, Array], WayCost | None]:
        """Return a made-up batch and its cost; no cost if the model cannot compute one."""
        model = self._model
        rows = min(model.config.max_batch_size, MOST_ROWS)
        for size in FREE_SIZES:
            batch = {spec.name: made_up(spec, rows, size) for spec in model.interface.inputs}
            try:
                return batch, measured(backend, batch)
            except Exception as error:  # noqa: BLE001  (the model may refuse made-up sizes and values)
                logger.debug("%s: cannot compute a made-up batch: %s", model.path, error)
        return {}, None


def load_in_best_ways(model: DeviceModel, decisions: Decisions) -> Backend:
    """Load a copy in the fastest ways that give the usual answers. The model's configuration gets them, with the figures.

    Raises:
        ModelLoadError: see `OnnxRuntime.load`.
    """
    ways = model.open_ways()
    if not ways:
        return model.load(model.config, model.placement)
    trial = WaysTrial(model, ways)
    try:
        chosen = decisions.of(trial) or ChosenWays((), "")  # it always decides
        backend, config = trial.loaded or model.loaded(chosen.ways)
    except ModelLoadError as error:
        if model.placement.require_gpu:
            raise
        logger.info("%s: its ways to compute on CUDA were not tried (%s)", model.path, error)
        return model.load(model.config, model.placement)
    model.config.CopyFrom(config)
    model.config.parameters[MEASURED].string_value = chosen.said
    how = " and ".join(chosen.ways) or "the usual way"
    logger.info("%s: is computed on CUDA by %s (%s)", model.path, how, chosen.said)
    return backend


def _why_not(way: str, backend: Backend, cost: WayCost, usual: WayCost) -> str | None:
    """Return why a way must not be used; None if it may."""
    records = isinstance(backend, OnnxRuntimeBackend) and backend.records_graphs
    if way in {"graphs", "copies"} and not records:
        return "needs CUDA graphs, which fail or are off" if way == "copies" else "cannot be recorded"
    error = largest_error(cost.answers, usual.answers)
    return f"gives answers that differ by {error:.2g} of the largest value" if error > LARGEST_ERROR else None


def _in_words(cost: WayCost) -> str:
    return f"{cost.ms:.3g} ms ({cost.busy_ms:.2g} ms on the processor)"


def _for_batch(model: DeviceModel) -> str:
    rows = model.config.max_batch_size
    return f" for a batch of {min(rows, MOST_ROWS)}" if rows else " for a request"


def _sleeps(device_id: int) -> bool:
    """Return whether threads sleep already while they wait for a device, which another model's trial has chosen."""
    driver = cuda_driver()
    return driver is None or device_id in driver.blocking


def _wake(device_id: int) -> None:
    driver = cuda_driver()
    if driver is not None:
        with suppress(CudaError):  # it was not changed either
            driver.set_blocking_waits(device_id, on=False)


def _device_name(device_id: int) -> str:
    driver = cuda_driver()
    with suppress(CudaError):
        return "" if driver is None else str(driver.describe(device_id)["name"])
    return ""
