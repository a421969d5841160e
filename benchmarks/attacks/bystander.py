"""A well-behaved client that asks at a steady pace beside an attack, checks every answer and keeps every latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from halfserve import Client, ClientError, RetryPolicy
from halfserve.serve.client.channel_settings import Tls

TIMEOUT_S = 30.0
ROWS, COLUMNS = 4, 64


@dataclass
class Account:
    """Answers and latencies of the client.

    Attributes:
        latencies_s: latency of each right answer in seconds, counted from when the request was due.
        lost: the error text of each request that got none.
    """

    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of the latencies."""
        return 1000 * statistics.quantiles(self.latencies_s, n=100)[98] if len(self.latencies_s) > 1 else float("nan")


def ask(grpc_address: str, http_address: str, token: str | None, tls: Tls | None, every_s: float, stop: Event) -> Account:
    """Send a request each `every_s` seconds until told to stop.

    Args:
        grpc_address: HOST:PORT of a server with the model "affine" (y = 2 x + 1).
        http_address: HOST:PORT of its REST interface, which is not asked.
        token: token of the client; None if the server asks for none.
        tls: TLS settings; None for a plain connection.
        every_s: seconds from one request to the next.
        stop: ends the loop.
    """
    del http_address
    random = np.random.default_rng(0)
    with Client(grpc_address, timeout_s=TIMEOUT_S, retries=RetryPolicy(retries=0), token=token, tls=tls) as client:

        def once() -> str | None:
            x = random.integers(-500, 500, (ROWS, COLUMNS)).astype(np.float16)
            try:
                right = np.array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1)
            except ClientError as error:
                return f"{error.code}: {error}"
            return None if right else "a wrong answer"

        return at_a_pace(once, every_s, stop)


def becomes_ready(model: str, version: str, grpc_address: str, token: str | None, tls: Tls | None) -> bool:
    """Return whether the server takes requests of this version within `TIMEOUT_S`."""
    with Client(grpc_address, timeout_s=TIMEOUT_S, token=token, tls=tls) as client:
        try:
            client.wait_until_ready(model, version)
        except ClientError:
            return False
    return True


def at_a_pace(once: Callable[[], str | None], every_s: float, stop: Event) -> Account:
    """Call `once`, which asks and returns why there was no right answer, each `every_s` seconds until told to stop."""
    account, due = Account(), time.monotonic()
    while not stop.wait(max(0.0, due - time.monotonic())):
        lost = once()
        if lost is None:
            account.latencies_s.append(time.monotonic() - due)
        else:
            account.lost.append(lost)
        due = max(due + every_s, time.monotonic() - 1.0)  # catch up with one second at most
    return account
