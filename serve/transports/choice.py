"""Which transport carries gRPC; only the chosen one is imported."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from enum import StrEnum

from serve.protocol.service import Service
from serve.security.memory_budget import MemoryBudget
from serve.security.security import Guard
from serve.transports.listener import ConnectionLimit
from serve.transports.transport import Transport


class TransportName(StrEnum):
    """The transports by name.

    NGHTTP2 is libnghttp2 on the server's own event loop: the fast one. GRPCIO is grpcio's asyncio server: the reference.
    """

    NGHTTP2 = "nghttp2"
    GRPCIO = "grpcio"


def make_transport(
    name: TransportName,
    service: Service,
    host: str,
    port: int,
    guard: Guard | None = None,
    listening: Sequence[socket.socket] = (),
    *,
    connections: ConnectionLimit | None = None,
    budget: MemoryBudget | None = None,
) -> Transport:
    """A transport that does not listen yet, with what stands before it; None lets everything in.

    NGHTTP2 can use sockets that another process listens on as well (`listening`), in place of host and port. It keeps to the
    limit of `connections` and within the `budget` of memory, which hold for all servers of this process.
    """
    guard = guard or Guard()
    if name is TransportName.NGHTTP2:
        from serve.transports.nghttp2.server import Nghttp2Server  # noqa: PLC0415  (what is not chosen is not imported)

        tls = None if guard.tls is None else guard.tls.context("h2")
        return Nghttp2Server(
            service,
            host,
            port,
            tls=tls,
            gate=guard.gate,
            budget=budget,
            socket=guard.socket,
            option=guard.option,
            listening=listening,
            connections=connections,
        )
    from serve.transports.grpcio_server import GrpcioServer  # noqa: PLC0415  (see above)

    return GrpcioServer(service, host, port, guard=guard)
