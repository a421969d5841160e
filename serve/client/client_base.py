"""What both clients have in common: their settings, and what each call is sent with."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve.client.bound_exchange import BoundModel, bound_infer
from serve.client.connection.address import Balancing, checked_balancing, target_of
from serve.client.connection.channel import ChannelSettings, Compression, compression_named
from serve.client.connection.headers import Headers, HeaderValue, Token, bearer, headers_of
from serve.client.connection.rpc_errors import from_rpc_error
from serve.client.connection.tls import Tls
from serve.client.errors import Cancelled, InferenceClientError, InvalidRequest
from serve.client.exchanges.calls import Answer, Exchange
from serve.client.exchanges.deadline import DEFAULT_TIMEOUT_S, Deadline, checked_timeout
from serve.client.exchanges.retry import RetryBudget, RetryPolicy, retried
from serve.client.infer_exchange import InferState, infer
from serve.client.options import SEND_OPTIONS
from serve.client.values.answer import InferAnswer

CLOSING_S = 5.0  # what a server may take that is asked to forget shared memory


@dataclass(frozen=True, kw_only=True)
class Sending:
    """What the calls of one exchange are sent with.

    Attributes:
        deadline: of all of them together.
        headers: gRPC metadata.
        compression: grpc's value; None for the channel's.
        closing: whether they are made by a client that is being closed.
    """

    deadline: Deadline
    headers: Headers
    compression: Any
    closing: bool = False


class ClientBase:
    """Settings of a client; connecting is left to InferenceClient and AsyncInferenceClient.

    Args:
        address: HOST:PORT of the server's gRPC port, where a name may stand for several replicas; "unix:/path" of a socket; or
            several IP:PORT.
        timeout_s: seconds that each call may take when it does not say otherwise, repetitions included, sent to the server as
            the gRPC deadline; None for no limit.
        retries: how many times a call is made again where that is safe, 0 to 10, or a RetryPolicy.
        tls: certificates, for an encrypted connection.
        token: sent as "authorization: Bearer ..." with each call, or a callable that gives it. Only over TLS, or to this
            machine.
        metadata: gRPC metadata for each call.
        compression: of what is sent, "gzip" or "deflate": for slow networks; it costs much CPU.
        balancing: over several replicas: "pick_first" asks the first that answers, "round_robin" all in turn.
        shared_memory: put large tensors into shared memory instead of messages, where the server is on this machine and takes
            them; where not, they are sent. See also `shared_region`.
        keepalive_s: ping a silent server while calls wait for it. Servers may close connections that ping too often (gRPC's
            own do below 300).

    Raises:
        InvalidRequest: an argument is out of range.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        retries: int | RetryPolicy = 0,
        tls: Tls | None = None,
        token: Token | None = None,
        metadata: Mapping[str, HeaderValue] | None = None,
        compression: Compression | None = None,
        balancing: Balancing = "pick_first",
        shared_memory: bool = False,
        keepalive_s: float | None = None,
    ) -> None:
        target = target_of(address)
        self.address = target.shown
        self.timeout_s = checked_timeout(timeout_s)
        if keepalive_s is not None and not keepalive_s > 0:
            raise InvalidRequest(f"keepalive_s must be seconds above 0, or None for no pings, not {keepalive_s!r}")
        if token is not None and tls is None and not target.is_local:
            raise InvalidRequest(
                f"a token would go unencrypted to {target.shown}, for all on the way to read; encrypt with tls= (--tls)"
            )
        compression_named(compression)
        self._settings = ChannelSettings(
            target=target, tls=tls, balancing=checked_balancing(balancing), compression=compression, keepalive_s=keepalive_s
        )
        self._retry = retries if isinstance(retries, RetryPolicy) else RetryPolicy(retries=retries)
        self._budget = RetryBudget()
        self._token = token
        self._headers = headers_of(metadata)
        self._state = InferState(shared_memory=shared_memory)
        self._closed = self._taken_back = False
        self._process: int | None = None
        self._rpcs: dict[str, Any] = {}
        self._opening, self._ended = threading.Lock(), threading.Event()

    @property
    def _shares(self) -> bool:
        """Whether a server may know of memory of this client."""
        return self._state.pool is not None or bool(self._state.left or self._state.regions)

    def _infer(
        self, model: str, inputs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Exchange[InferAnswer], Sending]:
        self._check_usable()  # before the exchange takes shared memory, which a forked child has in common with its parent
        return infer(self._state, model, inputs, **_without_sending(options)), self._sent_with(options)

    def _infer_bound(self, model: BoundModel, inputs: Any, options: Mapping[str, Any]) -> tuple[Exchange[InferAnswer], Sending]:
        self._check_usable()  # see _infer
        return bound_infer(self._state, model, inputs, _without_sending(options)), self._sent_with(options)

    def _streaming(self, timeout_s: float | None) -> tuple[Sending, float | None]:
        """What a stream is sent with, which has no deadline as a whole, and the seconds that an answer may take."""
        self._check_usable()
        sending = self._sending(timeout_s)
        return replace(sending, deadline=Deadline.after(None)), sending.deadline.limit_s

    def _sent_with(self, options: Mapping[str, Any]) -> Sending:
        return self._sending(**{name: options[name] for name in SEND_OPTIONS if name in options})

    def _sending(
        self,
        timeout_s: float | None = None,
        compression: Compression | None = None,
        metadata: Mapping[str, HeaderValue] | None = None,
    ) -> Sending:
        headers = self._headers if metadata is None else self._headers + headers_of(metadata)
        return Sending(
            deadline=Deadline.after(self.timeout_s if timeout_s is None else checked_timeout(timeout_s)),
            headers=headers if self._token is None else headers + bearer(self._token),
            compression=compression_named(compression),
        )

    def _patient(self, exchange: Exchange[Answer], sending: Sending) -> Exchange[Answer]:
        """The exchange with the client's retries."""
        return (
            retried(exchange, self._retry, self._budget, sending.deadline)
            if self._retry.retries or self._retry.wait_for_server
            else exchange
        )

    def _check_usable(self, *, closing: bool = False) -> None:
        """Refuse what would hang.

        Raises:
            Cancelled: the client is closed.
            InferenceClientError: this process is a fork of the one that has connected, or this event loop is another.
        """
        if self._closed and not closing:
            raise Cancelled("this client is closed; make a new one")
        if self._process is None:
            self._process = os.getpid()
        self._check_process()

    def _check_process(self) -> None:
        """Refuse to wait for threads that a fork has left behind.

        Raises:
            InferenceClientError: this process is a fork of the one that has connected.
        """
        if self._process != os.getpid():
            raise InferenceClientError(
                "this client has connected in another process; gRPC does not survive a fork: make clients in the children, "
                'or start them with the "spawn" method',
                code="FAILED_PRECONDITION",
            )

    def _closed_meanwhile(self, error: Exception | str) -> Cancelled:
        return Cancelled(f"this client was closed during the call ({error}); make a new one")

    def _whole(self, answer: Any, method: str) -> Any:
        """The answer, if there is one: grpc has None for a call that ends well without a message, or with part of one.

        Raises:
            InferenceClientError: there is none (code "INTERNAL").
        """
        if answer is None:
            raise InferenceClientError(
                f"{self.address} ended {method} well, but with no message, or none that can be read; is a proxy on the way?",
                code="INTERNAL",
            )
        return answer

    def _failure(self, error: Any, method: str, sending: Sending) -> InferenceClientError:
        return from_rpc_error(error, method=method, address=self.address, timeout_s=sending.deadline.limit_s)


def _without_sending(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in SEND_OPTIONS}
