from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from serve.observability.gpu_metrics import find_nvml, gpu_metrics
from tests.serve.observability.metric_text import to_text


class NoFigureError(Exception):
    pass


class TwoGpus:
    """The part of pynvml that is asked: two devices, the second without figures of its energy."""

    NVMLError = NoFigureError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  (NVIDIA's name)
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802  (NVIDIA's name)
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:  # noqa: N802  (NVIDIA's name)
        return b"GPU-b" if device else "GPU-a"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:  # noqa: N802  (NVIDIA's name)
        return SimpleNamespace(gpu=50 + device)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:  # noqa: N802  (NVIDIA's name)
        return SimpleNamespace(total=150_754_820_096, used=1_048_576 + device)

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:  # noqa: N802  (NVIDIA's name)
        return 75_500

    def nvmlDeviceGetEnforcedPowerLimit(self, _: int) -> int:  # noqa: N802  (NVIDIA's name)
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, device: int) -> int:  # noqa: N802  (NVIDIA's name)
        if device:
            raise NoFigureError
        return 12_345


def test_gpu_figures_are_as_perf_analyzer_reads_them() -> None:
    lines = [line for line in to_text(gpu_metrics(TwoGpus())).splitlines() if not line.startswith("#")]
    assert lines == [
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5',
        'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.51',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 150754820096',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"} 150754820096',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 1048576',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 1048577',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 75.5',
        'nv_gpu_power_usage{gpu_uuid="GPU-b"} 75.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-a"} 700',
        'nv_gpu_power_limit{gpu_uuid="GPU-b"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-a"} 12.345',
    ]
    assert all(re.fullmatch(r'\w+\{gpu_uuid="[^"]+"\} \d+(\.\d+)?', line) for line in lines)


class OneLost(TwoGpus):
    """The first device has fallen off the bus."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802  (NVIDIA's name)
        if not index:
            raise NoFigureError
        return index


class NoDriver(TwoGpus):
    """The driver is gone, as while it is updated."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  (NVIDIA's name)
        raise NoFigureError


def test_a_device_that_is_lost_does_not_take_the_others_figures_with_it() -> None:
    lines = [line for line in to_text(gpu_metrics(OneLost())).splitlines() if not line.startswith("#")]
    assert lines[0] == 'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.51'
    assert not any("GPU-a" in line for line in lines)
    assert not [line for line in to_text(gpu_metrics(NoDriver())).splitlines() if not line.startswith("#")]


def test_without_the_library_there_are_no_figures() -> None:
    assert list(gpu_metrics(None)) == []


@pytest.mark.gpu
def test_a_real_device_tells_its_figures() -> None:
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("needs a CUDA device and the package nvidia-ml-py")
    text = to_text(gpu_metrics(nvml))
    for name in ("nv_gpu_utilization", "nv_gpu_power_usage", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"):
        assert re.search(rf'^{name}\{{gpu_uuid="GPU-[0-9a-f-]+"\}} \d+(\.\d+)?$', text, re.MULTILINE)
