from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.observability.trace_context import TraceContext, parent_of

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


def test_a_callers_context_is_read() -> None:
    headers = {b"traceparent": b"00-" + TRACE + b"-" + SPAN + b"-01", b"tracestate": b"vendor=1"}
    expected = TraceContext(trace_id=int(TRACE, 16), parent_id=int(SPAN, 16), sampled=True, state="vendor=1")
    assert parent_of(headers) == expected


def test_its_decision_is_read() -> None:
    parent = parent_of({b"traceparent": b"00-" + TRACE + b"-" + SPAN + b"-00"})
    assert parent is not None
    assert not parent.sampled


def test_later_versions_may_say_more() -> None:
    assert parent_of({b"traceparent": b"01-" + TRACE + b"-" + SPAN + b"-01-what-else"}) is not None


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
