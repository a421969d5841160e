from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.transports.grpc_framing import PREFIX_BYTES, frame
from halfserve.serve.transports.nghttp2.fairness import TransportLimits
from halfserve.serve.transports.nghttp2.frame_reader import MIN_RUN_BYTES
from halfserve.serve.transports.nghttp2.frames import (
    DATA,
    GOAWAY,
    HEAD_BYTES,
    HEADER_TABLE_SIZE,
    head_of,
    rst_stream,
    window_update,
)
from halfserve.serve.transports.nghttp2.pending_requests import PendingRequests
from tests.serve.transports.nghttp2.connection_scene import FIRST, Scene, begin, begun, data, ends, on_a_loop, raw

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
    requests, call, body = PendingRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True)), Taker(), frame(message)
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


@pytest.mark.parametrize("announced", [None, 500, 350, 305, 100])
def test_a_run_stops_at_what_was_announced(announced: int | None) -> None:
    requests, call = PendingRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True)), Taker()
    body, head = frame(bytes(500)), head_of(DATA, 0, STREAM, 100)
    requests.calls[STREAM] = call
    if announced is not None:
        requests.announced[STREAM] = announced
    assert requests.take(STREAM, body[:100], is_last=False)
    run = head + body[100:200] + head + body[200:300] + head + body[300:400] + data(body[400:])
    pieces = 3 if announced is None else min(3, (announced - 100) // 100)
    assert requests.take_run(STREAM, run, 0, head) == pieces * (len(head) + 100)
    assert requests.owed == 100 + pieces * 100
    assert requests.announced.get(STREAM) == (None if announced is None else announced - requests.owed)


@given(st.lists(st.integers(1, 700), max_size=8))
def test_memory_is_set_aside_for_so_much_at_once(sizes: list[int]) -> None:
    requests, held = PendingRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True)), 0
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
    requests = PendingRequests(LIMITS, MemoryBudget(DEFAULT_BYTES).share(is_known=True))
    assert requests.take(STREAM, bytes(70), is_last=True)
    assert requests.owed == 70


