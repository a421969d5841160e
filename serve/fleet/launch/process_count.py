"""The number of server processes that `--processes` asks for, and whether the machine has enough resources for them."""

from __future__ import annotations

from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.engine.resource_limits import FEWEST_FILES, available_bytes, most_files, usable_cores

AUTO = "auto"
PROCESS_BYTES = 100 * 2**20  # memory of a server without models
FILES_EACH = 4  # open files in each process per other process


def process_count(text: str, *, use_gpu: bool) -> int:
    """Parse the option's text; "auto" means one process if models run on a GPU, else one for each usable core.

    Raises:
        ValueError: the text is neither "auto" nor a whole number of 1 or more.
    """
    if text == AUTO:
        return 1 if use_gpu and device_count() else usable_cores()
    if not (text.isascii() and text.isdigit() and int(text[:9]) and len(text) < 7):
        raise ValueError(f"is {text[:20]!r}, expected {AUTO!r} or a whole number from 1 to 999999")
    return int(text)


def check_room(count: int) -> None:
    """Check that `count` processes can start at all.

    Raises:
        FailedPreconditionError: there is too little memory, or the limit on open files is too low.
    """
    room = available_bytes()
    if room is not None and count * PROCESS_BYTES > room:
        raise FailedPreconditionError(
            f"--processes {count} needs {count * PROCESS_BYTES >> 20} MiB before any model is loaded, and {room >> 20} MiB are "
            f"available; ask for {max(1, room // PROCESS_BYTES)} or fewer"
        )
    needed = FEWEST_FILES + FILES_EACH * count
    if needed > most_files():
        raise FailedPreconditionError(
            f"--processes {count} needs {needed} open files in each process, and the limit is {most_files()}; "
            "raise it (ulimit -n), or ask for fewer processes"
        )
