from __future__ import annotations

from collections import Counter

import pytest

from serve.benchmark.load.order import Tally
from serve.benchmark.load.recorder import Recorder


def test_a_process_is_busy_for_what_it_did_not_wait_of_each_window() -> None:
    recorder = Recorder(1, 1_000)
    recorder.idle_ns += 300
    first, second = recorder.window(2_000), recorder.window(3_000)
    assert first.busy == pytest.approx(0.7)
    assert second.busy == 1.0
    assert (first.seconds, second.seconds) == (1e-6, 1e-6)


def test_windows_are_as_busy_as_their_time_says_and_processes_as_the_busiest() -> None:
    long, short = Tally(seconds=3.0, busy=0.2, sent=1), Tally(seconds=1.0, busy=1.0, sent=2, errors=Counter(UNKNOWN=1))
    after, beside = long.then([short]), long.beside([short])
    assert after.busy == pytest.approx(0.4)
    assert (after.seconds, after.sent) == (4.0, 3)
    assert (beside.seconds, beside.busy, beside.sent, beside.failed) == (3.0, 1.0, 3, 1)
