"""Shadow runs: sampling, drift, degradation."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import (
    BOUNDS,
    LEAST_RUNS,
    WINDOW,
    Degradation,
    Distance,
    GuardCounters,
    OutputTally,
    Tally,
    compare,
)
from halfserve.serve.engine.precision_guard.twin import MAX_WAITING, Fp32Twin, Shadow
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array, Tensors
from tests.serve.engine.fakes import FakeBackend

CLASSES_ON_AXIS_1 = np.zeros((2, 3, 4, 5))
CLASSES_ON_AXIS_1[:, 1] = 1
NON_FINITE = [math.nan, math.inf, -math.inf, 2.0]


@pytest.mark.parametrize(
    ("answer", "reference", "distance"),
    [
        ([[1, 2], [4, -8]], [[1, 2], [4, -8]], Distance(0, 8, 2, 2)),
        ([[1, 3], [5, 4]], [[2, 1], [5, 3.5]], Distance(2, 5, 2, 1)),
        ([[1, 1]], [[1, 1 + 2**-13]], Distance(2**-13, 1 + 2**-13, 1, 1)),
        (np.ones(5), np.ones(5), Distance(0, 1, 0, 0)),
        (np.ones((5, 1)), np.ones((5, 1)), Distance(0, 1, 0, 0)),
        (np.ones((0, 3)), np.ones((0, 3)), Distance(0, 0, 0, 0)),
        (CLASSES_ON_AXIS_1, CLASSES_ON_AXIS_1, Distance(0, 1, 40, 40)),
        ([math.nan, 1], [7, 1], Distance(math.inf, 7, 0, 0)),
        ([math.inf, 1], [7, 1], Distance(math.inf, 7, 0, 0)),
        (NON_FINITE, NON_FINITE, Distance(0, 2, 0, 0)),
        (np.negative(NON_FINITE), NON_FINITE, Distance(math.inf, 2, 0, 0)),
    ],
    ids=[
        *("equal", "largest error and choice by row", "a choice that fp16 cannot tell apart"),
        *("no row", "one class", "no element", "classes on axis 1"),
        *("NaN alone", "infinite alone", "equal and not finite", "other signs"),
    ],
)
def test_answers_are_compared_by_value_and_choice(answer: Any, reference: Any, distance: Distance) -> None:
    assert compare(np.array(answer, np.float16), np.array(reference, np.float32)) == distance


def test_integers_agree_or_not() -> None:
    distance = compare(np.array([1, 2, 3]), np.array([1, 2, 4]))
    assert (distance.error, distance.rows, distance.agreeing) == (0.0, 3, 2)


def test_bfloat16_is_a_floating_dtype() -> None:
    reference = np.array([[1.001, 3.0]], np.float32)
    distance = compare(reference.astype(ml_dtypes.bfloat16), reference)
    assert 0 < distance.error < 0.01
    assert distance.scale == 3.0


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the answer has shape \[2\], the fp32 twin's \[3\]"):
        compare(np.zeros(2), np.zeros(3))


def test_an_answer_near_zero_is_scaled_by_earlier_outputs() -> None:
    drift = OutputTally()
    ordinary = np.array([100.0], np.float32)
    assert drift.add(compare(ordinary.astype(np.float16), ordinary)) == 0.0
    small = np.array([1e-3], np.float32)
    assert drift.add(compare(np.array([2e-3], np.float16), small)) == pytest.approx(1e-5, rel=0.05)
    tiny = OutputTally()
    assert tiny.add(compare(np.array([2e-7], np.float16), np.array([1e-7], np.float32))) < 0.01


def test_the_histogram_holds_every_run_once() -> None:
    drift = OutputTally()
    reference = np.array([1.0], np.float32)
    for answer in (1.0, 1.0 + BOUNDS[9], 3.0, np.inf):
        drift.add(compare(np.array([answer]), reference))
    histogram = drift.counters().drift
    assert histogram is not None
    assert sum(histogram.counts) == 4
    assert len(histogram.counts) == len(histogram.bounds) + 1
    assert (histogram.counts[0], histogram.counts[-1]) == (1, 2)
    assert histogram.total == pytest.approx(2.0 + BOUNDS[9])


def test_few_runs_say_nothing() -> None:
    state = Degradation(0.01)
    assert not any(state.add(1.0) for _ in range(LEAST_RUNS - 1))
    assert not state.degraded
    assert state.add(1.0)
    assert state.degraded


def test_one_bad_run_in_twenty_is_bearable_and_more_are_not() -> None:
    state = Degradation(0.01)
    for run in range(WINDOW):
        assert not state.add(0.02 if run % 20 == 19 else 0.005)
    assert not state.degraded
    assert state.add(math.nan)
    assert state.degraded


def test_recovery_needs_nearly_all_runs_good() -> None:
    state = Degradation(0.01)
    changes = [state.add(1.0) for _ in range(30)]
    assert changes.count(True) == 1
    good = 0
    while state.degraded:
        state.add(0.0)
        good += 1
    # All but two of the bad runs have left the window by then.
    assert good == WINDOW - 2
    assert state.share <= 0.01


@given(st.lists(st.sampled_from([0.0, 0.01, 0.02, math.inf, math.nan]), max_size=500))
def test_a_change_is_reported_exactly_when_the_state_changes(errors: list[float]) -> None:
    state = Degradation(0.01)
    for error in errors:
        before = state.degraded
        assert state.add(error) == (state.degraded is not before)
        assert 0 <= state.share <= 1


WAIT_S = 60.0


class Doubling(FakeBackend):
    """A twin that doubles x, and can be held; signals each run."""

    def __init__(self) -> None:
        self.release = threading.Event()  # computes nothing until it is set
        self.release.set()
        self.entered = threading.Semaphore(0)  # counts the runs that began
        self.seen: list[list[float]] = []

    def run(self, inputs: Tensors) -> Tensors:
        self.entered.release()
        assert self.release.wait(WAIT_S)
        assert inputs["x"].dtype == np.float32
        if (inputs["x"] < 0).any():
            raise ValueError("negative values hurt")
        self.seen.append(inputs["x"].ravel().tolist())
        return {"y": inputs["x"] * 2}


class Scene:
    """A shadow, its counters, and batches for it."""

    def __init__(self, load: Callable[[], Backend], *, share: float = 1.0, batched: bool = True) -> None:
        self.tally = Tally("m/1", GuardPolicy.COUNT, ["y"], Degradation(0.01))
        self.shadow = Shadow(Fp32Twin(load), self.tally, rate=1.0, share=share, batched=batched)

    def sample(self, *values: float, answer: float | None = None) -> None:
        """One batch of one-row requests with these values, answered rightly unless `answer` says what all of them got."""
        requests = [InferRequest({}, ("y",), 1, None, None, lambda _: None) for _ in values]
        x = np.array(values, np.float16).reshape(-1, 1)
        y = x * np.float16(2) if answer is None else np.full_like(x, answer)
        self.shadow.sample(requests, {"x": x}, {"y": y})
        x[:] = -1  # the buffers are the next batch's now
        y[:] = -1

    def settled(self) -> GuardCounters:
        """The counters once everything that was taken is done; nothing can be sampled after."""
        worker = self.shadow._worker
        done = threading.Event()
        if worker is not None:
            worker.submit(done.set)
            assert done.wait(WAIT_S)
        return self.tally.counters()


def test_a_sample_is_compared_with_the_twins_answer() -> None:
    scene = Scene(Doubling)
    scene.sample(3.0)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped, counters.shadow_failed) == (1, 0, 0)
    drift = counters.outputs["y"].drift
    assert drift is not None
    assert (drift.counts[0], sum(drift.counts)) == (1, 1)


def test_one_request_of_a_batch_is_taken_whole() -> None:
    twin = Doubling()
    scene = Scene(lambda: twin)
    for _ in range(8):
        scene.sample(1.0, 2.0, 3.0)
        scene.settled()
    assert all(len(x) == 1 and x[0] in {1.0, 2.0, 3.0} for x in twin.seen)
    assert len(twin.seen) == 8


def test_a_model_without_a_batch_dimension_is_not_split() -> None:
    twin = Doubling()
    scene = Scene(lambda: twin, batched=False)
    request = InferRequest({}, ("y",), 1, None, None, lambda _: None)
    x: Array = np.ones((2, 3), np.float16)
    scene.shadow.sample([request], {"x": x}, {"y": x * 2})
    assert scene.settled().shadow_runs == 1
    assert twin.seen == [[1.0] * 6]


def test_samples_are_dropped_while_the_shadow_is_busy() -> None:
    twin = Doubling()
    scene = Scene(lambda: twin)
    twin.release.clear()
    scene.sample(1.0)
    assert twin.entered.acquire(timeout=WAIT_S)
    for value in range(MAX_WAITING + 2):
        scene.sample(float(value))
    twin.release.set()
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped) == (MAX_WAITING, 3)


def test_samples_are_dropped_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> Worker:
        raise RuntimeError("can't start new thread")

    scene = Scene(Doubling)
    with monkeypatch.context() as without:
        without.setattr("halfserve.serve.engine.precision_guard.twin.Worker", refused)
        for value in range(MAX_WAITING + 1):
            scene.sample(float(value))
    scene.sample(1.0)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped) == (1, MAX_WAITING + 1)


def test_after_a_run_it_rests_for_its_share_of_time() -> None:
    scene = Scene(Doubling, share=1e-9)
    scene.sample(1.0)
    scene.settled()
    scene.sample(2.0)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped) == (1, 1)


def test_samples_taken_during_a_run_are_dropped_while_resting() -> None:
    twin = Doubling()
    scene = Scene(lambda: twin, share=1e-9)
    twin.release.clear()
    scene.sample(1.0)
    assert twin.entered.acquire(timeout=WAIT_S)
    scene.sample(2.0)
    twin.release.set()
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped) == (1, 1)


def test_time_while_the_process_is_stopped_is_not_rested_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stood_s, clock = 0.0, time.monotonic

    class Stopped(Doubling):
        def run(self, inputs: Tensors) -> Tensors:
            nonlocal stood_s
            stood_s += 60.0
            return super().run(inputs)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + stood_s)
    scene = Scene(Stopped, share=0.01)
    scene.sample(1.0)
    scene.settled()
    stood_s += 60.0
    scene.sample(2.0)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_dropped) == (2, 0)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_requests_with_infinite_inputs_are_not_compared(value: float) -> None:
    scene = Scene(Doubling)
    scene.sample(value)
    assert scene.settled().shadow_runs == 0


def test_a_run_that_fails_is_counted_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(Doubling)
    for value in (-1.0, -2.0, 4.0):
        scene.sample(value)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_failed) == (1, 2)
    assert caplog.text.count("negative values hurt") == 1
    assert scene.tally.recent_events()[0].text == "a shadow run failed: ValueError: negative values hurt"


def test_a_twin_that_cannot_be_loaded_ends_it() -> None:
    def load() -> Backend:
        raise ModelLoadError("fp32/model.onnx: is not a readable ONNX file")

    scene = Scene(load)
    scene.sample(1.0)
    scene.settled()
    scene.sample(2.0)
    counters = scene.settled()
    assert (counters.shadow_runs, counters.shadow_failed, counters.shadow_dropped) == (0, 1, 0)
    assert "there are no more" in scene.tally.recent_events()[0].text


def test_a_stopped_shadow_takes_no_samples() -> None:
    scene = Scene(Doubling)
    scene.sample(1.0)
    scene.settled()
    scene.shadow.stop()
    scene.sample(2.0)
    assert scene.settled().shadow_runs == 1


def test_the_guard_of_a_model_that_is_unloaded_ends_the_thread() -> None:
    others = set(threading.enumerate())
    twin = Doubling()
    twin.release.clear()
    scene = Scene(lambda: twin)
    guard = PrecisionGuard([], scene.tally, policy=GuardPolicy.COUNT, batched=True, shadow=scene.shadow)
    scene.sample(1.0)
    (thread,) = set(threading.enumerate()) - others
    guard.stop()
    twin.release.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    scene.sample(2.0)
    assert set(threading.enumerate()) <= others, "a batch that ends later begins none anew"


def test_one_input_that_is_not_finite_says_nothing_about_precision() -> None:
    scene = Scene(Doubling)
    x = np.ones((1, 1), np.float16)
    request = InferRequest({}, ("y",), 1, None, None, lambda _: None)
    scene.shadow.sample([request], {"x": x, "z": np.full_like(x, np.nan)}, {"y": np.full_like(x, np.nan)})
    assert scene.settled().shadow_runs == 0


def test_requests_are_taken_at_the_rate_that_was_asked_for() -> None:
    shadow = Shadow(Fp32Twin(Doubling), Scene(Doubling).tally, rate=0.01, share=1.0, batched=True)
    shadow.stop()
    gaps = []
    for _ in range(1000):
        shadow.sample([], {}, {})
        gaps.append(shadow.until)
    assert 80 < sum(gaps) / len(gaps) < 120
    assert min(gaps) >= 1


def test_drift_degrades_the_model_once_and_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scene = Scene(Doubling)
    for _ in range(LEAST_RUNS + 5):
        scene.sample(8.0, answer=17.0)
        scene.settled()
    assert scene.settled().degraded
    for _ in range(WINDOW):
        scene.sample(8.0)
        scene.settled()
    assert not scene.settled().degraded
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith(
        "m/1: degraded: 100.0% of the latest shadow runs differ from the fp32 twin by more than 0.01 of the output's size "
        "(output 'y': 0.0625)"
    )
    assert lines[1].startswith("m/1: recovered: 1.0% of the latest")
    assert [event.kind for event in scene.tally.recent_events()] == ["recovered", "degraded"]
