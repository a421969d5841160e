"""Calls that libnghttp2 is not told of, and how it comes to hear of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ngh2 import GoAwayReceived

from serve.engine.errors import UnavailableError
from serve.protocol.status import Status
from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW_BYTES,
    PADDED,
    RST_STREAM,
    WINDOW_UPDATE,
    head_of,
    rst_stream,
    window_update,
)
from serve.transports.nghttp2.hpack_blocks import literals
from tests.serve.transports.nghttp2.connection_scene import Scene, begun
from tests.serve.transports.nghttp2.http2_peer import WINDOW_BYTES

PING, RESERVED = 0x6, 1 << 31
SIZES = st.integers(0, 40) | st.integers(0, 3000) | st.integers(0, 200_000)


def test_what_repeats_is_answered_without_libnghttp2() -> None:
    async def run() -> None:
        scene = await begun()
        streams = [scene.call(frame(b"%d" % number)) for number in range(10)]
        await scene.exchange()
        assert scene.untold == streams
        for stream in reversed(streams):
            scene.answer(stream, b"!")
        await scene.exchange()
        assert [scene.answered(stream) for stream in streams] == [[b"%d!" % number] for number in range(10)]
        assert len(scene.opened) == 1  # all had the same headers

    asyncio.run(run())


class Step(Enum):
    """What a client or the server may do next."""

    CALL, PIECES, OTHER, ANSWER, FAIL, RESET, GO_ON = range(7)


STEPS = [*Step, Step.CALL, Step.CALL, Step.PIECES, Step.ANSWER]


class Story:
    """What happens on one connection, and what must come of it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sent: dict[int, bytes] = {}
        self.growing: dict[int, bytes] = {}  # what is still to be sent
        self.answers: dict[int, bytes] = {}
        self.failed: set[int] = set()

    def take(self, step: Step, body: bytes, choice: int) -> None:
        """Do one thing, if it can be done."""
        scene, ready = self.scene, [stream for stream in self.scene.waiting if stream in self.sent]
        if step in (Step.CALL, Step.OTHER):
            self.sent[scene.call(frame(body), b"/a/b" if step is Step.CALL else b"/other/%d" % choice)] = body
        elif step is Step.PIECES:
            whole, middle = frame(body), len(body) * choice // 99
            stream = scene.call(whole[:middle], end=False)
            self.sent[stream], self.growing[stream] = body, whole[middle:]
        elif step is Step.GO_ON and self.growing:
            stream = sorted(self.growing)[choice % len(self.growing)]
            scene.client.send_data(stream, self.growing.pop(stream), end_stream=True)
        elif ready:
            self._end(step, ready[choice % len(ready)], body)

    def _end(self, step: Step, stream: int, body: bytes) -> None:
        if step is Step.ANSWER:
            self.answers[stream] = self.scene.waiting[stream] + body
            self.scene.answer(stream, body)
        elif step is Step.FAIL:
            self.failed.add(stream)
            self.scene.fail(stream, "e" * min(len(body), 30_000))
        elif step is Step.RESET:
            self.scene.client.reset_stream(stream)
            del self.sent[stream]

    def check(self) -> None:
        """Everything has been sent and answered."""
        assert not self.scene.wire.has_closed
        assert not self.scene.connection.calls
        for stream, body in self.sent.items():
            if stream in self.failed:
                assert self.scene.status(stream) == 13
            else:
                assert self.scene.answered(stream) == [self.answers[stream]]
                assert self.answers[stream].startswith(body)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), SIZES, st.integers(0, 99)), min_size=4, max_size=40),
    st.lists(st.integers(1, 60) | st.integers(1, 30_000), min_size=1, max_size=12),
    st.sampled_from([65_535, 100_000, 2**22]),
    st.sampled_from([0, 10, 1000, 65_535, 2**22]),
    st.sampled_from([65_535, 400_000, 2**24]),
)
def test_whatever_happens_each_call_gets_its_own_answer(
    steps: list[tuple[Step, int, int]], cuts: list[int], window: int, stream_window: int, server_window: int
) -> None:
    """The client checks the server's flow control, and the server's windows must let every request through."""

    async def run() -> None:
        limits = {"stream_window_bytes": max(65_535, server_window // 4), "connection_window_bytes": server_window}
        scene = await begun({INITIAL_WINDOW_SIZE: stream_window}, window, **limits)
        story = Story(scene)
        for number, (step, size, choice) in enumerate(steps):
            story.take(step, b"%d" % number + bytes(size), choice)
            await scene.exchange(cuts)
        while story.growing:
            story.take(Step.GO_ON, b"", 0)
        await scene.exchange(cuts)
        for stream in list(scene.waiting):
            story.answers[stream] = scene.waiting[stream]
            scene.answer(stream)
        scene.client.update_settings({INITIAL_WINDOW_SIZE: 2**30})
        scene.client.set_local_window_size(2**30)
        await scene.exchange()
        story.check()

    asyncio.run(run())


FIRST = 101  # a stream that the client does not know of
TOO_MUCH = MAX_WINDOW_BYTES - WINDOW_BYTES + 100  # of which two answers have used some
FIELD = literals([(b"a", b"b")])


def begin(scene: Scene, stream: int = FIRST) -> bytes:
    return raw(HEADERS, END_HEADERS, stream, scene.block)


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head_of(kind, flags, stream, len(payload)) + payload


def data(payload: bytes, flags: int = END_STREAM, stream: int = FIRST) -> bytes:
    return raw(DATA, flags, stream, payload)


def ends(scene: Scene) -> list[tuple[str, int]]:
    """What was ended, and how: calls answered and reset, and the connection."""
    names = {HEADERS: "answered", RST_STREAM: "reset", GOAWAY: "connection"}
    return [
        (names[kind], stream) for kind, flags, stream, _ in scene.frames() if kind in names and (kind != HEADERS or flags & 1)
    ]


@pytest.mark.parametrize(
    ("rest", "outcome"),
    [
        pytest.param(data(b"\2" + frame(b"x") + b"\0\0", PADDED | END_STREAM), "answered", id="a padded request"),
        pytest.param(data(frame(b"x"), 0) + raw(HEADERS, END_HEADERS | END_STREAM, FIRST, FIELD), "answered", id="trailers"),
        pytest.param(data(frame(b"x"), 0) + raw(HEADERS, END_HEADERS, FIRST, FIELD), "reset", id="headers twice"),
        pytest.param(data(frame(b"x")) + raw(HEADERS, 0, FIRST + 2, FIELD), "answered", id="headers in pieces"),
        pytest.param(
            data(frame(b"x")) + head_of(0xBE, 0, 0, 20_000) + bytes(100), "answered", id="a large frame of no known kind"
        ),
    ],
)
def test_what_is_out_of_the_ordinary_is_for_libnghttp2(rest: bytes, outcome: str) -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + rest)
        assert scene.untold == []
        if FIRST in scene.waiting:
            scene.answer(FIRST)
        assert ends(scene) == [(outcome, FIRST)]

    asyncio.run(run())


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(lambda scene: begin(scene) + data(frame(b"x")) + data(b"x"), id="data after the end"),
        pytest.param(lambda scene: begin(scene) + window_update(FIRST, 0), id="a window of nothing"),
        pytest.param(lambda scene: begin(scene) + window_update(FIRST, MAX_WINDOW_BYTES - 65_534), id="too large a window"),
        pytest.param(lambda scene: begin(scene, FIRST + 1), id="an even stream"),
        pytest.param(lambda scene: begin(scene, 0), id="no stream"),
        pytest.param(lambda scene: begin(scene) + data(b"x", 0, FIRST + 2), id="data of a stream that never was"),
        pytest.param(lambda scene: begin(scene) + rst_stream(FIRST + 2, 0), id="the end of a stream that never was"),
        pytest.param(lambda scene: begin(scene) + window_update(0, 0), id="nothing more for the connection"),
        pytest.param(lambda scene: begin(scene) + window_update(0, TOO_MUCH), id="too much for the connection"),
        pytest.param(lambda scene: begin(scene) + raw(WINDOW_UPDATE, 0, 0, b"123"), id="a frame of the wrong size"),
        pytest.param(lambda scene: begin(scene) + data(bytes(FRAME_BYTES + 1), 0), id="too large a frame"),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(frames: Callable[[Scene], bytes]) -> None:
    async def run() -> None:
        scene = await begun()
        in_time = scene.call(frame(b"x"))
        scene.push()
        scene.send(frames(scene))
        assert ("connection", 0) in ends(scene)
        scene.answer(in_time)

    asyncio.run(run())


def test_a_connection_that_libnghttp2_ends_is_over_and_names_the_last_stream() -> None:
    """A client may send again what is said not to have been looked at."""

    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + data(frame(b"x")) + raw(PING, 0, 0, b"1234567"))
        (goaway,) = [payload for kind, _, _, payload in scene.frames() if kind == GOAWAY]
        assert int.from_bytes(goaway[:4]) == FIRST
        assert scene.wire.has_closed
        assert not scene.connection._repeated.known

    asyncio.run(run())


