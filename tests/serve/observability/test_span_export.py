"""Records of traced requests on their way into files."""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.observability.inference_record import TraceContext
from halfserve.serve.observability.span_export import (
    CHUNK,
    SCOPE,
    FileExporter,
    OtlpFormat,
    TritonFormat,
    make_exporter,
    resource,
    to_line,
    to_sdk,
)
from halfserve.serve.observability.tracing import TraceRecord, spans_of

IDS = {"traceId", "spanId", "parentSpanId"}
TIMES = BatchTimes(started=2_000, assembled=3_000, computed=7_000, split=8_000)


def spans(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [span for line in lines for of in line["resourceSpans"] for scope in of["scopeSpans"] for span in scope["spans"]]


def batch_of(requests: int, start: int) -> list[TraceRecord]:
    times = BatchTimes(started=2_000 + start, assembled=3_000, computed=7_000, split=8_000)
    return [record(TraceContext(start + number), times) for number in range(1, requests + 1)]


@pytest.mark.parametrize("log_frequency", [0, 3], ids=["one file", "files of three traces"])
def test_a_batch_is_one_however_many_of_its_requests_are_traced(tmp_path: Path, log_frequency: int) -> None:
    exporter = FileExporter(tmp_path / "traces", lambda: log_frequency, OtlpFormat())
    sizes = [2, 1, CHUNK, 2, 2 * CHUNK + 1]
    exporter.deliver([one for number, size in enumerate(sizes) for one in batch_of(size, 1000 * number)])
    exporter.close()
    links = [
        len(span["links"]) for file in sorted(tmp_path.iterdir()) for span in spans(file) if span["name"].startswith("batch")
    ]
    assert links == sizes
    names = Counter(span["name"] for file in tmp_path.iterdir() for span in spans(file))
    assert names["inference.GRPCInferenceService/ModelInfer"] == sum(sizes)


def record(context: TraceContext, batch: BatchTimes | None = TIMES, error: str = "") -> TraceRecord:
    return TraceRecord(
        context=context,
        model='m"1',
        version="7",
        request_id="id",
        rows=2,
        request_bytes=10,
        response_bytes=0 if error else 20,
        status="INTERNAL" if error else "OK",
        error=error,
        peer="127.0.0.1:5",
        epoch_ns=10**18,
        arrived_ns=1_000,
        ended_ns=9_000,
        batch=batch,
        batch_rows=4,
    )


def test_tritons_format_tells_when_a_trace_passed_each_stage(tmp_path: Path) -> None:
    exporter = FileExporter(tmp_path / "traces", lambda: 0, TritonFormat())
    exporter.deliver([record(TraceContext(5))])
    refused = record(TraceContext(6), None, "the model failed")
    refused.request_id, refused.is_rest = "", True
    exporter.deliver([refused])
    exporter.close()
    computed = {"COMPUTE_START": 2_000, "COMPUTE_INPUT_END": 3_000, "COMPUTE_OUTPUT_START": 7_000, "COMPUTE_END": 8_000}
    about = {"model_name": 'm"1', "model_version": 7}
    assert json.loads((tmp_path / "traces").read_text()) == [
        {"id": 1, **about, "request_id": "id"},
        {"id": 1, "timestamps": stamps("GRPC_WAITREAD", computed, "GRPC_SEND")},
        {"id": 2, **about},
        {"id": 2, "timestamps": stamps("HTTP_RECV", {}, "HTTP_SEND")},
    ]


def test_each_of_several_processes_has_an_array_of_its_own(tmp_path: Path) -> None:
    for process in (1, 2):
        exporter = make_exporter(f"triton:{tmp_path / 'traces'}", lambda: 0, process=process)
        exporter.deliver([record(TraceContext(5))])
        exporter.close()
    assert [len(json.loads((tmp_path / f"traces-{process}").read_text())) for process in (1, 2)] == [2, 2]


def stamps(received: str, computed: dict[str, int], sent: str) -> list[dict[str, Any]]:
    first = dict.fromkeys([f"{received}_START", f"{received}_END", "REQUEST_START", "QUEUE_START"], 1_000)
    last = dict.fromkeys(["REQUEST_END", f"{sent}_START", f"{sent}_END"], 9_000)
    return [{"name": name, "ns": ns} for name, ns in (first | computed | last).items()]


def with_hex_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: base64.b64decode(v).hex() if k in IDS else with_hex_ids(v) for k, v in value.items()}
    return [with_hex_ids(v) for v in value] if isinstance(value, list) else value


def without_flags(value: Any) -> Any:
    """Flags tell whether a parent is remote too, in bits that few read; and a status that is unset is as good as none."""
    if isinstance(value, dict):
        return {k: without_flags(v) for k, v in value.items() if k != "flags" and v != {}}
    return [without_flags(v) for v in value] if isinstance(value, list) else value


def test_lines_are_what_opentelemetrys_own_encoder_says() -> None:
    records = [
        record(TraceContext(trace_id=5)),
        record(TraceContext(trace_id=6, parent_id=8, state="vendor=1")),
        record(TraceContext(trace_id=7), None, "the model failed"),
    ]
    spans = spans_of(records)
    own = resource()
    expected = with_hex_ids(MessageToDict(encode_spans(to_sdk(spans, own)), use_integers_for_enums=True))
    assert without_flags(json.loads(to_line(spans, own.attributes, SCOPE))) == without_flags(expected)


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.lists(st.text()))))
def test_any_resource_makes_a_line_of_json(attributes: dict[str, Any]) -> None:
    line = to_line([], attributes, ("a", "b"))
    (told,) = json.loads(line)["resourceSpans"]
    assert [attribute["key"] for attribute in told["resource"]["attributes"]] == list(attributes)
    assert line.count("\n") == 1


def test_requests_of_one_batch_share_its_span() -> None:
    other = BatchTimes(started=2_500, assembled=3_000, computed=7_000, split=8_000)
    spans = spans_of([record(TraceContext(5)), record(TraceContext(6)), record(TraceContext(7), other)])
    batches = [span for span in spans if span.name.startswith("batch")]
    assert [[trace_id for trace_id, _ in span.links] for span in batches] == [[5, 6], [7]]
    computes = [span for span in spans if span.name == "compute"]
    first, second = [(span.trace_id, span.span_id) for span in batches]
    assert [list(span.links) for span in computes] == [[first], [first], [second]]


def test_what_happened_to_a_request_lies_within_its_span() -> None:
    first, second = record(TraceContext(trace_id=1)), record(TraceContext(trace_id=2))
    second.epoch_ns += 5_000  # as where the process was interrupted between two looks at clocks
    second.ended_ns = TIMES.split
    spans = spans_of([first, second])
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    parts = [(span, by_id[span.trace_id, span.parent_id]) for span in spans if (span.trace_id, span.parent_id) in by_id]
    assert len(parts) == 3 + 2 * 2
    assert all(whole.start_ns <= part.start_ns <= part.end_ns <= whole.end_ns for part, whole in parts)
