"""The gate of one listening port, which decides which calls are admitted and what an admitted caller may do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from google.protobuf.message import Message

from halfserve.serve.engine.errors import InferenceError, PermissionDeniedError, UnauthenticatedError
from halfserve.serve.protocol.inference import InferenceEntry
from halfserve.serve.protocol.rpc import INFERENCE, UNKNOWN_METHOD, Access, Method, Role, Rpc, RpcCall, Send
from halfserve.serve.protocol.service import INFERENCE_PATHS, LimitedService, Service
from halfserve.serve.security.client_limits import ClientAllowance, ClientAllowances, GatedInference, network_of
from halfserve.serve.security.model_rights import ModelRights
from halfserve.serve.security.restricted_apis import Header, RestrictedApis, check_header
from halfserve.serve.security.security_options import RestrictedGroup
from halfserve.serve.security.tokens import CHANGED_TOKEN, TokenHolder, Tokens

Count = Callable[[InferenceError], None]
ADMIN_ELSEWHERE = "RPCs that change the server are not served on this port; use its admin port or socket"
# With several headers a proxy and this server might each check a different one.
SEVERAL_TOKENS = "the call has several 'authorization' headers, expected one: send 'authorization: Bearer <token>' once"
UNRESTRICTED = RestrictedApis((), ())


class Gate:
    """Admits all calls of a connection with the same headers at once, or one HTTP request. Lives on the event loop."""

    def __init__(
        self,
        *,
        tokens: Tokens | None,
        shares: ClientAllowances | None,
        admin_elsewhere: bool,
        count: Count,
        shared_memory: bool = True,
        restricted: RestrictedApis = UNRESTRICTED,
    ) -> None:
        """Make the gate of one port.

        Without `tokens` every caller is admitted, without `shares` none is limited. `admin_elsewhere` refuses RPCs that change
        the server. `count` is called with each refusal. Without `shared_memory` on the server, requests need not be searched
        for its parameters.
        """
        self._restricted = restricted
        self._shared_memory = shared_memory
        self._tokens = tokens
        self._shares = shares
        self._admin_elsewhere = admin_elsewhere
        self._count = count
        self._listeners: list[Callable[[], None]] = []
        self._views = ServiceViews()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever an admitted caller may have lost rights."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Act on changed or expired tokens."""
        self._views.keep(() if self._tokens is None else self._tokens.rights())
        for listener in self._listeners:
            listener()

    def admit_call(self, rpcs: Mapping[str, Rpc], path: str, headers: Sequence[Header]) -> AccessGrant:
        """Admit a call by its path, which is that of inference, of one of these RPCs, or of none, and by its headers, whose
        names are in lower case.

        Raises:
            UnauthenticatedError: there is no valid token, or there are several `authorization` headers.
            PermissionDeniedError: the token does not carry the role, the RPC is served on another port, or the call lacks a
                header.
        """
        rpc = rpcs.get(path)
        access = INFERENCE if path in INFERENCE_PATHS else UNKNOWN_METHOD if rpc is None else rpc.access
        return self._admit(access, headers, self._restricted.grpc.get(access.api))

    def admit_route(self, access: Access, headers: Sequence[Header]) -> AccessGrant:
        """Admit an HTTP request by what its route requires, as `admit_call` admits a call."""
        return self._admit(access, headers, self._restricted.http.get(access.api))

    def layer(self, rpc: Rpc, method: Method) -> Method:
        """Return the method of an RPC with the checks of its callers, whose calls have the grant of `admit_call`.

        It charges each call, and checks the token with each request and at the end of the requests; without a token it checks
        the rights with each response of a stream.
        """
        if not rpc.is_stream:

            async def answer(request: Message, call: RpcCall) -> Message:
                _grant_of(call).charge(call.peer)
                response: Message = await method(request, call)
                return response

            return answer

        async def stream(requests: AsyncIterator[Message], call: RpcCall) -> None:
            grant = _grant_of(call)
            grant.charge(call.peer)
            await method(grant.checked_requests(requests), replace(call, send=partial(grant.send_while_rights_last, call.send)))

        return stream

    def _admit(self, access: Access, headers: Sequence[Header], restriction: RestrictedGroup | None) -> AccessGrant:
        tokens, role = self._tokens, access.role
        shown = [value for name, value in headers if name == b"authorization"]
        authorization = shown[0] if shown else None
        bearer: Bearer | None = None
        try:
            if restriction is not None:
                check_header(restriction, headers)
            if access.is_admin and self._admin_elsewhere:
                raise PermissionDeniedError(ADMIN_ELSEWHERE)
            if tokens is not None:
                if len(shown) > 1:
                    raise UnauthenticatedError(SEVERAL_TOKENS)
                if role is not None:
                    bearer = Bearer(holder=tokens.admit(authorization, role), tokens=tokens)
        except InferenceError as error:
            self._count(error)
            raise
        rights_now = None
        if bearer is not None:
            rights = bearer.holder.rights
        elif tokens is None:
            rights = None
        else:
            rights_now = partial(tokens.rights_of, authorization)
            rights = rights_now()
        return AccessGrant(
            bearer,
            rights=rights,
            rights_now=rights_now,
            views=self._views,
            shares=None if role is None else self._shares,  # health calls are not limited
            may_share=bearer is None or not self._shared_memory or bearer.holder.may(Role.SHARED_MEMORY),
            requires_token=tokens is not None,
            count=self._count,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bearer:
    """A caller with an accepted token."""

    holder: TokenHolder  # the token's holder
    tokens: Tokens  # the current tokens, which must still contain the holder's

    def check(self) -> None:
        """Raise UnauthenticatedError if the token has been revoked or changed, or has expired."""
        self.tokens.check(self.holder)


class AccessGrant:
    """The rights of an admitted caller, in all calls of a connection with the same headers or in one HTTP request.

    Attributes:
        sees_all: whether no model is hidden from the caller.
        is_trusted: whether a token was accepted, or none is required on this port.
        holder: the name of the token's holder; "" without a token.
    """

    def __init__(
        self,
        bearer: Bearer | None,
        *,
        rights: ModelRights | None,
        rights_now: Callable[[], ModelRights | None] | None = None,
        views: ServiceViews,
        shares: ClientAllowances | None,
        may_share: bool,
        requires_token: bool,
        count: Count,
    ) -> None:
        """Make the grant of one caller.

        `bearer` is None for a call that requires no token. `rights` None stands for all models; `rights_now` returns the
        present rights of a caller that needs no token but may have sent one. `views` makes the services restricted to some
        models. `requires_token` is True if calls that are not open to all require one. `count` is called with each refusal.
        """
        self._bearer = bearer
        self._rights = rights
        self._rights_now = rights_now
        self._views = views
        self._shares = shares
        self._may_share = may_share
        self._count = count
        self.sees_all = rights is None
        self.is_trusted = bearer is not None or not requires_token
        self.holder = "" if bearer is None else bearer.holder.name

    def service(self, service: Service) -> Service:
        """Return the service, restricted to the models that the caller may use."""
        return service if self._rights is None else self._views.of(service, self._rights)

    def check(self) -> None:
        """Check that the caller would be admitted now: its request may arrive long after its headers.

        Raises:
            UnauthenticatedError: the token is no longer valid.
        """
        try:
            if self._bearer is not None:
                self._bearer.check()
        except InferenceError as error:
            self._count(error)
            raise

    async def checked_requests(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """Yield the requests of a stream; the token must be valid with each of them and at their end."""
        async for request in requests:
            self.check()
            yield request
        self.check()  # a method may act only once it knows that its request was the last one

    async def send_while_rights_last(self, send: Send, response: Message) -> None:
        """Send a response to a watch, such as of a model's health, unless a caller without a token has other rights by now."""
        if self._rights_now is not None and self._rights_now() != self._rights:
            raise UnauthenticatedError(CHANGED_TOKEN)
        await send(response)

    def charge(self, peer: str) -> None:
        """Charge one call of a client's address before any work is done for it.

        gRPC inference is charged per request instead (see `inference`).

        Raises:
            UnauthenticatedError: the token is no longer valid.
            RateLimitedError: the client is over its limit.
        """
        share = self._share(peer)
        try:
            if self._bearer is not None:
                self._bearer.check()
            if share is not None:
                share.charge()
        except InferenceError as error:
            self._count(error)
            raise

    def inference_of(self, service: Service, call: RpcCall) -> InferenceEntry:
        """Return the entry for the inference requests of a gRPC call's caller."""
        inference = service.inference_of(call.peer, call.headers, self.holder, partial(self.client, call.peer))
        return self.inference(inference, call.peer)

    def inference(self, inference: InferenceEntry, peer: str, *, is_charged: bool = False) -> InferenceEntry:
        """Return the entry for the inference requests of a client's address: the given one if there is nothing to check.

        `is_charged` is True if the requests have been charged already.
        """
        share, bearer = self._share(peer), self._bearer
        if bearer is None and share is None:
            return inference
        check = None if bearer is None else bearer.check
        return GatedInference(
            inference, share=share, check=check, may_share=self._may_share, count=self._count, is_charged=is_charged
        )

    def client(self, peer: str) -> str:
        """Return the client that the caller counts as: the token's holder, or the network of an address with a port."""
        # A name in the token file has no colon, so that it cannot equal an address's key.
        return f"address:{network_of(peer)}" if self._bearer is None else self._bearer.holder.name

    def _share(self, peer: str) -> ClientAllowance | None:
        return None if self._shares is None else self._shares.of(self.client(peer))


def client_name(grant: AccessGrant | None, peer: str) -> str:
    """Return the client that a caller counts as, also without a gate; see `AccessGrant.client`."""
    return network_of(peer) if grant is None else grant.client(peer)


class ServiceViews:
    """Services restricted to some models, one for all callers with the same rights. On the event loop only."""

    def __init__(self) -> None:
        self._made: dict[tuple[Service, ModelRights], LimitedService] = {}

    def of(self, service: Service, rights: ModelRights) -> Service:
        view = self._made.get((service, rights))
        if view is None:
            view = self._made[service, rights] = LimitedService(service, rights.allow)
        return view

    def keep(self, rights: Iterable[ModelRights | None]) -> None:
        """Close the views of all rights but these."""
        kept = set(rights)
        for key in [key for key in self._made if key[1] not in kept]:
            self._made.pop(key).close()

    def __len__(self) -> int:
        return len(self._made)


def _grant_of(call: RpcCall) -> AccessGrant:
    if not isinstance(call.grant, AccessGrant):
        raise TypeError("a call has come past the gate of its port")
    return call.grant
