"""What a gate gives to whom it lets in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from google.protobuf.message import Message

from serve.engine.errors import InferenceError, UnauthenticatedError
from serve.protocol.inference import WatchableInference
from serve.protocol.service import Service, StreamMethod, UnaryMethod
from serve.security.client_limits import Share, Shares, network_of
from serve.security.gated_inference import GatedInference
from serve.security.model_rights import ModelRights
from serve.security.token_file import Holder
from serve.security.tokens import CHANGED_TOKEN, Tokens
from serve.security.views import Views

Count = Callable[[InferenceError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bearer:
    """Who has shown a token.

    Attributes:
        holder: of the token.
        tokens: among which it must still be.
    """

    holder: Holder
    tokens: Tokens

    def check(self) -> None:
        """Check that it would be let in now.

        Raises:
            UnauthenticatedError: the token has been revoked, or has expired.
        """
        self.tokens.check(self.holder)


class Pass:
    """Holds for all calls of a connection with the same headers, or for one HTTP request.

    Attributes:
        is_counted: whether `charge` must be asked before each call: it is counted, or its token may expire meanwhile.
        sees_all: whether no model is hidden.
        is_trusted: whether a token was shown and accepted, or none is asked for anywhere.
    """

    def __init__(
        self,
        bearer: Bearer | None,
        *,
        rights: ModelRights | None,
        rights_now: Callable[[], ModelRights | None] | None = None,
        views: Views,
        shares: Shares | None,
        may_share: bool,
        asks_for_tokens: bool,
        count: Count,
    ) -> None:
        """A pass.

        Args:
            bearer: of a token; None where none is asked for.
            rights: the models that may be used; None stands for all.
            rights_now: tells those of who needs no token, and may have shown one; None where nobody has any.
            views: what is seen with such rights.
            shares: that calls are charged to; None charges nothing.
            may_share: whether requests may name shared memory.
            asks_for_tokens: whether calls that are not open to all need one.
            count: is told of what was refused.
        """
        self._bearer = bearer
        self._rights = rights
        self._rights_now = rights_now
        self._views = views
        self._shares = shares
        self._may_share = may_share
        self._count = count
        self.sees_all = rights is None
        self.is_trusted = bearer is not None or not asks_for_tokens
        self.is_counted = shares is not None or (bearer is not None and bearer.holder.expires_s is not None)

    def service(self, service: Service) -> Service:
        """What the caller may see of a service."""
        return service if self._rights is None else self._views.of(service, self._rights)

    def check(self) -> None:
        """Check that the caller would be let in now: a call may take its time to bring its request.

        Raises:
            UnauthenticatedError: the token does not hold any more.
        """
        try:
            if self._bearer is not None:
                self._bearer.check()
        except InferenceError as error:
            self._count(error)
            raise

    def unary(self, method: UnaryMethod) -> UnaryMethod:
        """A method that checks again when the request is there."""
        return method if self._bearer is None else replace(method, answer=partial(_checked_answer, self.check, method.answer))

    def stream(self, method: StreamMethod) -> StreamMethod:
        """A method that checks again with each request, and at their end; or with each answer, where it asks for no token."""
        if self._bearer is None:
            if self._rights_now is None:
                return method
            return replace(method, answer=lambda requests: self._while_rights_are(method.answer(requests)))
        return replace(method, answer=lambda requests: method.answer(_checked_requests(self.check, requests)))

    def charge(self, peer: str) -> None:
        """Count one call, before anything is done for it; gRPC's inference is counted with each request (see `inference`).

        Args:
            peer: the client's address, with its port.

        Raises:
            UnauthenticatedError: the token does not hold any more.
            RateLimitedError: the client has taken its share.
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

    def inference(self, inference: WatchableInference, peer: str, *, is_charged: bool = False) -> WatchableInference:
        """The way in for inference requests: the plain one where there is nothing to look at.

        Args:
            inference: answers requests.
            peer: the client's address, with its port.
            is_charged: requests that come there have been charged already.
        """
        share, bearer = self._share(peer), self._bearer
        if bearer is None and share is None:
            return inference
        check = None if bearer is None else bearer.check
        return GatedInference(
            inference, share=share, check=check, may_share=self._may_share, count=self._count, is_charged=is_charged
        )

    async def _while_rights_are(self, answers: AsyncIterator[Message]) -> AsyncIterator[Message]:
        """What is told for as long as somebody listens, such as a model's health."""
        async for answer in answers:
            if self._rights_now is not None and self._rights_now() != self._rights:
                raise UnauthenticatedError(CHANGED_TOKEN)
            yield answer

    def _share(self, peer: str) -> Share | None:
        if self._shares is None:
            return None
        # A name in the token file holds no colon: no address can be mistaken for one.
        return self._shares.of(f"address:{network_of(peer)}" if self._bearer is None else self._bearer.holder.name)


def _checked_answer(check: Callable[[], None], answer: Callable[[Any], Message], request: Message) -> Message:
    check()
    return answer(request)


async def _checked_requests(check: Callable[[], None], requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        check()
        yield request
    check()  # some methods act when they have seen that there is no other
