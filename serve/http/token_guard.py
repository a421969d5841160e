"""Let in whom the gate lets in, before anything of a request but its headers is looked at."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from serve.engine.errors import InferenceError, UnauthenticatedError
from serve.http.answers import error_answer
from serve.http.browser_guard import App, Message
from serve.http.statuses import http_status
from serve.security.gate import Gate

PASS = "halfserve.pass"  # noqa: S105  (where a request's scope holds what the gate gave)
# Browsers ask their user for a name and a password on the second; the password is the token.
CHALLENGE = 'Bearer realm="halfserve", Basic realm="halfserve", charset="UTF-8"'


class TokenGuard:
    """An ASGI application around another."""

    def __init__(self, app: App, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer a request, or refuse it."""
        path = scope["path"]
        try:
            given = self._gate.admit_path(path, dict(scope["headers"]).get(b"authorization"))
            if not path.endswith("/infer"):  # which is counted with its request
                given.charge(peer_of(scope))
        except InferenceError as error:
            status, text, headers = http_status(error)
            if isinstance(error, UnauthenticatedError):
                headers["www-authenticate"] = CHALLENGE
            headers["connection"] = "close"  # the body is not wanted
            await error_answer(status, text, headers)(scope, receive, send)
            return
        scope[PASS] = given
        await self._app(scope, receive, send)


def peer_of(scope: Any) -> str:
    """The client's address."""
    client = scope.get("client")
    return "" if client is None else f"{client[0]}:{client[1]}"
