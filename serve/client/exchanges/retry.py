"""Asking again: when it is safe, how long to wait before, and how often in all."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

from serve.client.errors import InferenceClientError, InvalidRequest, Repeat, ServerUnavailable
from serve.client.exchanges.calls import Answer, Call, Exchange, Pause
from serve.client.exchanges.deadline import Deadline

MAX_RETRIES = 10
BUDGET_TOKENS = 100.0
TOKENS_PER_SUCCESS = 0.1


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How a call that failed is made again, always within its deadline.

    A call is repeated only where that is safe: when the server was not reached or refused the call before it began; when the
    server is overloaded and says when to come back; and, if the call is idempotent, when the connection broke and nobody knows
    how far the server got. The pause before the n-th repetition is drawn evenly between 0 and `initial_backoff_s` *
    `multiplier`^n, at most `max_backoff_s` (full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/);
    the server's own hint is waited for in addition.

    Attributes:
        retries: repetitions of one call, 0 to 10; waiting for a server takes none of them.
        initial_backoff_s: bound of the first pause, in seconds.
        max_backoff_s: bound of every pause, in seconds.
        multiplier: growth of the bound from one pause to the next, 1 or more.
        wait_for_server: go on beyond `retries`, until the deadline, while nobody answers at the address at all: for clients
            that are to outlast restarts, however long these take.

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

    def spends(self, error: InferenceClientError) -> int:
        """How many of the `retries` a repetition after this error takes: 0 or 1."""
        return 0 if self.wait_for_server and _reached_nobody(error) else 1

    def pause_s(self, attempt: int, hint_s: float | None) -> float:
        """Seconds before repetition `attempt`, counted from 0."""
        bound_s = min(self.max_backoff_s, self.initial_backoff_s * self.multiplier ** min(attempt, MAX_RETRIES))
        return (hint_s or 0.0) + random.uniform(0.0, bound_s)  # noqa: S311  (spreads clients over time; nothing secret)


class RetryBudget:
    """Keeps the repetitions of a client below a tenth of its calls, so that retries cannot keep a server overloaded.

    It starts with a hundred tokens, so that all calls under way can be made again when a server is lost. A repetition takes
    one, a call that succeeds gives a tenth of one back. Attempts that reach nobody burden no server and are not counted. Safe
    to use from many threads.
    """

    def __init__(self) -> None:
        self._tokens = BUDGET_TOKENS
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take a token; False when there is none."""
        with self._lock:
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True

    def give(self) -> None:
        """A call has succeeded."""
        with self._lock:
            self._tokens = min(BUDGET_TOKENS, self._tokens + TOKENS_PER_SUCCESS)


def retried(exchange: Exchange[Answer], policy: RetryPolicy, budget: RetryBudget, deadline: Deadline) -> Exchange[Answer]:
    """The same exchange, with each of its calls made again where that is safe.

    The error that the exchange sees is that of the last attempt.
    """
    try:
        step = next(exchange)
        while True:
            if isinstance(step, Pause):
                yield step
                step = exchange.send(None)
                continue
            try:
                answer = yield from _attempts(step, policy, budget, deadline)
            except InferenceClientError as error:
                step = exchange.throw(error)
            else:
                step = exchange.send(answer)
    except StopIteration as finished:
        result: Answer = finished.value
        return result
    finally:
        exchange.close()


def is_safe(error: InferenceClientError, *, idempotent: bool) -> bool:
    """Whether the call that failed like this may be made again."""
    return error.repeat is Repeat.SAFE or (error.repeat is Repeat.IF_IDEMPOTENT and idempotent)


def _attempts(call: Call, policy: RetryPolicy, budget: RetryBudget, deadline: Deadline) -> Exchange[object]:
    attempt, spent = 0, 0
    while True:
        try:
            answer: object = yield call
        except InferenceClientError as error:
            pause_s = policy.pause_s(attempt, error.retry_after_s)
            spent += policy.spends(error)
            if spent > policy.retries or not is_safe(error, idempotent=call.idempotent):
                raise
            if not deadline.allows(pause_s):
                raise
            if not _reached_nobody(error) and not budget.take():
                raise
        else:
            budget.give()
            return answer
        yield Pause(pause_s)
        attempt += 1


def _reached_nobody(error: InferenceClientError) -> bool:
    return isinstance(error, ServerUnavailable) and error.repeat is Repeat.SAFE and error.retry_after_s is None
