"""Pauses in long work, so that it does not come over requests all at once.

Loading a model takes some milliseconds of a core here and there, and a request that meets a few of them in a row is a late one.
Work says where it could rest; whether it does is decided by who has it done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PAUSE_S = 0.002  # for the loop to catch up with what it has put off

_PAUSES = ContextVar("pauses", default=False)


@contextmanager
def pausing(*, pauses: bool = True) -> Iterator[None]:
    """Within, `pause` does so on the calling thread."""
    token = _PAUSES.set(pauses)
    try:
        yield
    finally:
        _PAUSES.reset(token)


def pause() -> None:
    """Rest for PAUSE_S within `pausing`; nothing elsewhere. Call it between pieces of work, with no lock held."""
    if _PAUSES.get():
        time.sleep(PAUSE_S)
