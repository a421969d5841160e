"""Open an ONNX file in ONNX Runtime: fp16 on CUDA, upcast to fp32 on the CPU, and never one for the other unsaid."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort

from serve.backends.cores import fewer_cores
from serve.backends.onnx_runtime.cuda_graphs import why_not_recorded
from serve.backends.onnx_runtime.cuda_neighbours import TURNS, settle_thread
from serve.backends.onnx_runtime.denormals import KEY as DENORMALS
from serve.backends.onnx_runtime.denormals import keep_to_own_threads
from serve.backends.onnx_runtime.node_placement import RECORD_ENTRY
from serve.backends.onnx_runtime.onnx_preparation import PreparedModel, prepared
from serve.backends.onnx_runtime.optimization_level import OptimizationLevel
from serve.backends.onnx_runtime.probe.crash_probe import CrashProbe, Trial
from serve.backends.onnx_runtime.probe.probe_child import FORMAT_ENTRY
from serve.backends.onnx_runtime.session_settings import SessionSettings
from serve.backends.onnx_runtime.thread_choice import is_quick, may_be_quick
from serve.backends.runtime_errors import is_about_an_option, reason_of
from serve.engine.backend import DevicePlacement
from serve.engine.background_threads import pause
from serve.engine.cuda_driver import device_count
from serve.engine.errors import ModelLoadError, is_device_lost

logger = logging.getLogger(__name__)

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
LOG_NOTHING_BUT_FATAL = 4  # what fails is raised, or said below in one line
Providers = list[tuple[str, dict[str, str]]]
_preloading = threading.Lock()  # the process has one stdout: of two that redirect it, the last leaves it as the first had it


class _UnusableDeviceError(Exception):
    """The runtime has the CUDA provider, and cannot start it; the text is the runtime's."""


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    """A session, and what it computes in.

    Attributes:
        session: the runtime's own.
        precision: in words: "fp16", "fp32", or "fp32 (the fp16 model, upcast)".
        level: how far the runtime was allowed to rewrite the model.
        given_names: the session's names of inputs that are called otherwise in the model file.
        records_graphs: it was opened to record CUDA graphs.
    """

    session: ort.InferenceSession
    precision: str
    level: OptimizationLevel
    given_names: Mapping[str, str] = field(default_factory=dict)
    records_graphs: bool = False

    @property
    def provider(self) -> str:
        """Where it computes, as the runtime reports it."""
        return str(self.session.get_providers()[0])


