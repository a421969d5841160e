"""The figures of each model that Triton has no names for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import Metric

from serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    OutOfMemoryError,
    OverloadedError,
    QueueFullError,
    UnavailableError,
)
from serve.engine.model import Model, VersionState, VersionStatus
from serve.engine.model_statistics import CANCELLED, EDGES_NS, Histogram, zeros
from serve.engine.precision_guard.guard import NonFiniteError
from serve.observability.text_format import number
from serve.observability.triton_metrics import labels_of

STAGE_EDGES = (*(number(ns / 1e9) for ns in EDGES_NS), "+Inf")
FAILURES = {CANCELLED: 0} | zeros(
    BackendError, DeadlineExceededError, NonFiniteError, OutOfMemoryError, OverloadedError, QueueFullError, UnavailableError
)
ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def model_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The halfserve_* metrics of models."""
    yield _stages(models)
    yield _batch_rows(models)
    yield from _gauges(models)
    yield _failures(models)
    computing = Metric("halfserve_compute_seconds", "Time that instances were busy with batches", "counter")
    for model in models:
        busy_ns = sum(
            size.compute_input.ns + size.compute_infer.ns + size.compute_output.ns
            for size in model.statistics.totals.by_batch_size.values()
        )
        computing.add_sample("halfserve_compute_seconds_total", labels_of(model), busy_ns / 1e9)
    yield computing


def state_metric(statuses: Sequence[VersionStatus]) -> Metric:
    """1 for the state that each model version is in, 0 for the others."""
    metric = Metric("halfserve_model_state", "1 for the state that a model version is in", "gauge")
    for status in statuses:
        for state in VersionState:
            labels = {"model": status.name, "version": status.version, "state": state.value}
            metric.add_sample(metric.name, labels, int(state is status.state))
    return metric


def _stages(models: Sequence[Model]) -> Metric:
    metric = Metric("halfserve_request_stage_seconds", "Time of answered requests by stage; total is all of them", "histogram")
    for model in models:
        for stage, histogram in model.statistics.histograms().items():
            _add_histogram(metric, labels_of(model) | {"stage": stage}, histogram)
    return metric


def _add_histogram(metric: Metric, labels: dict[str, str], histogram: Histogram) -> None:
    at_most = 0
    for edge, at_most in zip(STAGE_EDGES, accumulate(histogram.counts), strict=True):
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": edge}, at_most)
    metric.add_sample(f"{metric.name}_sum", labels, histogram.ns / 1e9)
    metric.add_sample(f"{metric.name}_count", labels, at_most)


def _batch_rows(models: Sequence[Model]) -> Metric:
    metric = Metric("halfserve_batch_rows", "Batches by the rows that were computed together", "histogram")
    for model in models:
        labels = labels_of(model)
        batches = {size: per_size.compute_infer.count for size, per_size in model.statistics.totals.by_batch_size.items()}
        for edge in ROW_EDGES:
            at_most = sum(count for size, count in batches.items() if size <= edge)
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": str(edge)}, at_most)
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": "+Inf"}, sum(batches.values()))
        metric.add_sample(f"{metric.name}_sum", labels, sum(size * count for size, count in batches.items()))
        metric.add_sample(f"{metric.name}_count", labels, sum(batches.values()))
    return metric


def _gauges(models: Sequence[Model]) -> Iterator[Metric]:
    depth = Metric("halfserve_queue_depth", "Requests that wait for their batch now", "gauge")
    last = Metric("halfserve_last_inference_timestamp_seconds", "When the last batch was computed; 0: never", "gauge")
    copies = Metric("halfserve_model_instances", "Copies of the model", "gauge")
    up = Metric("halfserve_model_instances_up", "Copies that take batches; the others are being loaded anew", "gauge")
    restarts = Metric("halfserve_model_instance_restarts", "Copies that broke and were loaded anew", "counter")
    info = Metric("halfserve_model_info", "Where the model really computes, and in what", "gauge")
    for model in models:
        labels = labels_of(model)
        depth.add_sample(depth.name, labels, model.batcher.waiting)
        last.add_sample(last.name, labels, model.statistics.totals.last_inference_ms / 1e3)
        copies.add_sample(copies.name, labels, len(model.batcher.instances))
        up.add_sample(up.name, labels, sum(instance.is_up for instance in model.batcher.instances))
        restarted = sum(instance.restarts for instance in model.batcher.instances)
        restarts.add_sample("halfserve_model_instance_restarts_total", labels, restarted)
        info.add_sample(info.name, labels | {"provider": model.provider, "precision": model.precision}, 1)
    return iter((depth, last, copies, up, restarts, info))


def _failures(models: Sequence[Model]) -> Metric:
    metric = Metric("halfserve_requests_failed", "Requests of a model that got an error, by reason", "counter")
    for model in models:
        for reason, count in sorted((FAILURES | model.statistics.totals.failures).items()):
            metric.add_sample("halfserve_requests_failed_total", labels_of(model) | {"reason": reason}, count)
    return metric