def counted(length: int) -> bytes:
    """Bytes that differ where they lie elsewhere."""
    return b"".join(number.to_bytes(4) for number in range(length // 4 + 1))[:length]


SIZE = 2 * MIN_RUN_BYTES
LARGE = frame(counted(5 * SIZE))


def send_in_pieces(scene: Scene, pieces: list[bytes]) -> None:
    """A call whose request comes in frames of these bytes, the last of which ends it."""
    scene.send(begin(scene) + b"".join(data(piece, 0) for piece in pieces[:-1]) + data(pieces[-1]))


@pytest.mark.parametrize(
    ("pieces", "limits"),
    [
        pytest.param([frame(b"hello")[:7], b"llo"], {}, id="in two"),
        pytest.param([frame(b"hello"), b""], {}, id="an end of its own"),
        pytest.param([frame(b"hello")[:3], frame(b"hello")[3:]], {}, id="less than its length"),
        pytest.param([frame(bytes(60_000))[:100], bytes(59_905)], {"stream_window_bytes": 65_535}, id="half a window"),
        pytest.param([frame(bytes(30_000))[:20_000], bytes(10_005)], {"max_held_bytes": 1000}, id="more than is held"),
    ],
)
@on_a_loop
async def test_a_request_in_pieces_becomes_whole(pieces: list[bytes], limits: dict[str, int]) -> None:
    scene = await begun(None, **limits)
    send_in_pieces(scene, pieces)
    assert scene.waiting == {FIRST: b"".join(pieces)[5:]}
    scene.answer(FIRST)
    assert ends(scene) == [("answered", FIRST)]


@given(
    length=st.integers(4 * MIN_RUN_BYTES, 100_000),
    size=st.sampled_from([MIN_RUN_BYTES - 1, MIN_RUN_BYTES, 5555, 16_384]),
    cuts=st.lists(st.integers(1, 100_100), max_size=3),
    ends_apart=st.booleans(),
)
@on_a_loop
async def test_a_request_in_equal_frames_becomes_whole_however_it_arrives(
    length: int, size: int, cuts: list[int], *, ends_apart: bool
) -> None:
    scene, body = await begun(), frame(counted(length))
    owed = scene.connection._fast_path.requests.owed
    pieces = [body[start : start + size] for start in range(0, len(body), size)] + [b""] * ends_apart
    frames = b"".join(data(piece, 0) for piece in pieces[:-1]) + data(pieces[-1])
    opening = begin(scene)
    first = len(opening) + HEAD_BYTES  # a message whose prefix comes in two is assembled by libnghttp2
    for part in cut(opening + frames, [place for place in cuts if not first <= place < first + PREFIX_BYTES]):
        scene.send(part)
    assert scene.waiting == {FIRST: body[PREFIX_BYTES:]}
    assert scene.untold == [FIRST]
    assert scene.connection._fast_path.requests.owed == owed + len(body)


RUN = b"".join(data(LARGE[start : start + SIZE], 0) for start in range(0, 4 * SIZE, SIZE))
REST = data(LARGE[4 * SIZE :])


@pytest.mark.parametrize(
    ("between", "is_handed_over"),
    [
        pytest.param(data(LARGE[4 * SIZE : 4 * SIZE + 9], 0), False, id="a shorter frame of its own"),
        pytest.param(window_update(FIRST, 1), False, id="a window"),
        pytest.param(raw(GOAWAY, 0, 0, bytes(8)), True, id="the client's goodbye"),
    ],
)
@on_a_loop
async def test_a_run_of_frames_goes_on_behind_others(between: bytes, *, is_handed_over: bool) -> None:
    scene = await begun()
    rest = REST if between[3] != DATA else data(LARGE[4 * SIZE + 9 :])
    scene.send(begin(scene) + RUN + between + rest)
    assert scene.waiting == {FIRST: LARGE[PREFIX_BYTES:]}
    assert (scene.untold == []) == is_handed_over
    scene.answer(FIRST)
    assert ends(scene)[0] == ("answered", FIRST)


@on_a_loop
async def test_frames_of_two_requests_may_alternate() -> None:
    scene, other = await begun(), FIRST + 2
    bodies = {FIRST: LARGE, other: frame(LARGE[PREFIX_BYTES:][::-1])}
    frames = [begin(scene, stream) for stream in bodies]
    for start in range(0, 4 * SIZE, 2 * SIZE):
        for stream, body in bodies.items():
            frames += [data(body[at : at + SIZE], 0, stream) for at in (start, start + SIZE)]
    frames += [data(body[4 * SIZE :], stream=stream) for stream, body in bodies.items()]
    scene.send(b"".join(frames))
    assert scene.waiting == {stream: body[PREFIX_BYTES:] for stream, body in bodies.items()}
    assert scene.untold == [FIRST, other]


@on_a_loop
async def test_a_request_given_up_between_equal_frames_leaves_the_rest_behind() -> None:
    scene = await begun()
    next_call = begin(scene, FIRST + 2) + data(frame(b"x"), stream=FIRST + 2)
    scene.send(begin(scene) + RUN + rst_stream(FIRST, 8) + data(LARGE[:SIZE], 0) * 3 + next_call)
    assert scene.gone == [FIRST]
    assert scene.waiting == {FIRST + 2: b"x"}


@pytest.mark.parametrize("length", [2 * SIZE, 3 * SIZE, 3 * SIZE + 1])
@on_a_loop
async def test_more_equal_frames_than_the_message_has_get_a_status(length: int) -> None:
    scene = await begun()
    scene.send(begin(scene) + data(frame(bytes(length))[:SIZE], 0) + data(bytes(SIZE), 0) * 3 + data(bytes(SIZE)))
    assert not scene.waiting
    assert ends(scene)[0] == ("answered", FIRST)
    assert not scene.connection.session.calls


@on_a_loop
async def test_a_frame_in_pieces_becomes_whole_where_libnghttp2_does_everything() -> None:
    scene = await begun({HEADER_TABLE_SIZE: 0})
    for size in (30_000, 40_000):
        stream = scene.call(frame(bytes(size)))
        await scene.exchange([10_000])
        assert scene.waiting == {stream: bytes(size)}
        scene.answer(stream)
        await scene.exchange()
        assert scene.answered(stream) == [bytes(size)]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([frame(b"hello")[:7], b"l"], id="ends inside"),
        pytest.param([frame(b"hello")[:7], b"llo and more"], id="goes on"),
        pytest.param([frame(b"hello") + frame(b"again")], id="two messages"),
        pytest.param([b"\1" + frame(b"hello")[1:7], b"llo"], id="compressed with nothing that is known"),
        pytest.param([b""], id="nothing"),
    ],
)
@on_a_loop
async def test_a_request_that_is_no_message_gets_a_status(pieces: list[bytes]) -> None:
    scene = await begun()
    send_in_pieces(scene, pieces)
    assert not scene.waiting
    assert ends(scene)[0] == ("answered", FIRST)
    assert not scene.connection.session.calls


@pytest.mark.parametrize("pieces", [[frame(b"x")], [frame(b"hello")[:7], b"llo"]])
@on_a_loop
async def test_a_call_may_be_refused_as_it_begins(pieces: list[bytes]) -> None:
    scene = await begun()
    scene.refusal = UnavailableError("not now")
    scene.send(begin(scene) + b"".join(data(piece, 0) for piece in pieces) + data(b""))
    await asyncio.sleep(0)
    assert ends(scene) == [("answered", FIRST), ("reset", FIRST)]
    assert not scene.connection.session.calls
