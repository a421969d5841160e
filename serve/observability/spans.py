"""Records of requests as OpenTelemetry's spans. Runs on the tracing thread; the SDK is imported with this file, not before.

A request's span has two children, queue and compute. A batch is a trace of its own, as its requests may come from several: its
span links to each of theirs, and each request's compute links to it. Spans are made whole, from times that are past, and not
through a Tracer: that is for what goes on now, and takes six times as long.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from serve.engine.statistics import BatchTimes
from serve.observability.tracer import TraceRecord

BATCH_STAGES = (
    ("compute_input", "started", "assembled"),
    ("compute_infer", "assembled", "computed"),
    ("compute_output", "computed", "split"),
)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status()


class SpanMaker:
    """Makes spans of records."""

    def __init__(self) -> None:
        self._resource = _resource()
        self._scope = InstrumentationScope("halfserve", version("halfserve"))

    def spans(self, records: Sequence[TraceRecord]) -> list[ReadableSpan]:
        """All spans of these records; those of one batch stand together."""
        made: list[ReadableSpan] = []
        for _, group in groupby(records, key=lambda record: id(record.batch) if record.batch else id(record)):
            self._group(list(group), made)
        return made

    def _group(self, records: list[TraceRecord], made: list[ReadableSpan]) -> None:
        """Add the spans of one batch, or of one request that was not computed."""
        batch, epoch_ns = records[0].batch, records[0].epoch_ns
        places = [_place(record.context.trace_id, record.context.state) for record in records]
        link = None if batch is None else Link(self._batch(batch, records[0], places, made))
        for record, place in zip(records, places, strict=True):
            made.append(self._request(record, place))
            left_queue_ns = record.ended_ns if batch is None else batch.started
            made.append(self._child("queue", place, record.arrived_ns + epoch_ns, left_queue_ns + epoch_ns))
            if batch is not None and link is not None:
                made.append(self._child("compute", place, batch.started + epoch_ns, batch.split + epoch_ns, [link]))

    def _request(self, record: TraceRecord, place: SpanContext) -> ReadableSpan:
        context = record.context
        parent = None
        if context.parent_id:
            parent = SpanContext(context.trace_id, context.parent_id, is_remote=True, trace_flags=SAMPLED)
        return ReadableSpan(
            "inference.GRPCInferenceService/ModelInfer",
            place,
            parent,
            self._resource,
            _attributes(record),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, record.error) if record.error else UNSET,
            start_time=record.arrived_ns + record.epoch_ns,
            end_time=record.ended_ns + record.epoch_ns,
            instrumentation_scope=self._scope,
        )

    def _batch(
        self, batch: BatchTimes, record: TraceRecord, requests: list[SpanContext], made: list[ReadableSpan]
    ) -> SpanContext:
        """Add a batch and its stages; `record` is of any of its requests."""
        epoch_ns = record.epoch_ns
        place = _place(random.getrandbits(128) or 1)
        attributes: Mapping[str, str | int] = {
            "halfserve.model": record.model,
            "halfserve.version": record.version,
            "halfserve.rows": record.batch_rows,
            "halfserve.traced_requests": len(requests),
        }
        made.append(
            ReadableSpan(
                f"batch {record.model}",
                place,
                None,
                self._resource,
                attributes,
                links=[Link(request) for request in requests],
                start_time=batch.started + epoch_ns,
                end_time=batch.split + epoch_ns,
                instrumentation_scope=self._scope,
            )
        )
        for name, start, end in BATCH_STAGES:
            made.append(self._child(name, place, getattr(batch, start) + epoch_ns, getattr(batch, end) + epoch_ns))
        return place

    def _child(self, name: str, parent: SpanContext, start_ns: int, end_ns: int, links: Sequence[Link] = ()) -> ReadableSpan:
        return ReadableSpan(
            name,
            _place(parent.trace_id),
            parent,
            self._resource,
            links=links,
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=self._scope,
        )


def _place(trace_id: int, state: str = "") -> SpanContext:
    """A new span's place in a trace."""
    span_id = random.getrandbits(64) or 1
    return SpanContext(
        trace_id,
        span_id,
        is_remote=False,
        trace_flags=SAMPLED,
        trace_state=TraceState.from_header([state]) if state else None,
    )


def _attributes(record: TraceRecord) -> dict[str, str | int]:
    return {
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelInfer",
        "rpc.response.status_code": record.status,
        "client.address": record.peer,
        "halfserve.model": record.model,
        "halfserve.version": record.version,
        "halfserve.request_id": record.request_id,
        "halfserve.rows": record.rows,
        "halfserve.request_bytes": record.request_bytes,
        "halfserve.response_bytes": record.response_bytes,
    }


def _resource() -> Resource:
    """What the OTEL_* variables say of this service; its name is halfserve where they do not."""
    named = "OTEL_SERVICE_NAME" in os.environ or SERVICE_NAME in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create(None if named else {SERVICE_NAME: "halfserve"})
