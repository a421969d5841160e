"""The measurements of a tuning in a file, so that one that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE
from halfserve.serve.tuning.search import RefusedSettingsError, TuningPoint
from halfserve.serve.tuning.settings import Choice

logger = logging.getLogger(__name__)


class RecordedPoints:
    """A machine whose measurements are written to a file, and read from it where they were made before.

    `path` is None for a user without a home: nothing is kept. The time of a measurement that is read counts as it was, so that
    a search decides as it did.
    """

    def __init__(self, path: Path | None, measure: Callable[[Choice, int, float], TuningPoint]) -> None:
        self._path = path
        self._measure = measure
        self._entries: dict[str, dict[str, Any]] = {}
        self.spent_s = 0.0
        if path is not None:
            with suppress(OSError, ValueError):
                self._entries = json.loads(path.read_bytes())

    def measure(self, choice: Choice, concurrency: int, seconds: float, number: int) -> TuningPoint:
        """See `TunedMachine`."""
        key = json.dumps([[asdict(settings) for settings in choice], concurrency, round(seconds, 6), number])
        if key not in self._entries:
            began_s = time.monotonic()
            try:
                entry = asdict(self._measure(choice, concurrency, seconds))
            except RefusedSettingsError as error:
                entry = {"refused": str(error)}
            self._entries[key] = entry | {"choice": None, "spent_s": time.monotonic() - began_s}
            self._write()
        entry = dict(self._entries[key])
        self.spent_s += entry.pop("spent_s")
        if "refused" in entry:
            raise RefusedSettingsError(entry["refused"])
        entry["choice"] = choice
        return TuningPoint(**entry)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(self._path) as file:
                file.write(json.dumps(self._entries).encode())
        except OSError as error:
            logger.warning("%s: the measurements cannot be kept for a later run: %s", self._path, error.strerror)
            self._path = None


def circumstances_key(paths: Iterable[Path], facts: Iterable[object]) -> str:
    """Return a digest of what a measurement depends on besides the settings: files and folders, requests, machine, version."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]
    # A config.pbtxt is among the facts, and its backups have no effect.
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if CONFIG_FILE not in file.name]
    machine = (platform.node(), platform.machine(), platform.release(), version("halfserve"))
    return hashlib.blake2b(repr([machine, stats, *facts]).encode(), digest_size=20).hexdigest()
