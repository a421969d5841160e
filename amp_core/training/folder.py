"""The folder of a run: who may write in it, and what is left from before."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from amp_core.training.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHECKPOINT, PREVIOUS, LOG, RECORD, RECORD_PLOT, TENSORBOARD = (
    "checkpoint.pt", "checkpoint.previous.pt", "train.jsonl", "record.json", "record.png", "tensorboard"
)  # fmt: skip
_LOCK = ".lock"


@contextmanager
def writing_into(path: Path) -> Iterator[None]:
    """Say which folder could not be written to, where the system says only why.

    Raises:
        TrainingError: If the block raises an OSError: a full disk, a quota.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(f"cannot write into the folder {path}: {error.strerror or error}") from error


@contextmanager
def own_folder(path: Path) -> Iterator[None]:
    """Make the folder if it is missing, and keep other runs out of it while this one is in it.

    A run that was killed left its lock to the system, which releases it; files that it had only begun to write are removed.
    What was made here is removed again if the block raises before it has put anything there.

    Raises:
        TrainingError: If the folder cannot be made or written to, or another run is in it.
    """
    with writing_into(path):
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+b", buffering=0)  # nothing is left to be written, and to fail, when it is closed
    with lock:
        with writing_into(path):
            _lock(lock, path)
            for name in (CHECKPOINT, LOG, RECORD, RECORD_PLOT):
                for unfinished in path.glob(f".{name}.*.tmp"):
                    unfinished.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, if there is nothing but the lock in them."""
    with suppress(OSError):  # a file came in, or the system keeps them: the error that ended the run is the one to tell
        if folders and [entry.name for entry in folders[0].iterdir()] == [_LOCK]:
            (folders[0] / _LOCK).unlink()
            for folder in folders:
                folder.rmdir()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        import fcntl  # noqa: PLC0415  (Windows has none; two runs in one folder are not kept apart there)
    except ImportError:
        return
    try:
        # A lock of the process, not of the open file: data workers that outlive a killed run for a moment do not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip() or "unknown"
        raise TrainingError(f"another run (process {owner}) is writing into {folder}; choose another folder") from error
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    file.write(str(os.getpid()).encode())


def set_previous_aside(folder: Path) -> None:
    """Rename the checkpoint of an earlier run: if this one ended before its first, it would be taken for this one's."""
    checkpoint = folder / CHECKPOINT
    if checkpoint.exists():
        checkpoint.replace(folder / PREVIOUS)