@pytest.mark.parametrize("settings", [{HEADER_TABLE_SIZE: 0}, {INITIAL_WINDOW_SIZE: 0}])
def test_an_answer_leaves_before_settings_that_it_was_not_made_for_are_taken(settings: dict[int, int]) -> None:
    async def run() -> None:
        scene = await begun()
        scene.flushes = False  # the answer and the settings share a turn of the loop
        stream = scene.call(frame(b"x"))
        scene.push()
        scene.answer(stream)
        scene.client.update_settings(settings)
        scene.flushes = True
        await scene.exchange()
        assert scene.answered(stream) == [b"x"]
        assert not scene.wire.has_closed

    asyncio.run(run())


def test_who_gives_up_call_after_call_is_cut_off() -> None:
    async def run() -> None:
        scene = await begun(reset_burst=10, resets_per_s=1)
        block = scene.block
        for stream in range(FIRST, FIRST + 400, 4):
            ended_badly = raw(HEADERS, END_HEADERS, stream, block) + data(
                b"", stream=stream
            )  # so that the block is known again
            asked = raw(HEADERS, END_HEADERS, stream + 2, block) + data(frame(b"x"), stream=stream + 2)
            scene.send(ended_badly + asked + rst_stream(stream + 2, 8))
        assert scene.wire.has_closed
        assert len(scene.gone) <= 12

    asyncio.run(run())


