"""The metrics of models: the name, kind, help text and figure of each, declared once in MODEL_METRICS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.metrics_core import Metric

from halfserve.serve.engine.errors import (
    BackendError,
    DeadlineExceededError,
    NonFiniteError,
    OutOfMemoryError,
    OverloadedError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import CANCELLED, EDGES_NS, Duration, Totals, zeros
from halfserve.serve.engine.precision_guard.tally import GuardCounters, OutputCounters
from halfserve.serve.engine.sequences.sequence_loading import sequences_of
from halfserve.serve.engine.sequences.sequence_scheduler import SequenceScheduler
from halfserve.serve.observability.metrics import Labels, labels_of, number

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
FAILURES = {CANCELLED: 0} | zeros(
    BackendError, DeadlineExceededError, NonFiniteError, OutOfMemoryError, OverloadedError, QueueFullError, UnavailableError
)
ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
STAGE_EDGES = tuple(number(ns / 1e9) for ns in EDGES_NS)


class ModelFigures:
    """Counters of one model at one time, which its metrics read.

    Attributes:
        guard: counters of the precision guard; None without one.
        sequences: scheduler of the model's sequences; None without them.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.labels = labels_of(model)
        self.totals = model.statistics.totals
        self.guard: GuardCounters | None = None if model.guard is None else model.guard.counters()
        self.sequences = sequences_of(model)

    @property
    def instances(self) -> Sequence[Instance]:
        return self.model.instances

    @property
    def cache(self) -> Totals | None:
        """The totals of a model with a response cache; None without one."""
        return self.totals if self.model.config.response_cache.enable else None


LabelledSamples = Iterable[tuple[str, Labels, float]]  # the suffix of a sample's name, its labels beside the model's, its value


@dataclass(frozen=True)
class ModelMetric:
    """A metric that each model has.

    Attributes:
        read: the samples of one model; none where the model has no such figure.
        is_latency: whether it is one of the counters that `--metrics-config counter_latencies=false` leaves out.
    """

    kind: str
    name: str
    text: str
    read: Callable[[ModelFigures], LabelledSamples]
    is_latency: bool = False


def _figure(read: Callable[[ModelFigures], float | None], suffix: str = "") -> Callable[[ModelFigures], LabelledSamples]:
    """Return the samples of a metric that has one figure for each model, or none."""

    def samples(figures: ModelFigures) -> LabelledSamples:
        value = read(figures)
        return () if value is None else ((suffix, {}, value),)

    return samples


def _gauge(name: str, text: str, read: Callable[[ModelFigures], float | None]) -> ModelMetric:
    return ModelMetric("gauge", name, text, _figure(read))


def _counter(name: str, text: str, read: Callable[[ModelFigures], float | None]) -> ModelMetric:
    return ModelMetric("counter", name, text, _figure(read, "_total"))


def _triton(name: str, text: str, read: Callable[[Totals], int]) -> ModelMetric:
    return ModelMetric("counter", name, text, _figure(lambda f: read(f.totals)))


