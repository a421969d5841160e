"""What is wrong with the data, in one line that its owner can act on."""

from __future__ import annotations


class DataError(ValueError):
    """A data set that cannot be read, split or batched, for a reason that its user can mend."""


class WorkerTraceback(Exception):  # noqa: N818  (never raised: the cause of a DataError, which shows where a worker failed)
    """The traceback of a worker process, as text: the exception itself may not survive the way to the main process."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text.rstrip()}")


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def no_shared_memory(error: Exception, name: str) -> DataError | None:
    """What to say where a worker process found no shared memory for a batch; None for all other errors.

    Args:
        error: torch's.
        name: of the data set.
    """
    if "</torch_" not in str(error):  # as torch names each piece of it
        return None
    return DataError(
        f"a worker process found no shared memory for a batch of the data set {name}, {one_line(error)}; give /dev/shm more "
        "room (docker run --shm-size), or take fewer workers or a smaller batch_size"
    )
