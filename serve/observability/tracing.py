"""Traces: selects the requests to trace (on the event loop), and makes spans from their records (on the tracing thread).

A request's span has two children, queue and compute. A batch has a trace of its own, as its requests may belong to several
traces: its span links to each request's span, and each request's compute span links to it. Spans are made at once from past
times. They are not the SDK's own objects: without these, files are written in a third of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.observability.inference_record import InferenceRecord, TraceContext, loggable
from halfserve.serve.observability.outbox import Outbox
from halfserve.serve.observability.trace_settings import TraceControl

INTERNAL, SERVER = "INTERNAL", "SERVER"
BATCH_STAGES = (
    ("compute_input", "started", "assembled"),
    ("compute_infer", "assembled", "computed"),
    ("compute_output", "computed", "split"),
)
NOTHING: Mapping[str, str | int] = {}

SpanPlace = tuple[int, int]  # the ids of a trace and of a span in it


@dataclass(slots=True, kw_only=True)  # a frozen one takes five times as long to make
class TraceRecord:
    """A traced request that has ended; times in nanoseconds on time.monotonic_ns()'s clock.

    Attributes:
        context: trace context of the request.
        model: name of the requested model.
        version: version of the model.
        request_id: first MAX_TEXT bytes of the request's id.
        rows: size of the request's batch dimension.
        request_bytes: size of the serialized request.
        response_bytes: size of the serialized response; 0 without one.
        status: name of the gRPC status.
        error: error text for the client; "" without an error.
        peer: address of the client.
        epoch_ns: offset from the monotonic clock to nanoseconds since the epoch.
        arrived_ns: time at which the request arrived.
        ended_ns: time at which the answer was handed over.
        batch: times at which the batch passed each stage, shared by its records; None if the request was not computed.
        batch_rows: rows of the whole batch.
        is_rest: the request came over REST, not over gRPC.
    """

    context: TraceContext
    model: str
    version: str
    request_id: str
    rows: int
    request_bytes: int
    response_bytes: int
    status: str
    error: str
    peer: str
    epoch_ns: int
    arrived_ns: int
    ended_ns: int
    batch: BatchTimes | None
    batch_rows: int
    is_rest: bool = False


class Tracer:
    """Decides which requests are traced, and records them. Lives on the event loop."""

    def __init__(self, control: TraceControl, outbox: Outbox[TraceRecord]) -> None:
        self._control = control
        self._outbox = outbox
        self.traced = 0

    @property
    def every(self) -> int:
        """Interval of requests that need a decision: 1, which is every request, if models differ in their settings."""
        return self._control.everywhere.settings.rate if self._control.is_uniform else 1

    def decide(self, model: str, parent: TraceContext | None, *, is_due: bool) -> TraceContext | None:
        """Return the trace context of a new request for a model; None if it is not traced.

        The decision of a caller, in its trace context, has priority; `is_due` marks one request in `every`.
        """
        if parent is None and not is_due:
            return None
        sampler = self._control.by_model.get(model, self._control.everywhere)
        decided = True if self._control.is_uniform else None  # with uniform settings `is_due` has decided
        if not sampler.take(decided=decided if parent is None else parent.sampled):
            return None
        # The ids are not secret; OpenTelemetry's own generator makes them in the same way.
        return parent or TraceContext(trace_id=random.getrandbits(128) or 1)

    def ended(self, record: InferenceRecord) -> None:
        """Keep a request that has been answered, has failed, or whose client has disconnected."""
        model, context = record.model, record.trace
        if context is None:
            return
        self.traced += 1
        self._outbox.put(
            TraceRecord(
                context=context,
                model=model.name,
                version=str(model.version),
                request_id=record.request_id.decode("utf-8", "replace"),
                rows=record.rows,
                request_bytes=record.request_bytes,
                response_bytes=record.response_bytes,
                status=record.status,
                error="" if record.status == "OK" else loggable(record.error) or record.status,
                peer=record.caller.peer,
                epoch_ns=time.time_ns() - time.monotonic_ns(),
                arrived_ns=record.arrived_ns,
                ended_ns=record.ended_ns,
                batch=record.batch,
                batch_rows=record.batch_rows if record.batch else 0,
                is_rest=record.caller.is_rest,
            )
        )


class Span(NamedTuple):
    """A span that has ended."""

    name: str  # name of the operation
    trace_id: int  # number of 128 bits
    span_id: int  # number of 64 bits
    parent_id: int  # id of the enclosing span; 0 for none
    start_ns: int  # start in nanoseconds since the epoch
    end_ns: int  # end in nanoseconds since the epoch
    attributes: Mapping[str, str | int] = NOTHING  # figures and names
    links: Sequence[SpanPlace] = ()  # trace and span ids of related spans
    kind: str = INTERNAL  # INTERNAL or SERVER
    is_parent_remote: bool = False  # whether the parent is the caller's span
    error: str = ""  # text of the error; "" without one
    state: str = ""  # the caller's `tracestate`


def spans_of(records: Sequence[TraceRecord]) -> list[Span]:
    """Return all spans of these records, grouped by batch."""
    made: list[Span] = []
    for _, group in groupby(records, key=lambda record: id(record.batch) if record.batch else id(record)):
        _add_group(list(group), made)
    return made


def whole_batches(records: Sequence[TraceRecord], most: int) -> int:
    """Return the number of records to export at a time: `most`, plus the rest of the last one's batch.

    A batch whose records are exported separately would become two batches.
    """
    end = min(most, len(records))
    while end < len(records) and records[end].batch is not None and records[end].batch is records[end - 1].batch:
        end += 1
    return end


def _add_group(records: list[TraceRecord], made: list[Span]) -> None:
    """Append the spans of one batch, or of one request that was not computed."""
    batch, epoch_ns = records[0].batch, records[0].epoch_ns
    places = [(record.context.trace_id, _new_id()) for record in records]
    links = () if batch is None else (_add_batch(batch, records[0], places, made),)
    for record, (trace_id, span_id) in zip(records, places, strict=True):
        made.append(_request_span(record, trace_id, span_id, epoch_ns))
        arrived_ns, left_queue_ns = record.arrived_ns, record.ended_ns if batch is None else batch.started
        made.append(Span("queue", trace_id, _new_id(), span_id, arrived_ns + epoch_ns, left_queue_ns + epoch_ns))
        if batch is not None:
            start_ns, end_ns = batch.started + epoch_ns, batch.split + epoch_ns
            made.append(Span("compute", trace_id, _new_id(), span_id, start_ns, end_ns, NOTHING, links))


def _request_span(record: TraceRecord, trace_id: int, span_id: int, epoch_ns: int) -> Span:
    """Make a request's span; `epoch_ns` is the same in all spans of a batch, because each reading differs a little."""
    context = record.context
    return Span(
        "inference.GRPCInferenceService/ModelInfer",
        trace_id,
        span_id,
        context.parent_id,
        record.arrived_ns + epoch_ns,
        record.ended_ns + epoch_ns,
        {
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
        },
        kind=SERVER,
        is_parent_remote=True,
        error=record.error,
        state=context.state,
    )


def _add_batch(batch: BatchTimes, record: TraceRecord, requests: list[SpanPlace], made: list[Span]) -> SpanPlace:
    """Append the spans of a batch and its stages; `record` is the record of any of its requests."""
    epoch_ns = record.epoch_ns
    trace_id, span_id = random.getrandbits(128) or 1, _new_id()
    attributes: Mapping[str, str | int] = {
        "halfserve.model": record.model,
        "halfserve.version": record.version,
        "halfserve.rows": record.batch_rows,
        "halfserve.traced_requests": len(requests),
    }
    start_ns, end_ns = batch.started + epoch_ns, batch.split + epoch_ns
    made.append(Span(f"batch {record.model}", trace_id, span_id, 0, start_ns, end_ns, attributes, requests))
    for name, start, end in BATCH_STAGES:
        made.append(Span(name, trace_id, _new_id(), span_id, getattr(batch, start) + epoch_ns, getattr(batch, end) + epoch_ns))
    return trace_id, span_id


def _new_id() -> int:
    return random.getrandbits(64) or 1
