"""What the precision guard of each model has counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import Metric

from serve.engine.model import Model
from serve.engine.precision_guard.tally import DriftHistogram, GuardCounters, OutputCounters
from serve.observability.text_format import number
from serve.observability.triton_metrics import labels_of

COUNTERS: tuple[tuple[str, str, Callable[[GuardCounters], int]], ...] = (
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


def guard_metrics(models: Sequence[Model]) -> Iterator[Metric]:
    """The halfserve_guard_* metrics of the models that have a guard."""
    guards = [(labels_of(model), counts) for model in models if (counts := _counts(model)) is not None]
    for name, text, read in COUNTERS:
        metric = Metric(f"halfserve_guard_{name}", text, "counter")
        for labels, guard in guards:
            metric.add_sample(f"{metric.name}_total", labels, read(guard))
        yield metric
    degraded = Metric("halfserve_guard_degraded", "1 while the drift is over its threshold", "gauge")
    for labels, guard in guards:
        degraded.add_sample(degraded.name, labels | {"policy": guard.policy}, int(guard.degraded))
    yield degraded
    outputs = [(labels | {"output": name}, counts) for labels, guard in guards for name, counts in guard.outputs.items()]
    for name, text, read_output in OUTPUT_COUNTERS:
        metric = Metric(f"halfserve_guard_{name}", text, "counter")
        for labels, output in outputs:
            metric.add_sample(f"{metric.name}_total", labels, read_output(output))
        yield metric
    yield _drift([(labels, output.drift) for labels, output in outputs if output.drift is not None])


def _drift(drifts: list[tuple[dict[str, str], DriftHistogram]]) -> Metric:
    text = "Scaled error against fp32 of the requests that were compared; infinite ones are not in the sum"
    metric = Metric("halfserve_guard_drift", text, "histogram")
    for labels, drift in drifts:
        at_most = 0
        edges = (*map(number, drift.bounds), "+Inf")
        for edge, at_most in zip(edges, accumulate(drift.counts), strict=True):
            metric.add_sample(f"{metric.name}_bucket", labels | {"le": edge}, at_most)
        metric.add_sample(f"{metric.name}_sum", labels, drift.total)
        metric.add_sample(f"{metric.name}_count", labels, at_most)
    return metric


def _counts(model: Model) -> GuardCounters | None:
    return None if model.guard is None else model.guard.counters()
