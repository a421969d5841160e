"""Load processes share a load; signals do not interrupt their start."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest

from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.load.load_generator import LoadGenerator, OnWindow, _shares, undisturbed
from halfserve.serve.benchmark.load.spec import INTERRUPTED, LoadEndpoint, LoadSpec, LoadStatistics
from tests.serve.benchmark.load.test_driver import UNARY, message, place_of
from tests.serve.running_server import RunningServer

IS_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def target(server: RunningServer) -> LoadEndpoint:
    host, port = place_of(server)
    return LoadEndpoint(host=host, port=port, path=UNARY)


def test_processes_share_an_order_and_take_the_next(server: RunningServer) -> None:
    with LoadGenerator(target(server), [message(), message(2, version="77")], processes=2) as generator:
        shared = generator.run(LoadSpec(concurrency=4, requests=20))
        alone = generator.run(LoadSpec(concurrency=1, requests=3))
        stopped = generator.run(LoadSpec(concurrency=2, window_s=0.02), lambda tally: not tally.latency.total)
        interrupted = generator.run(LoadSpec(concurrency=2, window_s=0.02), _pressing_ctrl_c_once())
    assert (shared.tally.latency.total, shared.tally.errors) == (10, Counter(NOT_FOUND=10))
    assert (alone.tally.latency.total, alone.tally.failed, alone.ended_early) == (2, 1, None)
    assert stopped.windows[0].sent > 0
    assert stopped.ended_early is None
    assert interrupted.ended_early == INTERRUPTED
    assert interrupted.tally.sent > 0


def _pressing_ctrl_c_once() -> OnWindow:
    pressed: list[LoadStatistics] = []

    def on_window(tally: LoadStatistics) -> bool:
        pressed.append(tally)
        if len(pressed) == 1:
            raise KeyboardInterrupt
        return True

    return on_window


def test_a_process_that_died_is_an_error_and_no_hang() -> None:
    with LoadGenerator(LoadEndpoint(host="127.0.0.1", port=1, path=UNARY), [b""]) as generator:
        generator._processes[0].kill()
        generator._processes[0].join()
        with pytest.raises(BenchmarkError, match="a process of the load generator has died"):
            generator.run(LoadSpec(concurrency=1, requests=1))
        generator.close()
        assert generator._processes == []


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_shares_add_up_to_the_order(processes: int) -> None:
    closed = [share for share in _shares(LoadSpec(concurrency=5, requests=11, connections=4), processes) if share]
    assert len(closed) == min(processes, 5)
    assert sum(share.concurrency or 0 for share in closed) == 5
    assert sum(share.requests or 0 for share in closed) == 11
    assert [share.share for share in closed] == [(index, len(closed)) for index in range(len(closed))]
    opened = [share for share in _shares(LoadSpec(rate=100, requests=11), processes) if share]
    assert len(opened) == processes
    assert sum(share.requests or 0 for share in opened) == 11
    assert {share.rate for share in opened} == {100}


def is_blocked_in_a_process() -> bool:
    return subprocess.run([sys.executable, "-c", IS_BLOCKED], capture_output=True, text=True, check=True).stdout == "True\n"


def test_ctrl_c_waits_until_processes_are_started_and_does_not_reach_them() -> None:
    blocked = []

    def start() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            elsewhere = threading.Thread(target=signal.raise_signal, args=(signal.SIGINT,))
            elsewhere.start()
            elsewhere.join()
            blocked.append(is_blocked_in_a_process())

    with pytest.raises(KeyboardInterrupt):
        start()
    assert blocked == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not is_blocked_in_a_process()


def test_another_thread_may_start_processes() -> None:
    blocked = []

    def start() -> None:
        with undisturbed():
            blocked.append(is_blocked_in_a_process())

    elsewhere = threading.Thread(target=start)
    elsewhere.start()
    elsewhere.join()
    assert blocked == [True]
