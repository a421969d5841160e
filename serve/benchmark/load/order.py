"""What the processes that generate the load are told, and what they tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve.benchmark.load.histogram import EMPTY, LatencyHistogram

Arrivals = Literal["constant", "poisson"]
INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """What an encrypted connection needs: names of PEM files.

    Attributes:
        authorities: the certificates that may have signed the server's; None for the system's own list.
        certificate: this side's, where the server asks for one.
        key: the certificate's private key.
        server_name: in the server's certificate, where it differs from the host.
    """

    authorities: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Whom to load.

    Attributes:
        host: name or address of the server.
        port: its gRPC port.
        path: of the RPC.
        streaming: whether the RPC takes many messages in one call.
        tls: for an encrypted connection; None for a plain one.
        headers: metadata of every call, names in lower case.
    """

    host: str
    port: int
    path: str
    streaming: bool = False
    tls: TlsFiles | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One load to generate: either `concurrency` or `rate` is given.

    Attributes:
        concurrency: requests in flight, each followed by the next when it is answered (closed loop).
        rate: requests per second, sent whether the earlier ones are answered or not (open loop).
        arrivals: how the requests of a rate follow each other: evenly, or at random as those of many users do.
        seconds: no request is started after this time; None for no such limit.
        requests: no more than so many are started; None for no such limit.
        timeout_s: the deadline of each request, counted from when it was to be sent.
        connections: of each process; more are opened where the server allows too few calls on one.
        window_s: how often a process tells what it has measured since it last told.
        share: this process's number and how many there are.
    """

    concurrency: int | None = None
    rate: float | None = None
    arrivals: Arrivals = "poisson"
    seconds: float | None = None
    requests: int | None = None
    timeout_s: float = 30.0
    connections: int = 1
    window_s: float = 0.25
    share: tuple[int, int] = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What was measured over some time; tallies of several processes or windows add up.

    Attributes:
        latencies: of the requests that succeeded, by model: from the intended sending time (open loop) or the sending (closed
            loop) to the whole answer.
        errors: failed requests by gRPC status name.
        messages: the first server message of each of these statuses.
        sent: requests that were started.
        lateness: how long after its intended time each request of an open loop was noticed: the generator's own delay.
        seconds: how long it took.
        busy: the share of the time in which a process found no moment to wait, of the busiest one.
        held_back: requests that had to wait because every connection was full.
    """

    latencies: Sequence[LatencyHistogram] = ()
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    sent: int = 0
    lateness: LatencyHistogram = EMPTY
    seconds: float = 0.0
    busy: float = 0.0
    held_back: int = 0

    @property
    def latency(self) -> LatencyHistogram:
        """Of all models together."""
        return LatencyHistogram.merged(self.latencies)

    @property
    def failed(self) -> int:
        """Requests that failed."""
        return self.errors.total()

    def beside(self, others: Sequence[Tally]) -> Tally:
        """The sum over processes that ran at the same time: the time passed once."""
        tallies = [self, *others]
        return _sum(tallies, seconds=max(t.seconds for t in tallies), busy=max(t.busy for t in tallies))

    def then(self, others: Sequence[Tally]) -> Tally:
        """The sum over windows that followed each other."""
        tallies, seconds = [self, *others], self.seconds + sum(tally.seconds for tally in others)
        busy = sum(tally.busy * tally.seconds for tally in tallies) / seconds if seconds else 0.0
        return _sum(tallies, seconds=seconds, busy=busy)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A load, done.

    Attributes:
        tally: of the whole of it.
        windows: the same, window by window, for as long as requests were started.
        ended_early: why the load stopped before its end (INTERRUPTED for Ctrl-C); None where it did not.
    """

    tally: Tally
    windows: Sequence[Tally] = ()
    ended_early: str | None = None


def _sum(tallies: Sequence[Tally], *, seconds: float, busy: float) -> Tally:
    models = max(len(tally.latencies) for tally in tallies)
    messages: dict[str, str] = {}
    for tally in tallies:
        messages = tally.messages | messages
    return Tally(
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
