"""Triton's summaries of latencies with quantiles, which --metrics-config selects.

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/metrics.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import Metric

from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import Duration, LatencyFigures, Totals
from halfserve.serve.observability.metrics import CACHE_COUNTERS, TRITON_COUNTERS, labels_of, number

SETTINGS = ("counter_latencies", "summary_latencies", "summary_quantiles")
BOOLS = {"true": True, "false": False}
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)  # Triton's default
DURATIONS = {f"nv_inference_{name}" for name, *_ in TRITON_COUNTERS if name.endswith("_us")}
LATENCY_COUNTERS = DURATIONS | {name for name, *_ in CACHE_COUNTERS}
# Name, text, the count and sum since the model was loaded, and the stage that has quantiles.
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
        if name not in SETTINGS:
            raise ValueError(f"has the setting {name!r}, expected one of: {', '.join(SETTINGS)}")
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
