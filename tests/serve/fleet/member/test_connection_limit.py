from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from halfserve.serve.fleet.member.handover import GONE, ConnectionCounts
from halfserve.serve.fleet.member.process_member import SharedConnectionLimit
from halfserve.serve.transports.listener import Listener

HOST = "127.0.0.1"


@pytest.mark.parametrize("count", [2, 5, 40])
async def test_connections_go_to_whoever_has_the_fewest(tmp_path: Path, count: int) -> None:
    """Three members on one socket, as their own processes would be; one of them has ended."""
    ConnectionCounts.create(tmp_path, 3)
    with socket.create_server((HOST, 0)) as bound:
        limits = [SharedConnectionLimit(100, "", ConnectionCounts(tmp_path), place) for place in (1, 2)]
        listeners = [Listener(asyncio.Protocol, most=100, shared=limit) for limit in limits]
        for listener, limit in zip(listeners, limits, strict=True):
            listener.begin([bound.dup()])
            limit.begin()
        opened = []
        for number in range(count):
            opened.append(await asyncio.open_connection(HOST, bound.getsockname()[1]))
            while sum(limit.open for limit in limits) <= number:  # noqa: ASYNC110  (accepting signals nothing)
                await asyncio.sleep(0)
        for listener in listeners:
            listener.close()
        for _, writer in opened:
            writer.close()
    (fewer, more) = sorted(limit.open for limit in limits)
    assert fewer + more == count
    assert more - fewer <= 1 + count // 16


def test_a_member_that_leaves_gets_no_more(tmp_path: Path) -> None:
    ConnectionCounts.create(tmp_path, 2)
    counts = ConnectionCounts(tmp_path)
    staying, leaving = (SharedConnectionLimit(100, "", counts, place) for place in (1, 2))
    staying.begin()
    staying.take()
    assert not staying.gives_way()  # the other one does not accept yet
    leaving.begin()
    assert staying.gives_way()
    assert counts.all_accept()
    leaving.close()
    assert not staying.gives_way()
    leaving.take()  # one that was on its way
    leaving.release()
    assert not staying.gives_way()
    staying.close()
    assert counts.fewest() == GONE
