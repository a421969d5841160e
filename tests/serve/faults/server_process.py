"""Server processes, and clients that check every answer while tests inject faults."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from halfserve import Client, ClientError, RetryPolicy
from tests.models import Array, mlp_weights

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    process: subprocess.Popen[str]  # the operating system's
    address: str  # "127.0.0.1:port"
    repository: Path
    access_log: Path  # its file
    errors: IO[bytes]  # what it writes to standard error

    def error_text(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()

    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def until(self, condition: Callable[[], bool], ask: Callable[[], object]) -> None:
        """Wait for a condition; each question to the server is a turn of its event loop."""
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < ends_s, f"it never came about; the server says: {self.error_text()}"
            ask()


@contextmanager
def run_faulty_server(repository: Path) -> Iterator[ServerProcess]:
    """The server of `server_program`; ends it, and looks at how it went."""
    access_log = repository.parent / "access.log"
    command = [sys.executable, "-m", "tests.serve.faults.server_program", str(repository), str(access_log)]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            try:
                address = f"127.0.0.1:{process.stdout.readline().strip()}"
                yield ServerProcess(process, address, repository, access_log, errors)
                process.terminate()
                assert process.wait(WAIT_S) == 0
            finally:
                process.kill()
        errors.seek(0)
        assert b"Traceback" not in errors.read()


ON_ONE_STREAM = 32
TOLERANCE = 0.02


class Load:
    """Asks the model "mlp" until it is stopped, with single requests and on streams."""

    def __init__(self, addresses: list[str], retry: RetryPolicy) -> None:
        self._addresses = addresses
        self._retry = retry
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._answers: Counter[int] = Counter()  # by client
        self.refused: list[ClientError] = []  # errors that single requests met; more than the test allows for fails it

    def ask(self, seed: int) -> None:
        random, (first, second) = np.random.default_rng(seed), mlp_weights()
        with Client(self._addresses, timeout_s=WAIT_S, retries=self._retry) as client:
            while not self._stop.is_set():
                x = random.standard_normal((int(random.integers(1, 4)), 64)).astype(np.float16)
                try:
                    y = client.infer("mlp", {"x": x})["y"]
                except ClientError as error:
                    with self._changed:
                        self.refused.append(error)
                        self._changed.notify_all()
                    continue
                _check(x, y, first, second)
                self._count(seed, 1)

    def stream(self, seed: int) -> None:
        random, (first, second) = np.random.default_rng(seed), mlp_weights()
        with Client(self._addresses, timeout_s=WAIT_S, retries=self._retry) as client:
            while not self._stop.is_set():
                inputs = [random.standard_normal((1, 64)).astype(np.float16) for _ in range(ON_ONE_STREAM)]
                answered = []
                for answer in client.stream_infer("mlp", [{"x": x} for x in inputs], in_flight=8):
                    _check(inputs[answer.index], answer.outputs["y"], first, second)
                    answered.append(answer.index)
                assert answered == list(range(ON_ONE_STREAM))  # each once
                self._count(seed, ON_ONE_STREAM)

    def wait_for_more(self, count: int = 20) -> None:
        """Until so many more answers have come."""
        with self._changed:
            enough = self.answers + count
            assert self._changed.wait_for(lambda: self.answers >= enough, WAIT_S), self.refused[:3]

    def wait_for_all(self, clients: int) -> None:
        """Until so many clients have had an answer: the server has all connections by then."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._answers) >= clients, WAIT_S), self.refused[:3]

    def wait_for_refusals(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.refused) >= count, WAIT_S)

    @property
    def answers(self) -> int:
        return self._answers.total()

    def stop(self) -> None:
        self._stop.set()

    def _count(self, client: int, answers: int) -> None:
        with self._changed:
            self._answers[client] += answers
            self._changed.notify_all()


@contextmanager
def under_load(
    addresses: list[str],
    *,
    askers: int = 3,
    streams: int = 1,
    retry: RetryPolicy | None = None,
    may_refuse: bool = False,
) -> Iterator[Load]:
    """Clients at work; at the end every answer was right, and none was refused unless it may be."""
    load = Load(addresses, retry or RetryPolicy(retries=0))
    with ThreadPoolExecutor(askers + streams) as pool:
        work = [pool.submit(load.ask if number < askers else load.stream, number) for number in range(askers + streams)]
        try:
            load.wait_for_all(askers + streams)
            yield load
        finally:
            load.stop()
    for one in work:
        one.result()  # raises what it has found wrong
    if not may_refuse:
        assert [str(error) for error in load.refused] == []


def _check(x: Array, y: Array, first: Array, second: Array) -> None:
    exact = np.maximum(x.astype(np.float32) @ first.astype(np.float32), 0) @ second.astype(np.float32)
    assert y.shape == exact.shape
    assert np.allclose(y, exact, atol=TOLERANCE, rtol=TOLERANCE), "an answer is another request's, or wrong"
