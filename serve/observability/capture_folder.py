"""The folder of captured requests: writes shards, and deletes the oldest ones where the folder would exceed its bound.

Several processes may share the folder: each writes under a lock. Only the constructor runs on the event loop's thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from halfserve.files.atomic_files import atomic_file
from halfserve.protos.captured_requests import CapturedMessage, encode_shard
from halfserve.serve.engine.errors import FailedPreconditionError

logger = logging.getLogger(__name__)

MARKER: Final = ".halfserve-capture"  # its lock is held while a shard is written; only folders with it are deleted from
PRIVATE: Final = 0o700  # mode of the folders, and 0600 of the files: the tensors are the data of users
SHARD: Final = re.compile(r"(\d{6,})\.npz")


class CaptureFolder:
    """Writes the requests of one process.

    Attributes:
        captured: number of requests on the disk.
        dropped: number of requests that were lost: the disk could not be written, or has no room for them.
        freed_bytes: size of all requests that were given to `write`, whether they were written or not.
        size: bytes of all shards in the folder, as of the last write.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Make the folder if it is missing.

        Raises:
            FailedPreconditionError: it cannot be written, or has files that are no capture.
        """
        self._path = path
        self._max_bytes = max_bytes
        self.captured = self.dropped = self.freed_bytes = self.size = 0
        self._is_failing = False
        try:
            path.mkdir(PRIVATE, parents=True, exist_ok=True)
            others = [entry.name for entry in path.iterdir() if entry.name != MARKER]
            if others and not (path / MARKER).exists():
                raise FailedPreconditionError(
                    f"requests cannot be captured in {path}: it has other files, such as {min(others)!r}; expected a new "
                    "or empty folder, or that of an earlier capture"
                )
            (path / MARKER).touch(0o600)
            with self._alone():
                self.size = sum(size for _, _, size in self._shards())
        except OSError as error:
            raise FailedPreconditionError(
                f"requests cannot be captured in {path}: {error.strerror}; choose a folder that this user can write"
            ) from None

    def write(self, requests: Sequence[CapturedMessage]) -> None:
        """Write one shard per model. Requests are counted as dropped where the disk cannot be written."""
        by_model: dict[str, list[CapturedMessage]] = defaultdict(list)
        for request in requests:
            by_model[request.model].append(request)
        try:
            for model, group in by_model.items():
                written = self._write(model, group)
                self.captured += written
                self.dropped += len(group) - written
        finally:
            self.freed_bytes += sum(request.size for request in requests)

    def _write(self, model: str, group: list[CapturedMessage]) -> int:
        """Write a shard, and return the number of its requests."""
        shard = encode_shard(group)
        if len(shard) > self._max_bytes:
            return 0
        try:
            with self._alone():
                self._write_alone(self._path / model, shard)
        except OSError as error:
            if not self._is_failing:
                text = "requests cannot be captured in %s: %s; they are answered, but not captured until it can be written"
                logger.warning(text, self._path, error.strerror)
            self._is_failing = True
            return 0
        if self._is_failing:
            logger.warning("requests are captured in %s again", self._path)
        self._is_failing = False
        return len(group)

    def _write_alone(self, folder: Path, shard: bytes) -> None:
        shards = sorted(self._shards())
        number = shards[-1][0] + 1 if shards else 1
        total = sum(size for _, _, size in shards) + len(shard)
        for _, path, size in shards:  # the lowest numbers are the oldest
            if total <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        folder.mkdir(PRIVATE, exist_ok=True)
        with atomic_file(folder / f"{number:06d}.npz") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(shard)
        self.size = total

    def _shards(self) -> Iterator[tuple[int, Path, int]]:
        """Number, path and size of each shard of all models; unfinished files of a killed process are deleted."""
        for folder in self._path.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                if match := SHARD.fullmatch(path.name):
                    yield int(match[1]), path, path.stat().st_size
                elif path.suffix == ".tmp":
                    path.unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process too."""
        with (self._path / MARKER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