def test_a_call_that_is_given_up_frees_its_place() -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + data(frame(b"x")) + begin(scene, FIRST + 2) + rst_stream(FIRST, 8))
        assert scene.gone == [FIRST]
        scene.send(data(frame(b"y"), stream=FIRST + 2))
        scene.answer(FIRST + 2)
        assert ends(scene) == [("answered", FIRST + 2)]

    asyncio.run(run())


def test_a_client_that_leaves_gets_what_it_has_asked_for() -> None:
    async def run() -> None:
        scene = await begun()
        streams = [scene.call(frame(b"%d" % number), path) for number, path in enumerate((b"/a/b", b"/other"))]
        scene.push()
        scene.client.send_goaway(0)
        await scene.exchange()
        for stream in streams:
            assert not scene.wire.has_closed
            scene.answer(stream)
        assert scene.wire.has_closed
        scene.read()
        assert [scene.answered(stream) for stream in streams] == [[b"0"], [b"1"]]

    asyncio.run(run())


def test_what_is_to_be_sent_does_not_grow_while_the_socket_takes_nothing() -> None:
    async def run() -> None:
        scene = await begun(max_held_bytes=1000)
        block = scene.block
        for stream in (FIRST, FIRST + 2):  # unfinished, and libnghttp2's: the second has to wait
            scene.send(raw(HEADERS, END_HEADERS, stream, block + FIELD) + data(frame(bytes(5000))[:2000], 0, stream))
        scene.send(raw(HEADERS, END_HEADERS, FIRST + 4, block) + data(frame(b"x"), 0, FIRST + 4))
        assert FIRST + 4 in scene.untold
        scene.fail(FIRST + 4, "no", ended=False)
        scene.connection.pause_writing()
        for _ in range(100):
            scene.send(data(b"late", 0, FIRST + 4))
        assert not scene.connection._repeated.unsent
        scene.frames()
        scene.connection.resume_writing()
        assert len([kind for kind, *_ in scene.frames() if kind == WINDOW_UPDATE]) <= 2

    asyncio.run(run())


