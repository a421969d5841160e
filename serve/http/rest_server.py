"""The HTTP side of a server: the REST interface and the page on one port, metrics on another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence

from starlette.routing import Route

from serve.engine.inference_core import InferenceCore
from serve.http.api import guarded_application, rest_routes
from serve.http.http_server import HttpServer
from serve.http.metrics import Metrics
from serve.http.openapi import OpenApi
from serve.http.options import HttpOptions
from serve.http.page.page import Page
from serve.http.request_body import BodyReader
from serve.protocol.service import Service
from serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from serve.security.security import Guard
from serve.transports.listener import ConnectionLimit


class RestServer:
    """Listens on one or two ports and answers from the same engine as gRPC does.

    Attributes:
        routes: everything that the first port answers.
        port: where the REST interface and the page are; 0 before it listens.
        metrics_port: where the metrics are alone; None where they are not.
    """

    def __init__(
        self,
        core: InferenceCore,
        service: Service,
        host: str,
        options: HttpOptions,
        guard: Guard | None = None,
        listening: Mapping[str, Sequence[socket.socket]] | None = None,
        *,
        connections: ConnectionLimit | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """A server that does not listen yet.

        Args:
            core: the models.
            service: the RPCs, of which each REST path is one.
            host: a name or address of this machine.
            options: ports and limits.
            guard: what stands before the ports; None lets everything in.
            listening: sockets that another process listens on as well, in place of host and port: for "http" and "metrics".
            connections: a bound on those of all servers of this process.
            budget: the memory that all clients may take; None makes one of the usual size for this server alone.
        """
        guard, listening, budget = guard or Guard(), listening or {}, budget or MemoryBudget(DEFAULT_BYTES)
        tls = None if guard.tls is None else guard.tls.context("http/1.1")
        self._core = core
        self._options = options
        self._page = Page(core) if options.page else None
        self._bodies = BodyReader(options.limits, budget)
        self.routes = self._routes(service)
        self._servers = [
            HttpServer(
                guarded_application(self._routes, service, host, options, guard.gate),
                host,
                options.port,
                limits=options.limits,
                budget=budget,
                tls=tls,
                listening=listening.get("http", ()),
                connections=connections,
            )
        ]
        if options.metrics_port is not None:
            app = guarded_application(_metrics, service, host, options, guard.gate)
            self._servers.append(
                HttpServer(
                    app,
                    host,
                    options.metrics_port,
                    limits=options.limits,
                    budget=budget,
                    option="--metrics-port",
                    tls=tls,
                    listening=listening.get("metrics", ()),
                    connections=connections,
                )
            )
        self.port = 0
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Listen, and fill in the ports.

        Raises:
            BindError: an address is in use, not this machine's, or not allowed; then none is listened on.
        """
        try:
            ports = [await server.start() for server in self._servers]
        except BaseException:
            await self.stop(0.0)
            raise
        self.port = ports[0]
        self.metrics_port = ports[1] if len(ports) > 1 else None
        self._core.figures.readings["http_connections"] = lambda: sum(server.connections for server in self._servers)
        if self._page is not None:
            self._page.start()

    def _routes(self, service: Service) -> list[Route]:
        """What the first port answers, of a service that may show some models only."""
        core = service.core
        routes = [*rest_routes(core, service, self._bodies, self._options), *_metrics(service), *OpenApi(service).routes()]
        if self._page is not None:
            routes += (self._page if core is self._core else self._page.showing(core)).routes()
        return routes

    async def give_notice(self) -> None:
        """Take no new connections, and end those in use with their next answer."""
        await asyncio.gather(*(server.give_notice() for server in self._servers))

    async def stop(self, grace_s: float) -> None:
        """Take no new requests, give those in flight `grace_s` seconds to be answered, then close."""
        if self._page is not None:
            self._page.stop()
        for server in self._servers:
            await server.stop(grace_s)


def _metrics(service: Service) -> list[Route]:
    return Metrics(service.core).routes()
