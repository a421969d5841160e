"""Python's garbage collector, in a process that answers requests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# A request in flight is some ten objects that the collector knows of. From Python's 700 new ones on it would look through those
# of 64 requests at each batch, and find nothing, as none of them go in circles: that is 7 % of the server's time for a request.
# tests/serve/transports/nghttp2/test_server.py holds that, also of requests that are refused or given up.
NEW_OBJECTS = 10_000


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Have it pass over what is there already, which stays as long as the server, and look for circles more seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
