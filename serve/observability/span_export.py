"""Export of traces: to a collector, or into files, as OTLP's JSON or in Triton's own format.

Exporters are used on the tracing thread; OpenTelemetry is imported there, and only for its own formats.
https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/ and https://opentelemetry.io/docs/specs/otlp/
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/trace.md#json-trace-output
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import count
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfserve.serve.observability.observe_options import OTLP, file_of, is_tritons
from halfserve.serve.observability.outbox import ArrayFile, LineFile
from halfserve.serve.observability.tracing import Span, SpanPlace, TraceRecord, spans_of, whole_batches

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

CHUNK = 64  # traces that are exported at a time: some hundred KB
SCOPE = ("halfserve", version("halfserve"))
ERROR_CODE = 2  # OTLP's status code of an error
SAMPLED_FLAG = 1
SPAN_KINDS = {"INTERNAL": 1, "SERVER": 2}


def make_exporter(to: str, log_frequency: Callable[[], int], *, process: int | None = None) -> OtlpExporter | FileExporter:
    """Return an exporter to a collector ("otlp"), or to a file: a path, or "triton:" and a path.

    `log_frequency` tells the traces per file, for each file. `process`, the number of this process among several, separates
    arrays (FILE-NUMBER); files of lines are shared.
    """
    if to == OTLP:
        return OtlpExporter()
    path = Path(file_of(to))
    if not is_tritons(to):
        return FileExporter(path, log_frequency, OtlpFormat())
    return FileExporter(path if process is None else path.with_name(f"{path.name}-{process}"), log_frequency, TritonFormat())


class OtlpExporter:
    """To the collector that the OTEL_EXPORTER_OTLP_* variables name, over gRPC; by OpenTelemetry's own exporter.

    OpenTelemetry's BatchSpanProcessor does not replace the Outbox: it queues spans and not records, so that the event loop
    would make the spans of each request (0.2 ms), and it does not count the spans that the collector refuses.
    """

    def __init__(self) -> None:
        self._parts: tuple[Any, Resource] | None = None

    def prepare(self) -> None:
        """Import OpenTelemetry, which takes some 100 ms, before there are requests to answer.

        Raises:
            ImportError: it is not installed.
        """
        self._exporter()

    def deliver(self, records: list[TraceRecord]) -> None:
        """Send spans and wait until they are accepted.

        Raises:
            ConnectionError: they were not, within OTEL_EXPORTER_OTLP_TIMEOUT.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415  (slow, and only needed here)

        exporter, of = self._exporter()
        rest = records
        while rest:
            end = whole_batches(rest, CHUNK)
            part, rest = rest[:end], rest[end:]
            if exporter.export(to_sdk(spans_of(part), of)) is not SpanExportResult.SUCCESS:
                raise ConnectionError("the collector did not take them; check OTEL_EXPORTER_OTLP_ENDPOINT")

    def close(self) -> None:
        if self._parts is not None:
            self._parts[0].shutdown()

    def _exporter(self) -> tuple[Any, Resource]:
        if self._parts is None:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  (slow, and only needed here)
                OTLPSpanExporter,
            )

            self._parts = OTLPSpanExporter(), resource()
        return self._parts


class FileExporter:
    """Into files of one format."""

    def __init__(self, path: Path, log_frequency: Callable[[], int], form: OtlpFormat | TritonFormat) -> None:
        self._path = path
        self._log_frequency = log_frequency
        self._form = form
        self._file = form.file(path)
        self._number = self._traces = 0

    def prepare(self) -> None:
        self._form.prepare()

    def deliver(self, records: list[TraceRecord]) -> None:
        """Append traces; a new file begins after `log_frequency` traces: FILE.0, FILE.1, ...

        Raises:
            OSError: they cannot be written.
        """
        rest = records
        while rest:
            end = whole_batches(rest, self._room())
            part, rest = rest[:end], rest[end:]
            self._file.write(self._form.written(part))
            self._traces += len(part)

    def close(self) -> None:
        self._file.close()

    def _room(self) -> int:
        """Return the number of traces to write now; begins the next file if this one is full."""
        each = self._log_frequency()
        if not each:
            return CHUNK
        if self._number and self._traces < each:
            return min(CHUNK, each - self._traces)
        self._file.close()
        self._file = self._form.file(self._path.with_name(f"{self._path.name}.{self._number}"))
        self._number += 1
        self._traces = 0
        return min(CHUNK, each)


class OtlpFormat:
    """Each line is an OTLP ExportTraceServiceRequest as JSON, which a collector's otlpjsonfile receiver reads."""

    def __init__(self) -> None:
        self._resource: Mapping[str, Any] | None = None

    def prepare(self) -> None:
        self._attributes()

    def file(self, path: Path) -> LineFile:
        return LineFile(path)

    def written(self, records: Sequence[TraceRecord]) -> list[str]:
        return [to_line(spans_of(records), self._attributes(), SCOPE)]

    def _attributes(self) -> Mapping[str, Any]:
        if self._resource is None:
            self._resource = resource().attributes
        return self._resource


class TritonFormat:
    """A JSON array that has two objects for each trace: its id and model, and when it passed each stage.

    Times are nanoseconds on the monotonic clock, as Triton's are. A message is received at one moment and sent at one moment:
    this server measures neither, and Triton's own tools leave out traces without them.
    """

    def __init__(self) -> None:
        self._ids = count(1)

    def prepare(self) -> None:
        """Nothing is needed."""

    def file(self, path: Path) -> ArrayFile:
        return ArrayFile(path)

    def written(self, records: Sequence[TraceRecord]) -> list[str]:
        return [text for record in records for text in _triton_objects(next(self._ids), record)]


