"""Metrics as a server would tell them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from halfserve.serve.observability.metrics import MetricTexts


def to_text(metrics: Iterable[Metric]) -> str:
    texts = MetricTexts()
    texts.add(metrics)
    return texts.joined().decode()
