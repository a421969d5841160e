"""Traces of a real server: in a file, and at a real OTLP collector."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from tritonclient.utils import InferenceServerException

from halfserve.serve.observability.inference_record import TraceContext, parent_of
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, SECRET, Serving, index, row

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


def spans_of(path: Path) -> list[dict[str, Any]]:
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    scopes = [scope for r in requests for resource in r["resourceSpans"] for scope in resource["scopeSpans"]]
    return [span for scope in scopes for span in scope["spans"]]


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def named(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


def test_a_request_is_traced_in_its_callers_trace(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    options = ObserveOptions(trace_to=str(file))
    began_ns = time.time_ns()
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(3), request_id="traced", headers=PARENT, client_timeout=CLIENT_TIMEOUT_S)
        client.infer("mlp", row(3), request_id="not", headers={}, client_timeout=CLIENT_TIMEOUT_S)
    spans = spans_of(file)
    assert len(spans) == 7
    request, batch = named(spans, "inference.GRPCInferenceService/ModelInfer"), named(spans, "batch mlp")
    assert (request["traceId"], request["parentSpanId"], request["traceState"]) == (TRACE_ID, SPAN_ID, "vendor=1")
    told = attributes(request)
    assert (told["halfserve.request_id"], told["halfserve.rows"], told["rpc.response.status_code"]) == ("traced", "3", "OK")
    queue, compute = named(spans, "queue"), named(spans, "compute")
    assert {span["parentSpanId"] for span in (queue, compute)} == {request["spanId"]}
    assert [link["spanId"] for link in compute["links"]] == [batch["spanId"]]
    assert [(link["traceId"], link["spanId"]) for link in batch["links"]] == [(TRACE_ID, request["spanId"])]
    assert batch["traceId"] != TRACE_ID
    assert (attributes(batch)["halfserve.rows"], attributes(batch)["halfserve.traced_requests"]) == ("3", "1")
    stages = [named(spans, f"compute_{stage}") for stage in ("input", "infer", "output")]
    assert {span["parentSpanId"] for span in stages} == {batch["spanId"]}
    moments = [request["startTimeUnixNano"], queue["startTimeUnixNano"], queue["endTimeUnixNano"]]
    moments += [compute["startTimeUnixNano"], *(span["endTimeUnixNano"] for span in stages)]
    moments += [compute["endTimeUnixNano"], request["endTimeUnixNano"]]
    assert list(map(int, moments)) == sorted(map(int, moments))
    assert began_ns < int(moments[0])
    assert int(moments[-1]) < time.time_ns()


def test_a_model_has_a_count_of_its_own(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with (
        serving(ObserveOptions(trace_to=str(file), trace_rate=1)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.update_trace_settings("mlp", {"trace_count": "1"}, client_timeout=CLIENT_TIMEOUT_S)
        for number in range(3):
            client.infer("mlp", row(), request_id=str(number), client_timeout=CLIENT_TIMEOUT_S)
        client.infer("picky", index(0), request_id="other", client_timeout=CLIENT_TIMEOUT_S)
    requests = [span for span in spans_of(file) if span["name"].endswith("ModelInfer")]
    assert [attributes(span)["halfserve.request_id"] for span in requests] == ["0", "other"]


def test_no_more_than_the_beginning_of_a_long_id_is_kept(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with (
        serving(ObserveOptions(trace_to=str(file), trace_rate=1)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.infer("mlp", row(), request_id="é" * 100_000, client_timeout=CLIENT_TIMEOUT_S)
    request = named(spans_of(file), "inference.GRPCInferenceService/ModelInfer")
    assert attributes(request)["halfserve.request_id"] == "é" * 128


def test_one_request_in_rate_is_traced_under_its_logged_id(serving: Serving, tmp_path: Path) -> None:
    file, log = tmp_path / "traces.json", tmp_path / "access.log"
    options = ObserveOptions(trace_to=str(file), trace_rate=2, access_log=AccessLog.ALL, access_log_file=log)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        for number in range(5):
            client.infer("mlp", row(), request_id=str(number), client_timeout=CLIENT_TIMEOUT_S)
    requests = [span for span in spans_of(file) if span["name"].endswith("ModelInfer")]
    assert [attributes(span)["halfserve.request_id"] for span in requests] == ["1", "3"]
    logged = {line["trace_id"] for line in map(json.loads, log.read_text().splitlines()) if "trace_id" in line}
    assert logged == {span["traceId"] for span in requests}
    assert len(logged) == 2


def test_a_failed_request_has_a_span_with_its_status_and_no_values(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    with serving(ObserveOptions(trace_to=str(file))) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("picky", index(0), client_timeout=CLIENT_TIMEOUT_S)  # whose batch is not the failed one's
        with pytest.raises(InferenceServerException):
            client.infer("picky", index(SECRET), headers=PARENT, client_timeout=CLIENT_TIMEOUT_S)
    spans = spans_of(file)
    request = named(spans, "inference.GRPCInferenceService/ModelInfer")
    assert request["status"]["code"] == 2
    assert attributes(request)["rpc.response.status_code"] == "INTERNAL"
    assert str(SECRET) not in file.read_text()
    assert {span["name"] for span in spans} == {"inference.GRPCInferenceService/ModelInfer", "queue"}


def test_a_file_holds_as_many_traces_as_asked(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    options = ObserveOptions(trace_to=str(file), trace_rate=1, trace_log_frequency=2)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        for _ in range(5):
            client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
    counts = [
        sum(span["name"].endswith("ModelInfer") for span in spans_of(tmp_path / f"traces.json.{number}")) for number in range(3)
    ]
    assert counts == [2, 2, 1]
    assert not file.exists()


@pytest.mark.parametrize("log_frequency", [0, 2], ids=["one file", "files of two traces"])
def test_tritons_own_files_hold_an_array_of_traces(serving: Serving, tmp_path: Path, log_frequency: int) -> None:
    file = tmp_path / "traces.json"
    options = ObserveOptions(trace_to=f"triton:{file}", trace_rate=1, trace_count=3, trace_log_frequency=log_frequency)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        for number in range(4):
            client.infer("mlp", row(), request_id=str(number), client_timeout=CLIENT_TIMEOUT_S)
    files = [tmp_path / f"traces.json.{number}" for number in range(2)] if log_frequency else [file]
    assert sorted(tmp_path.glob("traces*")) == files
    parts = [[entry["request_id"] for entry in json.loads(one.read_text()) if "model_name" in entry] for one in files]
    assert parts == ([["0", "1"], ["2"]] if log_frequency else [["0", "1", "2"]])
    stages = [stamp["name"] for stamp in json.loads(files[0].read_text())[1]["timestamps"]]
    assert stages[:4] + stages[-3:] == [
        *("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START", "QUEUE_START"),
        *("REQUEST_END", "GRPC_SEND_START", "GRPC_SEND_END"),
    ]


class Collector(grpc.GenericRpcHandler):  # type: ignore[misc]  # (grpcio ships no types)
    """Takes spans as any OTLP collector does."""

    def __init__(self) -> None:
        self.requests: SimpleQueue[otlp.ExportTraceServiceRequest] = SimpleQueue()

    def service(self, handler_call_details: Any) -> Any:
        assert handler_call_details.method == "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

        def export(request: otlp.ExportTraceServiceRequest, _: Any) -> otlp.ExportTraceServiceResponse:
            self.requests.put(request)
            return otlp.ExportTraceServiceResponse()

        return grpc.unary_unary_rpc_method_handler(
            export, otlp.ExportTraceServiceRequest.FromString, otlp.ExportTraceServiceResponse.SerializeToString
        )


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[collector])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collector
    finally:
        server.stop(0).wait()


@pytest.mark.long
def test_a_collector_gets_traces_that_were_turned_on_at_run_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as (endpoint, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "digits")
        with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
            observer = server.service.observability.observer
            assert observer.log is None
            assert observer.tracer is None
            client.update_trace_settings(settings={"trace_level": "TIMESTAMPS", "trace_rate": "1"})
            client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
            (resource,) = collector.requests.get(timeout=CLIENT_TIMEOUT_S).resource_spans
            assert server.call(server.core.figures.readings["halfserve_traces_total"].read) == 1
    assert ("service.name", "digits") in [(entry.key, entry.value.string_value) for entry in resource.resource.attributes]
    names = [span.name for span in resource.scope_spans[0].spans]
    assert sorted(names) == [
        "batch mlp",
        "compute",
        "compute_infer",
        "compute_input",
        "compute_output",
        "inference.GRPCInferenceService/ModelInfer",
        "queue",
    ]


def test_a_lost_collector_costs_traces_and_nothing_else(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    options = ObserveOptions(trace_to="otlp", trace_rate=1)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        client.infer("mlp", row(), client_timeout=CLIENT_TIMEOUT_S)
        server.call(server.service.observability.close)
        assert server.call(server.core.figures.readings["halfserve_traces_dropped_total"].read) == 1
    assert "traces: 1 lost: the collector did not take them; check OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text


def test_a_callers_context_is_read() -> None:
    def read(version: bytes, flags: bytes) -> TraceContext | None:
        return parent_of({b"traceparent": version + b"-" + TRACE + b"-" + SPAN + b"-" + flags, b"tracestate": b"vendor=1"})

    context = TraceContext(trace_id=int(TRACE, 16), parent_id=int(SPAN, 16), sampled=True, state="vendor=1")
    assert read(b"00", b"01") == context
    assert read(b"00", b"00") == replace(context, sampled=False)
    assert read(b"01", b"01-what-else") == context, "later versions may say more"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00",
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00-" + TRACE.upper() + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + SPAN + b"-01-more",
        b"ff-" + TRACE + b"-" + SPAN + b"-01",
        b"00-" + TRACE[:-1] + b"-" + SPAN + b"-01",
    ],
    ids=["empty", "short", "zero-trace", "zero-span", "capitals", "too-much", "version-ff", "short-trace"],
)
def test_what_the_standard_calls_invalid_is_no_context(value: bytes) -> None:
    assert parent_of({b"traceparent": value}) is None


@given(st.binary())
def test_any_bytes_are_taken(value: bytes) -> None:
    parent = parent_of({b"traceparent": value, b"tracestate": value})
    assert parent is None or parent.trace_id
