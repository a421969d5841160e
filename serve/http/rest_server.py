"""The HTTP side of a server: the REST interface and the page on one port, metrics on another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.routing import Route

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model_statistics import Reading
from halfserve.serve.http.generate import GenerateRoute
from halfserve.serve.http.guards import App, BrowserGuard, TokenGuard
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.http.http_server import HttpServer
from halfserve.serve.http.infer_route import InferRoute
from halfserve.serve.http.page import Page
from halfserve.serve.http.request_body import BodyReader
from halfserve.serve.http.responses import HANDLERS, on_unexpected
from halfserve.serve.http.routes import (
    MODEL,
    VERSION,
    ModelRoutes,
    SettingRoutes,
    SharedMemoryRoutes,
    metrics_route,
    openapi_route,
)
from halfserve.serve.http.tasks.picture_routes import PictureRoutes
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
        """A server that does not listen yet.

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

        def server(routes_of: Callable[[Service], list[Route]], name: str, port: int) -> HttpServer:
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

        self._servers = [server(self._routes, "http", options.port)]
        if options.metrics_port is not None:
            self._servers.append(server(lambda seen: [metrics_route(seen)], "metrics", options.metrics_port))
        self.port = 0  # TCP port of the REST interface and the page; 0 before it listens
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
        self.port = ports[0]
        self.metrics_port = ports[1] if len(ports) > 1 else None
        self._core.figures.readings[Reading.HTTP_CONNECTIONS] = lambda: sum(server.connections for server in self._servers)
        self._texts.start()
        if self._page is not None:
            self._page.start()

    def _routes(self, service: Service) -> list[Route]:
        """The routes of the first port, for a service that may be restricted to some models."""
        core = service.core
        infer = InferRoute(core, service, self._bodies, self._options.limits)
        generate = GenerateRoute(service, self._bodies, self._options.limits)
        routes = [
            *(Route(f"{path}/infer", infer.answer, methods=["POST"]) for path in (MODEL, VERSION)),
            *(Route(f"{path}/generate", generate.answer, methods=["POST"]) for path in (MODEL, VERSION)),
            *(Route(f"{path}/generate_stream", generate.stream, methods=["POST"]) for path in (MODEL, VERSION)),
            *ModelRoutes(service, self._bodies).routes(),
            *SharedMemoryRoutes(service, self._bodies).routes(),
            *SettingRoutes(service, self._bodies).routes(),
            *PictureRoutes(service, self._bodies, self._texts.threads).routes(),
            *TextRoutes(TextEndpoint(service, self._bodies, self._options.limits, self._texts)).routes(),
            metrics_route(service),
            openapi_route(service),
        ]
        if self._page is not None:
            routes += (self._page if core is self._core else self._page.restricted_to(core)).routes()
        return routes

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


def application(routes: list[Route], host: str, options: HttpOptions) -> App:
    """An ASGI application that answers these routes without authentication."""
    return _browser_guard(_starlette(routes), host, options)


def guarded_application(
    routes_of: Callable[[Service], list[Route]], service: Service, host: str, options: HttpOptions, gate: Gate | None
) -> App:
    """An ASGI application that answers admitted requests, each from the models that its token permits.

    `routes_of` makes the routes of a service. Without a gate, all requests are admitted.
    """
    if gate is None:
        return application(routes_of(service), host, options)
    guarded = TokenGuard(lambda seen: _starlette(routes_of(seen)), service, gate)
    return _browser_guard(guarded, host, options)


def _browser_guard(app: App, host: str, options: HttpOptions) -> App:
    return BrowserGuard(app, host=host, allowed_hosts=options.allowed_hosts, allowed_origins=options.allowed_origins)


def _starlette(routes: list[Route]) -> Starlette:
    app = Starlette(routes=routes, exception_handlers={**HANDLERS, Exception: on_unexpected})
    app.router.redirect_slashes = False
    return app
