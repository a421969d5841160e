"""What one client may take, counted. On the event loop only."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

from serve.engine.errors import RateLimitedError
from serve.security.options import ClientLimits

MAX_REMEMBERED = 10_000  # clients that are not connected
CONCURRENCY_RETRY_S = 0.1  # there is no telling when a request in progress ends
Clock = Callable[[], float]


class Share:
    """What one client has taken: a bucket of allowances that fills with time, and its requests in progress."""

    __slots__ = ("__weakref__", "_allowance", "_burst", "_clock", "_filled_s", "_in_progress", "_max", "_rate")

    def __init__(self, limits: ClientLimits, clock: Clock) -> None:
        self._rate, self._max, self._clock = limits.requests_per_s, limits.max_concurrent, clock
        self._burst = float(limits.burst or max(1.0, limits.requests_per_s or 1.0))
        self._allowance, self._filled_s = self._burst, clock()
        self._in_progress = 0

    def charge(self) -> None:
        """Take one request's allowance.

        Raises:
            RateLimitedError: there is none left.
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
            RateLimitedError: as `charge`, or as many are in progress as may be; then it has not begun.
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


class Shares:
    """The shares of all clients. Those that are connected are known, and of the others the latest: memory stays bounded."""

    def __init__(self, limits: ClientLimits, clock: Clock = time.monotonic, max_remembered: int = MAX_REMEMBERED) -> None:
        self._limits, self._clock, self._max_remembered = limits, clock, max_remembered
        self._known: WeakValueDictionary[str, Share] = WeakValueDictionary()
        self._latest: OrderedDict[str, Share] = OrderedDict()

    def of(self, client: str) -> Share:
        """The share of a client."""
        share = self._known.get(client)
        if share is None:
            share = self._known[client] = Share(self._limits, self._clock)
        self._latest[client] = share
        self._latest.move_to_end(client)
        if len(self._latest) > self._max_remembered:
            self._latest.popitem(last=False)
        return share

    def __len__(self) -> int:
        return len(self._known)


def network_of(peer: str) -> str:
    """Whom an address with a port counts as: an IPv4 address for itself, an IPv6 one for its /64, which is one customer's."""
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
