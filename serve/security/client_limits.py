"""Limits of each client, counted on the event loop, and the inference entry that enforces them."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from halfserve.serve.engine.errors import InferenceError, InvalidArgumentError, PermissionDeniedError, RateLimitedError
from halfserve.serve.protocol.inference import Cancel, InferenceEntry, ManyReplies, Reply
from halfserve.serve.protocol.messages import parse_request
from halfserve.serve.security.security_options import ClientLimits

MAX_REMEMBERED = 10_000  # most clients whose allowance is remembered while they are not connected
CONCURRENCY_RETRY_S = 0.1  # suggested wait: when a request in progress will end is unknown
REGION = "shared_memory_region"
REGION_BYTES = REGION.encode()
Clock = Callable[[], float]
Check = Callable[[], None]


class ClientAllowance:
    """The token bucket of one client, and the number of its requests in progress."""

    __slots__ = ("__weakref__", "_allowance", "_burst", "_clock", "_filled_s", "_in_progress", "_max", "_rate")

    def __init__(self, limits: ClientLimits, clock: Clock) -> None:
        self._rate, self._max, self._clock = limits.requests_per_s, limits.max_concurrent, clock
        self._burst = float(limits.burst or max(1.0, limits.requests_per_s or 1.0))
        self._allowance, self._filled_s = self._burst, clock()
        self._in_progress = 0

    def charge(self) -> None:
        """Take one request from the bucket.

        Raises:
            RateLimitedError: the bucket is empty.
        """
        if self._rate is None:
            return
        now = self._clock()
        self._allowance = min(self._burst, self._allowance + (now - self._filled_s) * self._rate)
        self._filled_s = now
        if self._allowance < 1:
            wait_s = (1 - self._allowance) / self._rate
            raise RateLimitedError(
                f"this client may send {self._rate:g} requests a second; send the next in {wait_s:.3g} s", retry_after_s=wait_s
            )
        self._allowance -= 1

    def enter(self, *, is_charged: bool = False) -> None:
        """Begin a request, which may have been charged already.

        Raises:
            RateLimitedError: the bucket is empty, or too many requests are in progress; then this one has not begun.
        """
        if self._max is not None and self._in_progress >= self._max:
            raise RateLimitedError(
                f"this client may have {self._max} requests in progress; wait for one of them",
                retry_after_s=CONCURRENCY_RETRY_S,
            )
        if not is_charged:
            self.charge()
        self._in_progress += 1

    def leave(self) -> None:
        """End a request that has begun."""
        self._in_progress -= 1


class ClientAllowances:
    """The allowances of all connected clients, and of the most recent others up to a limit, so that memory stays bounded."""

    def __init__(self, limits: ClientLimits, clock: Clock = time.monotonic, max_remembered: int = MAX_REMEMBERED) -> None:
        self._limits, self._clock, self._max_remembered = limits, clock, max_remembered
        self._known: WeakValueDictionary[str, ClientAllowance] = WeakValueDictionary()
        self._latest: OrderedDict[str, ClientAllowance] = OrderedDict()

    def of(self, client: str) -> ClientAllowance:
        share = self._known.get(client)
        if share is None:
            share = self._known[client] = ClientAllowance(self._limits, self._clock)
        self._latest[client] = share
        self._latest.move_to_end(client)
        if len(self._latest) > self._max_remembered:
            self._latest.popitem(last=False)
        return share

    def __len__(self) -> int:
        return len(self._known)


def network_of(peer: str) -> str:
    """Return the client that an address with a port counts as: an IPv4 address itself, an IPv6 address's /64 network."""
    host = peer.rpartition(":")[0].strip("[]") if ":" in peer else peer
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class GatedInference:
    """The inference entry of one caller that is limited, or restricted."""

    __slots__ = ("_check", "_count", "_inference", "_is_charged", "_may_share", "_share")

    def __init__(
        self,
        inference: InferenceEntry,
        *,
        share: ClientAllowance | None,
        check: Check | None,
        may_share: bool,
        count: Callable[[InferenceError], None],
        is_charged: bool = False,
    ) -> None:
        """Wrap an entry with the checks and limits of one caller.

        `share` None sets no limits. `check` raises once the caller's token is no longer valid, as a stream may last longer than
        a token. `count` is called with each refusal.
        """
        self._is_charged = is_charged
        self._inference = inference
        self._share = share
        self._check = check
        self._may_share = may_share
        self._count = count

    def infer(
        self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, *, many: ManyReplies | None = None
    ) -> Cancel:
        """Check and limit a request, then call `Inference.infer`.

        Raises:
            UnauthenticatedError: the caller's token is no longer valid.
            PermissionDeniedError: the request names shared memory, which the token's roles do not include.
            RateLimitedError: the caller is over its limit.
        """
        share = self._share
        try:
            if self._check is not None:
                self._check()
            if not self._may_share and _names_region(bytes(data)):
                raise PermissionDeniedError("the token may not use shared memory: it requires the role 'shared-memory'")
            if share is not None:
                share.enter(is_charged=self._is_charged)
        except InferenceError as error:
            self._count(error)
            raise
        if share is None:
            return self._inference.infer(data, time_left_s, reply, many=many)
        return _CountedRequest(share, reply).begin(self._inference, data, time_left_s, many)

    def failed(self, data: bytes, error: Exception) -> None:
        self._inference.failed(data, error)

    def gone(self, data: bytes) -> None:
        self._inference.gone(data)


class _CountedRequest:
    """A request in progress, which leaves its allowance exactly once."""

    __slots__ = ("_cancel", "_left", "_reply", "_share")

    def __init__(self, share: ClientAllowance, reply: Reply) -> None:
        self._share = share
        self._reply = reply
        self._left = False
        self._cancel: Cancel | None = None

    def begin(
        self,
        inference: InferenceEntry,
        data: bytes | memoryview,
        time_left_s: float | None,
        many: ManyReplies | None,
    ) -> Cancel:
        try:
            self._cancel = inference.infer(data, time_left_s, self._answered, many=many)
        except BaseException:
            self._leave()
            raise
        return self._gone

    def _answered(self, result: bytes | InferenceError) -> None:
        self._leave()
        self._reply(result)

    def _gone(self) -> None:
        self._leave()
        if self._cancel is not None:
            self._cancel()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._share.leave()


def _names_region(data: bytes) -> bool:
    """Return whether a request names a shared memory region; the quick search may also find the word within a tensor."""
    if REGION_BYTES not in data:
        return False
    try:
        request = parse_request(data)
    except InvalidArgumentError:
        return False  # malformed requests are refused later, with that error
    return any(REGION in i.parameters for i in request.inputs) or any(REGION in o.parameters for o in request.outputs)
