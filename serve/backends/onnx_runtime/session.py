"""Opens ONNX files in ONNX Runtime: fp16 on CUDA, upcast to fp32 on the CPU, with every fallback logged."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnx import TensorProto, helper

from halfserve.files.cuda_products import TF32, product_options
from halfserve.installation import install_hint
from halfserve.nvidia_libraries import load_nvidia_libraries, why_no_cudnn
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe, onnx_trial
from halfserve.serve.backends.onnx_runtime.cuda import (
    RECORDING_LOCK,
    is_lost,
    settle_thread,
    why_not_recorded,
    why_not_without_cudnn,
)
from halfserve.serve.backends.onnx_runtime.cuda_errors import (
    floats_on_cpu,
    is_about_an_option,
    is_about_cudnn,
    missing_kernel,
    reason_of,
)
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import PreparedModel, prepared
from halfserve.serve.backends.onnx_runtime.probe_child import FORMAT_ENTRY, ones
from halfserve.serve.backends.onnx_runtime.session_settings import OptimizationLevel, SessionSettings
from halfserve.serve.backends.onnx_runtime.shared_weights import CONVOLUTIONS, few, on_device
from halfserve.serve.engine.backend import ALLOW_CPU, DevicePlacement
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import InstanceLostError, ModelLoadError
from halfserve.serve.engine.resource_limits import fewer_cores, usable_cores

logger = logging.getLogger(__name__)

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
LOG_NOTHING_BUT_FATAL = 4  # errors are raised, or logged here in one line
Providers = list[tuple[str, dict[str, str]]]
QUICK_S = 200e-6
QUICK_BYTES = 1 << 26  # size of the inputs: larger batches cannot be this fast, and may not fit in memory
RUNS = 5
# Largest file to try: larger models are not quick, and opening them twice is slow.
SMALL_FILE_BYTES = 4 << 20
DENORMALS = "session.set_denormal_as_zero"
# This entry costs nothing: the runtime records the assignment anyway.
RECORD_ENTRY = ("session.record_ep_graph_assignment_info", "1")


class _UnusableDeviceError(Exception):
    """The CUDA provider cannot start; the text is the runtime's."""


@dataclass(frozen=True, kw_only=True)
class OpenSession:
    session: ort.InferenceSession  # the runtime's session
    precision: str  # in words: "fp16", "fp32", "fp32 (TF32 products)" or "fp32 (the fp16 model, upcast)"
    level: OptimizationLevel  # optimization level
    given_names: Mapping[str, str] = field(default_factory=dict)  # the session's name of each renamed input
    records_graphs: bool = False  # whether the session records CUDA graphs
    by_rows: Mapping[int, ort.InferenceSession] = field(default_factory=dict)  # the sessions for these numbers of rows alone

    @property
    def provider(self) -> str:
        """Name of the provider that computes, as the runtime reports it."""
        return str(self.session.get_providers()[0])