def test_a_length_that_is_announced_holds() -> None:
    async def run() -> None:
        scene = Scene()
        for _ in range(2):
            stream = scene.call(frame(b"x"), content_length=b"6")
            await scene.exchange()
            scene.answer(stream)
            await scene.exchange()
        stream = scene.call(frame(b"more than that"), content_length=b"6")
        scene.push()
        scene.frames()
        assert (stream not in scene.waiting, scene.untold) == (True, [])

    asyncio.run(run())


def test_a_reserved_bit_means_nothing() -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + window_update(FIRST | RESERVED, 5) + data(frame(b"x"), stream=FIRST | RESERVED))
        assert scene.untold == [FIRST]
        scene.answer(FIRST)
        assert ends(scene) == [("answered", FIRST)]

    asyncio.run(run())


def test_the_largest_of_windows_is_taken() -> None:
    async def run() -> None:
        scene = await begun(None, MAX_WINDOW_BYTES)
        for _ in range(4):
            stream = scene.call(frame(bytes(30_000)))
            await scene.exchange()
            scene.answer(stream)
            await scene.exchange()
            assert scene.answered(stream) == [bytes(30_000)]
        assert not scene.connection._repeated.is_over

    asyncio.run(run())


def test_an_old_stream_does_not_begin_anew() -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + data(frame(b"x")) + begin(scene, 1))
        assert list(scene.waiting) == [FIRST]
        scene.answer(FIRST)
        assert ends(scene) == [("answered", FIRST)]

    asyncio.run(run())


def test_what_comes_late_for_a_call_that_is_over_harms_nobody() -> None:
    async def run() -> None:
        scene = await begun()
        late = window_update(FIRST, 5) + data(b"late", 0) + rst_stream(FIRST, 8)
        scene.send(begin(scene) + data(frame(b"x"), 0))
        scene.fail(FIRST, "no", ended=False)
        assert ends(scene) == [("answered", FIRST), ("reset", FIRST)]
        scene.send(late)
        scene.connection.go_away()
        scene.send(late)
        assert ends(scene) == [("connection", 0)]

    asyncio.run(run())


def test_a_connection_that_is_told_to_go_answers_what_it_has() -> None:
    async def run() -> None:
        scene = await begun()
        streams = [scene.call(frame(b"x")) for _ in range(3)]
        scene.push()
        scene.connection.go_away()
        assert scene.untold == []
        scene.read()
        (goaway,) = [event for event in scene.events if isinstance(event, GoAwayReceived)]
        assert goaway.last_stream_id == streams[-1]
        for stream in streams:
            scene.answer(stream)
        await scene.exchange()
        assert [scene.answered(stream) for stream in streams] == [[b"x"]] * 3

    asyncio.run(run())


@pytest.mark.parametrize("more", [b"", FIELD])
def test_more_calls_than_allowed_are_too_many_wherever_they_are(more: bytes) -> None:
    async def run() -> None:
        scene = await begun(max_streams=2)
        scene.send(begin(scene) + begin(scene, FIRST + 2))
        assert scene.untold == [FIRST, FIRST + 2]
        scene.send(raw(HEADERS, END_HEADERS, FIRST + 4, scene.block + more))
        assert ends(scene) == [("connection", 0)]
        assert sorted(scene.connection._calls) == [FIRST, FIRST + 2]

    asyncio.run(run())


