"""Counters of members: sent to the other members, left behind for them at a member's end, and added up.

In each sum the first counters are those of the member that received the request.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.observability.exposition import collect
from halfserve.serve.protocol.rpcs import model_statistics

COUNTERS = {"counter", "histogram"}
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
# Triton's counters that can be computed from the statistics.
OF_STATISTICS: Mapping[str, Callable[[pb.ModelStatistics], int]] = {
    "nv_inference_request_success": lambda one: one.inference_stats.success.count,
    "nv_inference_count": lambda one: one.inference_count,
    "nv_inference_exec_count": lambda one: one.execution_count,
    "nv_inference_request_duration_us": lambda one: one.inference_stats.success.ns // 1000,
    "nv_inference_queue_duration_us": lambda one: one.inference_stats.queue.ns // 1000,
    "nv_inference_compute_input_duration_us": lambda one: one.inference_stats.compute_input.ns // 1000,
    "nv_inference_compute_infer_duration_us": lambda one: one.inference_stats.compute_infer.ns // 1000,
    "nv_inference_compute_output_duration_us": lambda one: one.inference_stats.compute_output.ns // 1000,
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

    @classmethod
    async def of(cls, core: InferenceCore) -> MemberCounters:
        """Read the current counters of a server."""
        metrics: dict[str, Metric] = {}
        async for metric in collect(core):
            known = metrics.setdefault(metric.name, metric)
            if known is not metric:
                known.samples += metric.samples
        statistics = pb.ModelStatisticsResponse(model_stats=[model_statistics(model) for model in core.models()])
        return cls(statistics=statistics, metrics=list(metrics.values()))

    def add(self, other: MemberCounters) -> None:
        """Add the counters of another member, for all of its models."""
        add_statistics(self.statistics, [other.statistics], everything=True)
        self.metrics = merge_metrics(self.metrics, [other.metrics], everything=True)

    def write(self, file: Path) -> None:
        """Write the counters to a file, replacing earlier ones.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        hidden = file.with_name(f".{file.name}.new")
        hidden.write_bytes(self.to_bytes())
        hidden.rename(file)

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


def counters_of(metrics: Iterable[Metric]) -> list[Metric]:
    """The metrics of a member that remain valid after its end: its counters, except those about the process."""
    return [metric for metric in metrics if metric.type in COUNTERS and not metric.name.startswith("process_")]


def with_statistics(metrics: Sequence[Metric], statistics: pb.ModelStatisticsResponse) -> list[Metric]:
    """Metrics in which the counters known to the statistics are replaced by their newer values."""
    texts = {metric.name: metric.documentation for metric in metrics}
    made = {name: Metric(name, texts.get(name, ""), "counter") for name in OF_STATISTICS}
    for name, metric in made.items():
        for one in statistics.model_stats:
            metric.add_sample(name, {"model": one.name, "version": one.version}, OF_STATISTICS[name](one))
    return [*(metric for metric in metrics if metric.name not in made), *made.values()]


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
