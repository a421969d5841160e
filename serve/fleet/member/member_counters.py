"""Counters of members: sent to the other members, and added up.

In each sum the first counters are those of the member that received the request.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from halfserve.protos import inference_pb2 as pb

# Gauges are summed, except for these and for quantiles, of which the slowest member's are reported.
OF_THE_MACHINE = ("nv_cpu_", "nv_gpu_", "nv_energy_")  # prefixes of gauges that every member reports alike
SMALLEST = {"halfserve_ready", "process_start_time_seconds"}
LARGEST = {
    "halfserve_build_info",
    "halfserve_guard_degraded",
    "halfserve_last_inference_timestamp_seconds",
    "halfserve_model_info",
    "halfserve_model_state",
    "process_max_fds",
}


@dataclass(kw_only=True)
class MemberCounters:
    """Counters of one member, or the sum of several.

    Attributes:
        statistics: statistics of its models.
        metrics: all metrics, with each name once.
    """

    statistics: pb.ModelStatisticsResponse = field(default_factory=pb.ModelStatisticsResponse)
    metrics: list[Metric] = field(default_factory=list)

    def add(self, other: MemberCounters) -> None:
        """Add the counters of another member, for all of its models."""
        add_statistics(self.statistics, [other.statistics], everything=True)
        self.metrics = merge_metrics(self.metrics, [other.metrics], everything=True)

    def to_bytes(self) -> bytes:
        metrics = [
            [one.name, one.documentation, one.type, [[sample.name, sample.labels, sample.value] for sample in one.samples]]
            for one in self.metrics
        ]
        statistics = base64.b64encode(self.statistics.SerializeToString()).decode()
        return json.dumps({"statistics": statistics, "metrics": metrics}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> MemberCounters:
        """Restore what `to_bytes` serialized."""
        content = json.loads(data)
        counters = cls()
        counters.statistics.ParseFromString(base64.b64decode(content["statistics"]))
        for name, text, kind, samples in content["metrics"]:
            metric = Metric(name, text, kind)
            for sample in samples:
                metric.add_sample(*sample)
            counters.metrics.append(metric)
        return counters


def add_statistics(
    own: pb.ModelStatisticsResponse, others: Iterable[pb.ModelStatisticsResponse], *, everything: bool = False
) -> None:
    """Add the statistics of other members to a member's own; of models that it does not serve only with `everything`."""
    found = {(one.name, one.version): one for one in own.model_stats}
    for other in others:
        for one in other.model_stats:
            key = one.name, one.version
            if key in found:
                _add_model(found[key], one)
            elif everything:
                found[key] = own.model_stats.add()
                found[key].CopyFrom(one)


def _add_model(total: pb.ModelStatistics, one: pb.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, one.last_inference)
    total.inference_count += one.inference_count
    total.execution_count += one.execution_count
    for kind in pb.InferStatistics.DESCRIPTOR.fields_by_name:
        _add(getattr(total.inference_stats, kind), getattr(one.inference_stats, kind))
    sizes = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in one.batch_stats:
        if batch.batch_size not in sizes:
            sizes[batch.batch_size] = pb.InferBatchStatistics(batch_size=batch.batch_size)
        for name in ("compute_input", "compute_infer", "compute_output"):
            _add(getattr(sizes[batch.batch_size], name), getattr(batch, name))
    merged = [sizes[size] for size in sorted(sizes)]
    del total.batch_stats[:]
    total.batch_stats.extend(merged)


def _add(total: pb.StatisticDuration, one: pb.StatisticDuration) -> None:
    total.count += one.count
    total.ns += one.ns


def merge_metrics(own: Sequence[Metric], others: Iterable[Sequence[Metric]], *, everything: bool = False) -> list[Metric]:
    """Merge metrics of other members into a member's own; of models that it does not serve only with `everything`."""
    metrics = {metric.name: metric for metric in own}
    served = {model_of(sample.labels) for metric in own for sample in metric.samples}
    for other in others:
        for metric in other:
            if metric.name.startswith(OF_THE_MACHINE):
                continue
            samples = [sample for sample in metric.samples if everything or model_of(sample.labels) in served]
            if metric.name not in metrics:
                metrics[metric.name] = _metric_of(metric, samples)
            else:
                metrics[metric.name] = _merged(metrics[metric.name], samples)
    return list(metrics.values())


def model_of(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Name and version of a sample's model; None if it has none."""
    return labels.get("model"), labels.get("version")


def _metric_of(metric: Metric, samples: Iterable[Sample]) -> Metric:
    made = Metric(metric.name, metric.documentation, metric.type)
    made.samples = list(samples)
    return made


def _slower(one: float, other: float) -> float:
    return other if math.isnan(one) else max(one, other)  # NaN: it had no requests


def _merged(metric: Metric, samples: Iterable[Sample]) -> Metric:
    combine = min if metric.name in SMALLEST else max if metric.name in LARGEST else None
    totals = {(one.name, tuple(sorted(one.labels.items()))): one for one in metric.samples}
    for one in samples:
        key = (one.name, tuple(sorted(one.labels.items())))
        if key not in totals:
            totals[key] = one
        else:
            before = totals[key].value
            together = _slower if "quantile" in one.labels else combine
            totals[key] = totals[key]._replace(value=together(before, one.value) if together else before + one.value)
    return _metric_of(metric, totals.values())
