"""Messages between the benchmark and its load processes: load specifications, statistics and latency histograms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

Nanoseconds: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Seconds: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
MANTISSA_BITS = 11
NANOSECONDS_PER_MS = 1e6
Arrivals = Literal["constant", "poisson"]
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyHistogram:
    """Latencies as an HDR histogram: accurate to 0.05 %, in a few thousand numbers for any number of requests.

    The buckets are those of Gil Tene's HdrHistogram (http://hdrhistogram.org), with 1024 steps per doubling. They are stored
    sparsely as two arrays, so that numpy can merge them and they are cheap to send between processes.
    """

    values_ns: Nanoseconds  # int64 [buckets], increasing: the middle of each non-empty bucket, in nanoseconds
    counts: Nanoseconds  # int64 [buckets]: number of latencies in each bucket, above 0
    sum_ns: int  # exact sum of all latencies, in nanoseconds
    min_ns: int  # exact smallest latency, in nanoseconds; 0 if there is none
    max_ns: int  # exact largest latency, in nanoseconds; 0 if there is none

    @classmethod
    def of(cls, latencies_ns: Nanoseconds) -> LatencyHistogram:
        """Build from int64 [requests] latencies in nanoseconds, which must not be negative; may be empty."""
        if not len(latencies_ns):
            return EMPTY
        values, counts = np.unique(_bucketed(latencies_ns), return_counts=True)
        return cls(
            values_ns=values,
            counts=counts.astype(np.int64),
            sum_ns=int(latencies_ns.sum()),
            min_ns=int(latencies_ns.min()),
            max_ns=int(latencies_ns.max()),
        )

    @classmethod
    def merged(cls, histograms: Iterable[LatencyHistogram]) -> LatencyHistogram:
        parts = [histogram for histogram in histograms if histogram.total]
        if not parts:
            return EMPTY
        values, where = np.unique(np.concatenate([part.values_ns for part in parts]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, where, np.concatenate([part.counts for part in parts]))
        return cls(
            values_ns=values,
            counts=counts,
            sum_ns=sum(part.sum_ns for part in parts),
            min_ns=min(part.min_ns for part in parts),
            max_ns=max(part.max_ns for part in parts),
        )

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def mean_ms(self) -> float:
        """Mean in milliseconds; the histogram must not be empty."""
        return self.sum_ns / self.total / NANOSECONDS_PER_MS

    def percentiles_ms(self, percents: Sequence[float]) -> list[float]:
        """Percentiles in milliseconds by nearest rank; the histogram must not be empty."""
        cumulated = np.cumsum(self.counts)
        ranks = [max(1, math.ceil(percent / 100 * self.total - 1e-9)) for percent in percents]
        values = self.values_ns[np.searchsorted(cumulated, ranks)].clip(self.min_ns, self.max_ns)
        return [float(value) for value in values / NANOSECONDS_PER_MS]

    def within(self, bound_ms: float) -> int:
        return int(self.counts[self.values_ns <= bound_ms * NANOSECONDS_PER_MS].sum())


EMPTY = LatencyHistogram(values_ns=np.empty(0, np.int64), counts=np.empty(0, np.int64), sum_ns=0, min_ns=0, max_ns=0)


def _bucketed(latencies_ns: Nanoseconds) -> Nanoseconds:
    """Return the middle of each latency's bucket, where all but the leading MANTISSA_BITS bits are dropped."""
    _, bit_lengths = np.frexp(latencies_ns.astype(np.float64))
    shifts = np.maximum(bit_lengths.astype(np.int64) - MANTISSA_BITS, 0)
    bucketed: Nanoseconds = ((latencies_ns >> shifts) << shifts) + ((1 << shifts) >> 1)
    return bucketed


@dataclass(frozen=True, kw_only=True)
class TlsPaths:
    authorities: str | None = None  # CA certificates to verify the server's with; None for the system's
    certificate: str | None = None  # certificate of this side, if the server requests one
    key: str | None = None  # private key of the certificate
    server_name: str | None = None  # name in the server's certificate, if it differs from the host


