"""Answers that no well-behaved server gives: each ends in an exception of this package, and never in a wrong array."""

from __future__ import annotations

import pytest

from serve.client import InferenceClientError
from tests.serve.benchmark.load.scripted_peer import HEADERS, OK, Peer, peer
from tests.serve.client.conftest import Connect

WAIT_S = 20


@pytest.mark.parametrize("sent", [None, b"", b"\0\0\0", b"\0\0\0\0\5ab", b"\0\0\0\0\2\xff\xff"])
def test_a_call_that_ends_well_without_a_message(connect: Connect, sent: bytes | None) -> None:
    """None at all, a part of one, or one that is no protobuf."""

    def answer(server: Peer, stream: int) -> None:
        if sent is None:
            server.refuse(stream, *HEADERS, *OK)
            return
        server.http2.send_response(stream, HEADERS)
        if sent:
            server.http2.send_data(stream, sent)
        server.http2.send_trailers(stream, OK)

    with peer(answer) as (host, port):
        client = connect(f"{host}:{port}", timeout_s=WAIT_S)
        for ask in (client.server_metadata, client.is_live, lambda: client.infer("m", {"x": [1.0]})):
            with pytest.raises(InferenceClientError, match=r"no message|deserializing") as caught:
                ask()
            assert caught.value.code == "INTERNAL"
