"""An exchange with a server as a generator of RPCs and pauses, without input or output.

An exchange yields steps, receives each RPC's answer (or has its ClientError thrown in) and returns the result. The
synchronous and the asyncio client only execute the steps, so both behave alike. Deadlines and retries wrap exchanges. The
retries of gRPC's service config cannot replace them: these know no idempotence per call, cannot wait for a server, and
stop after 5 attempts.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.errors import ClientError, InvalidRequest, Repeat, ServerUnavailable, deadline_exceeded, is_above_0

DEFAULT_TIMEOUT_S = 30.0
LONGEST_S = 1e8  # seconds, about three years; the protocol has eight digits, and longer limits overflow
MAX_RETRIES = 10
BUDGET_TOKENS = 100.0
TOKENS_PER_SUCCESS = 0.1


@dataclass(frozen=True)
class UnaryRpc:
    request: Message  # message to send; its class determines the RPC and the class of the answer
    # Whether making the call twice has the same effect as making it once; such a call may be repeated when it is unknown
    # whether the server received it.
    idempotent: bool = True
    data: bytes | None = None  # the serialized request, whose raw contents `request` may lack; None: serialize `request`

    def serialized(self) -> bytes:
        return self.request.SerializeToString() if self.data is None else self.data

    @property
    def method(self) -> str:
        """The RPC's name, such as "ModelInfer"."""
        return type(self.request).__name__.removesuffix("Request")

    @property
    def answer(self) -> type[Message]:
        answer: type[Message] = getattr(pb, f"{self.method}Response")
        return answer


@dataclass(frozen=True)
class Pause:
    seconds: float


Answer = TypeVar("Answer")
Exchange = Generator[UnaryRpc | Pause, Any, Answer]


def advance(exchange: Exchange[Answer], outcome: Any) -> UnaryRpc | Pause:
    """Return the next step after the last one's outcome: an answer, a ClientError to throw in, or None (start, pause).
    Raises StopIteration: the exchange is over; its value is the result.
    """
    return exchange.throw(outcome) if isinstance(outcome, ClientError) else exchange.send(outcome)


