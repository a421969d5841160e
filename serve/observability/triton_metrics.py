"""The figures of each model under Triton's names, so that its dashboards and alerts work here unchanged.

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

from serve.engine.model import Model
from serve.engine.model_statistics import CANCELLED, Totals

# Triton knows four reasons: what was not computed on purpose, what nobody waited for, what the model failed on, and the rest.
REASONS = {
    "queue_full": "REJECTED",
    "deadline_exceeded": "REJECTED",
    "unavailable": "REJECTED",
    CANCELLED: "CANCELED",
    "backend": "BACKEND",
}
TRITON_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("request_success", "Requests that were answered", lambda t: t.success.count),
    ("count", "Rows that were computed: a batch of n counts n times", lambda t: t.rows),
    ("exec_count", "Batches that were computed", lambda t: t.batches),
    ("request_duration_us", "Time of answered requests, from arrival to answer", lambda t: t.success.ns // 1000),
    ("queue_duration_us", "Time that requests waited in the queue", lambda t: t.queue.ns // 1000),
    ("compute_input_duration_us", "Time to assemble inputs", lambda t: t.compute_input.ns // 1000),
    ("compute_infer_duration_us", "Time in the backend", lambda t: t.compute_infer.ns // 1000),
    ("compute_output_duration_us", "Time to take outputs apart", lambda t: t.compute_output.ns // 1000),
)


def labels_of(model: Model) -> dict[str, str]:
    """What tells one model version's figures from another's."""
    return {"model": model.name, "version": str(model.version)}


def triton_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The nv_inference_* metrics."""
    for name, text, read in COUNTERS:
        metric = Metric(f"nv_inference_{name}", text, "counter")
        for model in models:
            metric.add_sample(metric.name, labels_of(model), read(model.statistics.totals))
        yield metric
    yield _failures(models)
    pending = Metric("nv_inference_pending_request_count", "Requests that wait for their batch now", "gauge")
    for model in models:
        pending.add_sample(pending.name, labels_of(model), model.batcher.waiting)
    yield pending


def _failures(models: Sequence[Model]) -> Metric:
    metric = Metric("nv_inference_request_failure", "Requests that got an error, by Triton's reasons", "counter")
    for model in models:
        counts = dict.fromkeys(TRITON_REASONS, 0)
        for reason, count in model.statistics.totals.failures.items():
            counts[REASONS.get(reason, "OTHER")] += count
        for reason, count in counts.items():
            metric.add_sample(metric.name, labels_of(model) | {"reason": reason}, count)
    return metric
