"""A well-behaved client that asks at a steady pace beside an attack, checks every answer and keeps every latency."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from threading import Event

import numpy as np

from halfserve import Client, ClientError, RetryPolicy
from halfserve.serve.client.connection import Tls

EVERY_S = 0.005
TIMEOUT_S = 30.0
ROWS, COLUMNS = 4, 64


@dataclass
class Account:
    """What the client saw.

    Attributes:
        latencies_s: of each right answer, counted from when the request was due.
        lost: the error text of each request that got none.
        has_second: whether version 2 of the model "flip" was ready at the end.
    """

    latencies_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    has_second: bool = False

    @property
    def p99_ms(self) -> float:
        """The 99th percentile of the latencies."""
        return 1000 * statistics.quantiles(self.latencies_s, n=100)[98] if len(self.latencies_s) > 1 else float("nan")


def ask(address: str, token: str | None, stop: Event, tls: Tls | None = None) -> Account:
    """Send a request each EVERY_S seconds until told to stop.

    Args:
        address: HOST:PORT of a server with the model "affine" (y = 2 x + 1).
        token: to show, where the server asks for one.
        stop: ends the loop.
        tls: where the server speaks it.
    """
    account, random = Account(), np.random.default_rng(0)
    with Client(address, timeout_s=TIMEOUT_S, retries=RetryPolicy(retries=0), token=token, tls=tls) as client:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            x = random.integers(-500, 500, (ROWS, COLUMNS)).astype(np.float16)
            try:
                right = np.array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1)
            except ClientError as error:
                account.lost.append(f"{error.code}: {error}")
            else:
                if right:
                    account.latencies_s.append(time.monotonic() - due)
                else:
                    account.lost.append("a wrong answer")
            due = max(due + EVERY_S, time.monotonic() - 1.0)  # catch up with one second at most
        account.has_second = client.is_ready("flip", "2")
    return account
