"""The connections that share a load: made when they are needed, replaced when they are lost."""

from __future__ import annotations

import math
import time

from serve.benchmark.load.calls import Calls, StreamingCalls, UnaryCalls, call_headers
from serve.benchmark.load.connection import ConnectionLostError, Http2Connection
from serve.benchmark.load.order import Order, Target

MAX_CONNECTIONS = 500  # select takes no more than 1024 descriptors
RETRY_S = 0.1
GIVE_UP_S = 1.0  # a server that has let nobody in for so long is gone
RECONNECT_TIMEOUT_S = 1.0


class Links:
    """The connections to one target, in turn.

    Attributes:
        given_up: whether there has been no connection for too long, however often one was asked for.
        trouble: why the last one was lost, or not made.
    """

    def __init__(self, target: Target, order: Order) -> None:
        self._target = target
        # A streaming call outlives its requests, so each request's time is kept on this side alone.
        self._headers = call_headers(target, None if target.streaming else order.timeout_s)
        self._wanted = order.connections
        self._concurrency = order.concurrency or 1
        self._links: list[Calls] = []
        self._turn = 0
        self._retry_s = 0.0
        self._alone_since_s: float | None = None
        self.given_up = False
        self.trouble = "no connection"

    @property
    def all(self) -> list[Calls]:
        """Every connection, draining ones too."""
        return self._links

    @property
    def retry_s(self) -> float | None:
        """Seconds until the next attempt to connect; None when none is needed."""
        usable = any(link.connection.usable for link in self._links)
        return None if usable else max(0.0, self._retry_s - time.monotonic())

    def open(self) -> None:
        """Connect as often as the order wants."""
        while len(self._links) < min(self._wanted, MAX_CONNECTIONS) and self._connect():
            capacity = max(1, self._links[0].connection.max_streams)
            self._wanted = max(self._wanted, math.ceil(self._concurrency / capacity))

    def with_room(self) -> Calls | None:
        """A connection that takes a request now; None when all are full or gone."""
        links, behind = self._links, False
        for _ in range(len(links)):
            self._turn = (self._turn + 1) % len(links)
            link = links[self._turn]
            if link.room > 0:
                if not link.connection.is_behind:
                    return link
                behind = True
        if behind:
            return None  # the network is what is full, which another connection would not change
        usable = [link for link in links if link.connection.usable]
        if len(usable) >= MAX_CONNECTIONS or time.monotonic() < self._retry_s or not self._connect():
            return None
        return links[-1] if links[-1].room > 0 else None

    def drop(self, link: Calls, reason: str) -> None:
        """Forget a connection that is lost."""
        self.trouble = reason
        link.connection.close()
        self._links.remove(link)
        self._turn = 0

    def retire(self) -> None:
        """Close connections that take no more calls and have none in flight."""
        for link in [link for link in self._links if not link.connection.usable and not link.in_flight]:
            self.drop(link, "the server is stopping")

    def close(self) -> None:
        """Hang up everywhere."""
        for link in self._links:
            link.connection.close()
        self._links = []

    def _connect(self) -> bool:
        try:
            connection = Http2Connection(self._target, timeout_s=RECONNECT_TIMEOUT_S)
        except ConnectionLostError as error:
            self.trouble = str(error)
            now_s = time.monotonic()
            self._retry_s = now_s + RETRY_S
            if not self._links:
                # Not from the loss on: where requests are rare, nothing is asked for in between.
                self._alone_since_s = self._alone_since_s or now_s
                self.given_up = now_s - self._alone_since_s > GIVE_UP_S
            return False
        kind = StreamingCalls if self._target.streaming else UnaryCalls
        self._links.append(kind(connection, self._headers))
        self._alone_since_s = None
        return True
