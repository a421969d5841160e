"""The figures of models as metrics, and Prometheus' text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/. The writer of prometheus_client does not fit: it ends every
counter's name in _total, which Triton's names do not, and writes a million as 1e+06, which perf_analyzer does not read.
Triton's names: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from halfserve.serve.engine.model import Model, VersionState, VersionStatus
from halfserve.serve.engine.model_statistics import EDGES_NS, Duration, LatencyFigures, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
LATENCY_SETTINGS = ("counter_latencies", "histogram_latencies", "summary_latencies", "summary_quantiles")
FIRST_RESPONSE_EDGES_MS = (100, 500, 2000, 5000)  # Triton's default
BOOLS = {"true": True, "false": False}
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)  # Triton's default
# Summaries with quantiles, which --metrics-config selects: name, text, count and sum since the model was loaded, and stage.
SUMMARIES: tuple[tuple[str, str, Callable[[Totals], Duration], str], ...] = (
    ("nv_inference_request_summary_us", "Time of requests, from arrival to answer", lambda t: t.success, "total"),
    ("nv_inference_queue_summary_us", "Time that requests waited in the queue", lambda t: t.queue, "queue"),
    ("nv_inference_compute_input_summary_us", "Time to assemble inputs", lambda t: t.compute_input, "compute_input"),
    ("nv_inference_compute_infer_summary_us", "Time in the backend", lambda t: t.compute_infer, "compute_infer"),
    ("nv_inference_compute_output_summary_us", "Time to take outputs apart", lambda t: t.compute_output, "compute_output"),
)
# Summaries of models with a response cache, which have none of whole requests, as in Triton.
CACHE_SUMMARIES: tuple[tuple[str, str, Callable[[Totals], Duration], str], ...] = (
    ("nv_cache_hit_summary_us", "Time of the look-ups that found an answer; without quantiles", lambda t: t.cache_hit, ""),
    ("nv_cache_miss_summary_us", "Time of the others, and of keeping answers; without quantiles", lambda t: t.cache_miss, ""),
)

Labels = dict[str, str]


class MetricTexts:
    """Metrics as text. Their samples may be added in parts; the format wants all samples of a metric together."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}

    def add(self, metrics: Iterable[Metric]) -> None:
        """Add samples. A counter's type line has the name of its samples; metrics without samples are left out."""
        for metric in metrics:
            if not metric.samples:
                continue
            name = metric.samples[0].name if metric.type in {"counter", "info"} else metric.name
            if name not in self._parts:
                kind = "gauge" if metric.type == "info" else metric.type
                text = metric.documentation.translate(HELP_ESCAPES)
                self._parts[name] = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode(errors="replace")]
            # A label or a text may have half of a surrogate pair, which UTF-8 cannot encode: "?" replaces it. Lines are
            # formatted here, between two turns of the event loop, and not all at once in `joined`.
            self._parts[name].append("".join(map(_line, metric.samples)).encode(errors="replace"))

    def joined(self) -> bytes:
        """Return all metrics, as UTF-8."""
        return b"".join(chain.from_iterable(self._parts.values()))