@dataclass(frozen=True, kw_only=True)
class SessionOpener:
    """Opens model files, each in the same way.

    Attributes:
        path: the model file.
        placement: where it is to run.
        settings: what its configuration says.
        probe: finds out whether the model ends the process; None takes it that it does not.
        rows: of the largest batch, which decides on threads where nobody else does; None leaves them to the runtime.
    """

    path: Path
    placement: DevicePlacement
    settings: SessionSettings = field(default_factory=SessionSettings)
    probe: CrashProbe | None = None
    rows: int | None = None

    def open(self) -> OpenSession:
        """Open on the CUDA device where there is one and it may be used, and on the CPU otherwise.

        A device that the runtime cannot use (its libraries are missing, say) is named in a warning.

        Raises:
            ModelLoadError: the runtime refuses the model, it ends the process, or a GPU is required and cannot be used.
        """
        ort.set_default_logger_severity(LOG_NOTHING_BUT_FATAL)
        placement = self.placement
        if not placement.use_gpu:
            return self._on_cpu()
        reason = _why_no_device(placement)
        if reason is None:
            said = _preload_cuda()
            try:
                opened = self._on_gpu()
            except _UnusableDeviceError as error:
                said = str(error)
            else:
                if opened.provider != CPU:
                    return opened
            reason = f"ONNX Runtime cannot use CUDA device {placement.device_id} ({said or 'it does not say why'})"
        elif not placement.require_gpu:
            return self._on_cpu()
        if placement.require_gpu:
            raise ModelLoadError(
                f"{self.path}: a GPU is required, but {reason}; pip install 'halfserve[cuda]' or allow the CPU"
            )
        logger.warning("%s: %s; it runs on the CPU. To use the GPU: pip install 'halfserve[cuda]'", self.path, reason)
        return self._on_cpu()

    def _on_gpu(self) -> OpenSession:
        if self.settings.cuda_graphs and self.settings.accelerators.tensorrt is None:
            try:
                opened = self._on_cuda({"enable_cuda_graph": "1"})
            except ModelLoadError as error:
                opened = self._on_cuda({})
                logger.warning("%s; it runs without CUDA graphs, which take models that run on CUDA as a whole", error)
                return opened
            else:
                reason = why_not_recorded(opened.session, "cuda") if opened.provider == CUDA else None
                if reason is None:
                    return replace(opened, records_graphs=opened.provider == CUDA)
                logger.warning(
                    "%s: %s, which CUDA graphs would not do for each batch; it runs without them", *(self.path, reason)
                )
                del opened  # two copies need twice the memory
        return self._on_cuda({})

    def _on_cuda(self, options: Mapping[str, str]) -> OpenSession:
        device = {"device_id": str(self.placement.device_id)}
        accelerators = self.settings.accelerators
        providers: Providers = [(CUDA, {**accelerators.cuda, **options, **device}), (CPU, {})]
        if accelerators.tensorrt is None:
            return self._open(providers, for_gpu=True)
        try:
            opened = self._open([(TENSORRT, {**accelerators.tensorrt, **device}), *providers], for_gpu=True)
        except _UnusableDeviceError as error:
            logger.warning("%s: ONNX Runtime cannot use TensorRT (%s); the model runs on CUDA", self.path, error)
            return self._open(providers, for_gpu=True)
        if opened.provider == CUDA:
            logger.warning("%s: ONNX Runtime cannot use TensorRT (is it installed?); the model runs on CUDA", self.path)
        return opened

    def _on_cpu(self) -> OpenSession:
        providers: Providers = [(CPU, {})]
        if self.rows is not None and self.settings.intra_op_threads is None and may_be_quick(self.path, self.placement):
            alone = replace(self, placement=replace(self.placement, threads=1))
            opened = alone._open(providers, for_gpu=False)  # noqa: SLF001  (another opener of the same file)
            if is_quick(opened.session, self.rows):
                return opened
        return self._open(providers, for_gpu=False)

    def _open(self, providers: Providers, *, for_gpu: bool) -> OpenSession:
        probe = None if self.settings.level is not None or providers[0][0] == TENSORRT else self.probe
        trial = Trial(path=self.path, providers=providers, settings=self.settings)
        if probe is not None:
            probe.expect(trial)
            pause()
        with prepared(self.path, for_gpu=for_gpu) as model:
            level = self.settings.level or OptimizationLevel.ALL
            if probe is not None:
                pause()
                level = probe.safe_level(trial, model.source)
            pause()
            return OpenSession(
                session=self._session(model, level, providers),
                precision=model.precision,
                level=level,
                given_names=model.given_names,
            )

    def _session(self, model: PreparedModel, level: OptimizationLevel, providers: Providers) -> ort.InferenceSession:
        if self.settings.session_entries.get(DENORMALS) == "1":
            keep_to_own_threads()
        on_gpu = providers[0][0] != CPU
        if on_gpu:
            settle_thread(self.placement.device_id)
        try:
            options = self._options(level)
            with TURNS.opening() if on_gpu else contextlib.nullcontext():
                session = ort.InferenceSession(
                    model.source,
                    options,
                    providers=[name for name, _ in providers],
                    provider_options=[choices for _, choices in providers],
                    enable_fallback=0,  # it would print to stdout, and go to the CPU unsaid, whatever the provider complains of
                )
        except Exception as error:
            # The runtime's exceptions have no common class of their own. RuntimeErrors are about providers, not about models.
            if on_gpu and isinstance(error, RuntimeError) and not (is_about_an_option(error) or is_device_lost(error)):
                raise _UnusableDeviceError(reason_of(error)) from error
            raise ModelLoadError(f"{self.path}: ONNX Runtime refuses the model: {reason_of(error)}") from error
        return session

    def _options(self, level: OptimizationLevel) -> Any:
        settings = self.settings
        options = ort.SessionOptions()
        options.log_severity_level = LOG_NOTHING_BUT_FATAL
        options.graph_optimization_level = ort.GraphOptimizationLevel(level.value)
        threads = self.placement.threads if settings.intra_op_threads is None else settings.intra_op_threads
        options.intra_op_num_threads = threads or fewer_cores()
        options.inter_op_num_threads = settings.inter_op_threads or fewer_cores()
        if settings.parallel:
            options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.enable_cpu_mem_arena = settings.memory_arena
        options.enable_mem_pattern = settings.memory_pattern and not settings.parallel
        # Threads that spin while they wait take the core from the event loop.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        for key, value in settings.session_entries.items():
            options.add_session_config_entry(key, value)
        options.add_session_config_entry(*FORMAT_ENTRY)
        options.add_session_config_entry(*RECORD_ENTRY)
        return options


def _why_no_device(placement: DevicePlacement) -> str | None:
    if CUDA not in ort.get_available_providers():
        return "this ONNX Runtime is built without CUDA"
    devices = device_count()
    if placement.device_id >= devices:
        return f"CUDA device {placement.device_id} is not there ({devices} found; is the NVIDIA driver installed?)"
    return None


def _preload_cuda() -> str:
    """Find CUDA and cuDNN where pip installed them, once; returns the first line that the runtime prints about it, if any."""
    with _preloading:
        return _preloaded()


@cache
def _preloaded() -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    return printed.getvalue().strip().split("\n")[0]
