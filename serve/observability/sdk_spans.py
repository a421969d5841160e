"""Spans as the OpenTelemetry SDK's own, for its exporters. The SDK is imported with this file, not before."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from serve.observability.spans import Span

SCOPE = ("halfserve", version("halfserve"))
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status()


def resource() -> Resource:
    """What the OTEL_* variables say of this service; its name is halfserve where they do not."""
    named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create(None if named else {SERVICE_NAME: "halfserve"})


def to_sdk(spans: Sequence[Span], of: Resource) -> list[ReadableSpan]:
    """The same spans, of this resource. Not made by a Tracer: that is for what goes on now, and takes six times as long."""
    scope = InstrumentationScope(*SCOPE)
    return [_readable(span, of, scope) for span in spans]


def _readable(span: Span, of: Resource, scope: InstrumentationScope) -> ReadableSpan:
    parent = None
    if span.parent_id:
        parent = _place(span.trace_id, span.parent_id, is_remote=span.is_parent_remote)
    return ReadableSpan(
        span.name,
        _place(span.trace_id, span.span_id, span.state),
        parent,
        of,
        span.attributes,
        links=[Link(_place(*link)) for link in span.links],
        kind=SpanKind[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else UNSET,
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=scope,
    )


def _place(trace_id: int, span_id: int, state: str = "", *, is_remote: bool = False) -> SpanContext:
    known = TraceState.from_header([state]) if state else None
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=SAMPLED, trace_state=known)
