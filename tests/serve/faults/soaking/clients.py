"""Well-behaved clients: each sends one request after the other and checks every answer by its values."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness.models import STEPS
from halfserve import Client, ClientError, RetryPolicy
from tests.serve.faults.soaking.tally import Tally

Array = np.ndarray[Any, Any]
TIMEOUT_S = 30.0
COUNTED = 30_000
ONCE = RetryPolicy(retries=0)
LENGTHS = (1, 7, 64, 333, 1024)
STREAMED = 64  # requests on one stream
Work = Callable[[Client, np.random.Generator, Tally], None]


def ask_affine(client: Client, random: np.random.Generator, tally: Tally) -> None:
    """Send a few rows to a small model."""
    x = _whole(random, int(random.integers(1, 9)), 64).astype(np.float16)
    _ask(client, "affine", x, 2 * x + 1, tally)


def ask_flip(client: Client, random: np.random.Generator, tally: Tally) -> None:
    """Send rows of another length each time."""
    x = _whole(random, int(random.integers(1, 4)), int(random.choice(LENGTHS))).astype(np.float16)
    _ask(client, "flip", x, -x, tally)


def ask_large(client: Client, random: np.random.Generator, tally: Tally) -> None:
    x = _whole(random, 1, 65_536).astype(np.float32)
    _ask(client, "large", x, x + x, tally)


def ask_shared(client: Client, random: np.random.Generator, tally: Tally) -> None:
    """Use shared memory, registered and unregistered again, for input and output."""
    with client.shared_region(2 * 262_144) as region:
        x, y = region.array((1, 65_536), np.float32), region.array((1, 65_536), np.float32)
        x[:] = _whole(random, 1, 65_536)
        started = time.monotonic()
        client.infer("large", {"x": x}, into={"y": y})
        _check("shared memory", y, x + x, started, tally)


def ask_stream(client: Client, random: np.random.Generator, tally: Tally) -> None:
    """Send many requests on one stream: each must be answered once, in order."""
    inputs = [_whole(random, 1, 64).astype(np.float16) for _ in range(STREAMED)]
    started, count = time.monotonic(), 0
    for answer in client.stream_infer("affine", [{"x": x} for x in inputs], in_flight=16):
        if answer.index != count:
            tally.fault(f"stream: answer {answer.index} came where {count} was due")
        _check("stream", answer.outputs["y"], 2 * inputs[answer.index] + 1, started, tally, timed=False)
        count += 1
    if count != STREAMED:
        tally.fault(f"stream: {count} answers to {STREAMED} requests")


def ask_steps(client: Client, random: np.random.Generator, tally: Tally) -> None:
    """Have a model compute for about 30 ms."""
    _ask(client, STEPS, np.array([COUNTED]), np.array([COUNTED]), tally, name="n")


WORKS: tuple[Work, ...] = (ask_affine, ask_affine, ask_flip, ask_large, ask_shared, ask_stream)


@contextmanager
def clients(
    address: str, works: Sequence[Work], tally: Tally, *, think_s: float = 0.0, retries: RetryPolicy = ONCE
) -> Iterator[None]:
    """Run a client for each work until the block ends, with pauses of `think_s`; errors are counted and do not end it."""
    stop = threading.Event()

    def keep_asking(work: Work, seed: int) -> None:
        random = np.random.default_rng(seed)
        with Client(address, timeout_s=TIMEOUT_S, retries=retries) as client:
            while not stop.is_set():
                try:
                    work(client, random, tally)
                except ClientError as error:
                    tally.fault(f"{work.__name__}: {error.code}: {error}")
                stop.wait(think_s)

    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(keep_asking, work, seed) for seed, work in enumerate(works)]
        try:
            yield
        finally:
            stop.set()
    for client in running:
        client.result()


def _whole(random: np.random.Generator, rows: int, columns: int) -> Array:
    return random.integers(-500, 500, (rows, columns))


def _ask(client: Client, model: str, x: Array, expected: Array, tally: Tally, name: str = "x") -> None:
    started = time.monotonic()
    _check(model, client.infer(model, {name: x})["y"], expected, started, tally)


def _check(kind: str, given: Array, expected: Array, started: float, tally: Tally, *, timed: bool = True) -> None:
    if given.dtype != expected.dtype or not np.array_equal(given, expected):
        tally.fault(f"{kind}: a wrong answer to {expected.shape}")
    else:
        tally.right(kind, started if timed else float("nan"))