def _triton_objects(number: int, record: TraceRecord) -> tuple[str, str]:
    received, sent = ("HTTP_RECV", "HTTP_SEND") if record.is_rest else ("GRPC_WAITREAD", "GRPC_SEND")
    arrived, batch, ended = record.arrived_ns, record.batch, record.ended_ns
    passed = [(name, arrived) for name in (f"{received}_START", f"{received}_END", "REQUEST_START", "QUEUE_START")]
    if batch is not None:
        passed += [("COMPUTE_START", batch.started), ("COMPUTE_INPUT_END", batch.assembled)]
        passed += [("COMPUTE_OUTPUT_START", batch.computed), ("COMPUTE_END", batch.split)]
    passed += [(name, ended) for name in ("REQUEST_END", f"{sent}_START", f"{sent}_END")]
    request_id = f',"request_id":{quoted(record.request_id)}' if record.request_id else ""
    stamps = ",".join([f'{{"name":"{name}","ns":{ns}}}' for name, ns in passed])
    return (
        f'{{"id":{number},"model_name":{quoted(record.model)},"model_version":{record.version}{request_id}}}',
        f'{{"id":{number},"timestamps":[{stamps}]}}',
    )


def to_line(spans: Sequence[Span], resource: Mapping[str, Any], scope: tuple[str, str]) -> str:
    """Return an ExportTraceServiceRequest as one line; ids are hexadecimal, and 64-bit numbers are strings.

    The spans are of one process, which `resource` describes; `scope` is the name and version of the library that made them.
    Formatted by hand: json.dumps takes three times as long, and protobuf's own JSON 25 times.
    """
    name, version = scope
    listed = ",".join([_span(span) for span in spans])
    return (
        f'{{"resourceSpans":[{{"resource":{{{_attributes(resource)}}},"scopeSpans":[{{'
        f'"scope":{{"name":{quoted(name)},"version":{quoted(version)}}},"spans":[{listed}]}}]}}]}}\n'
    )


def _span(span: Span) -> str:
    rest = ""
    if span.parent_id:
        rest += f',"parentSpanId":"{span.parent_id:016x}"'
    if span.state:
        rest += f',"traceState":{quoted(span.state)}'
    if span.attributes:
        rest += f",{_attributes(span.attributes)}"
    if span.links:
        rest += f',"links":[{",".join([f"{{{_ids(link)}}}" for link in span.links])}]'
    if span.error:
        rest += f',"status":{{"code":{ERROR_CODE},"message":{quoted(span.error)}}}'
    return (
        f'{{{_ids((span.trace_id, span.span_id))},"name":{quoted(span.name)},"kind":{SPAN_KINDS[span.kind]},'
        f'"startTimeUnixNano":"{span.start_ns}","endTimeUnixNano":"{span.end_ns}","flags":{SAMPLED_FLAG}{rest}}}'
    )


def _ids(place: SpanPlace) -> str:
    return f'"traceId":"{place[0]:032x}","spanId":"{place[1]:016x}"'


def _attributes(attributes: Mapping[str, Any]) -> str:
    listed = ",".join([f'{{"key":{quoted(key)},"value":{_value(value)}}}' for key, value in attributes.items()])
    return f'"attributes":[{listed}]'


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f'{{"stringValue":{quoted(value)}}}'
    if isinstance(value, bool):
        return f'{{"boolValue":{"true" if value else "false"}}}'
    if isinstance(value, int):
        return f'{{"intValue":"{value}"}}'
    if isinstance(value, float):
        return f'{{"doubleValue":{value!r}}}'
    return f'{{"arrayValue":{{"values":[{",".join([_value(inner) for inner in value])}]}}}}'


def resource() -> Resource:
    """Return the service as the OTEL_* variables describe it; its name is halfserve by default."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415  (slow, and only needed here)

    named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create(None if named else {SERVICE_NAME: "halfserve"})


def to_sdk(spans: Sequence[Span], of: Resource) -> list[ReadableSpan]:
    """Spans as the SDK's own, for its exporters. The SDK's Tracer takes six times as long, as it also manages open spans."""
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415  (slow, and only needed here)
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415  (as above)
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState  # noqa: PLC0415  (as above)
    from opentelemetry.trace.status import Status, StatusCode  # noqa: PLC0415  (as above)

    scope, flags, unset = InstrumentationScope(*SCOPE), TraceFlags(TraceFlags.SAMPLED), Status()

    def context(trace_id: int, span_id: int, state: str = "", *, is_remote: bool = False) -> SpanContext:
        known = TraceState.from_header([state]) if state else None
        return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=flags, trace_state=known)

    def readable(span: Span) -> ReadableSpan:
        parent = None
        if span.parent_id:
            parent = context(span.trace_id, span.parent_id, is_remote=span.is_parent_remote)
        return ReadableSpan(
            span.name,
            context(span.trace_id, span.span_id, span.state),
            parent,
            of,
            span.attributes,
            links=[Link(context(*link)) for link in span.links],
            kind=SpanKind[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else unset,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=scope,
        )

    return [readable(span) for span in spans]
