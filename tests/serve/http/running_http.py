"""A real HTTP server beside a real gRPC server, on the same engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from halfserve.serve.http.http_options import HttpLimits, HttpOptions
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.memory_budget import MemoryBudget
from halfserve.serve.security.security import PortSecurity
from tests.serve.running_server import RunningServer


@contextmanager
def running_http(
    server: RunningServer,
    options: HttpOptions | None = None,
    *,
    limits: HttpLimits | None = None,
    host: str = "127.0.0.1",
    shared_memory: bool = False,
    observe: ObserveOptions | None = None,
    forwarded: ForwardedHeaders | None = None,
    budget: MemoryBudget | None = None,
    guard: PortSecurity | None = None,
) -> Iterator[RestServer]:
    """HTTP on the core of a running server; a free port takes the place of the default one of the metrics.

    Without options, there is a free port with these limits, and none of the metrics.
    """
    options = options or HttpOptions(port=0, metrics_port=None, limits=limits or HttpLimits())
    if options.metrics_port == HttpOptions.metrics_port:
        options = replace(options, metrics_port=0)
    service = server.call(
        lambda: Service(
            server.core, server_version="0.0.test", shared_memory=shared_memory, observe=observe, forwarded=forwarded
        )
    )
    rest = server.call(lambda: RestServer(server.core, service, host, options, guard, budget=budget))
    server.run(rest.start())
    try:
        yield rest
    finally:
        server.run(rest.stop(0.5))
        server.call(service.observability.close)
