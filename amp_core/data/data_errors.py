"""Errors of data sets, in one line that users can act on."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from halfserve.amp_core.factory import one_line

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where POSIX shared memory lives on Linux: shm_open(3))
_SHARED_FILE = re.compile(r"</(torch_\w+)>")  # torch's name of each piece of shared memory


class DataError(ValueError):
    """A data set that cannot be read, split or batched, for a reason that its user can fix."""


class WorkerTraceback(Exception):  # noqa: N818  (never raised: the cause of a DataError, which shows where a worker failed)
    """The traceback of a worker process, as text: the exception itself may not be picklable."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\n{text.rstrip()}")


def no_shared_memory(error: Exception, name: str) -> DataError | None:
    """Return the error for a worker process without shared memory for a batch; None for all other errors.

    torch leaves an empty file behind, which is removed here.
    """
    file = _SHARED_FILE.search(str(error))
    if file is None:
        return None
    with suppress(OSError):
        (SHARED_MEMORY / file[1]).unlink()
    return DataError(
        f"a worker process found no shared memory for a batch of the data set {name}, {one_line(error)}; give /dev/shm more "
        "room (docker run --shm-size), or take fewer workers or a smaller batch_size"
    )
