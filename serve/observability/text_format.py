"""Prometheus' text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/. The writer of prometheus_client does not serve here: it ends every
counter's name in _total, which Triton's names do not, and writes a million as 1e+06, which perf_analyzer does not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


class MetricTexts:
    """Metrics as text that come in parts: all samples of a metric stand together, as the format has it."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        """Some more samples. A counter's type is told under their name; metrics without any are left out."""
        for metric in metrics:
            if not metric.samples:
                continue
            name = metric.samples[0].name if metric.type in {"counter", "info"} else metric.name
            if name not in self._parts:
                kind = "gauge" if metric.type == "info" else metric.type
                text = metric.documentation.translate(HELP_ESCAPES)
                self._parts[name] = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()]
            self._parts[name].append("".join(map(_line, metric.samples)).encode())  # here, as all of them take long in one go

    def joined(self) -> bytes:
        """All of them, as UTF-8."""
        return b"".join(chain.from_iterable(self._parts.values()))


def number(value: float) -> str:
    """A value in plain digits, as short as it goes without loss."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if value.is_integer():
        return str(int(value))
    text = repr(value)
    return text if "e" not in text else f"{value:.20f}".rstrip("0")


def _line(sample: Sample) -> str:
    labels = ",".join([f'{key}="{_escaped(value)}"' for key, value in sample.labels.items()])
    return f"{sample.name}{{{labels}}} {number(sample.value)}\n" if labels else f"{sample.name} {number(sample.value)}\n"


def _escaped(value: str) -> str:
    return value if value.isalnum() else value.translate(ESCAPES)
