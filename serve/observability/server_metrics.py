"""The figures of the process and its machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from serve.engine.errors import (
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
from serve.engine.model_statistics import ServerFigures, zeros

# Figures that other rooms tell when they are asked: (type, name, text).
READINGS = {
    "connections": ("gauge", "halfserve_connections", "Open gRPC connections"),
    "http_connections": ("gauge", "halfserve_http_connections", "Open HTTP connections"),
    "calls": ("gauge", "halfserve_calls", "gRPC calls in flight, streams included"),
    "access_log_dropped": ("counter", "halfserve_access_log_dropped_total", "Lines that the log could not take in time"),
    "worker_restarts": ("counter", "halfserve_worker_restarts_total", "Servers that a supervisor has started after the first"),
    "traces": ("counter", "halfserve_traces_total", "Requests that were traced"),
    "traces_dropped": ("counter", "halfserve_traces_dropped_total", "Traces that the exporter could not take in time"),
}
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


def server_metrics(figures: ServerFigures, *, is_ready: bool) -> Iterator[Metric]:
    """The halfserve_* metrics of the server, and process_* as everywhere."""
    ready = Metric("halfserve_ready", "1 while requests are taken", "gauge")
    ready.add_sample(ready.name, {}, int(is_ready))
    yield ready
    refused = Metric("halfserve_requests_refused", "Inference requests that reached no model's queue, by reason", "counter")
    for reason, count in sorted((REFUSALS | figures.refused).items()):
        refused.add_sample("halfserve_requests_refused_total", {"reason": reason}, count)
    yield refused
    for key, read in figures.readings.items():
        kind, name, text = READINGS[key]
        metric = Metric(name, text, kind)
        metric.add_sample(name, {}, read())
        yield metric
    build = Metric("halfserve_build_info", "Versions", "gauge")
    build.add_sample(build.name, _versions(), 1)
    yield build
    yield from _process().collect()


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found["version" if package == "halfserve" else "onnxruntime"] = version(package)
        except PackageNotFoundError:
            continue
    return found


@cache
def _process() -> ProcessCollector:
    return ProcessCollector(registry=None)
