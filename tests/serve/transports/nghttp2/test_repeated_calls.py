"""Calls that libnghttp2 is not told of, and how it comes to hear of them."""

from __future__ import annotations

import asyncio

import pytest
from ngh2 import GoAwayReceived

from serve.protocol.status import Status
from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.frames import (
    END_HEADERS,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    WINDOW_UPDATE,
    rst_stream,
    window_update,
)
from tests.serve.transports.nghttp2.connection_scene import begun
from tests.serve.transports.nghttp2.raw_frames import FIELD, FIRST, begin, data, ends, raw


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


def test_a_call_that_crosses_a_notice_is_answered_and_the_end_names_it() -> None:
    async def run() -> None:
        scene = await begun()
        before = scene.call(frame(b"x"))
        scene.push()
        scene.connection.give_notice()
        crossing = [scene.call(frame(b"y")), scene.call(frame(b"z"), b"/other")]  # the client has read nothing yet
        scene.push()
        scene.read()
        (notice,) = [event for event in scene.events if isinstance(event, GoAwayReceived)]
        assert notice.last_stream_id == MAX_STREAM
        await scene.exchange()
        await asyncio.sleep(0)
        assert scene.connection.goes  # as the client has read it
        scene.read()
        assert [event.last_stream_id for event in scene.events if isinstance(event, GoAwayReceived)] == [
            MAX_STREAM,
            crossing[-1],
        ]
        for stream in (before, *crossing):
            scene.answer(stream)
        await scene.exchange()
        assert [scene.answered(stream) for stream in (before, *crossing)] == [[b"x"], [b"y"], [b"z"]]

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


def test_a_connections_end_is_the_end_of_its_calls() -> None:
    async def run() -> None:
        scene = await begun()
        scene.send(begin(scene) + data(frame(b"x")))
        scene.connection.connection_lost(None)
        assert scene.gone == [FIRST]
        scene.connection.answer(FIRST, b"too late")
        assert scene.frames() == []

    asyncio.run(run())
