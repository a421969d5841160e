"""What Prometheus gets when it asks. Nothing is kept for it in between: figures are read from the engine's own counters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve.engine.inference_core import InferenceCore
from serve.observability.cpu_metrics import CpuMetrics
from serve.observability.gpu_metrics import find_nvml, gpu_metrics
from serve.observability.guard_metrics import guard_metrics
from serve.observability.model_metrics import model_metrics, state_metric
from serve.observability.server_metrics import server_metrics
from serve.observability.text_format import CONTENT_TYPE, to_text
from serve.observability.triton_metrics import triton_metrics

CPU = CpuMetrics()


class ServerCollector(Collector):
    """All metrics of a server, for any registry of prometheus_client. To be asked on the server's event loop."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """Read every figure."""
        models = self._core.models()
        yield from triton_metrics(models)
        yield from model_metrics(models)
        yield state_metric(self._core.index())
        yield from guard_metrics(models)
        yield from server_metrics(self._core.figures, is_ready=self._core.is_ready)
        yield from CPU.collect()
        yield from gpu_metrics(find_nvml())


def exposition(core: InferenceCore) -> tuple[bytes, str]:
    """The body of an answer to a scrape, and its content type. To be called on the server's event loop."""
    return to_text(ServerCollector(core).collect()).encode(), CONTENT_TYPE
