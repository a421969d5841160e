"""The CUDA devices' figures under Triton's names; perf_analyzer reads them, and wants one label, gpu_uuid, and plain digits."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

Nvml = Any  # the module pynvml, of the package nvidia-ml-py, which ships no types
FIGURES: tuple[tuple[str, str, str, Callable[[Nvml, Any], float]], ...] = (
    ("nv_gpu_utilization", "gauge", "Share of time the GPU was busy, 0 to 1", lambda n, d: _used(n, d).gpu / 100),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU memory", lambda n, d: int(n.nvmlDeviceGetMemoryInfo(d).total)),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU memory in use", lambda n, d: int(n.nvmlDeviceGetMemoryInfo(d).used)),
    ("nv_gpu_power_usage", "gauge", "Watts drawn", lambda n, d: n.nvmlDeviceGetPowerUsage(d) / 1e3),
    ("nv_gpu_power_limit", "gauge", "Watts allowed", lambda n, d: n.nvmlDeviceGetEnforcedPowerLimit(d) / 1e3),
    ("nv_energy_consumption", "counter", "Joules drawn", lambda n, d: n.nvmlDeviceGetTotalEnergyConsumption(d) / 1e3),
)


@cache
def find_nvml() -> Nvml | None:
    """NVIDIA's management library, started; None where there is no such package, driver or device."""
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
    """The nv_gpu_* metrics of every device; a figure that a device does not tell is left out."""
    if nvml is None:
        return
    devices = list(_devices(nvml))
    for name, kind, text, read in FIGURES:
        metric = Metric(name, text, kind)
        for device, label in devices:
            try:
                value = read(nvml, device)
            except nvml.NVMLError:
                continue
            metric.add_sample(name, label, value)
        yield metric


def _devices(nvml: Nvml) -> Iterator[tuple[Any, dict[str, str]]]:
    """The devices that answer, with their labels. One that has fallen off the bus must not take the other metrics with it."""
    with suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                yield device, {"gpu_uuid": _text(nvml.nvmlDeviceGetUUID(device))}


def _used(nvml: Nvml, device: Any) -> Any:
    return nvml.nvmlDeviceGetUtilizationRates(device)


def _text(name: str | bytes) -> str:
    """Older versions of the package tell names as bytes."""
    return name.decode() if isinstance(name, bytes) else name
