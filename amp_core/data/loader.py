"""One DataLoader that goes through one epoch after the other with the same workers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker

from amp_core.data.errors import DataError, WorkerTraceback
from amp_core.data.plans import Plan
from amp_core.data.source import End, Failure, Source

# Files that a process with workers has open: its own, and for each worker its pipes and the batches that wait, of which each
# tensor is one. Where they run out, torch leaves a traceback of its half-made iterator.
FILES, FILES_OF_A_WORKER = 32, 8


class Loader:
    """Turns plans into batches, in this process or in workers of its own.

    Args:
        source: Makes the batches.
        workers: How many processes besides this one; 0 makes them here.
        pin: Whether the batches go to pinned memory, from which copies to CUDA overlap with computation.
    """

    def __init__(self, source: Source, *, workers: int, pin: bool) -> None:
        self._plans = _Plans()
        self._workers = workers
        self._name = source.name
        self._running: Any = None
        self._torch: DataLoader[Any] = DataLoader(
            source,
            batch_size=None,
            sampler=self._plans,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin,
            collate_fn=_as_it_is,
            worker_init_fn=partial(_end_if_orphaned, os.getpid()),
            generator=Generator(),  # otherwise each epoch would draw from the process's own
        )

    def run(self, plans: Iterator[Plan]) -> Iterator[tuple[Any, Any]]:
        """Make the batches of an epoch, in order.

        Raises:
            DataError: If an item cannot be read or batched, or a worker died or could not be started.
        """
        self._plans.now = plans
        try:
            if self._workers:
                _check_open_files(self._workers)
                multiprocessing.Lock()  # where there can be none, torch would complain of its half-made iterator as well
            with _no_errors_from_signals():
                self._running = iter(self._torch)
        except OSError as error:
            raise DataError(
                f"no worker process could be started to read the data set {self._name}: {error.strerror or error}; "
                "take fewer workers, or 0 to read it in this process"
            ) from error
        ended = 0
        while ended < max(1, self._workers):  # all workers in a row: of a stream that splits itself each ends on its own
            result = self._next()
            if isinstance(result, Failure):
                raise DataError(result.message) from WorkerTraceback(result.traceback)
            if result is None:
                return
            if isinstance(result, End):
                ended += 1
                continue
            ended = 0
            yield result

    def _next(self) -> Any:
        try:
            return next(self._running, None)
        except (RuntimeError, ConnectionError, EOFError) as error:
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a worker process that read the data set {self._name} died; if the machine ran out of memory, "
                "take fewer workers or a smaller batch_size"
            ) from error

    def close(self) -> None:
        """End the workers, now and not when the last reference to them goes."""
        running, self._running = self._running, None
        if self._workers and running is not None:
            running._shutdown_workers()  # noqa: SLF001  (torch has no public way)


def _check_open_files(workers: int) -> None:
    try:
        import resource  # noqa: PLC0415  (Windows does not have it)
    except ModuleNotFoundError:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + workers * FILES_OF_A_WORKER
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise OSError(errno.EMFILE, f"the limit of open files is {limit} (ulimit -n), expected {needed} or more")


class _Plans:
    """A sampler whose plans are exchanged before each epoch: the DataLoader, and with it the workers, stay."""

    now: Iterator[Plan] = iter(())

    def __iter__(self) -> Iterator[Plan]:
        return self.now


@contextmanager
def _no_errors_from_signals() -> Iterator[None]:
    # With its first worker torch installs a handler that, when a worker dies, raises wherever the main thread happens to be,
    # in the middle of an optimizer's step too. Without it the death shows where the worker's batch is waited for.
    number = getattr(signal, "SIGCHLD", None)  # Windows has none, and torch no handler there
    before = None if number is None else signal.getsignal(number)
    try:
        yield
    finally:
        if number is not None and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


def _end_if_orphaned(parent: int, _: int) -> None:
    # torch's worker asks again and again whether its parent is still the one that it had when it first asked. Killed before
    # that, the parent is another one from the start, and the worker would stay for ever. So it is told whom to compare with.
    if multiprocessing.get_start_method() == "forkserver":  # whose workers are the server's children
        return
    if os.getppid() != parent:
        os._exit(1)
    worker.ManagerWatchdog = partial(_Watchdog, parent)  # type: ignore[assignment,misc]  # (called as the class is)


class _Watchdog:
    """torch's, of a parent that is known."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def is_alive(self) -> bool:
        """Whether the parent still lives."""
        return os.getppid() == self._parent


def _as_it_is(value: Any) -> Any:
    return value
