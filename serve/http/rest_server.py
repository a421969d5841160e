"""The HTTP side of a server: the REST interface and the page on one port, metrics on another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.http.generate import GenerateRoute
from halfserve.serve.http.guards import App, BrowserGuard, RouteAnswers, RouteGuard, TokenGuard
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.http_server import HttpServer
from halfserve.serve.http.infer_route import InferRoute
from halfserve.serve.http.management_routes import SettingRoutes, SharedMemoryRoutes
from halfserve.serve.http.page.page import Page
from halfserve.serve.http.request_body import BodyReader
from halfserve.serve.http.responses import HANDLERS, on_unexpected
from halfserve.serve.http.routes import MetricsRoute, ModelRoutes, OpenApiRoute
from halfserve.serve.http.routing.route_table import GuardedRoute, RouteTable, routes_of
from halfserve.serve.http.tasks.classification import ClassificationRoutes
from halfserve.serve.http.tasks.embeddings import EmbeddingRoutes
from halfserve.serve.http.tasks.picture_routes import PictureRoutes
from halfserve.serve.http.tasks.rerank import RerankRoutes
from halfserve.serve.http.tasks.tei_embeddings import TeiEmbeddingRoutes
from halfserve.serve.http.tasks.text_endpoint import TextEndpoint
from halfserve.serve.http.tasks.text_routes import TextRoutes
from halfserve.serve.http.tasks.tokenized_models import TokenizedModels
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.gate import Gate
from halfserve.serve.security.memory_budget import DEFAULT_BYTES, MemoryBudget
from halfserve.serve.security.security import PortSecurity
from halfserve.serve.transports.listener import ConnectionLimit


class RestServer:
    """Listens on one or two ports and answers from the same engine as gRPC does."""

    def __init__(
        self,
        core: InferenceCore,
        service: Service,
        host: str,
        options: HttpOptions,
        guard: PortSecurity | None = None,
        listening: Mapping[str, Sequence[socket.socket]] | None = None,
        *,
        connections: ConnectionLimit | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Make a server that does not listen yet.

        Args:
            core: the models.
            service: the RPCs behind the REST paths.
            host: a name or address of this machine.
            options: ports and limits.
            guard: security of both ports; None admits every request.
            listening: inherited sockets, in place of host and port: for "http" and "metrics".
            connections: a limit of all servers of this process together.
            budget: the memory of all clients; None makes a default one for this server alone.
        """
        guard, listening = guard or PortSecurity(), listening or {}
        shared_budget = budget or MemoryBudget(DEFAULT_BYTES)
        tls = None if guard.tls is None else guard.tls.context("http/1.1")
        self._core = core
        self._options = options
        self._page = Page(core) if options.page else None
        self._bodies = BodyReader(options.limits, shared_budget)
        self._texts = TokenizedModels(core)
        self.routes = self._routes(service)  # everything that the first port answers

        def server(routes_of: Callable[[Service], list[GuardedRoute]], name: str, port: int) -> HttpServer:
            return HttpServer(
                guarded_application(routes_of, service, host, options, guard.gate),
                host,
                port,
                limits=options.limits,
                budget=shared_budget,
                option=f"--{name}-port",
                tls=tls,
                listening=listening.get(name, ()),
                connections=connections,
            )

        self._servers = [] if options.port is None else [server(self._routes, "http", options.port)]
        if options.metrics_port is not None:
            self._servers.append(server(lambda seen: routes_of(MetricsRoute(seen)), "metrics", options.metrics_port))
        self.port = 0  # TCP port of the REST interface and the page; 0 before it listens, or without one
        self.metrics_port: int | None = None  # TCP port of the metrics alone; None without one

    async def start(self) -> None:
        """Listen, and set the ports.
        Raises BindError: an address is in use, not this machine's, or not allowed; then none is listened on.
        """
        try:
            ports = [await server.start() for server in self._servers]
        except BaseException:
            await self.stop(0.0)
            raise
        if self._options.port is not None:
            self.port = ports[0]
        if self._options.metrics_port is not None:
            self.metrics_port = ports[-1]
        self._core.figures.gauge("halfserve_http_connections", "Open HTTP connections", self._connections)
        self._texts.start()
        if self._page is not None:
            self._page.start()

    def _connections(self) -> int:
        return sum(server.connections for server in self._servers)

    def _routes(self, service: Service) -> list[GuardedRoute]:
        """Return the routes of the first port, for a service that may be restricted to some models."""
        core, bodies, limits = service.core, self._bodies, self._options.limits
        texts = TextEndpoint(service, bodies, limits, self._texts)
        answering: list[object] = [
            ModelRoutes(service, bodies),
            InferRoute(core, service, bodies, limits),
            PictureRoutes(service, bodies),
            GenerateRoute(service, bodies, limits),
            SharedMemoryRoutes(service, bodies),
            SettingRoutes(service, bodies),
            TextRoutes(texts),
            EmbeddingRoutes(texts),
            TeiEmbeddingRoutes(texts),
            RerankRoutes(texts),
            ClassificationRoutes(texts),
            MetricsRoute(service),
        ]
        answering.append(OpenApiRoute(service, tuple(answering)))
        if self._page is not None:
            answering.append(self._page if core is self._core else self._page.restricted_to(core))
        return routes_of(*answering)

    async def give_notice(self) -> None:
        """Accept no new connections, and end those in use with their next answer."""
        await asyncio.gather(*(server.give_notice() for server in self._servers))

    async def stop(self, grace_s: float) -> None:
        """Accept no new requests, give those in flight `grace_s` seconds to be answered, then close."""
        if self._page is not None:
            self._page.stop()
        self._texts.stop()
        for server in self._servers:
            await server.stop(grace_s)


def application(routes: list[GuardedRoute], host: str, options: HttpOptions) -> App:
    """Return an ASGI application that answers these routes without authentication."""
    return _guarded(_answers(routes), routes, host, options)


def guarded_application(
    routes_of: Callable[[Service], list[GuardedRoute]], service: Service, host: str, options: HttpOptions, gate: Gate | None
) -> App:
    """Return an ASGI application that answers admitted requests, each from the models that its token permits.

    `routes_of` makes the routes of a service. Without a gate, all requests are admitted.
    """
    routes = routes_of(service)
    if gate is None:
        return application(routes, host, options)
    return _guarded(TokenGuard(lambda seen: _answers(routes_of(seen)), service, gate), routes, host, options)


def _guarded(app: App, routes: list[GuardedRoute], host: str, options: HttpOptions) -> App:
    guard = BrowserGuard(app, host=host, allowed_hosts=options.allowed_hosts, allowed_origins=options.allowed_origins)
    return RouteGuard(guard, RouteTable(routes))


def _answers(routes: list[GuardedRoute]) -> App:
    answers: App = ExceptionMiddleware(RouteAnswers(routes), HANDLERS)
    return ServerErrorMiddleware(answers, on_unexpected)
