"""The machine's processors and memory under Triton's names, from /proc; nothing where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric


class CpuMetrics:
    """Utilization is that since the last time it was asked for."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._busy = self._all = 0

    def collect(self) -> Iterator[Metric]:
        """The nv_cpu_* metrics."""
        try:
            fields = (self._proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return
        ticks = [int(field) for field in fields]
        memory = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        yield _gauge("nv_cpu_utilization", "Share of time that processors were busy, 0 to 1", self._utilization(ticks))
        yield _gauge("nv_cpu_memory_total_bytes", "Memory", memory["MemTotal"])
        yield _gauge("nv_cpu_memory_used_bytes", "Memory in use", memory["MemTotal"] - memory["MemAvailable"])

    def _utilization(self, ticks: list[int]) -> float:
        """From user, nice, system, idle, iowait, irq, softirq and steal."""
        total = sum(ticks)
        busy = total - ticks[3] - ticks[4]
        share = (busy - self._busy) / max(1, total - self._all)
        self._busy, self._all = busy, total
        return round(share, 4)


def _gauge(name: str, text: str, value: float) -> Metric:
    metric = Metric(name, text, "gauge")
    metric.add_sample(name, {}, value)
    return metric