@dataclass(frozen=True, kw_only=True)
class LoadEndpoint:
    host: str  # host name or address of the server
    port: int  # port of the server
    path: str  # method path of the RPC, or path of the REST route
    is_rest: bool = False  # whether requests are bodies to POST over HTTP/1.1 instead of gRPC messages
    streaming: bool = False  # whether one call of the RPC carries many messages
    tls: TlsPaths | None = None  # PEM files for an encrypted connection; None for no encryption
    headers: tuple[tuple[str, str], ...] = ()  # metadata of every call, with lower-case names
    others: tuple[tuple[str, int], ...] = ()  # (host, port) of the other members of a cluster, which are loaded too

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def each(self) -> list[LoadEndpoint]:
        """One endpoint per member of the cluster; only this one for a single server."""
        return [self, *(replace(self, host=host, port=port, others=()) for host, port in self.others)]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadSpec:
    """A load to generate; either `concurrency` or `rate` is given."""

    concurrency: int | None = None  # requests in flight, each followed by the next when it is answered (closed loop)
    rate: float | None = None  # requests per second, sent whether the earlier ones are answered or not (open loop)
    arrivals: Arrivals = "poisson"  # whether the requests of a rate arrive evenly, or at random like those of many users
    # Sending times of all requests of a replay, in seconds after its start, in place of `arrivals`: float64 [requests], rising.
    times_s: Seconds | None = None
    seconds: float | None = None  # time in seconds after which no request is started; None for no such limit
    requests: int | None = None  # most requests to start; None for no such limit
    timeout_s: float = 30.0  # deadline of each request in seconds, counted from its intended sending time
    connections: int = 1  # connections of each process; more are opened if the server limits the calls on one
    window_s: float = 0.25  # interval between two reports of a process, in seconds
    share: tuple[int, int] = (0, 1)  # index of this process, and the number of processes


@dataclass(frozen=True, kw_only=True)
class LoadStatistics:
    """Statistics of a period; those of several processes or windows can be added."""

    # Latencies of successful requests, one histogram per model: from the intended sending time (open loop) or the actual one
    # (closed loop) to the complete answer.
    latencies: Sequence[LatencyHistogram] = ()
    errors: Counter[str] = field(default_factory=Counter)  # failed requests by name of the gRPC status
    messages: dict[str, str] = field(default_factory=dict)  # the first server message of each status
    sent: int = 0  # requests that were started
    # Delay between intended and actual sending time of each request of an open loop, caused by the generator.
    lateness: LatencyHistogram = EMPTY
    seconds: float = 0.0  # length of the period in seconds
    busy: float = 0.0  # fraction of the time in which the busiest process was not waiting
    held_back: int = 0  # requests that had to wait because every connection was full

    @property
    def latency(self) -> LatencyHistogram:
        """Latencies of all models together."""
        return LatencyHistogram.merged(self.latencies)

    @property
    def failed(self) -> int:
        return self.errors.total()

    def beside(self, others: Sequence[LoadStatistics]) -> LoadStatistics:
        """Add statistics of processes that ran at the same time; `seconds` and `busy` become the maximum."""
        tallies = [self, *others]
        return _sum(tallies, seconds=max(t.seconds for t in tallies), busy=max(t.busy for t in tallies))

    def then(self, others: Sequence[LoadStatistics]) -> LoadStatistics:
        """Add statistics of consecutive windows."""
        tallies, seconds = [self, *others], self.seconds + sum(tally.seconds for tally in others)
        busy = sum(tally.busy * tally.seconds for tally in tallies) / seconds if seconds else 0.0
        return _sum(tallies, seconds=seconds, busy=busy)


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    tally: LoadStatistics  # statistics of the whole load
    windows: Sequence[LoadStatistics] = ()  # the same statistics by window, for as long as requests were started
    ended_early: str | None = None  # reason why the load ended early (INTERRUPTED for Ctrl-C); None if it did not


def _sum(tallies: Sequence[LoadStatistics], *, seconds: float, busy: float) -> LoadStatistics:
    models = max(len(tally.latencies) for tally in tallies)
    messages: dict[str, str] = {}
    for tally in tallies:
        messages = tally.messages | messages
    return LoadStatistics(
        latencies=[
            LatencyHistogram.merged(tally.latencies[model] for tally in tallies if model < len(tally.latencies))
            for model in range(models)
        ],
        errors=sum((tally.errors for tally in tallies), Counter()),
        messages=messages,
        sent=sum(tally.sent for tally in tallies),
        lateness=LatencyHistogram.merged(tally.lateness for tally in tallies),
        seconds=seconds,
        busy=busy,
        held_back=sum(tally.held_back for tally in tallies),
    )
