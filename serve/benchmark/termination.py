"""What SIGTERM does to a measurement: what Ctrl-C does, so that nothing is left behind and what was measured is shown."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED_EXIT_CODE = 143  # 128 + SIGTERM, as shells report it


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGTERM. To be used in the main thread.

    Raises:
        SystemExit: the block was ended by SIGTERM (143).
    """
    terminated = False

    def interrupt(*_: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if terminated:
            sys.exit(TERMINATED_EXIT_CODE)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
