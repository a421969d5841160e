"""What Prometheus gets when it asks. Nothing is kept for it in between: figures are read from the engine's own counters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.observability.cpu_metrics import CpuMetrics
from serve.observability.gpu_metrics import find_nvml, gpu_metrics
from serve.observability.guard_metrics import guard_metrics
from serve.observability.model_metrics import model_metrics, state_metric
from serve.observability.server_metrics import server_metrics
from serve.observability.text_format import CONTENT_TYPE, MetricTexts
from serve.observability.triton_metrics import triton_metrics

CPU = CpuMetrics()
TOGETHER = 8  # models, whose figures take some milliseconds to write
STATES_TOGETHER = 256  # of versions, which take 8 us each


async def exposition(core: InferenceCore) -> tuple[bytes, str]:
    """The body of an answer to a scrape, and its content type. To be called on the server's event loop, which has time for
    others after a few models at a time.
    """
    texts, models = MetricTexts(), core.models()
    for at in range(0, len(models), TOGETHER):
        texts.add(_of_models(models[at : at + TOGETHER]))
        await asyncio.sleep(0)
    statuses = core.index()
    for at in range(0, len(statuses), STATES_TOGETHER):
        texts.add([state_metric(statuses[at : at + STATES_TOGETHER])])
        await asyncio.sleep(0)
    texts.add(_of_server(core))
    return texts.joined(), CONTENT_TYPE


def _of_models(models: Sequence[Model]) -> Iterator[Metric]:
    yield from triton_metrics(models)
    yield from model_metrics(models)
    yield from guard_metrics(models)


def _of_server(core: InferenceCore) -> Iterator[Metric]:
    yield from server_metrics(core.figures, is_ready=core.is_ready)
    yield from CPU.collect()
    yield from gpu_metrics(find_nvml())
