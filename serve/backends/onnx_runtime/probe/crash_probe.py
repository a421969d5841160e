"""Find out whether a model ends the process that loads it, before it can end this one.

ONNX Runtime is trusted with models from anywhere, and some make its graph optimizer crash. A child process loads and runs each
model first, at the highest optimization level, and at lower ones where that ends it. Verdicts are kept; see crash_verdicts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnxruntime as ort

from serve.backends.onnx_runtime.optimization_level import KEY, OptimizationLevel
from serve.backends.onnx_runtime.probe.alarm import Alarm
from serve.backends.onnx_runtime.probe.crash_verdicts import CrashVerdicts, Verdict, verdict_key
from serve.backends.onnx_runtime.probe.probe_process import CrashedError, ProbeProcess, TrialEndedError
from serve.backends.onnx_runtime.session_settings import SessionSettings
from serve.engine.background_threads import pause
from serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

OWN_VERSION = version("halfserve")  # reads a file
LIMIT_S = 60.0  # of one trial
# After which a child with nothing to do is ended. Starting one takes a tenth of a second of a core, and a model that has been
# replaced is often replaced again; a light one keeps some 25 MB meanwhile.
IDLE_S, LIGHT_IDLE_S = 2.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model under the circumstances in which it is to be loaded.

    Attributes:
        path: the model file as it came.
        providers: names and options.
        settings: of the session.
    """

    path: Path
    providers: list[tuple[str, dict[str, str]]]
    settings: SessionSettings

    def message(self, source: str | bytes, level: OptimizationLevel) -> dict[str, Any]:
        """What the child is told."""
        return {
            "path": "" if isinstance(source, bytes) else str(Path(source).absolute()),
            "bytes": len(source),
            "level": level.value,
            "providers": self.providers,
            "entries": dict(self.settings.session_entries),
            "parallel": self.settings.parallel,
            "memory_arena": self.settings.memory_arena,
            "memory_pattern": self.settings.memory_pattern,
        }

    @cached_property
    def key(self) -> str:
        """Equal for trials that end equally; costs a look at every byte of the file, but not at weights beside it."""
        message = self.message(b"", OptimizationLevel.ALL)
        # Ours too: what is changed in a model before it is loaded may change from one version to the next.
        return verdict_key(self.path, [ort.__version__, OWN_VERSION, repr(sorted(message.items()))])


class CrashProbe:
    """Tries models out, one at a time; any thread may ask."""

    def __init__(
        self, verdicts: CrashVerdicts, *, start: Callable[[], ProbeProcess] = ProbeProcess, limit_s: float = LIMIT_S
    ) -> None:
        """A probe that has no process yet.

        Args:
            verdicts: what is known already.
            start: makes the child process.
            limit_s: seconds that one trial may take.
        """
        self._verdicts = verdicts
        self._start = start
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: ProbeProcess | None = None
        self._idle = Alarm(self.close)

    def expect(self, trial: Trial) -> None:
        """Say that `safe_level` will be asked soon: the child starts while the caller does something else."""
        if self._verdicts.find(trial.key) is None:
            with self._lock, suppress(OSError):  # `safe_level` finds that out, too, and says so
                self._running()
                self._rest()

    def safe_level(self, trial: Trial, source: str | bytes) -> OptimizationLevel:
        """The highest level at which the model does not end the process; a lower one than all is named in a warning.

        Args:
            trial: the circumstances.
            source: the model's bytes, or the path of its file.

        Raises:
            ModelLoadError: it ends the process at every level.
        """
        key = trial.key
        verdict = self._verdicts.find(key)
        if verdict is None:
            try:
                verdict = self._tried(trial, source)
            except (TrialEndedError, OSError) as error:
                logger.warning("%s: could not be tried out in a process of its own: %s", trial.path, error)
                return OptimizationLevel.ALL
            pause()
            self._verdicts.keep(key, verdict)
        crashes = ", ".join(f"{how} at {level!r}" for level, how in verdict.crashes.items())
        if verdict.level is None:
            raise ModelLoadError(
                f"{trial.path}: the model ends ONNX Runtime {ort.__version__}'s process at every optimization level "
                f"({crashes}); export it in another way, or set the parameter {KEY!r} to load it without a trial"
            )
        if crashes:
            logger.warning(
                "%s: the model ends ONNX Runtime %s's process (%s); it is optimized at the level %r instead",
                *(trial.path, ort.__version__, crashes, verdict.level.label),
            )
        return verdict.level

    def close(self) -> None:
        """End the child, if there is one. It ends by itself when it has had nothing to do for a moment."""
        self._idle.stop()
        with self._lock:
            self._end()

    def _tried(self, trial: Trial, source: str | bytes) -> Verdict:
        with self._lock:
            try:
                return self._first_survived(trial, source)
            finally:
                self._rest()

    def _first_survived(self, trial: Trial, source: str | bytes) -> Verdict:
        crashes: dict[str, str] = {}
        model = source if isinstance(source, bytes) else b""
        for level in OptimizationLevel:
            try:
                self._running().try_out(trial.message(source, level), model, self._limit_s)
            except CrashedError as crash:
                crashes[level.label] = str(crash)
                self._end()
                continue
            except TrialEndedError:
                self._end()
                raise
            return Verdict(level, crashes)
        return Verdict(None, crashes)

    def _running(self) -> ProbeProcess:
        """The child, started if need be."""
        self._idle.off()
        if self._process is None or not self._process.alive:
            self._end()
            self._process = self._start()
        return self._process

    def _rest(self) -> None:
        """End the child, if there is one, once it has had nothing to do for a while."""
        if self._process is not None:
            self._idle.set(LIGHT_IDLE_S if self._process.is_light else IDLE_S)

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