def number(value: float) -> str:
    """Format a value in plain digits, as short as possible without loss."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    if value.is_integer():
        return str(int(value))
    text = repr(value)
    return text if "e" not in text else f"{value:.20f}".rstrip("0")


def _line(sample: Sample) -> str:
    # Labels are sorted by name as in Triton, because scripts search its metrics for whole lines; the bucket comes last.
    ordered = sorted(sample.labels.items(), key=_place)
    labels = ",".join([f'{key}="{_escaped(value)}"' for key, value in ordered])
    return f"{sample.name}{{{labels}}} {number(sample.value)}\n" if labels else f"{sample.name} {number(sample.value)}\n"


def _place(label: tuple[str, str]) -> tuple[bool, str]:
    return label[0] == "le", label[0]


def _escaped(value: str) -> str:
    return value if value.isalnum() else value.translate(ESCAPES)


def metric_of(name: str, text: str, kind: str, samples: Iterable[tuple[Labels, float]], *, suffix: str = "") -> Metric:
    """Return a metric with these samples, by their labels; `suffix` is what the samples' name has behind the metric's."""
    metric = Metric(name, text, kind)
    for labels, value in samples:
        metric.add_sample(f"{name}{suffix}", labels, value)
    return metric


def state_metric(statuses: Sequence[VersionStatus]) -> Metric:
    """1 for the state that each model version is in, 0 for the others."""
    metric = Metric("halfserve_model_state", "1 for the state that a model version is in", "gauge")
    for status in statuses:
        for state in VersionState:
            labels = {"model": status.name, "version": status.version, "state": state.value}
            metric.add_sample(metric.name, labels, int(state is status.state))
    return metric


def labels_of(model: Model) -> Labels:
    return {"model": model.name, "version": str(model.version)}


def summary_metrics(models: Sequence[Model], quantiles: Sequence[float]) -> Iterator[Metric]:
    """Yield the nv_*_summary_us metrics: counts and sums since the model was loaded, and quantiles of the last minute."""
    found = [(model, model.statistics.quantiles(quantiles)) for model in models]
    for name, text, read, stage in (*SUMMARIES, *CACHE_SUMMARIES):
        metric = Metric(name, text, "summary")
        for model, values in found:
            is_caching, labels = model.config.response_cache.enable, labels_of(model)
            if (stage == "total" and is_caching) or (not stage and not is_caching):
                continue
            total = read(model.statistics.totals)
            metric.add_sample(f"{name}_count", labels, total.count)
            metric.add_sample(f"{name}_sum", labels, total.ns // 1000)
            for quantile, ns in zip(quantiles, values.get(stage, ()), strict=False):  # none without a stage
                metric.add_sample(name, labels | {"quantile": number(quantile)}, round(ns / 1000, 1))
        yield metric


def histogram_metric(models: Sequence[Model]) -> Metric:
    """Return the times from the arrival of computed requests to their first response."""
    metric = Metric(
        "nv_inference_first_response_histogram_ms", "Time of computed requests to their first response", "histogram"
    )
    for model in models:
        # A request of a decoupled model computes until its first response.
        times = model.statistics.histograms()["compute_infer" if model.is_decoupled else "total"]
        at_most = dict(zip(EDGES_NS, accumulate(times.counts), strict=False))
        labels = labels_of(model)
        for edge in FIRST_RESPONSE_EDGES_MS:
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": str(edge)}, at_most[edge * 10**6])
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": "+Inf"}, times.count)
        metric.add_sample(f"{metric.name}_sum", labels, times.ns // 10**6)  # Triton's are whole, and readers parse them so
        metric.add_sample(f"{metric.name}_count", labels, times.count)
    return metric


def latency_figures(settings: Sequence[str]) -> LatencyFigures:
    """Parse Triton's settings of metrics, texts NAME=VALUE; the last one of a name counts.

    Raises:
        ValueError: a name or a value is invalid; the message says what was expected.
    """
    values: dict[str, str] = {}
    for setting in settings:
        name, _, values[name] = setting.partition("=")
        if name not in LATENCY_SETTINGS:
            raise ValueError(f"has the setting {name!r}, expected one of: {', '.join(LATENCY_SETTINGS)}")
        if name != "summary_quantiles" and values[name] not in BOOLS:
            raise ValueError(f"{name} is {values[name]!r}, expected true or false")
    given = values.get("summary_quantiles")
    quantiles = QUANTILES if given is None else tuple(map(_quantile, given.split(",")))
    has_summaries = BOOLS[values.get("summary_latencies", "false")]
    return LatencyFigures(
        has_counters=BOOLS[values.get("counter_latencies", "true")],
        has_histograms=BOOLS[values.get("histogram_latencies", "false")],
        quantiles=quantiles if has_summaries else (),
    )


def _quantile(pair: str) -> float:
    text = pair.partition(":")[0]  # the error that may follow is Triton's way to save memory
    try:
        quantile = float(text)
    except ValueError:
        quantile = -1
    if not 0 <= quantile <= 1:
        raise ValueError(
            f"summary_quantiles has {pair!r}, expected QUANTILE:ERROR with a quantile of 0 to 1, such as 0.99:0.001"
        )
    return quantile
