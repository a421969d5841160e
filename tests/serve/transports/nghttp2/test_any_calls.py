"""Any calls, in any pieces and any order: each gets its own answer."""

from __future__ import annotations

import asyncio
from enum import Enum
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from serve.transports.grpc_framing import PREFIX_BYTES, frame
from serve.transports.nghttp2.frames import HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE
from tests.serve.transports.nghttp2.connection_scene import Scene, begun

ANNOUNCED = {1: 40, 2: 3000}  # by their choice modulo 4, calls that say how long their request is, and that length
SIZES = st.integers(0, 40) | st.integers(0, 3000) | st.integers(0, 200_000)


class Step(Enum):
    """What a client or the server may do next."""

    CALL, PIECES, OTHER, ANSWER, FAIL, RESET, GO_ON, HAND_OVER = range(8)


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
        size = ANNOUNCED.get(choice % 4)
        if size is not None:
            body = body[:size].ljust(size)
        call = scene.call if size is None else partial(scene.call, content_length=b"%d" % (size + PREFIX_BYTES))
        if step in (Step.CALL, Step.OTHER):
            self.sent[call(frame(body), b"/a/b" if step is Step.CALL else b"/other/%d" % choice)] = body
        elif step is Step.PIECES:
            whole, middle = frame(body), len(body) * choice // 99
            stream = call(whole[:middle], end=False)
            self.sent[stream], self.growing[stream] = body, whole[middle:]
        elif step is Step.GO_ON and self.growing:
            stream = sorted(self.growing)[choice % len(self.growing)]
            scene.client.send_data(stream, self.growing.pop(stream), end_stream=True)
        elif step is Step.HAND_OVER and not choice:
            scene.client.update_settings({HEADER_TABLE_SIZE: 0})  # from now on libnghttp2 does everything
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