def checked_timeout(timeout_s: float | None) -> float | None:
    """Return the limit in seconds, capped at what gRPC supports; None for no limit, also if the limit is infinite.
    Raises InvalidRequest: the limit is neither None nor a number above 0.
    """
    if timeout_s is None or timeout_s == math.inf:
        return None
    if not is_above_0(timeout_s):
        raise InvalidRequest(f"timeout_s must be seconds above 0, or None for no limit, not {timeout_s!r}")
    return min(float(timeout_s), LONGEST_S)


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Time limit of an exchange: `limit_s` after its start, at `end_s` on the monotonic clock; both None for no limit."""

    limit_s: float | None
    end_s: float | None

    @classmethod
    def after(cls, limit_s: float | None) -> Deadline:
        return cls(limit_s=limit_s, end_s=None if limit_s is None else time.monotonic() + limit_s)

    def remaining_s(self, *, method: str, address: str) -> float | None:
        """Seconds left for the next call; None for no limit.
        Raises DeadlineExceeded: no time is left. grpc rounds to milliseconds and would still send the call.
        """
        if self.end_s is None:
            return None
        remaining_s = self.end_s - time.monotonic()
        if remaining_s <= 0:
            raise deadline_exceeded(method=method, address=address, limit_s=self.limit_s)
        return remaining_s

    def allows(self, pause_s: float) -> bool:
        """Return whether the deadline is later than the end of a pause of `pause_s` seconds."""
        return self.end_s is None or time.monotonic() + pause_s < self.end_s


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Rules for repeating a failed call, always within its deadline.

    A call is repeated only where that is safe: when the server was not reached or refused the call before it started to
    process it; when the server is overloaded and gives a retry delay; and, if the call is idempotent, when the connection
    broke and it is unknown how far the server got. The pause before the n-th repetition is drawn uniformly between 0 and
    `initial_backoff_s` * `multiplier`^n, at most `max_backoff_s` (full jitter:
    https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/); the server's own delay is added. In a cluster
    another member is tried, without a pause if there is one.

    Attributes:
        retries: most repetitions of one call, 0 to 10; waiting for a server does not count.
        initial_backoff_s: bound of the first pause, in seconds.
        max_backoff_s: bound of every pause, in seconds.
        multiplier: growth of the bound from one pause to the next, 1 or more.
        wait_for_server: repeat beyond `retries`, until the deadline, while no server answers at the address: for clients that
            must survive restarts of any length.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    retries: int = 3
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    multiplier: float = 2.0
    wait_for_server: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or not 0 <= self.retries <= MAX_RETRIES:
            raise InvalidRequest(f"retries must be 0 to {MAX_RETRIES}, not {self.retries!r}")
        if not 0 < self.initial_backoff_s <= self.max_backoff_s or not self.multiplier >= 1:
            raise InvalidRequest(
                "a RetryPolicy needs 0 < initial_backoff_s <= max_backoff_s and multiplier >= 1, not "
                f"{self.initial_backoff_s!r}, {self.max_backoff_s!r} and {self.multiplier!r}"
            )

    def spends(self, error: ClientError) -> int:
        """Return the number of `retries` that a repetition after this error uses up: 0 or 1."""
        return 0 if self.wait_for_server and _not_reached(error) else 1

    def pause_s(self, attempt: int, hint_s: float | None) -> float:
        """Seconds before repetition `attempt`, counted from 0."""
        bound_s = min(self.max_backoff_s, self.initial_backoff_s * self.multiplier ** min(attempt, MAX_RETRIES))
        return (hint_s or 0.0) + random.uniform(0.0, bound_s)  # noqa: S311  (spreads clients over time; nothing secret)


class RetryBudget:
    """Token bucket that keeps a client's repetitions below a tenth of its calls, so that retries cannot overload a server.

    It starts with a hundred tokens, so that all calls in flight can be repeated when a server is lost. A repetition takes one
    token, a successful call adds a tenth of one. Attempts that reach no server are not counted. Thread-safe.
    """

    def __init__(self) -> None:
        self._tokens = BUDGET_TOKENS
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def give(self) -> None:
        with self._lock:
            self._tokens = min(BUDGET_TOKENS, self._tokens + TOKENS_PER_SUCCESS)


def retried(exchange: Exchange[Answer], policy: RetryPolicy, budget: RetryBudget, deadline: Deadline) -> Exchange[Answer]:
    """Yield the exchange, with each of its calls repeated where that is safe; the exchange sees only the last
    attempt's error.
    """
    outcome: Any = None
    try:
        while True:
            step = advance(exchange, outcome)
            if isinstance(step, Pause):
                outcome = yield step
                continue
            try:
                outcome = yield from _attempts(step, policy, budget, deadline)
            except ClientError as error:
                outcome = error
    except StopIteration as finished:
        result: Answer = finished.value
        return result
    finally:
        exchange.close()


def is_safe(error: ClientError, *, idempotent: bool) -> bool:
    """Return whether the call that failed with this error may be repeated."""
    return error.repeat is Repeat.SAFE or (error.repeat is Repeat.IF_IDEMPOTENT and idempotent)


def _attempts(rpc: UnaryRpc, policy: RetryPolicy, budget: RetryBudget, deadline: Deadline) -> Exchange[object]:
    attempt, spent = 0, 0
    while True:
        try:
            answer: object = yield rpc
        except ClientError as error:
            pause_s = 0.0 if error.elsewhere else policy.pause_s(attempt, error.retry_after_s)
            spent += policy.spends(error)
            if spent > policy.retries or not is_safe(error, idempotent=rpc.idempotent) or not deadline.allows(pause_s):
                raise
            if not _not_reached(error) and not budget.take():
                raise
        else:
            budget.give()
            return answer
        yield Pause(pause_s)
        attempt += 1


def _not_reached(error: ClientError) -> bool:
    return isinstance(error, ServerUnavailable) and error.repeat is Repeat.SAFE and error.retry_after_s is None
