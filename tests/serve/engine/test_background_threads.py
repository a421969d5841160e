"""Worker threads, and what keeps long work on them from delaying requests."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import onnxruntime as ort
import pytest

from halfserve.serve.engine.background_threads import PAUSE_S, Worker, pause, pausing, sched_batch
from tests.models import save_mlp


def test_jobs_run_in_order_on_one_other_thread() -> None:
    ran: list[tuple[int, str]] = []
    done = threading.Event()
    worker = Worker("tester")
    for number in range(100):
        worker.submit(lambda n: ran.append((n, threading.current_thread().name)), number)
    worker.submit(done.set)
    assert done.wait(60)
    assert ran == [(number, "tester") for number in range(100)]
    worker.stop()


def test_stop_ends_the_thread_after_its_jobs() -> None:
    seen: list[threading.Thread] = []
    release = threading.Event()
    worker = Worker("stopping")
    worker.submit(release.wait)
    worker.submit(lambda: seen.append(threading.current_thread()))
    worker.stop()
    release.set()
    for thread in threading.enumerate():
        if thread.name == "stopping":
            thread.join(60)
    assert [thread.is_alive() for thread in seen] == [False]


def test_a_job_that_never_returns_does_not_keep_the_process() -> None:
    program = (
        "import threading; from halfserve.serve.engine.background_threads import Worker\n"
        "started = threading.Event()\n"
        "worker = Worker('stuck')\n"
        "worker.submit(lambda: (started.set(), threading.Event().wait()))\n"
        "started.wait(); print('leaving')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "leaving\n"


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, float]]:
    seen: list[tuple[threading.Thread, float]] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: seen.append((threading.current_thread(), seconds)))
    return seen


def test_work_pauses_only_within_pausing(rests: list[tuple[threading.Thread, float]]) -> None:
    pause()
    assert rests == []
    with pausing():
        pause()
        with pausing(pauses=False):
            pause()
        pause()
    pause()
    assert [seconds for _, seconds in rests] == [PAUSE_S, PAUSE_S]


def test_scheduling_is_reset_after_an_error(rests: list[tuple[threading.Thread, float]]) -> None:
    with pytest.raises(KeyError), pausing():
        raise KeyError
    pause()
    assert rests == []


def test_other_threads_do_not_pause(rests: list[tuple[threading.Thread, float]]) -> None:
    with pausing():
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join()
        pause()
    assert [who for who, _ in rests] == [threading.current_thread()]


if sys.platform != "linux":
    pytest.skip("threads have scheduling policies on Linux", allow_module_level=True)


def policies() -> dict[int, int]:
    """Of this process's threads, by their numbers."""
    found: dict[int, int] = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of another test has ended
            found[int(thread.name)] = os.sched_getscheduler(int(thread.name))
    return found


def test_the_thread_gives_way_within_and_no_longer() -> None:
    with sched_batch():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_the_interval_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), sched_batch():
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_threads_started_within_are_as_others_afterwards() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    try:
        with sched_batch():
            thread.start()
        assert thread.native_id is not None
        assert os.sched_getscheduler(thread.native_id) == os.SCHED_OTHER
    finally:
        go_on.set()
        thread.join()


def test_a_runtimes_own_threads_are_as_others(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    before = policies()
    with sched_batch():
        session = ort.InferenceSession(save_mlp(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    added = policies().keys() - before.keys()
    assert len(added) >= 2
    assert {policies()[thread] for thread in added} == {os.SCHED_OTHER}
    del session


def test_threads_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), list[int]()
    threads = [threading.Thread(target=go_on.wait) for _ in range(20)]
    ask = os.sched_getscheduler

    def noted(thread: int) -> int:
        asked.append(thread)
        return ask(thread)

    monkeypatch.setattr(os, "sched_getscheduler", noted)
    try:
        for thread in threads[:-1]:
            thread.start()
        with sched_batch():
            pass
        with sched_batch():
            asked.clear()
            threads[-1].start()
        assert {thread.native_id for thread in threads} & set(asked) == {threads[-1].native_id}
        assert ask(threads[-1].native_id or 0) == os.SCHED_OTHER
    finally:
        go_on.set()
        for thread in threads:
            thread.join()


def test_scheduling_is_reset_without_free_file_descriptors() -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with sched_batch():
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_process_started_within_gives_way_for_good() -> None:
    with sched_batch():
        asking = [sys.executable, "-S", "-c", "import os; print(os.sched_getscheduler(0))"]
        answer = subprocess.run(asking, capture_output=True, check=True, text=True).stdout
    assert int(answer) == os.SCHED_BATCH


def test_another_policy_is_left_alone() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # as chrt --batch does
    try:
        with sched_batch():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_a_forbidden_scheduling_change_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with sched_batch():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
