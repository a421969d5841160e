"""Start HTTP; nothing of it is imported where it is off."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from serve.engine.inference_core import InferenceCore
from serve.http.options import HttpOptions
from serve.protocol.service import Service
from serve.security.memory_budget import MemoryBudget
from serve.security.security import Guard
from serve.transports.listener import ConnectionLimit

if TYPE_CHECKING:
    from serve.http.rest_server import RestServer


async def start_http(
    core: InferenceCore,
    service: Service,
    host: str,
    options: HttpOptions | None,
    guard: Guard | None = None,
    listening: Mapping[str, Sequence[socket.socket]] | None = None,
    *,
    connections: ConnectionLimit | None = None,
    budget: MemoryBudget | None = None,
) -> RestServer | None:
    """A server that listens, on sockets of its own or on these; None where there are no options for one.

    All servers of this process together keep to the limit of `connections`.

    Raises:
        BindError: an address cannot be listened on; then none is.
    """
    if options is None:
        return None
    from serve.http.rest_server import RestServer  # noqa: PLC0415  (see above)

    server = RestServer(core, service, host, options, guard, listening, connections=connections, budget=budget)
    await server.start()
    return server
