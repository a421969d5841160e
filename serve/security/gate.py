"""The gate of one listening port: who may call what, and how often."""

from __future__ import annotations

from collections.abc import Callable

from serve.engine.errors import InferenceError, PermissionDeniedError, UnauthenticatedError
from serve.protocol.observed_inference import WatchableInference
from serve.security.client_limits import Share, Shares, network_of
from serve.security.gated_inference import GatedInference
from serve.security.roles import ADMIN_METHODS, ADMIN_PATHS, OPEN_METHODS, OPEN_PATHS, Role, method_role, path_role
from serve.security.token_file import Holder
from serve.security.tokens import WRONG_TOKEN, Tokens

ADMIN_ELSEWHERE = "what changes the server is not served on this port; use the admin port or socket that it was started with"


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

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever somebody who was let in may not be any more, or may do less."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """The tokens are others now."""
        for listener in self._listeners:
            listener()

    def admit_method(self, path: str, authorization: bytes | None) -> Pass:
        """Let a call of an RPC in.

        Raises:
            UnauthenticatedError: it shows no valid token.
            PermissionDeniedError: the token does not carry the role, or the RPC is for another port.
        """
        role = method_role(path)
        return self._admit(role, authorization, is_admin=path in ADMIN_METHODS, is_open=path in OPEN_METHODS)

    def admit_path(self, path: str, authorization: bytes | None) -> Pass:
        """Let an HTTP request in.

        Raises:
            UnauthenticatedError: it shows no valid token.
            PermissionDeniedError: the token does not carry the role, or the path is for another port.
        """
        is_admin, is_open = ADMIN_PATHS.fullmatch(path) is not None, OPEN_PATHS.fullmatch(path) is not None
        return self._admit(path_role(path), authorization, is_admin=is_admin, is_open=is_open)

    def _admit(self, role: Role | None, authorization: bytes | None, *, is_admin: bool, is_open: bool) -> Pass:
        try:
            if is_admin and self._admin_elsewhere:
                raise PermissionDeniedError(ADMIN_ELSEWHERE)
            holder = None if self._tokens is None or role is None else self._tokens.admit(authorization, role)
        except InferenceError as error:
            self._count(error)
            raise
        may_share = holder is None or not self._shared_memory or holder.may(Role.SHARED_MEMORY)
        shares = None if is_open else self._shares
        return Pass(holder, tokens=self._tokens, shares=shares, may_share=may_share, count=self._count)


class Pass:
    """What a gate gives to whom it lets in.

    Attributes:
        is_counted: whether calls are charged; health is free.
    """

    def __init__(
        self,
        holder: Holder | None,
        *,
        tokens: Tokens | None,
        shares: Shares | None,
        may_share: bool,
        count: Callable[[InferenceError], None],
    ) -> None:
        """A pass.

        Args:
            holder: of the token; None where none is asked for.
            tokens: that hold now.
            shares: that calls are charged to; None charges nothing.
            may_share: whether requests may name shared memory.
            count: is told of what was refused.
        """
        self._holder = holder
        self._tokens = tokens
        self._shares = shares
        self._may_share = may_share
        self._count = count
        self.is_counted = shares is not None

    def charge(self, peer: str) -> None:
        """Count one call that is no inference.

        Args:
            peer: the client's address, with its port.

        Raises:
            RateLimitedError: the client has taken its share.
        """
        share = self._share(peer)
        try:
            if share is not None:
                share.charge()
        except InferenceError as error:
            self._count(error)
            raise

    def inference(self, inference: WatchableInference, peer: str) -> WatchableInference:
        """The way in for inference requests: the plain one where there is nothing to look at.

        Args:
            inference: answers requests.
            peer: the client's address, with its port.
        """
        share = self._share(peer)
        if self._holder is None and share is None:
            return inference
        return GatedInference(
            inference,
            share=share,
            check=None if self._holder is None else self._check,
            may_share=self._may_share,
            count=self._count,
        )

    def _check(self) -> None:
        if self._tokens is not None and self._holder is not None and not self._tokens.holds(self._holder):
            raise UnauthenticatedError(WRONG_TOKEN)

    def _share(self, peer: str) -> Share | None:
        if self._shares is None:
            return None
        # A name in the token file holds no colon: no address can be mistaken for one.
        return self._shares.of(f"address:{network_of(peer)}" if self._holder is None else self._holder.name)
