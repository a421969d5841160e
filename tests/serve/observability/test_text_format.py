from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve.observability.text_format import number
from tests.serve.observability.metric_text import to_text


def gauge(name: str, labels: dict[str, str], value: float) -> Metric:
    metric = Metric(name, "A figure\nof a kind \\", "gauge")
    metric.add_sample(name, labels, value)
    return metric


@given(st.text(), st.floats() | st.integers(-(2**53), 2**53))
def test_what_is_written_reads_back(label: str, value: float) -> None:
    (metric,) = text_string_to_metric_families(to_text([gauge("some_figure", {"model": label, "version": "1"}, value)]))
    (sample,) = metric.samples
    assert sample.labels == {"model": label, "version": "1"}
    assert math.isclose(sample.value, value, abs_tol=1e-20) or (math.isnan(value) and math.isnan(sample.value))
    assert metric.documentation == "A figure\nof a kind \\"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (150_754_820_096, "150754820096"),
        (1.5e11, "150000000000"),
        (0.25, "0.25"),
        (1e-05, "0.00001"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_plain_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_counter_keeps_the_name_of_its_samples() -> None:
    triton, ours = Metric("nv_inference_count", "Rows", "counter"), Metric("halfserve_lost", "Lost", "counter")
    triton.add_sample("nv_inference_count", {}, 3)
    ours.add_sample("halfserve_lost_total", {"reason": "full"}, 4)
    assert to_text([triton, Metric("empty", "Nothing", "gauge"), ours]) == (
        "# HELP nv_inference_count Rows\n# TYPE nv_inference_count counter\nnv_inference_count 3\n"
        '# HELP halfserve_lost_total Lost\n# TYPE halfserve_lost_total counter\nhalfserve_lost_total{reason="full"} 4\n'
    )
