"""Requests until they are whole, without a connection."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.transports.grpc_framing import PREFIX_BYTES, frame
from serve.transports.limits import TransportLimits
from serve.transports.nghttp2.expected_requests import ExpectedRequests

STREAM, LIMITS = 1, TransportLimits(max_held_bytes=1000)


class Taker:
    """A call that keeps what it gets."""

    is_unary, held_bytes = True, 0

    def __init__(self) -> None:
        self.message: bytes | None = None
        self.last: bytes | None = None
        self.pieces = 0

    def take(self, message: bytes | memoryview) -> None:
        self.message = bytes(message)

    def grew(self) -> None:
        self.pieces += 1

    def receive_last(self, data: bytes) -> int:
        self.last = data
        return len(data)

    def receive(self, data: bytes) -> int:
        raise AssertionError(data)

    def end(self) -> None:
        raise AssertionError

    def gone(self) -> None:
        raise AssertionError

    def give_up(self, error: Exception) -> None:
        raise AssertionError(error)

    def give_up_stalled(self, before_s: float) -> None:
        raise AssertionError(before_s)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(place, len(data)) for place in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@given(st.binary(max_size=600), st.lists(st.integers(PREFIX_BYTES, 700), max_size=5), st.integers(-3, 3) | st.none())
def test_what_comes_in_pieces_is_whole_in_the_end_or_left_as_it_was(
    message: bytes, cuts: list[int], too_much: int | None
) -> None:
    requests, call, body = ExpectedRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True)), Taker(), frame(message)
    requests.calls[STREAM] = call
    if too_much is not None:
        requests.announced[STREAM] = max(len(body) + too_much, 0)
    pieces, taken = cut(body, cuts), 0
    for number, piece in enumerate(pieces):
        if not requests.take(STREAM, piece, is_last=number == len(pieces) - 1):
            break
        taken += len(piece)
    assert requests.owed == taken
    if not too_much:
        assert taken == len(body)
        assert (call.message, call.last) == ((message, None) if len(pieces) > 1 else (None, body))
        assert call.pieces == len(pieces) - 1
        assert {*requests.calls, *requests.announced, *requests.growing} == set(), "nothing is kept of what is whole"
    else:
        assert (call.message, call.last) == (None, None)
        assert STREAM in requests.calls
        assert requests.announced[STREAM] == max(len(body) + (too_much or 0), 0) - taken
    requests.clear()
    assert requests.take(STREAM, b"late", is_last=False)


@given(st.lists(st.integers(1, 700), max_size=8))
def test_memory_is_set_aside_for_so_much_at_once(sizes: list[int]) -> None:
    requests, held = ExpectedRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True)), 0
    for number, size in enumerate(sizes):
        stream = 2 * number + 1
        requests.calls[stream] = Taker()
        fits = held + size <= 1000
        assert requests.take(stream, frame(bytes(size))[:-1], is_last=False) == fits
        held += size if fits else 0
    for stream in list(requests.calls):
        requests.forget(stream)
    requests.calls[STREAM] = Taker()
    assert requests.take(STREAM, frame(bytes(1000))[:-1], is_last=False)


def test_what_nobody_expects_is_only_owed() -> None:
    requests = ExpectedRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True))
    assert requests.take(STREAM, bytes(70), is_last=True)
    assert requests.owed == 70
