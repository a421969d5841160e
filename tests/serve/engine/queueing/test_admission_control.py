"""Requests that could not be answered in time are refused, on a virtual clock and through the batcher."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.engine.errors import DeadlineExceededError, OverloadedError, QueueFullError
from halfserve.serve.engine.model_statistics import BatchTimes, Statistics
from halfserve.serve.engine.queueing.admission_control import AdmissionControl, full_error
from halfserve.serve.engine.queueing.batch_queue import BatchQueue
from halfserve.serve.engine.queueing.pace import CONFIDENT, BatchLimits, Pace
from halfserve.serve.engine.queueing.waiting_requests import FullError
from halfserve.serve.engine.requests import InferRequest
from tests.serve.engine.fakes import HeldBackend
from tests.serve.engine.scene import Answers, hold_first
from tests.serve.engine.simulation import Client, Simulation, goodput, linear, percentile, poisson

BATCH_S = 0.1


def admission(instances: int) -> AdmissionControl:
    """Of a model whose batches are known to take BATCH_S."""
    limits = BatchLimits(max_rows=4)
    queue = BatchQueue(limits)
    queue.pace = Pace(limits)
    for _ in range(CONFIDENT):
        queue.pace.observe("a", 4, BATCH_S)
    return AdmissionControl(queue, queue.pace, instances)


@pytest.mark.parametrize(
    ("instances", "begun", "free"),
    [
        (1, [], 0.05),
        (1, [0.0], 0.1),
        (1, [0.0, 0.1], 0.2),  # the second stands behind the first
        (2, [0.0], 0.05),
        (2, [0.0, 0.02], 0.1),
        (2, [0.0, 0.02, 0.1], 0.12),
        (2, [0.0, 0.02, 0.1, 0.12], 0.2),
    ],
)
def test_an_instance_is_free_after_its_last_batch(instances: int, begun: list[float], free: float) -> None:
    shed = admission(instances)
    for at in begun:
        shed.started("a", 4, at)
    assert shed.free_s(0.05) == pytest.approx(free)


@pytest.mark.parametrize(("asks_every_s", "is_taken"), [(0.5, False), (60.0, True)], ids=["hangs", "stood still"])
def test_a_batch_is_overdue_only_while_others_come(asks_every_s: float, *, is_taken: bool) -> None:
    shed = admission(1)
    shed.started("a", 4, 100.0)
    now, refused = 100.0, False
    while now < 160.0:  # all have ten seconds
        now += asks_every_s
        arrived_ns = int(now * 1e9)
        refused = shed.admit(InferRequest({}, (), 1, "a", now + 10, print, arrived_ns=arrived_ns), now) is not None
    assert refused is not is_taken


def test_a_full_queues_retry_delay_is_the_time_to_empty_it() -> None:
    statistics = Statistics()
    assert full_error(FullError("6 requests wait"), 6, statistics).retry_after_s == 0.001, "nothing is known yet"
    for _ in range(3):
        start = time.monotonic_ns()
        times = BatchTimes(started=start, assembled=start, computed=start + 2 * 10**9, split=start + 2 * 10**9)
        statistics.batch_done(times, [start], rows=4)
    assert full_error(FullError("6 requests wait"), 6, statistics).retry_after_s == pytest.approx(6 * 2 / 4)


FIXED, PER_ROW, MAX_ROWS = 0.004, 0.0005, 16
PEAK = MAX_ROWS / (FIXED + PER_ROW * MAX_ROWS)  # requests a second
SECONDS, SETTLED = 3.0, 1.0


@pytest.mark.parametrize(
    ("within", "load", "instances"),
    [
        (0.04, 5.0, 1),
        (0.1, 2.0, 2),
        *(pytest.param(within, 2.0, 1, marks=pytest.mark.long) for within in (0.04, 0.1, 0.4)),
    ],
)
def test_under_overload_as_much_is_answered_in_time_as_ever(within: float, load: float, instances: int) -> None:
    simulation = Simulation(BatchLimits(max_rows=MAX_ROWS), linear(FIXED, PER_ROW, noise=0.1), instances=instances)
    peak = PEAK * instances
    outcomes = simulation.run(poisson(peak * load, SECONDS, within=within))
    assert goodput(outcomes, SETTLED) >= 0.95 * peak
    took = [o.took for o in outcomes if o.kind == "answered" and o.client.at >= SETTLED]
    assert percentile(took, 0.99) <= within


def test_answers_leave_time_for_the_way_back() -> None:
    # The server counts from when a request is there: what the network takes, both ways, it does not see.
    within, on_the_way = 0.2, 0.03
    outcomes = Simulation(BatchLimits(max_rows=MAX_ROWS), linear(FIXED, PER_ROW, noise=0.1)).run(
        poisson(PEAK * 2, SECONDS, within=within)
    )
    in_time = [o for o in outcomes if o.kind == "answered" and o.client.at >= SETTLED and o.took + on_the_way <= within]
    assert len(in_time) / (SECONDS - SETTLED) >= 0.95 * PEAK


def test_without_foresight_overload_ends_all_good_work() -> None:
    simulation = Simulation(BatchLimits(max_rows=MAX_ROWS), linear(FIXED, PER_ROW, noise=0.1), foresees=False)
    outcomes = simulation.run(poisson(PEAK * 2, SECONDS, within=0.1))
    assert goodput(outcomes, SETTLED) < 0.1 * PEAK


def test_a_target_bounds_what_clients_without_deadlines_wait() -> None:
    limits = BatchLimits(max_rows=MAX_ROWS, latency_target_s=0.05)
    outcomes = Simulation(limits, linear(FIXED, PER_ROW, noise=0.1)).run(poisson(PEAK * 2, SECONDS))
    took = [o.took for o in outcomes if o.kind == "answered" and o.client.at >= SETTLED]
    assert percentile(took, 0.99) <= 0.05
    assert sum(t <= 0.05 for t in took) / (SECONDS - SETTLED) >= 0.95 * PEAK
    refused = [o.error for o in outcomes if o.kind == "refused"]
    assert {type(error) for error in refused} == {OverloadedError}
    assert all(isinstance(e, OverloadedError) and 0 < e.retry_after_s < 1 for e in refused)
    assert "too long to answer within its target of 50 ms; retry with back-off" in str(refused[0])


def test_batches_stay_small_enough_for_the_target() -> None:
    limits = BatchLimits(max_rows=256, latency_target_s=0.05)  # 256 rows take 132 ms
    simulation = Simulation(limits, linear(FIXED, PER_ROW))
    simulation.run(poisson(1000, SECONDS))
    rows = [rows for start, rows in simulation.batches if start >= SETTLED]
    assert max(rows) <= (0.05 / 2 - FIXED) / PER_ROW


def test_below_the_peak_nearly_nothing_is_refused() -> None:
    simulation = Simulation(BatchLimits(max_rows=MAX_ROWS), linear(FIXED, PER_ROW, noise=0.1))
    outcomes = simulation.run(poisson(PEAK * 0.8, SECONDS, within=0.1))
    assert sum(o.is_good for o in outcomes) >= 0.999 * len(outcomes)


def test_a_model_that_becomes_slower_is_learned_again() -> None:
    slow = linear(FIXED, PER_ROW, noise=0.1)
    cost = lambda rows, now: slow(rows, now) * (4 if now >= 2.0 else 1)  # noqa: E731  (one line says it)
    outcomes = Simulation(BatchLimits(max_rows=MAX_ROWS), cost).run(poisson(PEAK, 8.0, within=0.2))
    assert goodput(outcomes, 5.0) >= 0.9 * PEAK / 4


def test_a_model_that_becomes_faster_is_learned_again() -> None:
    # For a while every batch takes longer than any client waits: the model must not be given up for ever.
    usual = linear(FIXED, PER_ROW, noise=0.1)
    cost = lambda rows, now: usual(rows, now) * (20 if now < 3.0 else 1)  # noqa: E731  (one line says it)
    outcomes = Simulation(BatchLimits(max_rows=MAX_ROWS), cost).run(poisson(PEAK / 2, 10.0, within=0.06))
    assert goodput(outcomes, 7.0) >= 0.95 * PEAK / 2


def test_a_deadline_that_no_empty_server_could_meet_says_so() -> None:
    warm = [Client(at=0.1 * n, within=1.0) for n in range(30)]
    hopeless = [Client(at=5.0, within=1.0), Client(at=5.001, within=0.002)]
    outcome = Simulation(BatchLimits(max_rows=MAX_ROWS), linear(FIXED, PER_ROW)).run(warm + hopeless)[-1]
    assert outcome.kind == "refused"
    assert isinstance(outcome.error, DeadlineExceededError)
    assert "the deadline leaves 2.0 ms, less than the model takes for this request alone" in str(outcome.error)


def test_a_short_queue_timeout_is_met_by_a_free_instance() -> None:
    # Batches of 60 ms on two instances, and 40 ms in the queue: of two clients none ever has to wait.
    clients = [Client(at=0.03 * n, waits=0.04) for n in range(100)]
    warm = [Client(at=0.001 * n, within=9.0) for n in range(30)]  # what batches cost is known
    simulation = Simulation(BatchLimits(max_rows=1), linear(0.06, 0.0), instances=2)
    outcomes = simulation.run(warm + [replace(client, at=3.0 + client.at) for client in clients])
    assert {o.kind for o in outcomes[len(warm) :]} == {"answered"}


def test_waiting_pays_where_batches_are_dear_and_requests_come_fast() -> None:
    # 20 ms a batch whatever its size, and bursts of 8 in 4 ms every 60 ms: one batch a burst beats two.
    bursts = [Client(at=0.06 * burst + 0.0005 * n) for burst in range(60) for n in range(8)]
    took = {}
    for target in (None, 0.1):
        limits = BatchLimits(max_rows=64, latency_target_s=target)
        outcomes = Simulation(limits, linear(0.02, 0.00001)).run(bursts)
        settled = [o.took for o in outcomes if o.client.at >= 1.8]
        took[target] = sum(settled) / len(settled)
    assert took[0.1] < 0.8 * took[None]


def test_requests_do_not_wait_for_arrivals_that_stopped() -> None:
    lonely = [Client(at=0.1 * n) for n in range(60)]
    outcomes = Simulation(BatchLimits(max_rows=64, latency_target_s=0.09), linear(0.02, 0.00001)).run(lonely)
    assert max(o.took for o in outcomes) <= 0.0201


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from("ab")), min_size=20, max_size=80),
    st.sampled_from([None, 0.03]),
    st.sampled_from([0.0, 0.01]),
)
def test_with_a_free_instance_no_request_waits_beyond_delay_or_target(
    come: list[tuple[int, str]], target: float | None, delay: float
) -> None:
    limits = BatchLimits(max_rows=8, max_delay_s=delay, latency_target_s=target)
    simulation = Simulation(limits, linear(0.005, PER_ROW), instances=100)
    outcomes = simulation.run([Client(at=at / 10_000, bucket=bucket) for at, bucket in sorted(come)])
    compute = 0.005 + 8 * PER_ROW
    bound = min(target or 1.0, delay + compute if delay or not target else 1.0)
    assert all(o.kind == "answered" and o.took <= bound + 1e-5 for o in outcomes)


clients = st.builds(
    Client,
    at=st.integers(0, 400).map(lambda n: n / 1000),
    within=st.one_of(st.none(), st.integers(1, 60).map(lambda n: n / 1000)),
    waits=st.one_of(st.none(), st.integers(1, 30).map(lambda n: n / 1000)),
    rows=st.integers(1, 8),
    bucket=st.sampled_from("ab"),
    priority=st.integers(0, 1),
    cancels_after=st.one_of(st.none(), st.integers(0, 30).map(lambda n: n / 1000)),
)


@settings(max_examples=60)
@given(
    st.lists(clients, max_size=80),
    st.sampled_from([None, 0.01, 0.05]),
    st.sampled_from([0.0, 0.02]),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_request_gets_one_answer_within_its_bound(
    come: list[Client], target: float | None, delay: float, instances: int, foresees: bool
) -> None:
    limits = BatchLimits(max_rows=8, max_delay_s=delay, levels=2, latency_target_s=target, max_waiting=30)
    come = sorted(come, key=lambda client: client.at)
    simulation = Simulation(limits, linear(FIXED, PER_ROW, noise=0.3), instances=instances, foresees=foresees)
    outcomes = simulation.run(come)
    assert [o.client for o in outcomes] == come, "no request is lost"
    assert all(len(o.ends) == 1 for o in outcomes), "each is answered once"
    assert all(1 <= rows <= 8 for _, rows in simulation.batches)
    bounded = [o for o in outcomes if o.client.within is not None or target is not None]
    assert all(o in bounded for o in outcomes if o.kind == "refused" or (o.kind == "late" and o.client.waits is None))
    for outcome in outcomes:
        if outcome.kind == "late" and outcome not in bounded:
            assert outcome.client.waits is not None
            assert outcome.took >= outcome.client.waits - 1e-9, "nobody is dropped before his time"
    assert all(foresees or o.kind != "refused" for o in outcomes)
    for outcome in outcomes:
        if outcome.kind == "cancelled":
            assert outcome.took == pytest.approx(outcome.client.cancels_after)
    answered = [o for o in outcomes if o.kind == "answered"]
    for bucket, priority in {(o.client.bucket, o.client.priority) for o in answered}:
        same = [o.ends[0][1] for o in answered if (o.client.bucket, o.client.priority) == (bucket, priority)]
        assert instances > 1 or same == sorted(same), "in order of arrival"


async def test_a_full_queue_refuses_with_a_hint(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = answers.model(backend, max_waiting=2)
    await hold_first(backend, model.batcher, answers)
    model.batcher.submit(answers.request(1))
    model.batcher.submit(answers.request(2))
    with pytest.raises(QueueFullError, match="2 requests wait") as refused:
        model.batcher.submit(answers.request(3))
    assert refused.value.retry_after_s > 0
    backend.release.set()
    await answers.all(3)


async def test_requests_that_wait_in_vain_make_room_in_a_full_queue(answers: Answers) -> None:
    backend = HeldBackend(held=True)
    model = answers.model(backend, max_waiting=2)
    await hold_first(backend, model.batcher, answers)
    model.batcher.submit(answers.request(1, deadline=time.monotonic() - 1))
    model.batcher.submit(answers.request(2))
    model.batcher.submit(answers.request(3))
    assert "the deadline passed while the request waited" in str(answers.error(1))
    assert model.batcher.waiting == 2
    with pytest.raises(QueueFullError):
        model.batcher.submit(answers.request(4))
    assert model.statistics.totals.failures == {"deadline_exceeded": 1, "queue_full": 1}
    backend.release.set()
    await answers.all(4)


async def test_requests_beyond_the_latency_target_are_refused_on_arrival(answers: Answers) -> None:
    backend = HeldBackend()
    model = answers.model(backend, max_rows=1, latency_target_s=30.0)
    model.batcher.submit(answers.request(0))
    await answers.all(1)
    pace, admission = model.batcher._queue.pace, model.batcher._refusals.admission
    assert pace is not None
    assert admission is not None
    for _ in range(40):  # it learns what a batch takes
        pace.observe((1,), 1, 0.001)
    backend.release.clear()
    backend.entered.clear()
    await hold_first(backend, model.batcher, answers)
    admission._plenty_waiting = 0  # a closer look at everybody, as after long batches
    (running,) = admission.running
    running.likely_end_s = time.monotonic() + 60  # as if it had just begun, and took a minute
    with pytest.raises(
        OverloadedError, match="too long to answer within its target of 30000 ms; retry with back-off"
    ) as refused:
        model.batcher.submit(answers.request(150))
    assert 25 < refused.value.retry_after_s < 35
    # Coming back would not help whoever has set a deadline of its own: it comes closer as fast as the queue shortens.
    with pytest.raises(DeadlineExceededError, match="too long to answer before the deadline, [45]000 ms away; the request"):
        model.batcher.submit(answers.request(151, deadline=time.monotonic() + 5))
    assert model.statistics.totals.failures == {"overloaded": 1, "deadline_exceeded": 1}
    running.likely_end_s = time.monotonic()
    model.batcher.submit(answers.request(152, leave_by=time.monotonic() + 60))
    backend.release.set()
    await answers.all(3)
    assert answers.value(152) == 153


SLOW_FIXED, SLOW_PER_ROW = 0.02, 0.001
SLOW_PEAK = MAX_ROWS / (SLOW_FIXED + SLOW_PER_ROW * MAX_ROWS)  # requests a second, of one instance
TARGET_S, STILL_S, AFTER_S = 0.2, 60.0, 3.0


@pytest.mark.parametrize(("instances", "at"), [(1, 1.0), (8, 6.0)], ids=["early", "everywhere"])
def test_a_stopped_minute_makes_batches_no_smaller(instances: int, at: float) -> None:
    usual = linear(SLOW_FIXED, SLOW_PER_ROW)

    def cost(rows: int, now: float) -> float:
        takes = usual(rows, now)
        return takes + STILL_S if now < at <= now + takes else takes

    clients = poisson(instances * SLOW_PEAK * 0.6, at + AFTER_S)
    moved = [client if client.at < at else replace(client, at=client.at + STILL_S) for client in clients]
    limits = BatchLimits(max_rows=MAX_ROWS, latency_target_s=TARGET_S)
    outcomes = Simulation(limits, cost, instances=instances).run(moved)
    after = [outcome.kind for outcome in outcomes if outcome.client.at >= at + STILL_S]
    assert len(after) > AFTER_S * SLOW_PEAK / 2
    assert set(after) == {"answered"}
