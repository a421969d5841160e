"""Messages between the server and a model's process that come or go in pieces."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from halfserve.serve.backends.python_child.shared_segments import MOST_LENT
from halfserve.serve.backends.python_child.wire import CHUNK, INLINE_BYTES, PREFIX, Channel, ChannelClosedError, WireTensor

X = WireTensor("x", "UINT8", (INLINE_BYTES,), np.arange(INLINE_BYTES, dtype=np.uint8))


@pytest.fixture(name="pair")
def connected_pair() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket, and the channel at its other end."""
    ours, theirs = socket.socketpair()
    with ours, closing(Channel(theirs)) as channel:
        yield ours, channel


def test_a_message_in_pieces_is_taken_in_without_waiting(pair: tuple[socket.socket, Channel]) -> None:
    ours, channel = pair
    channel.send({"k": "first"}, [X])
    start = ours.recv(PREFIX.size)
    message = start + ours.recv(sum(PREFIX.unpack(start)), socket.MSG_WAITALL)
    for at in range(0, len(message), 10_000):
        assert channel.take_in() is None
        ours.sendall(message[at : at + 10_000])
    assert channel.take_in()
    header, (tensor,) = channel.receive()
    np.testing.assert_array_equal(tensor.data, X.data)
    assert (header, channel.take_in()) == ({"k": "first"}, None)


def test_large_messages_and_the_end_are_left_to_a_thread(pair: tuple[socket.socket, Channel]) -> None:
    ours, channel = pair
    header = {"text": "long " * CHUNK}
    assert not channel.send(dict(header), waits=False), "the socket's buffer has room for all of it"
    with closing(Channel(ours)) as other, ThreadPoolExecutor(1) as thread:
        rest = thread.submit(channel.send_rest)
        assert other.take_in() is False
        assert other.receive()[0] == header
        rest.result()
        channel.shut_down()
        assert other.take_in() is False
        with pytest.raises(ChannelClosedError):
            other.receive()


def mapped_segments() -> int:
    return sum("halfserve-tensors" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("keeps", [False, True])
def test_a_sender_that_receives_nothing_lends_few_segments(keeps: bool) -> None:
    """Segments are free once the receiver has let go of the tensors. What it keeps is sent without a segment at some point."""
    before, sends, kept = mapped_segments(), 3 * MOST_LENT, []
    large = [np.full(INLINE_BYTES + 1, at, np.uint8) for at in range(sends)]

    def send_all(channel: Channel) -> None:
        for data in large:
            channel.send({}, [WireTensor("x", "UINT8", data.shape, data)])

    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as sender, closing(Channel(theirs)) as receiver, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_all, sender)
        for data in large:
            _, (tensor,) = receiver.receive()
            np.testing.assert_array_equal(tensor.data, data)
            if keeps:
                kept.append(tensor)
            del tensor
        sending.result()
        for tensor, data in zip(kept, large, strict=False):
            np.testing.assert_array_equal(tensor.data, data)
        assert mapped_segments() - before <= 2 * MOST_LENT  # each is mapped twice: both ends are in this process
        kept.clear()
