"""Clients that are closed while others use them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from protos import inference_pb2 as pb
from serve.client import AsyncInferenceClient, Cancelled, InferenceClient, RetryPolicy
from serve.client.connection.channel import ChannelSettings
from tests.serve.client.scripted_server import Failure, ScriptedServer

WAIT_S = 20
FULL = Failure("RESOURCE_EXHAUSTED", "full", (("grpc-retry-pushback-ms", "600000"),))


@dataclass(frozen=True, kw_only=True)
class Observed(RetryPolicy):
    """Tells when a client is about to pause."""

    pauses: threading.Event = field(default_factory=threading.Event)

    def pause_s(self, attempt: int, hint_s: float | None) -> float:
        self.pauses.set()
        return super().pause_s(attempt, hint_s)


def test_a_call_that_waits_to_be_made_again_ends(scripted: ScriptedServer) -> None:
    scripted.answers["ServerMetadata"], policy = [FULL], Observed()
    client = InferenceClient(scripted.address, timeout_s=None, retries=policy)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.server_metadata)
        assert policy.pauses.wait(WAIT_S)
        client.close()
        with pytest.raises(Cancelled, match="this client is closed"):
            waits.result(WAIT_S)


def test_so_it_does_with_asyncio(scripted: ScriptedServer) -> None:
    scripted.answers["ServerMetadata"], policy = [FULL], Observed()

    async def ask() -> None:
        client = AsyncInferenceClient(scripted.address, timeout_s=None, retries=policy)
        waits = asyncio.create_task(client.server_metadata())
        assert await asyncio.to_thread(policy.pauses.wait, WAIT_S)
        await client.close()
        with pytest.raises(Cancelled, match="this client is closed"):
            await asyncio.wait_for(waits, WAIT_S)

    asyncio.run(ask())


def test_nothing_is_opened_once_a_client_is_closed(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.answers["ServerMetadata"] = [pb.ServerMetadataResponse(name="s")]
    opens, closed, opened, really_open = threading.Event(), threading.Event(), [], ChannelSettings.open

    def slowly(settings: ChannelSettings, kind: Any) -> Any:
        opens.set()
        assert closed.wait(WAIT_S)
        opened.append(really_open(settings, kind))
        return opened[0]

    monkeypatch.setattr(ChannelSettings, "open", slowly)
    client = InferenceClient(scripted.address)
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(client.server_metadata)
        assert opens.wait(WAIT_S)
        client.close()
        closed.set()
        with pytest.raises(Cancelled, match="this client was closed"):
            asks.result(WAIT_S)
    with pytest.raises(ValueError, match="closed channel"):
        opened[0].unary_unary("/any")(b"")
