"""Deadlines and retries of exchanges, driven by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.errors import ClientError, DeadlineExceeded, InvalidRequest, Overloaded, Repeat, ServerUnavailable
from halfserve.serve.client.exchange import (
    LONGEST_S,
    Deadline,
    Exchange,
    Pause,
    RetryBudget,
    RetryPolicy,
    UnaryRpc,
    checked_timeout,
    is_safe,
    retried,
)
from tests.serve.client.driving import drive

NEVER = Deadline.after(None)
REFUSED = Overloaded("full", retry_after_s=0.5, repeat=Repeat.SAFE)
LOST = ServerUnavailable("lost", repeat=Repeat.IF_IDEMPOTENT)


def test_a_call_is_not_sent_when_nothing_is_left() -> None:
    # Less than grpc's own resolution, and than the time that the next line takes.
    deadline = Deadline.after(1e-9)
    with pytest.raises(DeadlineExceeded, match="h:1 did not answer ModelInfer within 1e-09 s"):
        deadline.remaining_s(method="ModelInfer", address="h:1")


@pytest.mark.parametrize(("given", "used"), [(math.inf, None), (1e12, LONGEST_S), (10**30, LONGEST_S), (np.float32(0.5), 0.5)])
def test_very_long_timeouts_are_accepted(given: float, used: float | None) -> None:
    assert checked_timeout(given) == used


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, -math.inf, "5", True, [1]])
def test_a_timeout_must_be_above_zero(timeout_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s must be seconds above 0, or None for no limit"):
        checked_timeout(timeout_s)


def ask(*, idempotent: bool = True) -> Exchange[str]:
    request = pb.ModelInferRequest()
    answer = yield UnaryRpc(request, idempotent=idempotent)
    return str(answer)


def run(exchange: Exchange[Any], answers: list[Any]) -> tuple[int, list[float], Any]:
    """Return the number of calls, the pauses between them, and the result."""
    pauses: list[float] = []
    called, result = drive(exchange, answers, pauses)
    return len(called), pauses, result


def test_asks_again_after_a_pause_and_the_servers_hint() -> None:
    calls, pauses, result = run(retried(ask(), RetryPolicy(retries=2), RetryBudget(), NEVER), [REFUSED, LOST, "yes"])
    assert (calls, result) == (3, "yes")
    assert 0.5 <= pauses[0] <= 0.6
    assert 0 <= pauses[1] <= 0.2


@pytest.mark.parametrize(
    ("repeat", "idempotent", "expected"),
    [
        (Repeat.SAFE, True, True),
        (Repeat.SAFE, False, True),
        (Repeat.IF_IDEMPOTENT, True, True),
        (Repeat.IF_IDEMPOTENT, False, False),
        (Repeat.NO, True, False),
    ],
)
def test_only_safe_calls_are_repeated(repeat: Repeat, idempotent: bool, expected: bool) -> None:
    error = ClientError("e", repeat=repeat)
    assert is_safe(error, idempotent=idempotent) is expected
    exchange = retried(ask(idempotent=idempotent), RetryPolicy(retries=1), RetryBudget(), NEVER)
    if expected:
        assert run(exchange, [error, "yes"])[0] == 2
    else:
        with pytest.raises(ClientError, match="^e$"):
            run(exchange, [error, "yes"])


def test_does_not_wait_past_the_deadline() -> None:
    hint = Overloaded("full", retry_after_s=60, repeat=Repeat.SAFE)
    with pytest.raises(Overloaded, match="full"):
        run(retried(ask(), RetryPolicy(retries=3), RetryBudget(), Deadline.after(30)), [hint, "too late"])


def test_a_success_gives_back_a_tenth_of_a_repetition_up_to_a_hundred() -> None:
    budget = RetryBudget()
    for _ in range(20):
        budget.give()
    assert [budget.take() for _ in range(101)] == [True] * 100 + [False]
    for _ in range(15):
        budget.give()
    assert [budget.take(), budget.take()] == [True, False]


def test_the_budget_bounds_the_repetitions_of_a_client() -> None:
    budget, policy = RetryBudget(), RetryPolicy(retries=10)
    for _ in range(10):
        with pytest.raises(Overloaded):
            run(retried(ask(), policy, budget, NEVER), [REFUSED] * 11)
    with pytest.raises(Overloaded):
        run(retried(ask(), policy, budget, NEVER), [REFUSED, "never asked"])
    for _ in range(11):
        run(retried(ask(), policy, budget, NEVER), ["yes"])
    assert run(retried(ask(), policy, budget, NEVER), [REFUSED, "yes"])[0] == 2


def test_attempts_that_reach_no_server_cost_no_budget() -> None:
    budget, gone = RetryBudget(), ServerUnavailable("gone", repeat=Repeat.SAFE)
    while budget.take():
        pass
    assert run(retried(ask(), RetryPolicy(retries=3), budget, NEVER), [gone, gone, gone, "yes"])[0] == 4


def test_waits_for_a_server_as_long_as_there_is_time() -> None:
    gone, policy = ServerUnavailable("gone", repeat=Repeat.SAFE), RetryPolicy(retries=0, wait_for_server=True)
    assert run(retried(ask(), policy, RetryBudget(), NEVER), [gone] * 50 + ["yes"])[0] == 51
    with pytest.raises(ServerUnavailable, match="gone"):
        run(retried(ask(), policy, RetryBudget(), Deadline.after(1e-6)), [gone, "too late"])
    with pytest.raises(ServerUnavailable, match="lost"):
        run(retried(ask(), policy, RetryBudget(), NEVER), [LOST, "never asked"])


@pytest.mark.parametrize("error", [REFUSED, LOST])
def test_waiting_for_a_server_leaves_the_retries(error: ClientError) -> None:
    gone, policy = ServerUnavailable("gone", repeat=Repeat.SAFE), RetryPolicy(retries=2, wait_for_server=True)
    assert run(retried(ask(), policy, RetryBudget(), NEVER), [*[gone] * 5, error, gone, error, "yes"])[0] == 9
    with pytest.raises(type(error)):
        run(retried(ask(), policy, RetryBudget(), NEVER), [*[gone] * 5, *[error] * 3, "too late"])


def test_pauses_of_an_exchange_stay() -> None:
    def waiting() -> Exchange[int]:
        yield Pause(7)
        return 1

    assert run(retried(waiting(), RetryPolicy(), RetryBudget(), NEVER), []) == (0, [7], 1)


@given(st.integers(0, 10), st.one_of(st.none(), st.floats(0, 100)))
def test_a_pause_keeps_its_bounds(attempt: int, hint_s: float | None) -> None:
    policy = RetryPolicy(initial_backoff_s=0.1, max_backoff_s=1, multiplier=3)
    pause_s = policy.pause_s(attempt, hint_s) - (hint_s or 0)
    assert -1e-9 <= pause_s <= min(1, 0.1 * 3**attempt) + 1e-9


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"retries": -1}, "retries must be 0 to 10, not -1"),
        ({"retries": True}, "retries must be 0 to 10, not True"),
        ({"initial_backoff_s": 0}, "needs 0 < initial_backoff_s <= max_backoff_s"),
        ({"initial_backoff_s": 3}, "needs 0 < initial_backoff_s <= max_backoff_s"),
        ({"multiplier": 0.5}, "and multiplier >= 1"),
    ],
)
def test_invalid_retry_policies_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        RetryPolicy(**values)
