from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from serve.benchmark.load.start import undisturbed

IS_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


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


def test_in_another_thread_nothing_is_torn() -> None:
    blocked = []

    def start() -> None:
        with undisturbed():
            blocked.append(is_blocked_in_a_process())

    elsewhere = threading.Thread(target=start)
    elsewhere.start()
    elsewhere.join()
    assert blocked == [True]
