from __future__ import annotations

import asyncio

import pytest
from ngh2 import GoAwayReceived

from halfserve.serve.protocol.status import Status
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    PADDED,
    WINDOW_UPDATE,
    rst_stream,
    window_update,
)
from tests.serve.transports.nghttp2.connection_scene import FIELD, FIRST, Scene, begin, begun, data, ends, on_a_loop, raw

WHOLE = frame(b"hello")
PADDING = b"\2" + WHOLE[7:] + b"\0\0"


@on_a_loop
async def test_what_repeats_is_answered_without_libnghttp2() -> None:
    scene = await begun()
    streams = [scene.call(frame(b"%d" % number)) for number in range(10)]
    await scene.exchange()
    assert scene.untold == streams
    for stream in reversed(streams):
        scene.answer(stream, b"!")
    await scene.exchange()
    assert [scene.answered(stream) for stream in streams] == [[b"%d!" % number] for number in range(10)]
    assert len(scene.opened) == 1  # all had the same headers


@pytest.mark.parametrize("settings", [{HEADER_TABLE_SIZE: 0}, {INITIAL_WINDOW_SIZE: 0}])
@on_a_loop
async def test_an_answer_leaves_before_settings_that_it_was_not_made_for_are_taken(settings: dict[int, int]) -> None:
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


@on_a_loop
async def test_a_call_that_is_given_up_frees_its_place() -> None:
    scene = await begun()
    scene.send(begin(scene) + data(frame(b"x")) + begin(scene, FIRST + 2) + rst_stream(FIRST, 8))
    assert scene.gone == [FIRST]
    scene.send(data(frame(b"y"), stream=FIRST + 2))
    scene.answer(FIRST + 2)
    assert ends(scene) == [("answered", FIRST + 2)]


@on_a_loop
async def test_a_client_that_leaves_gets_what_it_has_asked_for() -> None:
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


@on_a_loop
async def test_what_is_to_be_sent_does_not_grow_while_the_socket_takes_nothing() -> None:
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
    assert not scene.connection._fast_path.has_unsent
    scene.frames()
    scene.connection.resume_writing()
    assert len([kind for kind, *_ in scene.frames() if kind == WINDOW_UPDATE]) <= 2


@on_a_loop
async def test_the_largest_of_windows_is_taken() -> None:
    scene = await begun(None, MAX_WINDOW_BYTES)
    for _ in range(4):
        stream = scene.call(frame(bytes(30_000)))
        await scene.exchange()
        scene.answer(stream)
        await scene.exchange()
        assert scene.answered(stream) == [bytes(30_000)]
    assert not scene.connection._fast_path.is_over


@on_a_loop
async def test_a_connection_that_is_told_to_go_answers_what_it_has() -> None:
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


@on_a_loop
async def test_a_call_that_crosses_a_notice_is_answered_and_the_end_names_it() -> None:
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


@on_a_loop
async def test_what_libnghttp2_is_done_with_is_not_kept_where_it_says_so_as_calls_are_handed_over() -> None:
    scene = await begun()
    told = scene.call(frame(b"x"), b"/other")
    scene.push()
    untold = scene.call(frame(b"x"))
    scene.push()
    scene.connection.session.fail(told, Status(13, "early"), ended=True)
    scene.connection.go_away()
    scene.answer(untold)
    await scene.exchange()
    assert (scene.status(told), scene.answered(untold)) == (13, [b"x"])
    assert not scene.connection.session.calls
    assert not scene.connection._fast_path.closed


@on_a_loop
async def test_a_client_that_wants_small_tables_is_libnghttp2s() -> None:
    scene = await begun({HEADER_TABLE_SIZE: 100})
    stream = scene.call(frame(b"x"))
    scene.push()
    assert scene.untold == []
    scene.answer(stream)
    await scene.exchange()
    assert scene.answered(stream) == [b"x"]


@on_a_loop
async def test_answers_wait_in_libnghttp2_where_the_socket_takes_no_more() -> None:
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


@on_a_loop
async def test_what_the_client_opens_a_stream_by_counts() -> None:
    scene = await begun({INITIAL_WINDOW_SIZE: 8})
    scene.send(begin(scene) + window_update(FIRST, 2) + data(frame(b"12345")))
    scene.answer(FIRST)
    assert ends(scene) == [("answered", FIRST)]  # ten bytes with the prefix
    scene.send(begin(scene, FIRST + 2) + data(frame(b"1234"), stream=FIRST + 2) + window_update(FIRST + 2, 0x10000))
    scene.connection.go_away()
    scene.answer(FIRST + 2, bytes(50_000))
    assert ends(scene) == [("connection", 0), ("answered", FIRST + 2)]