@dataclass(frozen=True, kw_only=True)
class SessionOpener:
    path: Path  # the model file
    placement: DevicePlacement  # device and CPU settings of the session
    settings: SessionSettings = field(default_factory=SessionSettings)  # settings in the model's configuration
    probe: CrashProbe | None = None  # checks for crashes; None trusts the model
    # Rows of the largest batch, to choose the number of threads unless configured; None leaves it to the runtime.
    rows: int | None = None
    # Numbers of rows to which the batches of a model with convolutions are padded, in rising order; none for other models.
    sizes: Sequence[int] = ()
    weights: Mapping[str, ort.OrtValue] = field(default_factory=dict)  # weights in the device's memory, by name

    def open(self) -> OpenSession:
        """Open on the CUDA device if there is one and it may be used, otherwise on the CPU.

        An unusable device is logged as a warning.

        Raises:
            ModelLoadError: the runtime refuses the model, it crashes the process, or a required GPU cannot be used.
        """
        ort.set_default_logger_severity(LOG_NOTHING_BUT_FATAL)
        placement = self.placement
        if not placement.use_gpu:
            return self._on_cpu()
        reason = why_no_device(placement)
        if reason is None:
            said = load_nvidia_libraries()
            try:
                opened = self._on_gpu()
            except _UnusableDeviceError as error:
                said = str(error)
            else:
                if opened.provider != CPU:
                    on_cpu = floats_on_cpu(opened.session, self.path)
                    if on_cpu is not None:
                        logger.warning("%s: %s", self.path, on_cpu)
                    return opened
            reason = f"ONNX Runtime cannot use CUDA device {placement.device_id} ({said or 'it does not say why'})"
        elif not placement.require_gpu:
            return self._on_cpu()
        if placement.require_gpu:
            raise ModelLoadError(
                f"{self.path}: a GPU is required, but {reason}; {ALLOW_CPU}, or add CUDA's libraries: {install_hint('cuda')}"
            )
        logger.warning("%s: %s; it runs on the CPU. To add CUDA's libraries: %s", self.path, reason, install_hint("cuda"))
        return self._on_cpu()

    def _on_gpu(self) -> OpenSession:
        settings = self.settings
        if settings.accelerators.tensorrt is not None:
            return self._on_cuda({})
        level = logging.WARNING if settings.cuda_graphs else logging.INFO  # nothing is amiss where graphs are not configured
        if settings.cuda_graphs or (settings.cuda_graphs is None and (self.sizes or "graphs" in settings.cuda_ways)):
            try:
                opened = self._on_cuda({"enable_cuda_graph": "1"})
            except ModelLoadError as error:
                opened = self._without_graphs()
                text = "%s; it runs without CUDA graphs, which take models that run on CUDA as a whole"
                logger.log(level, text, error)
                return opened
            else:
                reason = why_not_recorded(opened.session, "cuda") if opened.provider == CUDA else None
                if reason is None:
                    return replace(opened, records_graphs=opened.provider == CUDA)
                text = "%s: %s, which CUDA graphs would not do for each batch; it runs without them"
                logger.log(level, text, self.path, reason)
                del opened  # frees its memory before another copy is opened
        return self._without_graphs()

    def _without_graphs(self) -> OpenSession:
        """Open a session; for a model with convolutions one per batch size, because each keeps cuDNN's plans of one shape."""
        opened = self._on_cuda({})
        if opened.provider != CUDA or not self.sizes:
            return opened
        weights = self._shared_weights(opened.session)
        opener = replace(self, sizes=(), weights=weights)
        *others, largest = few(self.sizes)
        try:
            if weights:
                del opened  # frees its own copy of the weights
                opened = opener._on_cuda({})  # noqa: SLF001  (of the same class)
            by_rows = {size: opener._on_cuda({}).session for size in others}  # noqa: SLF001  (of the same class)
        except (ModelLoadError, _UnusableDeviceError) as error:
            logger.warning("%s: cannot be opened once for each batch size (%s)", self.path, error)
            return self._on_cuda({})
        by_rows[largest] = opened.session
        text = "%s: runs in a session for each batch size of %s, which share %d weights, as cuDNN's plans are for one size"
        logger.info(text, self.path, ", ".join(map(str, by_rows)), len(weights))
        return replace(opened, by_rows=by_rows)

    def _shared_weights(self, session: ort.InferenceSession) -> Mapping[str, ort.OrtValue]:
        """Return the weights that several sessions can share; none if a convolution runs on the CPU or memory runs out."""
        parts = [part for part in session.get_provider_graph_assignment_info() if part.ep_name == CPU]
        if any(node.op_type in CONVOLUTIONS for part in parts for node in part.get_nodes()):
            return {}
        try:
            return on_device(self.path, self.placement.device_id)
        except RuntimeError as error:  # the runtime's
            logger.warning("%s: its sessions share no weights (%s)", self.path, reason_of(error))
            return {}

    def _on_cuda(self, options: Mapping[str, str]) -> OpenSession:
        device = {"device_id": str(self.placement.device_id)}
        accelerators = self.settings.accelerators
        with open_onnx(self.path) as file:
            own = product_options(file.model)
        providers: Providers = [(CUDA, {**own, **accelerators.cuda, **options, **device}), (CPU, {})]
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
            opened = alone._open(providers, for_gpu=False)  # noqa: SLF001  (of the same class)
            if is_quick(opened.session, self.rows):
                return opened
        return self._open(providers, for_gpu=False)

    def _open(self, providers: Providers, *, for_gpu: bool) -> OpenSession:
        probe = None if self.settings.level is not None or providers[0][0] == TENSORRT else self.probe
        trial = onnx_trial(self.path, providers, self.settings)
        if probe is not None:
            probe.expect(trial)
            pause()
        with prepared(self.path, for_gpu=for_gpu) as model:
            level = self.settings.level or OptimizationLevel.ALL
            if probe is not None:
                pause()
                level = probe.safe_level(trial, model.source)
            pause()
            session = self._session(model, level, providers)
            return OpenSession(
                session=session,
                precision=_in_words(model.precision, session),
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
            self._register_operators(options)
            for name, value in self.weights.items():
                options.add_initializer(name, value)
            with RECORDING_LOCK.opening() if on_gpu else contextlib.nullcontext():
                session = ort.InferenceSession(
                    model.source,
                    options,
                    providers=[name for name, _ in providers],
                    provider_options=[choices for _, choices in providers],
                    enable_fallback=0,  # fallback prints to stdout and moves to the CPU silently
                )
        except ModelLoadError:
            raise
        except Exception as error:
            # The runtime's exceptions have no common base class. RuntimeErrors concern providers, not models.
            if on_gpu and is_about_cudnn(error):
                raise _UnusableDeviceError(why_no_cudnn() or reason_of(error)) from error
            lost = InstanceLostError(reason_of(error)) if on_gpu and is_lost(self.placement.device_id) else None
            if on_gpu and isinstance(error, RuntimeError) and lost is None and not is_about_an_option(error):
                raise _UnusableDeviceError(reason_of(error)) from error
            reason = missing_kernel(error) or reason_of(error)
            raise ModelLoadError(f"{self.path}: ONNX Runtime refuses the model: {reason}") from (lost or error)
        missed = why_not_without_cudnn(session) if on_gpu else None
        if missed is not None:
            raise _UnusableDeviceError(missed)
        return session

    def _register_operators(self, options: Any) -> None:
        for library in self.settings.operator_libraries:
            try:
                options.register_custom_ops_library(library)
            except Exception as error:
                # The runtime's exceptions have no common base class, and their texts name the library's path.
                raise ModelLoadError(
                    f"{self.path}: ONNX Runtime cannot load the operators of {Path(library).name!r}: "
                    f"{reason_of(error).replace(library, Path(library).name)}"
                ) from error

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
        # Spinning threads would take the core from the event loop.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        for key, value in settings.session_entries.items():
            options.add_session_config_entry(key, value)
        options.add_session_config_entry(*FORMAT_ENTRY)
        options.add_session_config_entry(*RECORD_ENTRY)
        return options


def _in_words(precision: str, session: ort.InferenceSession) -> str:
    """Return the precision of a session, with TF32 where float32 products lose digits by it."""
    options = session.get_provider_options().get(CUDA, {})
    has_tf32 = session.get_providers()[0] == CUDA and options.get(TF32) == "1"
    return f"{precision} (TF32 products)" if precision == "fp32" and has_tf32 else precision


def why_no_device(placement: DevicePlacement) -> str | None:
    """Return why the CUDA device of a placement cannot be used; None if it seems to exist."""
    if CUDA not in ort.get_available_providers():
        return "this ONNX Runtime is built without CUDA"
    devices = device_count()
    if placement.device_id >= devices:
        return f"CUDA device {placement.device_id} is not there ({devices} found; is the NVIDIA driver installed?)"
    return None


def may_be_quick(path: Path, placement: DevicePlacement) -> bool:
    """Return whether a trial with one thread pays: threads are not configured, there are several cores, the file is small."""
    return placement.threads == 0 and usable_cores() > 1 and path.stat().st_size <= SMALL_FILE_BYTES


def is_quick(session: ort.InferenceSession, rows: int) -> bool:
    """Return whether the largest batch is too fast to benefit from several threads; False if its size is unknown.

    Threads here do not spin, so that each parallel operator waits for the system to wake a thread: an MLP of 64-256-10 takes 19
    us for 64 rows on one thread, and 30 us on two. The session has one thread.
    """
    inputs = session.get_inputs()
    if any(not isinstance(size, int) for value in inputs for size in value.shape[1:]):
        return False
    batched = all(value.shape and not isinstance(value.shape[0], int) for value in inputs)
    if not batched and any(not isinstance(size, int) for value in inputs for size in value.shape):
        return False
    row = {value.name: ones(value) for value in inputs}
    if rows * sum(array.nbytes for array in row.values()) > QUICK_BYTES:
        return False
    return _quickest_s(session, {value.name: ones(value, rows) for value in inputs}) <= QUICK_S


def _quickest_s(session: ort.InferenceSession, feeds: dict[str, Any]) -> float:
    quickest = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        try:
            session.run(None, feeds)
        except Exception:  # noqa: BLE001  (the model rejects ones)
            return float("inf")
        took = time.perf_counter() - started
        quickest = min(quickest, took)
        if took > RUNS * QUICK_S:
            break
    return quickest


@functools.cache
def keep_to_own_threads() -> None:
    """Open the process's first session, without flush-to-zero.

    The first session applies `session.set_denormal_as_zero` also to the thread that opens it, and later threads inherit it: one
    model's answers would depend on another's setting.
    """
    number = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "nothing", number[:1], number[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def warn_if_in_vain(session: ort.InferenceSession, path: Path) -> None:
    """Warn if flush-to-zero has no effect because the session has no threads of its own."""
    if session.get_session_options().intra_op_num_threads == 1:
        logger.warning("%s: %s has no effect with one thread; set intra_op_thread_count to 2 or more", path, DENORMALS)


def nodes_by_provider(session: ort.InferenceSession) -> str:
    """Return node counts such as "CUDAExecutionProvider=31, CPUExecutionProvider=2", most first; "" without nodes.

    The session must be opened with RECORD_ENTRY. Nodes are counted before fusion.
    """
    counts: Counter[str] = Counter()
    for part in session.get_provider_graph_assignment_info():
        counts[str(part.ep_name)] += len(part.get_nodes())
    return ", ".join(f"{name}={count}" for name, count in counts.most_common())
