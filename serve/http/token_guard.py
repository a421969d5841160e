"""Let in whom the gate lets in, before anything of a request but its headers is looked at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from serve.engine.errors import InferenceError, InvalidArgumentError, UnauthenticatedError
from serve.http.answers import error_answer
from serve.http.browser_guard import App, Message
from serve.http.statuses import http_status
from serve.protocol.service import Service
from serve.security.gate import Gate
from serve.security.gate_pass import Pass

PASS = "halfserve.pass"  # noqa: S105  (where a request's scope holds what the gate gave)
# Browsers ask their user for a name and a password on the second; the password is the token.
CHALLENGE = 'Bearer realm="halfserve", Basic realm="halfserve", charset="UTF-8"'


class TokenGuard:
    """An ASGI application around others: one answers whoever may see everything, and one each of the limited views."""

    def __init__(self, app_of: Callable[[Service], App], service: Service, gate: Gate) -> None:
        """A guard.

        Args:
            app_of: makes an application that answers from a service.
            service: knows all models.
            gate: says who is let in, and what they see.
        """
        self._app_of = app_of
        self._app = app_of(service)
        self._service = service
        self._gate = gate
        self._views: dict[Service, App] = {}
        gate.on_change(self._views.clear)

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer a request, or refuse it."""
        path = scope["path"]
        try:
            given = self._gate.admit_path(path, _authorization(scope))
            given.charge(peer_of(scope))
        except InferenceError as error:
            status, text, headers = http_status(error)
            if isinstance(error, UnauthenticatedError):
                headers["www-authenticate"] = CHALLENGE
            headers["connection"] = "close"  # the body is not wanted
            await error_answer(status, text, headers)(scope, receive, send)
            return
        scope[PASS] = given
        app = self._app if given.sees_all else self._view(given.service(self._service))
        # An inference request is checked where it is queued.
        await app(scope, receive if path.endswith("/infer") else _checked(given, receive), send)

    def _view(self, service: Service) -> App:
        if service not in self._views:
            self._views[service] = self._app_of(service)
        return self._views[service]


def _authorization(scope: Message) -> bytes | None:
    shown: list[bytes] = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(shown) > 1:  # a proxy may have looked at another one
        raise InvalidArgumentError(f"the request has {len(shown)} authorization headers; expected one")
    return shown[0] if shown else None


def _checked(given: Pass, receive: Callable[[], Awaitable[Message]]) -> Callable[[], Awaitable[Message]]:
    """What receives a body, and checks once it is there that its sender would be let in now."""

    async def received() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            given.check()
        return message

    return received


def peer_of(scope: Any) -> str:
    """The client's address."""
    client = scope.get("client")
    return "" if client is None else f"{client[0]}:{client[1]}"
