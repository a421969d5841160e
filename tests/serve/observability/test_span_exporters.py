"""Records of traced requests on their way into files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from serve.engine.model_statistics import BatchTimes
from serve.observability.span_exporters import CHUNK, FileExporter
from serve.observability.trace_context import TraceContext
from serve.observability.tracer import TraceRecord
from tests.serve.observability.test_otlp_json import record


def spans(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for line in lines for of in line["resourceSpans"] for scope in of["scopeSpans"] for span in scope["spans"]]


def batch_of(requests: int, start: int) -> list[TraceRecord]:
    times = BatchTimes(started=2_000 + start, assembled=3_000, computed=7_000, split=8_000)
    return [record(TraceContext(start + number), times) for number in range(1, requests + 1)]


@pytest.mark.parametrize("log_frequency", [0, 3], ids=["one file", "files of three traces"])
def test_a_batch_is_one_however_many_of_its_requests_are_traced(tmp_path: Path, log_frequency: int) -> None:
    exporter = FileExporter(tmp_path / "traces", lambda: log_frequency)
    sizes = [2, 1, CHUNK, 2, 2 * CHUNK + 1]
    exporter.deliver([one for number, size in enumerate(sizes) for one in batch_of(size, 1000 * number)])
    exporter.close()
    links = [
        len(span["links"]) for file in sorted(tmp_path.iterdir()) for span in spans(file) if span["name"].startswith("batch")
    ]
    assert links == sizes
    names = Counter(span["name"] for file in tmp_path.iterdir() for span in spans(file))
    assert names["inference.GRPCInferenceService/ModelInfer"] == sum(sizes)
