"""Frames that no usual client sends, where calls are read without libnghttp2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from halfserve.serve.protocol.status import Status
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    GOAWAY,
    HEADERS,
    MAX_WINDOW_BYTES,
    PADDED,
    PRIORITY_FRAME,
    RST_STREAM,
    WINDOW_UPDATE,
    head_of,
    literals,
    rst_stream,
    window_update,
)
from tests.serve.transports.nghttp2.connection_scene import FIELD, FIRST, Scene, begin, begun, data, ends, on_a_loop, raw
from tests.serve.transports.nghttp2.http2_peer import WINDOW_BYTES, call_headers

FRAME_SIZE_ERROR, REFUSED_STREAM, COMPRESSION_ERROR = 0x6, 0x7, 0x9
WHOLE = END_HEADERS | END_STREAM
PING, CONTINUATION, RESERVED = 0x6, 0x9, 1 << 31
TOO_MUCH = MAX_WINDOW_BYTES - WINDOW_BYTES + 100  # of which two answers have used some


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
@on_a_loop
async def test_what_is_out_of_the_ordinary_is_for_libnghttp2(rest: bytes, outcome: str) -> None:
    scene = await begun()
    scene.send(begin(scene) + rest)
    assert scene.untold == []
    if FIRST in scene.waiting:
        scene.answer(FIRST)
    assert ends(scene) == [(outcome, FIRST)]


@pytest.mark.parametrize("field", [(b"a", b"b "), (b"a", b" b"), (b"A", b"b"), (b"connection", b"close"), (b":a", b"b")])
@on_a_loop
async def test_headers_that_http2_does_not_allow_are_answered_before_they_are_reset(field: tuple[bytes, bytes]) -> None:
    scene = await begun()
    wrong = raw(HEADERS, END_HEADERS, FIRST, scene.block + literals([field]))
    scene.send(wrong + data(frame(b"x")) + begin(scene, FIRST + 2) + data(frame(b"y"), stream=FIRST + 2))
    scene.answer(FIRST + 2)
    (head,) = [payload for kind, _, stream, payload in scene.frames() if kind == HEADERS and stream == FIRST]
    assert literals([(b"grpc-status", b"3")]) in head
    assert b"neither begin nor end with a space" in head

    scene.send(raw(HEADERS, END_HEADERS, FIRST + 4, scene.block + literals([field])))
    assert ends(scene) == [("answered", FIRST + 4), ("reset", FIRST + 4)]


@pytest.mark.parametrize(
    "hint",
    [
        pytest.param(lambda stream: raw(0x10, 0, 0, stream.to_bytes(4) + b"u=1"), id="PRIORITY_UPDATE"),
        pytest.param(lambda stream: raw(0x2, 0, stream, bytes(4) + b"\xff") * 10, id="PRIORITY"),
    ],
)
@on_a_loop
async def test_hints_what_to_answer_first_do_not_end_the_connection(hint: Callable[[int], bytes]) -> None:
    scene = await begun()
    for stream in range(FIRST, FIRST + 2 * 1200, 2):
        scene.send(hint(stream) + begin(scene, stream) + data(frame(b"x"), stream=stream))
        scene.answer(stream)
        assert ends(scene) == [("answered", stream)]


@on_a_loop
async def test_a_call_that_is_one_too_many_may_be_sent_again() -> None:
    scene = Scene(max_streams=1)
    scene.call(frame(b"x"))
    second = scene.call(frame(b"y"))
    scene.push()  # before the client knows how many it may send
    (reset,) = [(stream, payload) for kind, _, stream, payload in scene.frames() if kind in {HEADERS, RST_STREAM}]
    assert reset == (second, REFUSED_STREAM.to_bytes(4))


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
@on_a_loop
async def test_what_breaks_the_protocol_ends_the_connection(frames: Callable[[Scene], bytes]) -> None:
    scene = await begun()
    in_time = scene.call(frame(b"x"))
    scene.push()
    scene.send(frames(scene))
    assert ("connection", 0) in ends(scene)
    assert in_time in scene.gone
    scene.connection.session.answer(in_time, b"x")
    assert not scene.frames()


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        pytest.param(lambda scene: raw(HEADERS, WHOLE, FIRST, b"\x80"), COMPRESSION_ERROR, id="no such header"),
        pytest.param(lambda scene: raw(HEADERS, WHOLE, FIRST, scene.block + b"\0\5a"), COMPRESSION_ERROR, id="half a header"),
        pytest.param(lambda scene: raw(HEADERS, WHOLE, FIRST, b"\x3f\xff\xff\3"), COMPRESSION_ERROR, id="too large a table"),
        pytest.param(
            lambda scene: raw(HEADERS, 0, FIRST, scene.block) + raw(CONTINUATION, END_HEADERS, FIRST, b"\xff\xff"),
            COMPRESSION_ERROR,
            id="no such header in CONTINUATION",
        ),
        pytest.param(lambda scene: begin(scene) + raw(PRIORITY_FRAME, 0, FIRST, b"1234"), FRAME_SIZE_ERROR, id="PRIORITY"),
        pytest.param(lambda scene: raw(PRIORITY_FRAME, 0, FIRST, b"123456"), FRAME_SIZE_ERROR, id="PRIORITY of no call"),
        pytest.param(lambda scene: begin(scene) + raw(RST_STREAM, 0, FIRST, b"123"), FRAME_SIZE_ERROR, id="RST_STREAM"),
        pytest.param(lambda scene: head_of(HEADERS, WHOLE, FIRST, FRAME_BYTES + 1), FRAME_SIZE_ERROR, id="too large a frame"),
    ],
)
@on_a_loop
async def test_a_connection_ends_with_the_code_of_its_error_alone(frames: Callable[[Scene], bytes], code: int) -> None:
    """RFC 9113, sections 4.2, 4.3, 6.3 and 6.4. An answer to a call that was never read would hide the reason."""

    scene = await begun()
    scene.send(frames(scene))
    ((kind, _, _, payload),) = scene.frames()
    assert (kind, int.from_bytes(payload[4:8])) == (GOAWAY, code)
    assert scene.wire.has_closed


@on_a_loop
async def test_a_connection_that_libnghttp2_ends_is_over_and_names_the_last_stream() -> None:
    """A client may send again what is said not to have been looked at."""

    scene = await begun()
    scene.send(begin(scene) + data(frame(b"x")) + raw(PING, 0, 0, b"1234567"))
    (goaway,) = [payload for kind, _, _, payload in scene.frames() if kind == GOAWAY]
    assert int.from_bytes(goaway[:4]) == FIRST
    assert scene.wire.has_closed
    assert not scene.connection._fast_path.templates


@on_a_loop
async def test_who_gives_up_call_after_call_is_cut_off() -> None:
    scene = await begun(reset_burst=10, resets_per_s=1)
    block = scene.block
    for stream in range(FIRST, FIRST + 400, 4):
        ended_badly = raw(HEADERS, END_HEADERS, stream, block) + data(b"", stream=stream)  # so that the block is known again
        asked = raw(HEADERS, END_HEADERS, stream + 2, block) + data(frame(b"x"), stream=stream + 2)
        scene.send(ended_badly + asked + rst_stream(stream + 2, 8))
    assert scene.wire.has_closed
    assert len(scene.gone) <= 12


@pytest.mark.parametrize("is_over", [False, True])
@on_a_loop
async def test_long_headers_leave_others_their_turns(*, is_over: bool) -> None:
    """Frames alone are no measure: a byte of a compressed list may be a field of it."""

    scene = await begun()
    if is_over:  # headers in pieces are for libnghttp2, and all that comes behind them
        scene.send(raw(HEADERS, END_STREAM, FIRST, scene.block) + raw(CONTINUATION, END_HEADERS, FIRST, b""))
    opened = len(scene.opened)
    many = literals(call_headers(b"/a/b")) + literals([(b"a", b"")] * 400)
    streams = range(FIRST + 2, FIRST + 42, 2)
    blocks = {stream: many + literals([(b"n", b"%d" % stream)]) for stream in streams}
    scene.send(b"".join(raw(HEADERS, END_HEADERS, stream, block) for stream, block in blocks.items()))
    assert len(scene.opened) - opened <= 3
    while scene.wire.pauses:  # noqa: ASYNC110  (as in `Scene.exchange`)
        await asyncio.sleep(0)
    assert len(scene.opened) - opened == len(streams)


@on_a_loop
async def test_a_reserved_bit_means_nothing() -> None:
    scene = await begun()
    scene.send(begin(scene) + window_update(FIRST | RESERVED, 5) + data(frame(b"x"), stream=FIRST | RESERVED))
    assert scene.untold == [FIRST]
    scene.answer(FIRST)
    assert ends(scene) == [("answered", FIRST)]


@on_a_loop
async def test_an_old_stream_does_not_begin_anew() -> None:
    scene = await begun()
    scene.send(begin(scene) + data(frame(b"x")) + begin(scene, 1))
    assert list(scene.waiting) == [FIRST]
    scene.answer(FIRST)
    assert ends(scene) == [("answered", FIRST)]


@on_a_loop
async def test_what_comes_late_for_a_call_that_is_over_harms_nobody() -> None:
    scene = await begun()
    late = window_update(FIRST, 5) + data(b"late", 0) + rst_stream(FIRST, 8)
    scene.send(begin(scene) + data(frame(b"x"), 0))
    scene.fail(FIRST, "no", ended=False)
    assert ends(scene) == [("answered", FIRST), ("reset", FIRST)]
    scene.send(late)
    scene.connection.go_away()
    scene.send(late)
    assert ends(scene) == [("connection", 0)]


@pytest.mark.parametrize("more", [b"", FIELD])
@on_a_loop
async def test_more_calls_than_allowed_are_too_many_wherever_they_are(more: bytes) -> None:
    scene = await begun(max_streams=2)
    scene.send(begin(scene) + begin(scene, FIRST + 2))
    assert scene.untold == [FIRST, FIRST + 2]
    scene.send(raw(HEADERS, END_HEADERS, FIRST + 4, scene.block + more))
    assert ends(scene) == [("connection", 0)]
    assert sorted(scene.gone) == [FIRST, FIRST + 2]


@pytest.mark.parametrize("frames", [raw(CONTINUATION, 0, FIRST, b""), raw(CONTINUATION, 0, FIRST, b"") + bytes(100), None])
@on_a_loop
async def test_a_connection_that_is_at_its_end_can_be_looked_after(frames: bytes | None) -> None:
    """It stays where its client does not read: whoever looks after all connections must not fall over it."""

    scene = Scene() if frames is None else await begun()
    scene.send(b"GET / HTTP/1.1\r\nHost: no-http2\r\n\r\n" if frames is None else frames)
    assert scene.wire.has_closed
    scene.connection.ping()
    assert scene.connection.session.pinged_s is not None  # there will be no answer: it is ended when that is due
    scene.connection.go_away()
    scene.connection.session.give_up_stalled(2**60)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(
    ("frames", "reads_nothing"),
    [
        pytest.param(raw(PING, 0, 0, b"1234567"), False, id="libnghttp2 has said why"),
        pytest.param(
            raw(HEADERS, 0, FIRST, FIELD) + raw(CONTINUATION, 0, FIRST, b"") * 20, True, id="its client does not read"
        ),
    ],
)
@on_a_loop
async def test_calls_of_a_connection_that_has_ended_write_nothing(frames: bytes, *, reads_nothing: bool, leaves: bool) -> None:
    """Its socket stays open while its client does not read, and the calls are asked for by others: timers, models, streams."""

    scene = await begun()
    connection = scene.connection
    whole, part = scene.call(frame(b"x")), scene.call(frame(bytes(50_000))[:40_000], end=False)
    scene.push()
    if leaves:
        connection.go_away()
    if reads_nothing:
        connection.pause_writing()
    scene.send(frames)
    assert scene.wire.has_closed
    scene.wire.written.clear()
    assert sorted(scene.gone) == [whole, part]
    for stream in (whole, part):
        connection.session.begin(stream)
        connection.session.send(stream, b"x")
        connection.session.give_back(stream, 40_000)
        connection.session.is_behind(stream)
        connection.session.fail(stream, Status(13, "no"), ended=False)
        connection.session.answer(stream, b"x")
        connection.session.finish(stream, ended=True)
    connection.resume_writing()
    connection.read_on()
    connection.ping()
    connection.give_notice()
    connection.go_away()
    scene.send(raw(PING, 0, 0, b"12345678"))
    connection.close()
    assert not scene.frames()
    assert connection.goes


@on_a_loop
async def test_what_comes_after_the_end_is_dropped_and_the_client_may_read_all() -> None:
    """A window that it opens after the last answer must meet a socket that is open: a reset would cost it that answer."""

    scene = await begun()
    stream = scene.call(frame(b"x"))
    scene.push()
    scene.connection.go_away()
    assert not scene.wire.has_closed
    scene.answer(stream)
    assert scene.wire.listens_on
    assert scene.connection.session.pinged_s is not None  # it has so long to close
    scene.send(window_update(0, 100) + b"whatever it is")
    scene.connection.close()
    scene.read()
    assert scene.answered(stream) == [b"x"]


@on_a_loop
async def test_the_same_where_the_last_call_is_given_up_as_its_request_ends() -> None:
    scene = await begun()
    first, last = scene.call(frame(b"x")), scene.call(frame(b"y")[:4], end=False)
    scene.push()
    scene.connection.go_away()
    scene.answer(first)
    scene.client.send_data(last, frame(b"y")[4:], end_stream=True)
    end = scene.client.data_to_send()
    scene.client.reset_stream(last)
    scene.send(end + scene.client.data_to_send())
    assert scene.wire.listens_on
    assert not scene.connection.session.calls
    scene.read()
    assert scene.answered(first) == [b"x"]


@on_a_loop
async def test_the_same_where_part_of_a_frame_comes_behind_the_last_call() -> None:
    scene = await begun()
    first, last = scene.call(frame(b"x")), scene.call(b"", end=False)
    scene.push()
    scene.connection.go_away()
    scene.answer(first)
    scene.send(rst_stream(last, 8) + data(bytes(100), stream=last + 2)[:50])
    assert scene.wire.listens_on
    scene.read()
    assert scene.answered(first) == [b"x"]


@on_a_loop
async def test_a_call_that_outlasts_its_connection_writes_nothing() -> None:
    scene = await begun()
    first, second = scene.call(frame(b"x")), scene.call(frame(b"y"))
    scene.push()
    scene.connection.go_away()
    scene.answer(first)
    scene.connection.close()
    assert scene.wire.listens_on
    assert second in scene.gone
    scene.connection.session.answer(second, b"y")
    scene.connection.resume_writing()
    scene.read()
    assert (scene.answered(first), scene.answered(second)) == ([b"x"], None)
