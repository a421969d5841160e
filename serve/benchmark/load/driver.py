"""The loop of one process: send what is due, read what has come, wait for whichever is next.

`select` is what waits, because its time limit is exact to the microsecond where epoll's and libuv's are whole milliseconds.
"""

from __future__ import annotations

import itertools
import select
import time
from collections import deque
from collections.abc import Callable, Sequence

from serve.benchmark.load.arrivals import Pacer, pacer_of
from serve.benchmark.load.calls import Call, Calls, framed
from serve.benchmark.load.connection import ConnectionLostError
from serve.benchmark.load.links import Links
from serve.benchmark.load.order import Order, Tally, Target
from serve.benchmark.load.recorder import Recorder

NANOSECONDS = 1_000_000_000
NEVER_NS = 2**62

Tell = Callable[[Tally], bool]


class Driver:
    """Carries out one order.

    Args:
        target: whom to load.
        requests: serialized requests, sent in turn.
        models: for each of them, the number of the model it is for.
        order: this process's share.
    """

    def __init__(self, target: Target, requests: Sequence[bytes], models: Sequence[int], order: Order) -> None:
        self._order = order
        self._source = itertools.cycle(list(zip([framed(request) for request in requests], models, strict=True)))
        self._model_count = max(models) + 1
        self._links = Links(target, order)
        self._backlog: deque[int] = deque()  # intended times of requests that no connection has taken yet
        self._timeout_ns = round(order.timeout_s * NANOSECONDS)
        self._pacer: Pacer
        self._recorder: Recorder
        self._next_tick_ns = 0

    def connect(self) -> None:
        """Connect before the time runs."""
        self._links.open()

    def run(self, tell: Tell) -> str | None:
        """Load the server until the order is done.

        Args:
            tell: called with every window's tally; when it returns False no more requests are started.

        Returns:
            Why the load ended early; None where it did not.
        """
        started_ns = time.perf_counter_ns()
        self._pacer, self._recorder = pacer_of(self._order, started_ns), Recorder(self._model_count, started_ns)
        self._next_tick_ns = started_ns + self._window_ns
        try:
            trouble = self._loop(tell)
        finally:
            self._links.close()
        tell(self._recorder.window(time.perf_counter_ns()))
        return trouble

    @property
    def _window_ns(self) -> int:
        return round(self._order.window_s * NANOSECONDS)

    def _loop(self, tell: Tell) -> str | None:
        while True:
            now_ns = time.perf_counter_ns()
            due = self._take_due(now_ns)
            if self._deadline_ns() <= now_ns:
                self._expire(now_ns)
            if self._backlog:
                self._send_backlog(due)
            if now_ns >= self._next_tick_ns:
                self._tick(now_ns, tell)
            if self._links.given_up:
                self._fail_backlog()
                return self._links.trouble
            if self._pacer.exhausted and not self._backlog and not any(link.in_flight for link in self._links.all):
                return None
            self._flush()
            self._read(self._ready())

    def _take_due(self, now_ns: int) -> int:
        """Put what is due into the backlog; how many that are."""
        due = self._pacer.due(now_ns)
        if due:
            self._backlog.extend(due)
            if self._order.rate is not None:
                self._recorder.lateness_ns.extend([now_ns - intended_ns for intended_ns in due])
        return len(due)

    def _send_backlog(self, due: int) -> None:
        """Send what connections take, each its share."""
        backlog, source = self._backlog, self._source
        while backlog:
            link = self._links.with_room()
            if link is None:
                self._recorder.held_back += min(due, len(backlog))  # the latest are the last
                return
            share = -(-len(backlog) // len(self._links.all))
            for _ in range(min(share, link.room)):
                message, model = next(source)
                link.start(Call(model, backlog.popleft()), message)
                self._recorder.sent += 1
                if link.connection.is_behind:
                    break

    def _tick(self, now_ns: int, tell: Tell) -> None:
        """What need not be done at every turn."""
        self._next_tick_ns += self._window_ns
        self._links.retire()
        if not tell(self._recorder.window(now_ns)):
            self._pacer.stop()

    def _expire(self, now_ns: int) -> None:
        before_ns = now_ns - self._timeout_ns
        for link in self._links.all:
            self._ended(link.expired(before_ns), now_ns)
        while self._backlog and self._backlog[0] <= before_ns:
            self._backlog.popleft()
            self._recorder.failed("DEADLINE_EXCEEDED", "it could not even be sent in time")
            self._pacer.answered(1)

    def _flush(self) -> None:
        for link in list(self._links.all):
            try:
                link.connection.flush()
            except ConnectionLostError as error:
                self._lost(link, str(error))

    def _ready(self) -> list[Calls]:
        """Wait until something can be read or written, or until something is due."""
        links = self._links.all
        next_ns = min(self._next_tick_ns, self._pacer.next_ns() or self._next_tick_ns, self._deadline_ns())
        writers = [link.connection for link in links if link.connection.wants_write]
        waited_from_ns = time.perf_counter_ns()
        timeout_s = max(0.0, (next_ns - waited_from_ns) / NANOSECONDS)
        if self._backlog and (retry_s := self._links.retry_s) is not None:
            timeout_s = min(timeout_s, retry_s)
        if not links:
            time.sleep(timeout_s)
            ready: set[int] = set()
        else:
            readable, _, _ = select.select([link.connection for link in links], writers, [], timeout_s)
            ready = {connection.fileno() for connection in readable}
        self._recorder.idle_ns += time.perf_counter_ns() - waited_from_ns
        return [link for link in links if link.connection.fileno() in ready]

    def _deadline_ns(self) -> int:
        """When the oldest request runs out of time."""
        oldest_ns = self._backlog[0] if self._backlog else NEVER_NS
        for link in self._links.all:
            for call in link.in_flight.values():
                oldest_ns = min(oldest_ns, call.intended_ns)
                break
        return oldest_ns + self._timeout_ns

    def _read(self, ready: Sequence[Calls]) -> None:
        for link in ready:
            try:
                ended = link.receive()
            except ConnectionLostError as error:
                self._lost(link, str(error))
                continue
            self._ended(ended, time.perf_counter_ns())

    def _ended(self, calls: Sequence[Call], now_ns: int) -> None:
        self._recorder.ended(calls, now_ns)
        self._pacer.answered(len(calls))

    def _lost(self, link: Calls, reason: str) -> None:
        self._links.drop(link, reason)
        lost = list(link.in_flight.values())
        for call in lost:
            call.status, call.message = "UNAVAILABLE", reason
        self._ended(lost, 0)

    def _fail_backlog(self) -> None:
        while self._backlog:
            self._backlog.popleft()
            self._recorder.failed("UNAVAILABLE", self._links.trouble)