def test_what_libnghttp2_is_done_with_is_not_kept_where_it_says_so_as_calls_are_handed_over() -> None:
    async def run() -> None:
        scene = await begun()
        told = scene.call(frame(b"x"), b"/other")
        scene.push()
        untold = scene.call(frame(b"x"))
        scene.push()
        scene.connection.fail(told, Status(13, "early"), ended=True)
        scene.connection.go_away()
        scene.answer(untold)
        await scene.exchange()
        assert (scene.status(told), scene.answered(untold)) == (13, [b"x"])
        assert not scene.connection.calls
        assert not scene.connection._repeated.closed

    asyncio.run(run())


def test_a_client_that_wants_small_tables_is_libnghttp2s() -> None:
    async def run() -> None:
        scene = await begun({HEADER_TABLE_SIZE: 100})
        stream = scene.call(frame(b"x"))
        scene.push()
        assert scene.untold == []
        scene.answer(stream)
        await scene.exchange()
        assert scene.answered(stream) == [b"x"]

    asyncio.run(run())


def test_answers_wait_in_libnghttp2_where_the_socket_takes_no_more() -> None:
    async def run() -> None:
        scene = await begun()
        streams = [scene.call(frame(b"x")) for _ in range(2)]
        scene.push()
        scene.connection.pause_writing()
        scene.answer(streams[0])
        assert scene.untold == []
        assert not scene.wire.written
        scene.connection.resume_writing()
        scene.answer(streams[1])
        await scene.exchange()
        assert [scene.answered(stream) for stream in streams] == [[b"x"]] * 2
        scene.call(frame(b"x"))
        scene.push()
        assert len(scene.untold) == 1

    asyncio.run(run())


def test_what_the_client_opens_a_stream_by_counts() -> None:
    async def run() -> None:
        scene = await begun({INITIAL_WINDOW_SIZE: 8})
        scene.send(begin(scene) + window_update(FIRST, 2) + data(frame(b"12345")))
        scene.answer(FIRST)
        assert ends(scene) == [("answered", FIRST)]  # ten bytes with the prefix
        scene.send(begin(scene, FIRST + 2) + data(frame(b"1234"), stream=FIRST + 2) + window_update(FIRST + 2, 0x10000))
        scene.connection.go_away()
        scene.answer(FIRST + 2, bytes(50_000))
        assert ends(scene) == [("connection", 0), ("answered", FIRST + 2)]

    asyncio.run(run())


@pytest.mark.parametrize("pieces", [[frame(b"x")], [frame(b"hello")[:7], b"llo"]])
def test_a_call_may_be_refused_as_it_begins(pieces: list[bytes]) -> None:
    async def run() -> None:
        scene = await begun()
        scene.refusal = UnavailableError("not now")
        scene.send(begin(scene) + b"".join(data(piece, 0) for piece in pieces) + data(b""))
        await asyncio.sleep(0)
        assert ends(scene) == [("answered", FIRST), ("reset", FIRST)]
        assert not scene.connection.calls

    asyncio.run(run())


def test_a_connections_end_is_the_end_of_its_calls() -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + data(frame(b"x")))
        scene.connection.connection_lost(None)
        assert scene.gone == [FIRST]
        scene.connection.answer(FIRST, b"too late")
        assert scene.frames() == []

    asyncio.run(run())


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
def test_a_request_in_pieces_becomes_whole(pieces: list[bytes], limits: dict[str, int]) -> None:
    async def run() -> None:
        scene = await begun(None, **limits)
        scene.send(begin(scene))
        for piece in pieces[:-1]:
            scene.send(data(piece, 0))
        scene.send(data(pieces[-1]))
        assert scene.waiting == {FIRST: b"".join(pieces)[5:]}
        scene.answer(FIRST)
        assert ends(scene) == [("answered", FIRST)]

    asyncio.run(run())


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
def test_a_request_that_is_no_message_gets_a_status(pieces: list[bytes]) -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene))
        for piece in pieces[:-1]:
            scene.send(data(piece, 0))
        scene.send(data(pieces[-1]))
        assert not scene.waiting
        assert ends(scene)[0] == ("answered", FIRST)
        assert not scene.connection.calls

    asyncio.run(run())
