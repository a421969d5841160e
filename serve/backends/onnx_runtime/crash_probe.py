"""Crash probe: finds out whether a model crashes the process that loads it.

Some models crash a runtime, such as ONNX Runtime in its graph optimizer. A child process loads and runs each model first, at
the highest optimization level, and after a crash at lower ones. Verdicts are cached in the user's cache folder, so that the
next start does not try again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import onnxruntime as ort

from halfserve.serve.backends.onnx_runtime.custom_operators import stamp
from halfserve.serve.backends.onnx_runtime.probe_process import CrashedError, ProbeProcess, TrialEndedError, timer
from halfserve.serve.backends.onnx_runtime.session_settings import OPTIMIZATION_LEVEL, OptimizationLevel, SessionSettings
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.disk_files import open_regular
from halfserve.serve.engine.errors import ModelLoadError

READ_BYTES = 1 << 20
logger = logging.getLogger(__name__)

OWN_VERSION = version("halfserve")
LIMIT_S = 60.0  # seconds for one trial
# Seconds before an idle child is ended. A start costs 0.1 s, and replaced models are often replaced again; a light child keeps
# 25 MB.
IDLE_S, LIGHT_IDLE_S = 2.0, 60.0


def default_folder() -> Path | None:
    """Return the folder of verdicts below $XDG_CACHE_HOME or ~/.cache; None for a user without a home, as in containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfserve" / "crash_verdicts"
    except RuntimeError:
        return None


def verdict_key(path: Path, circumstances: Iterable[str]) -> str:
    """Return a digest of the model file and the conditions of the trial (runtime version, provider, settings)."""
    digest = hashlib.blake2b(digest_size=20)
    for circumstance in circumstances:
        digest.update(circumstance.encode() + b"\0")
    with open_regular(path) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class CrashVerdict:
    """The result of a trial."""

    level: OptimizationLevel | None  # the first level that did not crash; None if all did
    crashes: dict[str, str]  # signal by level, such as "SIGSEGV"


