"""One process of the load generator: orders in, tallies out. It imports neither grpc nor protobuf."""

from __future__ import annotations

import gc
import signal
from collections.abc import Sequence
from typing import Any

from serve.benchmark.load.driver import Driver
from serve.benchmark.load.order import Order, Tally, Target

WINDOW, DONE = "window", "done"


def work(pipe: Any, target: Target, requests: Sequence[bytes], models: Sequence[int]) -> None:
    """A process's life: until the other end of the pipe is closed.

    Args:
        pipe: takes an Order, answers "ready", takes "start" (or "abort"), then gives (WINDOW, Tally) any number of times and
            (DONE, why the load ended early or None). While it runs, "stop" ends the sending and "abort" the waiting too.
        target: whom to load.
        requests: serialized, sent in turn.
        models: for each of them, the number of the model it is for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    gc.disable()  # a collection is a pause in the middle of a measurement, and nothing here makes cycles
    try:
        while True:
            order = pipe.recv()
            if not isinstance(order, Order):
                continue  # "stop" for a load that had just ended
            driver = Driver(target, requests, models, order)
            driver.connect()
            pipe.send("ready")
            if pipe.recv() == "start":
                _carry_out(pipe, driver)
            gc.collect()
    except (EOFError, BrokenPipeError):
        return


def _carry_out(pipe: Any, driver: Driver) -> None:
    # `timeout` sends it to the whole group; the parent asks for what was measured.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        trouble = driver.run(lambda tally: _told(pipe, tally))
    except _AbortedError as aborted:
        pipe.send((WINDOW, aborted.tally))
        trouble = None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send((DONE, trouble))


class _AbortedError(Exception):
    """Nobody wants the rest."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self.tally = tally


def _told(pipe: Any, tally: Tally) -> bool:
    if pipe.poll():
        if pipe.recv() == "abort":
            raise _AbortedError(tally)
        pipe.send((WINDOW, tally))
        return False
    pipe.send((WINDOW, tally))
    return True
