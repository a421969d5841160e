from __future__ import annotations

import subprocess
import sys
import threading

from serve.engine.worker import Worker


def test_jobs_run_in_order_on_one_other_thread() -> None:
    ran: list[tuple[int, str]] = []
    done = threading.Event()
    worker = Worker("tester")
    for number in range(100):
        worker.submit(lambda n: ran.append((n, threading.current_thread().name)), number)
    worker.submit(done.set)
    assert done.wait(20)
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
            thread.join(20)
    assert [thread.is_alive() for thread in seen] == [False]


def test_a_job_that_never_returns_does_not_keep_the_process() -> None:
    program = (
        "import threading; from serve.engine.worker import Worker\n"
        "started = threading.Event()\n"
        "worker = Worker('stuck')\n"
        "worker.submit(lambda: (started.set(), threading.Event().wait()))\n"
        "started.wait(); print('leaving')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "leaving\n"
