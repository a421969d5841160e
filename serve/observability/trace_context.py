"""Which trace a request belongs to: W3C's `traceparent`, as clients send it in the call's metadata.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace and the caller's place in it.

    Attributes:
        trace_id: 128 bits.
        parent_id: of the caller's span, 64 bits; 0 where the trace begins here.
        sampled: the caller has decided that this is traced.
        state: the caller's `tracestate`, passed on.
    """

    trace_id: int
    parent_id: int = 0
    sampled: bool = True
    state: str = ""


def parent_of(headers: Mapping[bytes, bytes]) -> TraceContext | None:
    """The context that a caller sent; None where it sent none, or one that the standard calls invalid."""
    value = headers.get(b"traceparent")
    if value is None:
        return None
    match = PARENT.fullmatch(value.strip())
    if match is None or (match[4] and value.startswith(b"00")):
        return None
    trace_id, parent_id = int(match[1], 16), int(match[2], 16)
    if not (trace_id and parent_id):
        return None
    return TraceContext(
        trace_id=trace_id,
        parent_id=parent_id,
        sampled=bool(int(match[3], 16) & SAMPLED),
        state=headers.get(b"tracestate", b"").decode("ascii", "replace"),
    )