@dataclass(frozen=True)
class CrashVerdictCache:
    """A folder of verdicts, one small file each. Unreadable or unwritable files only cost another trial."""

    folder: Path | None  # None caches nothing

    def find(self, key: str) -> CrashVerdict | None:
        if self.folder is None:
            return None
        try:
            known = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            level = None if known["level"] is None else OptimizationLevel[known["level"].upper()]
            return CrashVerdict(level, {str(name): str(signal) for name, signal in known["crashes"].items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, key: str, verdict: CrashVerdict) -> None:
        """Write a verdict atomically."""
        if self.folder is None:
            return
        level = None if verdict.level is None else verdict.level.label
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f"{key}.{os.urandom(4).hex()}.part"
            try:
                part.write_text(json.dumps({"level": level, "crashes": verdict.crashes}), encoding="utf-8")
                part.replace(self.folder / f"{key}.json")
            except OSError:
                part.unlink(missing_ok=True)


class LoadTrial(Protocol):
    """A model and the conditions under which a runtime is to load it."""

    @property
    def path(self) -> Path:
        """The original model file."""

    @property
    def levels(self) -> tuple[OptimizationLevel, ...]:
        """The optimization levels to try, the highest first."""

    @property
    def key(self) -> str:
        """Key that is equal for trials with equal results."""

    def message(self, source: str | bytes, level: OptimizationLevel) -> dict[str, Any]:
        """Return the request to the child process. `source`: the model's bytes, or the path of its file."""


@dataclass(frozen=True, kw_only=True)
class CrashTrial:
    """A trial with ONNX Runtime."""

    path: Path  # the original model file
    providers: list[tuple[str, dict[str, str]]]  # names and options of the providers
    settings: SessionSettings  # settings of the session

    @property
    def levels(self) -> tuple[OptimizationLevel, ...]:
        return tuple(OptimizationLevel)

    def message(self, source: str | bytes, level: OptimizationLevel) -> dict[str, Any]:
        """See `LoadTrial`."""
        return {
            "path": "" if isinstance(source, bytes) else str(Path(source).absolute()),
            "bytes": len(source),
            "level": level.value,
            "providers": self.providers,
            "entries": dict(self.settings.session_entries),
            "parallel": self.settings.parallel,
            "memory_arena": self.settings.memory_arena,
            "memory_pattern": self.settings.memory_pattern,
            "operator_libraries": self.settings.operator_libraries,
        }

    @cached_property
    def key(self) -> str:
        """Key that is equal for trials with equal results; computing it reads the whole file, but not external weights."""
        message = self.message(b"", OptimizationLevel.ALL)
        # This package's version is included because it changes models before they are loaded.
        libraries = map(stamp, self.settings.operator_libraries)
        return verdict_key(self.path, [ort.__version__, OWN_VERSION, repr(sorted(message.items())), *libraries])


class CrashProbe:
    """Runs trials, one at a time; thread-safe."""

    def __init__(
        self, verdicts: CrashVerdictCache, *, start: Callable[[], ProbeProcess] = ProbeProcess, limit_s: float = LIMIT_S
    ) -> None:
        self._verdicts = verdicts
        self._start = start
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: ProbeProcess | None = None
        self._idle: threading.Timer | None = None

    def expect(self, trial: LoadTrial) -> None:
        """Start the child, because `safe_level` will be called soon."""
        if self._verdicts.find(trial.key) is None:
            with self._lock, suppress(OSError):  # `safe_level` reports the error
                self._running()
                self._rest()

    def safe_level(self, trial: CrashTrial, source: str | bytes) -> OptimizationLevel:
        """Return the highest level at which the model does not crash ONNX Runtime; a reduced level is logged as a warning.

        `source` is the model's bytes, or the path of its file. Raises ModelLoadError: the model crashes at every level.
        """
        verdict = self.verdict(trial, source)
        if verdict is None:
            return OptimizationLevel.ALL
        crashes = ", ".join(f"{how} at {level!r}" for level, how in verdict.crashes.items())
        if verdict.level is None:
            raise ModelLoadError(
                f"{trial.path}: the model ends ONNX Runtime {ort.__version__}'s process at every optimization level "
                f"({crashes}); export it in another way, or set the parameter {OPTIMIZATION_LEVEL!r} to load it without a trial"
            )
        if crashes:
            logger.warning(
                "%s: the model ends ONNX Runtime %s's process (%s); it is optimized at the level %r instead",
                *(trial.path, ort.__version__, crashes, verdict.level.label),
            )
        return verdict.level

    def verdict(self, trial: LoadTrial, source: str | bytes) -> CrashVerdict | None:
        """Return the result of a trial, from the cache if it is known; None if the model could not be tried, with a warning."""
        key = trial.key
        verdict = self._verdicts.find(key)
        if verdict is None:
            try:
                verdict = self._tried(trial, source)
            except (TrialEndedError, OSError) as error:
                logger.warning("%s: could not be tried out in a process of its own: %s", trial.path, error)
                return None
            pause()
            self._verdicts.keep(key, verdict)
        return verdict

    def close(self) -> None:
        """End the child, if there is one. An idle child also ends by itself."""
        self._cancel_idle()
        with self._lock:
            self._end()

    def _tried(self, trial: LoadTrial, source: str | bytes) -> CrashVerdict:
        with self._lock:
            try:
                return self._first_survived(trial, source)
            finally:
                self._rest()

    def _first_survived(self, trial: LoadTrial, source: str | bytes) -> CrashVerdict:
        crashes: dict[str, str] = {}
        model = source if isinstance(source, bytes) else b""
        for level in trial.levels:
            try:
                self._running().try_out(trial.message(source, level), model, self._limit_s)
            except CrashedError as crash:
                crashes[level.label] = str(crash)
                self._end()
                continue
            except TrialEndedError:
                self._end()
                raise
            return CrashVerdict(level, crashes)
        return CrashVerdict(None, crashes)

    def _running(self) -> ProbeProcess:
        """Return the child process, started if necessary."""
        self._cancel_idle()
        if self._process is None or not self._process.alive:
            self._end()
            self._process = self._start()
        return self._process

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()

    def _rest(self) -> None:
        """Schedule the end of an idle child."""
        if self._process is not None:
            self._idle = timer(LIGHT_IDLE_S if self._process.is_light else IDLE_S, self.close)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
