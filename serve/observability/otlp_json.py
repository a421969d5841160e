"""Spans as OTLP's JSON: what a collector's otlpjsonfile receiver reads.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Ids are hexadecimal, 64-bit numbers are texts. By hand, as
protobuf's own JSON takes ten times as long, in a process that has requests to answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

ERROR = 2  # of OTLP's status codes
SPAN_KINDS = {"INTERNAL": 1, "SERVER": 2}


def to_line(spans: Sequence[ReadableSpan]) -> str:
    """An ExportTraceServiceRequest as one line; all spans are of one resource and scope."""
    first = spans[0]
    scope = first.instrumentation_scope
    request = {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(first.resource.attributes)},
                "scopeSpans": [
                    {
                        "scope": {} if scope is None else {"name": scope.name, "version": scope.version},
                        "spans": [_span(span) for span in spans],
                    }
                ],
            }
        ]
    }
    return json.dumps(request, separators=(",", ":")) + "\n"


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None  # noqa: S101  (for the type checker: every span that was started has one)
    fields = _ids(context) | {
        "name": span.name,
        "kind": SPAN_KINDS[span.kind.name],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "flags": int(context.trace_flags),
    }
    if span.parent is not None:
        fields["parentSpanId"] = f"{span.parent.span_id:016x}"
    if context.trace_state:
        fields["traceState"] = context.trace_state.to_header()
    if span.attributes:
        fields["attributes"] = _attributes(span.attributes)
    if span.links:
        fields["links"] = [_ids(link.context) for link in span.links]
    if not span.status.is_ok:
        fields["status"] = {"code": ERROR, "message": span.status.description or ""}
    return fields


def _ids(context: SpanContext) -> dict[str, Any]:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value(inner) for inner in value]}}
