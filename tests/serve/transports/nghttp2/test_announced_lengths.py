"""Calls whose client says how long their request is, as HTTP lets it: libnghttp2 compares, and so does who reads without it."""

from __future__ import annotations

import asyncio

import pytest

from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PADDED
from tests.serve.transports.nghttp2.connection_scene import Scene
from tests.serve.transports.nghttp2.raw_frames import FIELD, FIRST, begin, data, ends, raw

WHOLE = frame(b"hello")
PADDING = b"\2" + WHOLE[7:] + b"\0\0"


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
def test_what_is_as_long_as_announced_is_read_without_libnghttp2(pieces: list[bytes]) -> None:
    async def run() -> None:
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
        assert not scene.connection._repeated.requests.announced

    asyncio.run(run())


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
def test_what_is_not_is_reset_and_the_connection_goes_on(frames: list[bytes]) -> None:
    async def run() -> None:
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
        assert scene.connection.calls == 0

    asyncio.run(run())


def test_what_is_handed_over_half_way_is_compared_with_what_is_left() -> None:
    async def run() -> None:
        for rest, outcome in ((WHOLE[7:], "answered"), (WHOLE[7:9], "reset")):
            scene = await announced()
            scene.send(begin(scene) + data(WHOLE[:7], 0) + raw(DATA, PADDED | END_STREAM, FIRST, b"\1" + rest + b"\0"))
            assert scene.untold == []
            for stream in list(scene.waiting):
                scene.answer(stream)
            assert ends(scene)[0] == (outcome, FIRST)

    asyncio.run(run())


def test_whole_requests_are_handed_over_as_such() -> None:
    async def run() -> None:
        scene = await announced()
        scene.send(begin(scene) + data(WHOLE))
        scene.connection.go_away()
        assert scene.untold == []
        scene.answer(FIRST)
        assert ends(scene) == [("connection", 0), ("answered", FIRST)]

    asyncio.run(run())