@on_a_loop
async def test_a_connections_end_is_the_end_of_its_calls() -> None:
    scene = await begun()
    scene.send(begin(scene) + data(frame(b"x")))
    scene.connection.connection_lost(None)
    assert scene.gone == [FIRST]
    scene.connection.session.answer(FIRST, b"too late")
    assert scene.frames() == []


async def announced() -> Scene:
    """A scene with the two calls behind it after which others like them repeat."""
    scene = Scene()
    for _ in range(2):
        stream = scene.call(WHOLE, content_length=b"%d" % len(WHOLE))
        await scene.exchange()
        scene.answer(stream)
        await scene.exchange()
    return scene


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([WHOLE], id="in one"),
        pytest.param([WHOLE[:7], WHOLE[7:]], id="in two"),
        pytest.param([WHOLE[:7], WHOLE[7:], b""], id="an end of its own"),
    ],
)
@on_a_loop
async def test_what_is_as_long_as_announced_is_read_without_libnghttp2(pieces: list[bytes]) -> None:
    scene = await announced()
    for stream in (FIRST, FIRST + 2):
        scene.send(begin(scene, stream))
        for piece in pieces[:-1]:
            scene.send(data(piece, 0, stream))
        scene.send(data(pieces[-1], stream=stream))
    assert scene.untold == [FIRST, FIRST + 2]
    assert scene.waiting == {FIRST: b"hello", FIRST + 2: b"hello"}
    for stream in scene.untold:
        scene.answer(stream)
    assert ends(scene) == [("answered", FIRST), ("answered", FIRST + 2)]
    assert not scene.connection._fast_path.requests.announced


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([data(WHOLE[:9])], id="shorter"),
        pytest.param([data(frame(b"hello!"))], id="longer"),
        pytest.param([data(b"")], id="nothing"),
        pytest.param([data(frame(b"hell"))], id="a shorter message"),
        pytest.param([data(WHOLE[:7], 0), data(WHOLE[7:9])], id="shorter in two"),
        pytest.param([data(WHOLE[:7], 0), data(b"")], id="an early end"),
        pytest.param([data(WHOLE[:7], 0), data(WHOLE[7:] + b"!")], id="longer in two"),
        pytest.param([data(WHOLE, 0), data(b"!")], id="one more"),
        pytest.param([data(frame(b"hello, you")[:9], 0), data(b"lo, you")], id="a longer message"),
        pytest.param([data(WHOLE[:7], 0), raw(HEADERS, END_HEADERS | END_STREAM, FIRST, FIELD)], id="trailers too soon"),
        pytest.param([data(WHOLE[:8], 0), raw(DATA, PADDED | END_STREAM, FIRST, PADDING)], id="longer, by what is padded"),
    ],
)
@on_a_loop
async def test_what_is_not_is_reset_and_the_connection_goes_on(frames: list[bytes]) -> None:
    scene = await announced()
    block = scene.block
    scene.send(begin(scene) + frames[0])
    for later in frames[1:]:
        scene.send(later)
    assert (scene.waiting, scene.untold) == ({}, [])
    assert ends(scene) == [("reset", FIRST)]
    scene.send(raw(HEADERS, END_HEADERS, FIRST + 2, block) + data(WHOLE, stream=FIRST + 2))
    scene.answer(FIRST + 2)
    assert ends(scene) == [("answered", FIRST + 2)]
    assert scene.connection.session.calls == 0


@on_a_loop
async def test_what_is_handed_over_half_way_is_compared_with_what_is_left() -> None:
    for rest, outcome in ((WHOLE[7:], "answered"), (WHOLE[7:9], "reset")):
        scene = await announced()
        scene.send(begin(scene) + data(WHOLE[:7], 0) + raw(DATA, PADDED | END_STREAM, FIRST, b"\1" + rest + b"\0"))
        assert scene.untold == []
        for stream in list(scene.waiting):
            scene.answer(stream)
        assert ends(scene)[0] == (outcome, FIRST)


@on_a_loop
async def test_whole_requests_are_handed_over_as_such() -> None:
    scene = await announced()
    scene.send(begin(scene) + data(WHOLE))
    scene.connection.go_away()
    assert scene.untold == []
    scene.answer(FIRST)
    assert ends(scene) == [("connection", 0), ("answered", FIRST)]
