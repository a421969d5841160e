"""The loop of one load process: pacing, sending, receiving and recording.

The loop waits in `select`, whose timeout has microsecond resolution, while epoll and libuv count whole milliseconds.
"""

from __future__ import annotations

import itertools
import select
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from halfserve.serve.benchmark.load.calls import OK, ConnectionCalls, ConnectionPool, InFlightRequest, framed, grpc_calls
from halfserve.serve.benchmark.load.http1 import rest_calls
from halfserve.serve.benchmark.load.http2_connection import ConnectionLostError
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadEndpoint, LoadSpec, LoadStatistics

NANOSECONDS = 1_000_000_000
SEED = 2024
CHUNK = 1024
NEVER_NS = 2**62
Tell = Callable[[LoadStatistics], bool]


def pacer_of(spec: LoadSpec, start_ns: int) -> ClosedLoop | OpenLoop:
    """Return the pacer of a load, which decides when requests are due; all times are nanoseconds of one clock."""
    return ClosedLoop(spec, start_ns) if spec.rate is None else OpenLoop(spec, start_ns)


class ClosedLoop:
    """Keeps a fixed number of requests in flight."""

    def __init__(self, spec: LoadSpec, start_ns: int) -> None:
        self._free = spec.concurrency or 0
        self._left = spec.requests
        self._end_ns = None if spec.seconds is None else start_ns + round(spec.seconds * NANOSECONDS)

    def due(self, now_ns: int) -> list[int]:
        """Return the intended sending times up to now that were not returned before."""
        if self._end_ns is not None and now_ns >= self._end_ns:
            self._left = 0
        count = self._free if self._left is None else min(self._free, self._left)
        self._free -= count
        if self._left is not None:
            self._left -= count
        return [now_ns] * count

    def answered(self, count: int) -> None:
        """Record that `count` requests have ended, successfully or not."""
        self._free += count

    def next_ns(self) -> int | None:
        """Next time at which `due` returns something even if no answer arrives; None for never."""
        return None if self._left == 0 else self._end_ns

    def stop(self) -> None:
        self._left = 0

    @property
    def exhausted(self) -> bool:
        """Whether no further request will be due."""
        return self._left == 0


class OpenLoop:
    """Sends a fixed number of requests per second, evenly spaced or as a Poisson process, or replays given times."""

    def __init__(self, spec: LoadSpec, start_ns: int) -> None:
        self._times = intended_times(spec, start_ns)
        self._next: int | None = next(self._times, None)
        # The interval after the last request counts too: otherwise the load would show a higher rate than it had.
        seconds = spec.seconds if spec.requests is None else None
        self._end_ns = None if seconds is None else start_ns + round(seconds * NANOSECONDS)

    def due(self, now_ns: int) -> list[int]:
        due = []
        while self._next is not None and self._next <= now_ns:
            due.append(self._next)
            self._next = next(self._times, None)
        if self._end_ns is not None and now_ns >= self._end_ns:
            self._end_ns = None
        return due

    def answered(self, count: int) -> None:
        """Answers do not change the rate of an open loop."""

    def next_ns(self) -> int | None:
        return self._end_ns if self._next is None else self._next

    def stop(self) -> None:
        self._next = self._end_ns = None

    @property
    def exhausted(self) -> bool:
        return self._next is None and self._end_ns is None


def intended_times(spec: LoadSpec, start_ns: int) -> Iterator[int]:
    """Yield the sending times of this process in increasing order, within the load's seconds and number of requests.

    Together the processes produce the whole load: evenly spaced times interleave, and independent Poisson processes add up to
    one. Random times are the same in every run.
    """
    index, processes = spec.share
    rate = spec.rate or 0.0
    end_ns = None if spec.seconds is None else start_ns + round(spec.seconds * NANOSECONDS)
    offsets: Iterable[float]
    if spec.times_s is not None:
        offsets = spec.times_s[index::processes].tolist()
    else:
        offsets = _random_s(rate / processes, index) if spec.arrivals == "poisson" else _even_s(rate, index, processes)
    for count, offset_s in enumerate(offsets):
        time_ns = start_ns + round(offset_s * NANOSECONDS)
        if (end_ns is not None and time_ns >= end_ns) or (spec.requests is not None and count >= spec.requests):
            return
        yield time_ns


def _even_s(rate: float, index: int, processes: int) -> Iterator[float]:
    count = index
    while True:
        yield count / rate
        count += processes


def _random_s(rate: float, index: int) -> Iterator[float]:
    generator, passed_s = np.random.default_rng([SEED, index]), 0.0
    while True:
        for gap_s in generator.exponential(1 / rate, CHUNK):
            passed_s += gap_s
            yield passed_s


