from __future__ import annotations

import signal
import time

import pytest

from serve.benchmark.termination import SAME_S, sigterm_as_interrupt


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_twice_at_once_interrupts_once(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, end: type[BaseException]
) -> None:
    now_s, handler = 5.0, signal.getsignal(number)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def measured() -> None:
        nonlocal now_s
        with sigterm_as_interrupt():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            signal.raise_signal(number)  # as `timeout` does
            now_s += SAME_S
            signal.raise_signal(number)  # somebody does not want to wait

    with pytest.raises(end):
        measured()
    assert now_s == 5.0 + SAME_S
    assert signal.getsignal(number) is handler


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
