"""Requests of several frames, where calls are read without libnghttp2."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.errors import UnavailableError
from serve.transports.grpc_framing import frame
from serve.transports.nghttp2.frames import HEADER_TABLE_SIZE
from tests.serve.transports.nghttp2.connection_scene import Scene, begun
from tests.serve.transports.nghttp2.raw_frames import FIRST, begin, data, ends


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
def test_a_request_in_pieces_becomes_whole(pieces: list[bytes], limits: dict[str, int]) -> None:
    async def run() -> None:
        scene = await begun(None, **limits)
        send_in_pieces(scene, pieces)
        assert scene.waiting == {FIRST: b"".join(pieces)[5:]}
        scene.answer(FIRST)
        assert ends(scene) == [("answered", FIRST)]

    asyncio.run(run())


def test_a_frame_in_pieces_becomes_whole_where_libnghttp2_does_everything() -> None:
    async def run() -> None:
        scene = await begun({HEADER_TABLE_SIZE: 0})
        for size in (30_000, 40_000):
            stream = scene.call(frame(bytes(size)))
            await scene.exchange([10_000])
            assert scene.waiting == {stream: bytes(size)}
            scene.answer(stream)
            await scene.exchange()
            assert scene.answered(stream) == [bytes(size)]

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
        send_in_pieces(scene, pieces)
        assert not scene.waiting
        assert ends(scene)[0] == ("answered", FIRST)
        assert not scene.connection.calls

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
