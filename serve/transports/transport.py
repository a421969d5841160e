"""Transports by name, and what the server requires of each; only the chosen one is imported."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from halfserve.serve.protocol.service import Service
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.transports.listener import ConnectionLimit


class TransportName(StrEnum):
    """NGHTTP2 is libnghttp2 on the server's event loop, the fast one; GRPCIO is grpcio's asyncio server, the reference."""

    NGHTTP2 = "nghttp2"
    GRPCIO = "grpcio"


class Transport(Protocol):
    """Carries the protocol's service over one listening address."""

    async def start(self) -> int:
        """Listen, and return the port (the one found, if 0 was requested).

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """
        ...

    async def give_notice(self) -> None:
        """Ask clients to send further calls elsewhere, and keep serving; called before `stop`."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait up to `grace_s` seconds for those in flight, then close."""


def make_transport(
    name: TransportName,
    service: Service,
    host: str,
    port: int,
    guard: PortSecurity | None = None,
    listening: Sequence[socket.socket] = (),
    *,
    connections: ConnectionLimit | None = None,
    budget: MemoryBudget | None = None,
) -> Transport:
    """Return a transport that does not listen yet.

    Args:
        name: name of the transport.
        service: methods to serve.
        host: address to listen on.
        port: TCP port to listen on.
        guard: TLS, tokens and the Unix socket; None admits every client.
        listening: sockets shared with other processes, used in place of host and port (NGHTTP2).
        connections: limit over all servers of the process (NGHTTP2).
        budget: memory shared by all servers of the process (NGHTTP2).
    """
    guard = guard or PortSecurity()
    if name is TransportName.NGHTTP2:
        from halfserve.serve.transports.nghttp2.server import Nghttp2Server  # noqa: PLC0415  (imported only if chosen)

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
    from halfserve.serve.transports.grpcio_server import GrpcioServer  # noqa: PLC0415  (see above)

    return GrpcioServer(service, host, port, guard=guard)
