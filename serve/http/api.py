"""The applications behind the HTTP ports, put together from their routes."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.routing import Route

from serve.engine.inference_core import InferenceCore
from serve.http.answers import HANDLERS, on_unexpected
from serve.http.browser_guard import App, BrowserGuard
from serve.http.infer_route import InferRoute
from serve.http.model_routes import MODEL, VERSION, ModelRoutes
from serve.http.options import HttpOptions
from serve.http.repository_routes import RepositoryRoutes
from serve.http.request_body import BodyReader
from serve.http.rpcs import Rpcs
from serve.http.settings_routes import SettingsRoutes
from serve.http.shared_memory_routes import SharedMemoryRoutes
from serve.http.token_guard import TokenGuard
from serve.protocol.service import Service
from serve.security.gate import Gate


def rest_routes(core: InferenceCore, service: Service, bodies: BodyReader, options: HttpOptions) -> list[Route]:
    """KServe v2's REST interface with Triton's extensions."""
    rpcs = Rpcs(service)
    infer = InferRoute(core, service, bodies, options.limits)
    return [
        *(Route(f"{path}/infer", infer.answer, methods=["POST"]) for path in (MODEL, VERSION)),
        *ModelRoutes(core, rpcs).routes(),
        *RepositoryRoutes(rpcs, bodies).routes(),
        *SharedMemoryRoutes(rpcs, bodies).routes(),
        *SettingsRoutes(rpcs, bodies).routes(),
    ]


def application(routes: list[Route], host: str, options: HttpOptions) -> App:
    """An ASGI application that answers these routes to everybody."""
    return BrowserGuard(_answering(routes), host=host, allowed_hosts=options.allowed_hosts)


def guarded_application(
    routes_of: Callable[[Service], list[Route]], service: Service, host: str, options: HttpOptions, gate: Gate | None
) -> App:
    """The same for whom the gate lets in, and of what it lets them see; None lets everybody see everything."""
    if gate is None:
        return application(routes_of(service), host, options)
    guarded = TokenGuard(lambda seen: _answering(routes_of(seen)), service, gate)
    return BrowserGuard(guarded, host=host, allowed_hosts=options.allowed_hosts)


def _answering(routes: list[Route]) -> Starlette:
    app = Starlette(routes=routes, exception_handlers={**HANDLERS, Exception: on_unexpected})
    app.router.redirect_slashes = False
    return app
