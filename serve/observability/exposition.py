"""The answer to a Prometheus scrape: the figures of the server, its models, its process and its machine.

Nothing is collected between two scrapes: figures are read from the engine's own counters.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import platform
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from halfserve.compiled_build import build_in_use
from halfserve.serve.engine.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from halfserve.serve.engine.inference_core import ON_DEMAND, InferenceCore
from halfserve.serve.engine.model_statistics import ServerFigures, zeros
from halfserve.serve.observability.metrics import (
    CONTENT_TYPE,
    MetricTexts,
    histogram_metric,
    metric_of,
    state_metric,
    summary_metrics,
)
from halfserve.serve.observability.model_metrics import model_metrics

logger = logging.getLogger(__name__)

TOGETHER = 8  # number of models whose figures are written at a time, in some milliseconds
STATES_TOGETHER = 256  # number of versions whose states are written at a time, in 8 us each
REFUSALS = zeros(
    FailedPreconditionError,
    InvalidArgumentError,
    MessageTooLargeError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
PACKAGES = ("halfserve", "onnxruntime-gpu", "onnxruntime")

Nvml = Any  # the module pynvml, of the package nvidia-ml-py, which ships no types
# The figures have Triton's names. perf_analyzer reads them, and accepts one label, gpu_uuid, and plain digits.
GPU_FIGURES: tuple[tuple[str, str, str, Callable[[Nvml, Any], float]], ...] = (
    ("nv_gpu_utilization", "gauge", "Share of time the GPU was busy, 0 to 1", lambda n, d: _gpu_busy(n, d) / 100),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU memory", lambda n, d: int(n.nvmlDeviceGetMemoryInfo(d).total)),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU memory in use", lambda n, d: int(n.nvmlDeviceGetMemoryInfo(d).used)),
    ("nv_gpu_power_usage", "gauge", "Watts drawn", lambda n, d: n.nvmlDeviceGetPowerUsage(d) / 1e3),
    ("nv_gpu_power_limit", "gauge", "Watts allowed", lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d) / 1e3),
    ("nv_energy_consumption", "counter", "Joules drawn", lambda n, d: n.nvmlDeviceGetTotalEnergyConsumption(d) / 1e3),
)


async def exposition(core: InferenceCore) -> tuple[bytes, str]:
    """Return the body of the answer, and its content type."""
    texts = MetricTexts()
    async for metric in collect(core):
        texts.add([metric])
    return texts.joined(), CONTENT_TYPE


async def collect(core: InferenceCore) -> AsyncIterator[Metric]:
    """Yield all metrics; one may come in parts. Runs on the server's event loop, and yields to it every few models."""
    models, latencies = core.models(), core.figures.latencies
    for at in range(0, len(models), TOGETHER):
        some = models[at : at + TOGETHER]
        for declared, metric in model_metrics(some):
            if latencies.has_counters or not declared.is_latency:
                yield metric
        for metric in summary_metrics(some, latencies.quantiles) if latencies.quantiles else ():
            yield metric
        if latencies.has_histograms:
            yield histogram_metric(some)
        await asyncio.sleep(0)
    # A model at rest is not unavailable: an alert on that state must not go off for it.
    statuses = [status for status in core.index() if status.reason != ON_DEMAND]
    for at in range(0, len(statuses), STATES_TOGETHER):
        yield state_metric(statuses[at : at + STATES_TOGETHER])
        await asyncio.sleep(0)
    for metric in (
        *server_metrics(core.figures, is_ready=core.is_ready),
        *_cpu().collect(),
        *pinned_memory_metrics(),
        *gpu_metrics(find_nvml()),
    ):
        yield metric


def server_metrics(figures: ServerFigures, *, is_ready: bool) -> Iterator[Metric]:
    """Yield the halfserve_* metrics of the server, and the usual process_* ones."""
    yield metric_of("halfserve_ready", "1 while requests are taken", "gauge", [({}, int(is_ready))])
    refused = (({"reason": reason}, count) for reason, count in sorted((REFUSALS | figures.refused).items()))
    text = "Inference requests that reached no model's queue, by reason"
    yield metric_of("halfserve_requests_refused", text, "counter", refused, suffix="_total")
    for reading in figures.readings.values():
        yield metric_of(reading.name, reading.text, reading.kind, [({}, reading.read())])
    for custom in figures.custom_metrics():
        metric = Metric(custom.name, custom.text, custom.kind)
        for suffix, labels, value in custom.samples:
            metric.add_sample(custom.name + suffix, labels, value)
        yield metric
    text = "Versions, and whether the hot path is compiled or plain"
    yield metric_of("halfserve_build_info", text, "gauge", [(_versions(), 1)])
    yield from _process().collect()


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "build": build_in_use().name}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found["version" if package == "halfserve" else "onnxruntime"] = version(package)
    return found


@cache
def _process() -> ProcessCollector:
    return ProcessCollector(registry=None)


class CpuMetrics:
    """The machine's processors and memory under Triton's names, from /proc; no metrics on systems without /proc."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._busy = self._all = 0

    def collect(self) -> Iterator[Metric]:
        """Yield the nv_cpu_* metrics. Utilization is the average since the previous call."""
        try:
            fields = (self._proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return
        memory = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        busy, used = self._utilization(list(map(int, fields))), memory["MemTotal"] - memory["MemAvailable"]
        yield metric_of("nv_cpu_utilization", "Share of time that processors were busy, 0 to 1", "gauge", [({}, busy)])
        yield metric_of("nv_cpu_memory_total_bytes", "Memory", "gauge", [({}, memory["MemTotal"])])
        yield metric_of("nv_cpu_memory_used_bytes", "Memory in use", "gauge", [({}, used)])

    def _utilization(self, ticks: list[int]) -> float:
        """Return the busy share since the previous call, from the ticks of user, nice, system, idle, iowait, irq, softirq and
        steal.
        """
        total = sum(ticks)
        busy = total - ticks[3] - ticks[4]
        share = (busy - self._busy) / max(1, total - self._all)
        self._busy, self._all = busy, total
        return round(share, 4)


@cache
def _cpu() -> CpuMetrics:
    return CpuMetrics()


def pinned_memory_metrics() -> Iterator[Metric]:
    """Yield Triton's figures of its pool of pinned memory, which dashboards read. They are 0: the runtimes have their own
    pools.
    """
    yield metric_of("nv_pinned_memory_pool_total_bytes", "Pool of pinned memory; 0: there is none", "gauge", [({}, 0)])
    yield metric_of("nv_pinned_memory_pool_used_bytes", "Pinned memory of the pool in use", "gauge", [({}, 0)])


@cache
def find_nvml() -> Nvml | None:
    """Return NVIDIA's management library, initialized; None without the package, a driver or a device."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        logger.info("no GPU figures: %s", error)
        return None
    return nvml


def gpu_metrics(nvml: Nvml | None) -> Iterator[Metric]:
    """Yield the nv_gpu_* metrics of every device; a figure that a device does not report is left out."""
    if nvml is None:
        return
    devices = list(_devices(nvml))
    for name, kind, text, read in GPU_FIGURES:
        metric = Metric(name, text, kind)
        for device, label in devices:
            with suppress(nvml.NVMLError):
                metric.add_sample(name, label, read(nvml, device))
        yield metric


def _devices(nvml: Nvml) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the devices that answer, with their labels. The loss of one must not cost the metrics of the others."""
    with suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(device)
                yield device, {"gpu_uuid": uuid.decode() if isinstance(uuid, bytes) else uuid}  # bytes in older versions


def _gpu_busy(nvml: Nvml, device: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)
