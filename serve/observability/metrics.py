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

from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    OutOfMemoryError,
    OverloadedError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.model import Model, VersionState, VersionStatus
from halfserve.serve.engine.model_statistics import CANCELLED, EDGES_NS, Duration, LatencyFigures, Totals, zeros
from halfserve.serve.engine.precision_guard.guard import NonFiniteError
from halfserve.serve.engine.precision_guard.tally import GuardCounters, OutputCounters
from halfserve.serve.engine.sequences.sequence_scheduler import SequenceScheduler
from halfserve.serve.engine.whole_requests import DecoupledRequests

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
# Triton has four reasons of failures. An error of a class not listed here counts as BACKEND, or as OTHER for an ensemble.
REASONS = {
    "queue_full": "REJECTED",
    "overloaded": "REJECTED",
    "deadline_exceeded": "REJECTED",
    "unavailable": "REJECTED",
    CANCELLED: "CANCELED",
    "request_cancelled": "CANCELED",
    "failed_precondition": "OTHER",
}
TRITON_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
TRITON_COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("request_success", "Requests that were answered", lambda t: t.success.count),
    ("count", "Rows that were computed: a batch of n counts n times", lambda t: t.rows),
    ("exec_count", "Batches that were computed", lambda t: t.batches),
    ("request_duration_us", "Time of answered requests, from arrival to answer", lambda t: t.success.ns // 1000),
    ("queue_duration_us", "Time that requests waited in the queue", lambda t: t.queue.ns // 1000),
    ("compute_input_duration_us", "Time to assemble inputs", lambda t: t.compute_input.ns // 1000),
    ("compute_infer_duration_us", "Time in the backend", lambda t: t.compute_infer.ns // 1000),
    ("compute_output_duration_us", "Time to take outputs apart", lambda t: t.compute_output.ns // 1000),
)
# Counters of models with a response cache.
CACHE_COUNTERS: tuple[tuple[str, str, Callable[[Totals], int]], ...] = (
    ("nv_cache_num_hits_per_model", "Requests that the response cache answered", lambda t: t.cache_hit.count),
    ("nv_cache_num_misses_per_model", "Requests that it had no answer for", lambda t: t.cache_miss.count),
    ("nv_cache_hit_duration_per_model", "Microseconds of the look-ups that found one", lambda t: t.cache_hit.ns // 1000),
    (
        "nv_cache_miss_duration_per_model",
        "Microseconds of the other look-ups, and of keeping the answers",
        lambda t: t.cache_miss.ns // 1000,
    ),
)
MODEL_GAUGES: tuple[tuple[str, str, Callable[[Model], float]], ...] = (
    ("halfserve_queue_depth", "Requests that wait for their batch now", lambda m: m.batcher.waiting),
    (
        "halfserve_last_inference_timestamp_seconds",
        "When the last batch was computed; 0: never",
        lambda m: m.statistics.totals.last_inference_ms / 1e3,
    ),
    ("halfserve_model_instances", "Copies of the model", lambda m: len(m.batcher.instances)),
    (
        "halfserve_model_instances_up",
        "Instances that take batches; the others are loading again",
        lambda m: sum(instance.is_up for instance in m.batcher.instances),
    ),
)
SEQUENCE_GAUGES: tuple[tuple[str, str, Callable[[SequenceScheduler], int]], ...] = (
    ("halfserve_sequences_active", "Sequences that have a slot", lambda s: s.running_sequences),
    ("halfserve_sequences_waiting", "Sequences that wait for a slot", lambda s: s.backlog),
    (
        "halfserve_sequence_requests_waiting",
        "Requests that wait for a slot, or for the one before them",
        lambda s: s.waiting,
    ),
)
FAILURES = {CANCELLED: 0} | zeros(
    BackendError, DeadlineExceededError, NonFiniteError, OutOfMemoryError, OverloadedError, QueueFullError, UnavailableError
)
ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
GUARD_COUNTERS: tuple[tuple[str, str, Callable[[GuardCounters], int]], ...] = (
    ("rejected", "Requests refused for a non-finite answer", lambda g: g.rejected),
    ("fallbacks", "Requests answered by the fp32 twin", lambda g: g.fallbacks),
    ("shadow_runs", "Requests computed again in fp32, to compare", lambda g: g.shadow_runs),
    ("shadow_dropped", "Comparisons left out, as too many waited", lambda g: g.shadow_dropped),
    ("shadow_failed", "Comparisons that failed", lambda g: g.shadow_failed),
)
OUTPUT_COUNTERS: tuple[tuple[str, str, Callable[[OutputCounters], int]], ...] = (
    ("non_finite_values", "Values that were NaN or infinite", lambda o: o.non_finite_values),
    ("non_finite_requests", "Requests with such values from finite inputs", lambda o: o.non_finite_requests),
    ("non_finite_inputs", "Requests whose own inputs were not finite", lambda o: o.from_inputs),
    ("rows_compared", "Rows compared with fp32 by their largest value", lambda o: o.rows_compared),
    ("rows_agreeing", "Rows whose largest value stands at the same place as in fp32", lambda o: o.rows_agreeing),
)

LATENCY_SETTINGS = ("counter_latencies", "summary_latencies", "summary_quantiles")
BOOLS = {"true": True, "false": False}
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)  # Triton's default
DURATIONS = {f"nv_inference_{name}" for name, *_ in TRITON_COUNTERS if name.endswith("_us")}
LATENCY_COUNTERS = DURATIONS | {name for name, *_ in CACHE_COUNTERS}
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
        """All metrics, as UTF-8."""
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


STAGE_EDGES = tuple(number(ns / 1e9) for ns in EDGES_NS)


def metric_of(name: str, text: str, kind: str, samples: Iterable[tuple[Labels, float]], *, suffix: str = "") -> Metric:
    """A metric with these samples, by their labels; `suffix` is what the samples' name has behind the metric's."""
    metric = Metric(name, text, kind)
    for labels, value in samples:
        metric.add_sample(f"{name}{suffix}", labels, value)
    return metric


def triton_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The nv_inference_* metrics."""
    for name, text, read in TRITON_COUNTERS:
        values = ((labels_of(model), read(model.statistics.totals)) for model in models)
        yield metric_of(f"nv_inference_{name}", text, "counter", values)
    caching = [model for model in models if model.config.response_cache.enable]
    for name, text, read in CACHE_COUNTERS:
        values = ((labels_of(model), read(model.statistics.totals)) for model in caching)
        yield metric_of(name, text, "counter", values)
    failures = Metric("nv_inference_request_failure", "Requests that got an error, by Triton's reasons", "counter")
    for model in models:
        counts: dict[str, int] = dict.fromkeys(TRITON_REASONS, 0)
        for reason, count in model.statistics.totals.failures.items():
            counts[REASONS.get(reason, "BACKEND" if model.composition is None else "OTHER")] += count
        for reason, count in counts.items():
            failures.add_sample(failures.name, labels_of(model) | {"reason": reason}, count)
    yield failures
    pending = Metric("nv_inference_pending_request_count", "Requests that wait for their batch now", "gauge")
    for model in models:
        sequences = _sequences_of(model)
        ahead = sum(len(instance.next_requests) for instance in model.batcher.instances)
        waiting = model.batcher.waiting + ahead + (0 if sequences is None else sequences.pending)
        pending.add_sample(pending.name, labels_of(model), waiting)
    yield pending


def model_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The halfserve_* metrics of models."""
    stages = Metric("halfserve_request_stage_seconds", "Time of computed requests by stage; total is all of them", "histogram")
    rows = Metric("halfserve_batch_rows", "Batches by the rows that were computed together", "histogram")
    restarts = Metric("halfserve_model_instance_restarts", "Instances that failed and were loaded again", "counter")
    info = Metric("halfserve_model_info", "Where the model really computes, and in what", "gauge")
    failures = Metric("halfserve_requests_failed", "Requests of a model that got an error, by reason", "counter")
    computing = Metric("halfserve_compute_seconds", "Time that instances were busy with batches", "counter")
    for model in models:
        labels, totals = labels_of(model), model.statistics.totals
        for stage, histogram in model.statistics.histograms().items():
            _add_histogram(stages, labels | {"stage": stage}, STAGE_EDGES, accumulate(histogram.counts), histogram.ns / 1e9)
        batches = {size: per_size.compute_infer.count for size, per_size in totals.by_batch_size.items()}
        at_most = [sum(count for size, count in batches.items() if size <= edge) for edge in (*ROW_EDGES, math.inf)]
        _add_histogram(rows, labels, map(str, ROW_EDGES), at_most, sum(size * count for size, count in batches.items()))
        restarted = sum(instance.restarts for instance in model.batcher.instances)
        restarts.add_sample("halfserve_model_instance_restarts_total", labels, restarted)
        info.add_sample(info.name, labels | {"provider": model.provider, "precision": model.precision}, 1)
        for reason, count in sorted((FAILURES | totals.failures).items()):
            failures.add_sample("halfserve_requests_failed_total", labels | {"reason": reason}, count)
        busy_ns = sum(
            size.compute_input.ns + size.compute_infer.ns + size.compute_output.ns for size in totals.by_batch_size.values()
        )
        computing.add_sample("halfserve_compute_seconds_total", labels, busy_ns / 1e9)
    yield from (stages, rows)
    for name, text, read in MODEL_GAUGES:
        yield metric_of(name, text, "gauge", ((labels_of(model), read(model)) for model in models))
    yield from (restarts, info, failures, computing)


def state_metric(statuses: Sequence[VersionStatus]) -> Metric:
    """1 for the state that each model version is in, 0 for the others."""
    metric = Metric("halfserve_model_state", "1 for the state that a model version is in", "gauge")
    for status in statuses:
        for state in VersionState:
            labels = {"model": status.name, "version": status.version, "state": state.value}
            metric.add_sample(metric.name, labels, int(state is status.state))
    return metric


def guard_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The halfserve_guard_* metrics of the models that have a precision guard."""
    guards = [(labels_of(model), model.guard.counters()) for model in models if model.guard is not None]
    outputs = [(labels | {"output": name}, counts) for labels, guard in guards for name, counts in guard.outputs.items()]
    for name, text, read in GUARD_COUNTERS:
        values = ((labels, read(guard)) for labels, guard in guards)
        yield metric_of(f"halfserve_guard_{name}", text, "counter", values, suffix="_total")
    states = ((labels | {"policy": guard.policy}, int(guard.degraded)) for labels, guard in guards)
    yield metric_of("halfserve_guard_degraded", "1 while the drift is over its threshold", "gauge", states)
    for name, text, read_output in OUTPUT_COUNTERS:
        values = ((labels, read_output(output)) for labels, output in outputs)
        yield metric_of(f"halfserve_guard_{name}", text, "counter", values, suffix="_total")
    text = "Scaled error against fp32 of the requests that were compared; infinite ones are not in the sum"
    drift = Metric("halfserve_guard_drift", text, "histogram")
    for labels, output in outputs:
        if output.drift is not None:
            edges = map(number, output.drift.bounds)
            _add_histogram(drift, labels, edges, accumulate(output.drift.counts), output.drift.total)
    yield drift


def sequence_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The halfserve_sequence* metrics of the models that have sequences."""
    found = [(labels_of(model), sequences) for model in models if (sequences := _sequences_of(model)) is not None]
    for name, text, read in SEQUENCE_GAUGES:
        yield metric_of(name, text, "gauge", ((labels, read(scheduler)) for labels, scheduler in found))
    text, expired = "Sequences that were ended as no request came for too long", ((one, s.expired) for one, s in found)
    yield metric_of("halfserve_sequences_expired", text, "counter", expired, suffix="_total")


def _sequences_of(model: Model) -> SequenceScheduler | None:
    scheduler = model.scheduler
    if isinstance(scheduler, DecoupledRequests):
        scheduler = scheduler.behind
    return scheduler if isinstance(scheduler, SequenceScheduler) else None


def labels_of(model: Model) -> Labels:
    return {"model": model.name, "version": str(model.version)}


def _add_histogram(metric: Metric, labels: Labels, edges: Iterable[str], at_most: Iterable[float], total: float) -> None:
    """Add one histogram; `at_most` has its cumulative counts, one per edge and one for all values."""
    count = 0.0
    for edge, count in zip((*edges, "+Inf"), at_most, strict=True):
        metric.add_sample(f"{metric.name}_bucket", labels | {"le": edge}, count)
    metric.add_sample(f"{metric.name}_sum", labels, total)
    metric.add_sample(f"{metric.name}_count", labels, count)


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
        has_counters=BOOLS[values.get("counter_latencies", "true")], quantiles=quantiles if has_summaries else ()
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