class StatisticsRecorder:
    """Collects ended requests into statistics, window by window."""

    def __init__(self, models: int, now_ns: int) -> None:
        self._models = models
        self._reset(now_ns)

    def ended(self, calls: Iterable[InFlightRequest], now_ns: int) -> None:
        latencies = self._latencies
        for call in calls:
            if call.status == OK:
                latencies[call.model].append(now_ns - call.intended_ns)
            else:
                self.failed(call.status or "UNKNOWN", call.message or "no explanation")

    def failed(self, status: str, message: str) -> None:
        self._errors[status] += 1
        self._messages.setdefault(status, message)

    def window(self, now_ns: int) -> LoadStatistics:
        """Return the statistics since the last call."""
        passed_ns = max(1, now_ns - self._began_ns)
        tally = LoadStatistics(
            latencies=[_histogram(latencies) for latencies in self._latencies],
            errors=self._errors,
            messages=self._messages,
            sent=self.sent,
            lateness=_histogram(self.lateness_ns),
            seconds=passed_ns / NANOSECONDS,
            busy=1 - min(1.0, self.idle_ns / passed_ns),
            held_back=self.held_back,
        )
        self._reset(now_ns)
        return tally

    def _reset(self, now_ns: int) -> None:
        self._began_ns = now_ns
        self._latencies = [array("q") for _ in range(self._models)]
        self._errors: Counter[str] = Counter()
        self._messages: dict[str, str] = {}
        self.lateness_ns = array("q")
        self.sent = self.held_back = self.idle_ns = 0


def _histogram(nanoseconds: array[int]) -> LatencyHistogram:
    return LatencyHistogram.of(np.frombuffer(nanoseconds, np.int64))


def in_turn(requests: Sequence[tuple[bytes, int]], spec: LoadSpec) -> Iterator[tuple[bytes, int]]:
    """Yield requests without end; in a replay, those whose place among all is that of this process's sending times."""
    if spec.times_s is None:
        return itertools.cycle(requests)
    (first, processes), times, count = spec.share, len(spec.times_s), len(requests)
    return (requests[place * count // times % count] for place in itertools.count(first, processes))


class Driver:
    """Generates one process's share of a load: sends serialized requests in turn, each for the model with its index."""

    def __init__(self, target: LoadEndpoint, requests: Sequence[bytes], models: Sequence[int], spec: LoadSpec) -> None:
        self._spec = spec
        messages = requests if target.is_rest else [framed(request) for request in requests]
        self._source = in_turn(list(zip(messages, models, strict=True)), spec)
        self._model_count = max(models) + 1
        self._links = ConnectionPool(target, spec, rest_calls if target.is_rest else grpc_calls)
        self._backlog: deque[int] = deque()  # intended times of requests that wait for a connection
        self._timeout_ns = round(spec.timeout_s * NANOSECONDS)
        self._pacer: ClosedLoop | OpenLoop
        self._recorder: StatisticsRecorder
        self._next_tick_ns = 0

    def connect(self) -> None:
        self._links.open()

    def run(self, tell: Tell) -> str | None:
        """Load the server until the share is done; return the reason why the load ended early, None if it did not.

        `tell` is called with every window's statistics; when it returns False no more requests are started.
        """
        started_ns = time.perf_counter_ns()
        self._pacer, self._recorder = pacer_of(self._spec, started_ns), StatisticsRecorder(self._model_count, started_ns)
        self._next_tick_ns = started_ns + self._window_ns
        try:
            trouble = self._loop(tell)
        finally:
            self._links.close()
        tell(self._recorder.window(time.perf_counter_ns()))
        return trouble

    @property
    def _window_ns(self) -> int:
        return round(self._spec.window_s * NANOSECONDS)

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
        """Put due requests into the backlog; return their number."""
        due = self._pacer.due(now_ns)
        if due:
            self._backlog.extend(due)
            if self._spec.rate is not None:
                self._recorder.lateness_ns.extend([now_ns - intended_ns for intended_ns in due])
        return len(due)

    def _send_backlog(self, due: int) -> None:
        """Send what the connections accept, distributed among them."""
        backlog, source = self._backlog, self._source
        while backlog:
            link = self._links.with_room()
            if link is None:
                self._recorder.held_back += min(due, len(backlog))  # the latest are at the end
                return
            share = -(-len(backlog) // len(self._links.all))
            for _ in range(min(share, link.room)):
                message, model = next(source)
                link.start(InFlightRequest(model, backlog.popleft()), message)
                self._recorder.sent += 1
                if link.connection.is_behind:
                    break

    def _tick(self, now_ns: int, tell: Tell) -> None:
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

    def _ready(self) -> list[ConnectionCalls]:
        """Wait until data can be read or written, or until a request is due."""
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
        """Time at which the oldest request exceeds its deadline."""
        oldest_ns = self._backlog[0] if self._backlog else NEVER_NS
        for link in self._links.all:
            for call in link.in_flight.values():
                oldest_ns = min(oldest_ns, call.intended_ns)
                break
        return oldest_ns + self._timeout_ns

    def _read(self, ready: Sequence[ConnectionCalls]) -> None:
        for link in ready:
            try:
                ended = link.receive()
            except ConnectionLostError as error:
                self._lost(link, str(error))
                continue
            self._ended(ended, time.perf_counter_ns())

    def _ended(self, calls: Sequence[InFlightRequest], now_ns: int) -> None:
        self._recorder.ended(calls, now_ns)
        self._pacer.answered(len(calls))

    def _lost(self, link: ConnectionCalls, reason: str) -> None:
        self._links.drop(link, reason)
        lost = list(link.in_flight.values())
        for call in lost:
            call.status, call.message = "UNAVAILABLE", reason
        self._ended(lost, 0)

    def _fail_backlog(self) -> None:
        while self._backlog:
            self._backlog.popleft()
            self._recorder.failed("UNAVAILABLE", self._links.trouble)
