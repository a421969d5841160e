"""What ends a measurement: SIGTERM does what Ctrl-C does, so that nothing is left behind and what was measured is shown."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED_EXIT_CODE = 143  # 128 + SIGTERM, as shells report it
SAME_S = 0.5


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGTERM, and once for a signal that comes twice. To be used in the main thread.

    `timeout` signals its child, and then the whole group, which the child is in: the second is nobody who has lost patience.

    Raises:
        SystemExit: the block was ended by SIGTERM (143).
    """
    terminated, raised_s = False, -SAME_S

    def interrupt(number: int, _: object) -> None:
        nonlocal terminated, raised_s
        now_s = time.monotonic()
        if now_s - raised_s < SAME_S:
            return
        terminated, raised_s = terminated or number == signal.SIGTERM, now_s
        raise KeyboardInterrupt

    # Who has Ctrl-C ignored (nohup, a job in the background) means it.
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(TERMINATED_EXIT_CODE)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
