"""Records of requests as spans in OpenTelemetry's sense. Runs on the tracing thread.

A request's span has two children, queue and compute. A batch is a trace of its own, as its requests may come from several: its
span links to each of theirs, and each request's compute links to it. Spans are made whole, from times that are past, and are
not yet the SDK's own: files are written without those, in a third of the time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from serve.engine.model_statistics import BatchTimes
from serve.observability.tracer import TraceRecord

INTERNAL, SERVER = "INTERNAL", "SERVER"
BATCH_STAGES = (
    ("compute_input", "started", "assembled"),
    ("compute_infer", "assembled", "computed"),
    ("compute_output", "computed", "split"),
)
NOTHING: Mapping[str, str | int] = {}

Place = tuple[int, int]  # the numbers of a trace and of a span in it


class Span(NamedTuple):
    """A span that has ended.

    Attributes:
        name: what was done.
        trace_id: 128 bits.
        span_id: 64 bits.
        parent_id: of the span it is part of; 0 for none.
        start_ns: since the epoch.
        end_ns: likewise.
        attributes: figures and names.
        links: to other spans.
        kind: INTERNAL or SERVER.
        is_parent_remote: the parent is the caller's.
        error: "" where all was well.
        state: the caller's `tracestate`.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int] = NOTHING
    links: Sequence[Place] = ()
    kind: str = INTERNAL
    is_parent_remote: bool = False
    error: str = ""
    state: str = ""


def spans_of(records: Sequence[TraceRecord]) -> list[Span]:
    """All spans of these records; those of one batch stand together."""
    made: list[Span] = []
    for _, group in groupby(records, key=lambda record: id(record.batch) if record.batch else id(record)):
        _add_group(list(group), made)
    return made


def whole_batches(records: Sequence[TraceRecord], most: int) -> int:
    """How many of the first records to take at a time: `most`, and those that follow of the last one's batch.

    A batch whose records are taken apart would become two.
    """
    end = min(most, len(records))
    while end < len(records) and records[end].batch is not None and records[end].batch is records[end - 1].batch:
        end += 1
    return end


def _add_group(records: list[TraceRecord], made: list[Span]) -> None:
    """Add the spans of one batch, or of one request that was not computed."""
    batch, epoch_ns = records[0].batch, records[0].epoch_ns
    places = [(record.context.trace_id, _new_id()) for record in records]
    links = () if batch is None else (_add_batch(batch, records[0], places, made),)
    for record, (trace_id, span_id) in zip(records, places, strict=True):
        made.append(_request(record, trace_id, span_id, epoch_ns))
        arrived_ns, left_queue_ns = record.arrived_ns, record.ended_ns if batch is None else batch.started
        made.append(Span("queue", trace_id, _new_id(), span_id, arrived_ns + epoch_ns, left_queue_ns + epoch_ns))
        if batch is not None:
            start_ns, end_ns = batch.started + epoch_ns, batch.split + epoch_ns
            made.append(Span("compute", trace_id, _new_id(), span_id, start_ns, end_ns, NOTHING, links))


def _request(record: TraceRecord, trace_id: int, span_id: int, epoch_ns: int) -> Span:
    """A request's span; `epoch_ns` as in all spans beside it: the clocks are never read at quite the same time."""
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


def _add_batch(batch: BatchTimes, record: TraceRecord, requests: list[Place], made: list[Span]) -> Place:
    """Add a batch and its stages; `record` is of any of its requests."""
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
    """Not secret, and made as OpenTelemetry's own generator makes them."""
    return random.getrandbits(64) or 1
