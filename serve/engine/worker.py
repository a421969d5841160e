"""A thread that runs one thing after the other."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

Job = tuple[Callable[..., object], tuple[Any, ...]]


class Worker:
    """Runs jobs in order on a thread of its own.

    Unlike an executor's, the thread is a daemon: a model that never returns cannot keep the process from ending. And a job
    makes no future, which nobody would look at: its answer goes back by the job's own hand.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Run `function(*arguments)` after what was submitted before; it must not raise."""
        self._jobs.put((function, arguments))

    def stop(self) -> None:
        """End the thread once what was submitted is done. Does not wait for it."""
        self._jobs.put(None)

    def hand_over(self, other: Worker) -> None:
        """Let another worker do what has not begun here, and end once the job that runs is done, if it ever is."""
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                other.submit(job[0], *job[1])
        self.stop()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, arguments = job
            function(*arguments)
            del job, function, arguments  # not to keep a batch alive until the next one comes