def _time(name: str, text: str, read: Callable[[Totals], Duration]) -> ModelMetric:
    return ModelMetric("counter", name, text, _figure(lambda f: read(f.totals).ns // 1000), is_latency=True)


def _cache(name: str, text: str, read: Callable[[Totals], int]) -> ModelMetric:
    return ModelMetric("counter", name, text, _figure(lambda f: None if f.cache is None else read(f.cache)), is_latency=True)


def _guard(name: str, text: str, read: Callable[[GuardCounters], int]) -> ModelMetric:
    return _counter(name, text, lambda f: None if f.guard is None else read(f.guard))


def _output(name: str, text: str, read: Callable[[OutputCounters], int]) -> ModelMetric:
    def samples(figures: ModelFigures) -> LabelledSamples:
        return (("_total", {"output": output}, read(counters)) for output, counters in _outputs(figures))

    return ModelMetric("counter", name, text, samples)


def _sequence(name: str, text: str, read: Callable[[SequenceScheduler], int]) -> ModelMetric:
    return _gauge(name, text, lambda f: None if f.sequences is None else read(f.sequences))


def _triton_failures(figures: ModelFigures) -> LabelledSamples:
    counts: dict[str, int] = dict.fromkeys(TRITON_REASONS, 0)
    for reason, count in figures.totals.failures.items():
        counts[REASONS.get(reason, "BACKEND" if figures.model.composition is None else "OTHER")] += count
    return (("", {"reason": reason}, count) for reason, count in counts.items())


def _pending(figures: ModelFigures) -> int:
    ahead = sum(len(instance.next_requests) for instance in figures.instances)
    return figures.model.waiting + ahead + (0 if figures.sequences is None else figures.sequences.pending)


def _stages(figures: ModelFigures) -> LabelledSamples:
    for stage, histogram in figures.model.statistics.histograms().items():
        yield from _histogram({"stage": stage}, STAGE_EDGES, accumulate(histogram.counts), histogram.ns / 1e9)


def _rows(figures: ModelFigures) -> LabelledSamples:
    batches = {size: per_size.compute_infer.count for size, per_size in figures.totals.by_batch_size.items()}
    at_most = [sum(count for size, count in batches.items() if size <= edge) for edge in (*ROW_EDGES, math.inf)]
    return _histogram({}, map(str, ROW_EDGES), at_most, sum(size * count for size, count in batches.items()))


def _info(figures: ModelFigures) -> LabelledSamples:
    return (("", {"provider": figures.model.provider, "precision": figures.model.precision}, 1),)


def _failures(figures: ModelFigures) -> LabelledSamples:
    return (("_total", {"reason": reason}, count) for reason, count in sorted((FAILURES | figures.totals.failures).items()))


def _busy_s(figures: ModelFigures) -> float:
    sizes = figures.totals.by_batch_size.values()
    return sum(size.compute_input.ns + size.compute_infer.ns + size.compute_output.ns for size in sizes) / 1e9


def _degraded(figures: ModelFigures) -> LabelledSamples:
    return () if figures.guard is None else (("", {"policy": figures.guard.policy}, int(figures.guard.degraded)),)


def _outputs(figures: ModelFigures) -> Iterable[tuple[str, OutputCounters]]:
    return () if figures.guard is None else figures.guard.outputs.items()


def _drift(figures: ModelFigures) -> LabelledSamples:
    for name, output in _outputs(figures):
        if output.drift is not None:
            edges = map(number, output.drift.bounds)
            yield from _histogram({"output": name}, edges, accumulate(output.drift.counts), output.drift.total)


def _histogram(labels: Labels, edges: Iterable[str], at_most: Iterable[float], total: float) -> LabelledSamples:
    """Yield the samples of one histogram; `at_most` has its cumulative counts, one per edge and one for all values."""
    count = 0.0
    for edge, count in zip((*edges, "+Inf"), at_most, strict=True):
        yield "_bucket", labels | {"le": edge}, count
    yield "_sum", labels, total
    yield "_count", labels, count


# All metrics of models but the summaries, in the order of the exposition.
MODEL_METRICS: tuple[ModelMetric, ...] = (
    _triton("nv_inference_request_success", "Requests that were answered", lambda t: t.success.count),
    _triton("nv_inference_count", "Rows that were computed: a batch of n counts n times", lambda t: t.rows),
    _triton("nv_inference_exec_count", "Batches that were computed", lambda t: t.batches),
    _time("nv_inference_request_duration_us", "Time of answered requests, from arrival to answer", lambda t: t.success),
    _time("nv_inference_queue_duration_us", "Time that requests waited in the queue", lambda t: t.queue),
    _time("nv_inference_compute_input_duration_us", "Time to assemble inputs", lambda t: t.compute_input),
    _time("nv_inference_compute_infer_duration_us", "Time in the backend", lambda t: t.compute_infer),
    _time("nv_inference_compute_output_duration_us", "Time to take outputs apart", lambda t: t.compute_output),
    _cache("nv_cache_num_hits_per_model", "Requests that the response cache answered", lambda t: t.cache_hit.count),
    _cache("nv_cache_num_misses_per_model", "Requests that it had no answer for", lambda t: t.cache_miss.count),
    _cache("nv_cache_hit_duration_per_model", "Microseconds of the look-ups that found one", lambda t: t.cache_hit.ns // 1000),
    _cache(
        "nv_cache_miss_duration_per_model",
        "Microseconds of the other look-ups, and of keeping the answers",
        lambda t: t.cache_miss.ns // 1000,
    ),
    ModelMetric("counter", "nv_inference_request_failure", "Requests that got an error, by Triton's reasons", _triton_failures),
    _gauge("nv_inference_pending_request_count", "Requests that wait for their batch now", _pending),
    ModelMetric(
        "histogram", "halfserve_request_stage_seconds", "Time of computed requests by stage; total is all of them", _stages
    ),
    ModelMetric("histogram", "halfserve_batch_rows", "Batches by the rows that were computed together", _rows),
    _gauge("halfserve_queue_depth", "Requests that wait for their batch now", lambda f: f.model.waiting),
    _gauge(
        "halfserve_last_inference_timestamp_seconds",
        "When the last batch was computed; 0: never",
        lambda f: f.totals.last_inference_ms / 1e3,
    ),
    _gauge("halfserve_model_instances", "Copies of the model", lambda f: len(f.instances)),
    _gauge(
        "halfserve_model_instances_up",
        "Instances that take batches; the others are loading again",
        lambda f: sum(instance.is_up for instance in f.instances),
    ),
    _counter(
        "halfserve_model_instance_restarts",
        "Instances that failed and were loaded again",
        lambda f: sum(instance.restarts for instance in f.instances),
    ),
    ModelMetric("gauge", "halfserve_model_info", "Where the model really computes, and in what", _info),
    ModelMetric("counter", "halfserve_requests_failed", "Requests of a model that got an error, by reason", _failures),
    _counter("halfserve_compute_seconds", "Time that instances were busy with batches", _busy_s),
    _counter(
        "halfserve_request_bytes",
        "Size of the requests of clients, as gRPC messages: without what lies in shared memory",
        lambda f: f.model.statistics.request_bytes,
    ),
    _counter(
        "halfserve_response_bytes",
        "Size of the responses to clients, as gRPC messages: without what lies in shared memory",
        lambda f: f.model.statistics.response_bytes,
    ),
    _guard("halfserve_guard_rejected", "Requests refused for a non-finite answer", lambda g: g.rejected),
    _guard("halfserve_guard_fallbacks", "Requests answered by the fp32 twin", lambda g: g.fallbacks),
    _guard("halfserve_guard_shadow_runs", "Requests computed again in fp32, to compare", lambda g: g.shadow_runs),
    _guard("halfserve_guard_shadow_dropped", "Comparisons left out, as too many waited", lambda g: g.shadow_dropped),
    _guard("halfserve_guard_shadow_failed", "Comparisons that failed", lambda g: g.shadow_failed),
    ModelMetric("gauge", "halfserve_guard_degraded", "1 while the drift is over its threshold", _degraded),
    _output("halfserve_guard_non_finite_values", "Values that were NaN or infinite", lambda o: o.non_finite_values),
    _output(
        "halfserve_guard_non_finite_requests",
        "Requests with such values from finite inputs",
        lambda o: o.non_finite_requests,
    ),
    _output("halfserve_guard_non_finite_inputs", "Requests whose own inputs were not finite", lambda o: o.from_inputs),
    _output("halfserve_guard_rows_compared", "Rows compared with fp32 by their largest value", lambda o: o.rows_compared),
    _output(
        "halfserve_guard_rows_agreeing",
        "Rows whose largest value stands at the same place as in fp32",
        lambda o: o.rows_agreeing,
    ),
    ModelMetric(
        "histogram",
        "halfserve_guard_drift",
        "Scaled error against fp32 of the requests that were compared; infinite ones are not in the sum",
        _drift,
    ),
    _sequence("halfserve_sequences_active", "Sequences that have a slot", lambda s: s.running_sequences),
    _sequence("halfserve_sequences_waiting", "Sequences that wait for a slot", lambda s: s.backlog),
    _sequence(
        "halfserve_sequence_requests_waiting",
        "Requests that wait for a slot, or for the one before them",
        lambda s: s.waiting,
    ),
    _counter(
        "halfserve_sequences_expired",
        "Sequences that were ended as no request came for too long",
        lambda f: None if f.sequences is None else f.sequences.expired,
    ),
)


def model_metrics(models: Sequence[Model]) -> Iterator[tuple[ModelMetric, Metric]]:
    """Yield the metrics of these models, each with its declaration."""
    found = [ModelFigures(model) for model in models]
    for declared in MODEL_METRICS:
        metric = Metric(declared.name, declared.text, declared.kind)
        for figures in found:
            for suffix, labels, value in declared.read(figures):
                metric.add_sample(declared.name + suffix, figures.labels | labels, value)
        yield declared, metric
