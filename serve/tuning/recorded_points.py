"""The measurements of a tuning in a file, so that one that was interrupted goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.benchmark.level import Load
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE
from halfserve.serve.tuning.search import RefusedSettingsError, TuningPoint
from halfserve.serve.tuning.settings import Choice, TunedSettings

logger = logging.getLogger(__name__)
READ_BYTES = 2**20


class RecordedPoints:
    """A machine whose measurements are written to a file, and read from it where they were made before.

    `path` is None for a user without a home: nothing is kept. The time of a measurement that is read counts as it was, so that
    a search decides as it did. A file that cannot be read or written is left alone, with a warning.
    """

    def __init__(
        self, path: Path | None, measure: Callable[[Choice, Load, float], TuningPoint], clock: Callable[[], float]
    ) -> None:
        self._path = path
        self._measure = measure
        self._clock = clock
        self._entries: dict[str, dict[str, Any]] = {} if path is None else _read(path)
        self.spent_s = 0.0
        self.reused = 0  # measurements that were read

    def measure(self, choice: Choice, load: Load, seconds: float, number: int) -> TuningPoint:
        """See `TunedMachine`."""
        key = json.dumps([[asdict(settings) for settings in choice], asdict(load), round(seconds, 6), number])
        entry = self._entries.get(key)
        if entry is None:
            entry = self._measured(choice, load, seconds)
            self._entries[key] = entry
            self._write()
        else:
            self.reused += 1
        self.spent_s += entry["spent_s"]
        if "refused" in entry:
            raise RefusedSettingsError(entry["refused"])
        return TuningPoint(choice=choice, load=load, **entry["point"])

    def _measured(self, choice: Choice, load: Load, seconds: float) -> dict[str, Any]:
        began_s = self._clock()
        try:
            point = self._measure(choice, load, seconds)
        except RefusedSettingsError as error:
            return {"refused": str(error), "spent_s": self._clock() - began_s}
        figures = {name: value for name, value in vars(point).items() if name not in ("choice", "load")}
        return {"point": figures, "spent_s": self._clock() - began_s}

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


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the measurements in a file; none of a file that is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entries: dict[str, dict[str, Any]] = json.loads(path.read_bytes())
        for entry in entries.values():
            float(entry["spent_s"])
            if "refused" not in entry:
                TuningPoint(choice=(TunedSettings(),), load=Load(), **entry["point"])
        return entries
    return {}


def circumstances_key(paths: Iterable[Path], texts: Iterable[str | bytes]) -> str:
    """Return a digest of what a measurement depends on besides the settings: files and folders, requests, machine, version."""
    digest = hashlib.blake2b(digest_size=20)
    facts = [platform.node(), platform.machine(), platform.release(), version("halfserve"), *texts]
    for fact in facts:
        digest.update(b"%d " % len(fact) + (fact if isinstance(fact, bytes) else fact.encode()))
    for path in paths:
        for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
            if file.name.startswith(CONFIG_FILE):  # among the texts, without what backups say
                continue
            digest.update(str(file.relative_to(path)).encode() + b"\0")
            with file.open("rb") as content:
                while block := content.read(READ_BYTES):
                    digest.update(block)
    return digest.hexdigest()
