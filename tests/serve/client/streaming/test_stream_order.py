"""Which answer is whose, and when a stream is over: without any server."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.client import (
    DeadlineExceeded,
    ServerUnavailable,
)
from serve.client.streaming import stream_order
from serve.client.streaming.stream_order import StreamOrder
from tests.serve.client.driving import metadata
from tests.serve.client.streaming.streamed import Clock, streamed


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_any_order_of_answers_becomes_the_order_of_requests(arrival: list[int], misfits: set[int]) -> None:
    order, taken = StreamOrder(metadata("FP32"), {}, address="h:1"), []
    sent = [order.request({"x": ["no number"] if index in misfits else [1.0]}) for index in range(6)]
    assert [request is None for request in sent] == [index in misfits for index in range(6)]
    for index in arrival:
        if index not in misfits:
            order.accept(streamed(str(index), float(index)))
        taken += [answer.index for answer in order.ready()]
    assert taken == list(range(6))
    order.check_complete()


def test_an_error_that_names_no_request_is_the_first_one_s_that_waits() -> None:
    order = StreamOrder(metadata("FP32"), {}, address="h:1")
    for value in ([1.0], ["no number"], [1.0], [1.0]):
        order.request({"x": value})
    order.accept(streamed("0", 1.0))
    order.accept(streamed("", error="odd"))
    order.accept(streamed("3", 3.0))
    assert [str(answer.error) for answer in order.ready()][2:] == ["odd", "None"]


def test_a_stream_that_ends_too_early() -> None:
    order = StreamOrder(metadata("FP32"), {}, address="h:1")
    order.request({"x": [1.0]})
    with pytest.raises(ServerUnavailable, match="h:1 ended a stream with 1 requests unanswered; send them again"):
        order.check_complete()


def test_the_server_has_time_to_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stream_order, "time", clock)
    order = StreamOrder(metadata("FP32"), {}, address="h:1")
    order.request({"x": [1.0]})
    clock.now = 3.0
    order.accept(streamed("0", 1.0))
    clock.now = 60.0
    assert not order.is_over(5)  # the source may have more
    order.complete()
    assert [order.is_over(5), order.patience_s(5)] == [False, 5]
    clock.now = 65.0
    assert order.is_over(5)
    assert not order.is_over(None)


def test_time_that_the_source_takes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    order = StreamOrder(metadata("FP32"), {}, address="h:1")
    assert order.patience_s(None) is None
    now += 60  # the source had nothing to send
    assert order.patience_s(5) == 5
    order.request({"x": [1.0]})
    now += 4
    assert order.patience_s(5) == 1
    order.request({"x": [1.0]})
    order.accept(streamed("0", 1.0))
    assert order.patience_s(5) == 5
    now += 5
    with pytest.raises(DeadlineExceeded, match="h:1 answered none of 1 requests of a stream within 5 s"):
        order.patience_s(5)
