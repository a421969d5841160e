"""The gate of one listening port: who may call what, and how often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from serve.engine.errors import InferenceError, PermissionDeniedError, UnauthenticatedError
from serve.security.client_limits import Shares
from serve.security.gate_pass import Bearer, Pass
from serve.security.roles import ADMIN_METHODS, ADMIN_PATHS, Role, method_role, path_role
from serve.security.tokens import Tokens
from serve.security.views import Views

ADMIN_ELSEWHERE = "what changes the server is not served on this port; use the admin port or socket that it was started with"


# A proxy that looks at one of them and a server that goes by another would let in whom neither means to.
SEVERAL_TOKENS = "the call has several 'authorization' headers, expected one; send 'authorization: Bearer <token>' once"


class Gate:
    """Lives on the event loop; asked once for all calls of a connection with the same headers, or once for an HTTP request."""

    def __init__(
        self,
        *,
        tokens: Tokens | None,
        shares: Shares | None,
        admin_elsewhere: bool,
        count: Callable[[InferenceError], None],
        shared_memory: bool = True,
    ) -> None:
        """A gate.

        Args:
            tokens: let in; None lets anybody in.
            shares: what clients have taken; None does not count.
            admin_elsewhere: what changes the server is refused here.
            count: is told of what was refused.
            shared_memory: whether there is any; where there is none, requests need not be searched for it.
        """
        self._shared_memory = shared_memory
        self._tokens = tokens
        self._shares = shares
        self._admin_elsewhere = admin_elsewhere
        self._count = count
        self._listeners: list[Callable[[], None]] = []
        self._views = Views()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever somebody who was let in may not be any more, or may do less."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """The tokens are others now, or one of them has ended."""
        self._views.keep(() if self._tokens is None else self._tokens.rights())
        for listener in self._listeners:
            listener()

    def admit_method(self, path: str, authorization: Sequence[bytes]) -> Pass:
        """Let a call of an RPC in.

        Args:
            path: of the RPC.
            authorization: the values of its `authorization` headers.

        Raises:
            UnauthenticatedError: it shows no valid token, or there are several such headers.
            PermissionDeniedError: the token does not carry the role, or the RPC is for another port.
        """
        return self._admit(method_role(path), authorization, is_admin=path in ADMIN_METHODS)

    def admit_path(self, path: str, authorization: bytes | None) -> Pass:
        """Let an HTTP request in.

        Raises:
            UnauthenticatedError: it shows no valid token.
            PermissionDeniedError: the token does not carry the role, or the path is for another port.
        """
        shown = () if authorization is None else (authorization,)
        return self._admit(path_role(path), shown, is_admin=ADMIN_PATHS.fullmatch(path) is not None)

    def _admit(self, role: Role | None, shown: Sequence[bytes], *, is_admin: bool) -> Pass:
        try:
            if is_admin and self._admin_elsewhere:
                raise PermissionDeniedError(ADMIN_ELSEWHERE)
            if len(shown) > 1 and self._tokens is not None:
                raise UnauthenticatedError(SEVERAL_TOKENS)
            authorization = shown[0] if shown else None
            bearer = self._bearer(role, authorization)
        except InferenceError as error:
            self._count(error)
            raise
        rights_now = None
        if bearer is not None:
            rights = bearer.holder.rights
        elif self._tokens is None:
            rights = None
        else:
            rights_now = partial(self._tokens.rights_of, authorization)
            rights = rights_now()
        return Pass(
            bearer,
            rights=rights,
            rights_now=rights_now,
            views=self._views,
            shares=None if role is None else self._shares,  # health is free
            may_share=bearer is None or not self._shared_memory or bearer.holder.may(Role.SHARED_MEMORY),
            asks_for_tokens=self._tokens is not None,
            count=self._count,
        )

    def _bearer(self, role: Role | None, authorization: bytes | None) -> Bearer | None:
        if self._tokens is None or role is None:
            return None
        return Bearer(holder=self._tokens.admit(authorization, role), tokens=self._tokens)
