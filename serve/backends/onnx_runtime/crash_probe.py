"""Crash probe: finds out whether a model crashes the process that loads it.

Some models crash a runtime, such as ONNX Runtime in its graph optimizer. A child process loads and runs each model first, at
the highest optimization level, and after a crash at lower ones. Verdicts are remembered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import onnxruntime as ort

from halfserve.serve.backends.onnx_runtime.session_settings import OPTIMIZATION_LEVEL, OptimizationLevel, SessionSettings, stamp
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.trials.decisions import Decision, Decisions, Trial, decision_key

CHILD = Path(__file__).with_name("probe_child.py")
# -P keeps modules beside the program from hiding others.
DEFAULT_COMMAND = (sys.executable, "-P", str(CHILD))

# The child yields to the server, but not with the lowest priority: a trial must end in time even on a busy machine.
NICENESS, LOWEST = 15, 19
LIGHT_KB = 128 << 10
KILLED = -9  # exit code after SIGKILL, for which Windows has no name
# Exit codes after signals of a terminal or service manager that stops the server, which models do not cause.
STOPPED = {-signal.SIGTERM, -signal.SIGINT} | ({-signal.SIGHUP, -signal.SIGQUIT} if sys.platform != "win32" else set())


class TrialEndedError(Exception):
    """A trial ended without an answer for a reason that does not concern the model."""


class CrashedError(Exception):
    """The model crashed the process; the text is the signal, such as "SIGSEGV"."""


def timer(in_s: float, call: Callable[[], object]) -> threading.Timer:
    """Start a timer that does not keep the process alive."""
    started = threading.Timer(in_s, call)
    started.daemon = True
    started.start()
    return started


class ProbeProcess:
    """One child process. A start takes 0.1 s; the process is reused until a model crashes it."""

    def __init__(self, command: tuple[str, ...] = DEFAULT_COMMAND) -> None:
        """Start the process without waiting for its readiness. Raises OSError: the process cannot be started."""
        self._peak_kb: int | None = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=False
        )
        _give_way(self._process.pid)
        self._out_of_time = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def is_light(self) -> bool:
        """Whether it has never held much more memory than a new process, device memory included."""
        return self._peak_kb is not None and self._peak_kb < LIGHT_KB

    def try_out(self, trial: dict[str, Any], model: bytes, limit_s: float) -> None:
        """Load and run a model once; `model` has its bytes, or is empty if it has a file.

        Raises CrashedError: the model crashed the process; TrialEndedError: the trial took too long, or the process was killed.
        """
        limit = timer(limit_s, self._run_out)
        try:
            answer = self._exchange(json.dumps(trial).encode() + b"\n", model)
        finally:
            limit.cancel()
        if not answer.endswith(b"\n"):  # it may have died while writing
            self._explain(self._process.wait(), limit_s)
        self._peak_kb = json.loads(answer)["peak_kb"]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipes()[0].close()
        self._process.kill()
        self._process.wait()
        self._pipes()[1].close()

    def _exchange(self, head: bytes, model: bytes) -> bytes:
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it died while reading; the missing answer shows it
            stdin.write(head)
            stdin.write(model)
            stdin.flush()
        answer: bytes = stdout.readline()
        return answer

    def _pipes(self) -> tuple[Any, Any]:
        return self._process.stdin, self._process.stdout

    def _run_out(self) -> None:
        self._out_of_time = True
        self._process.kill()

    def _explain(self, code: int, limit_s: float) -> NoReturn:
        if self._out_of_time:
            raise TrialEndedError(f"loading and running it once took more than {limit_s:g} s")
        if code == KILLED:
            raise TrialEndedError("the system ended the trial (out of memory?)")
        if code in STOPPED:
            raise TrialEndedError(f"the trial was stopped ({_name(code)})")
        if code >= 0 and sys.platform != "win32":
            raise TrialEndedError(f"the trial's process ended with code {code}")
        raise CrashedError(_name(code))


def _give_way(pid: int) -> None:
    """Lower the child's priority from outside, because its imports take longer than most trials."""
    with contextlib.suppress(AttributeError, OSError):  # Windows does not have this call
        os.setpriority(os.PRIO_PROCESS, pid, min(LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code & 0xFFFFFFFF:#x}"


logger = logging.getLogger(__name__)

LIMIT_S = 60.0  # seconds for one trial
# Seconds before an idle child is ended. A start costs 0.1 s, and replaced models are often replaced again; a light child keeps
# 25 MB.
IDLE_S, LIGHT_IDLE_S = 2.0, 60.0


@dataclass(frozen=True)
class CrashVerdict(Decision):
    """The optimization levels at which a model crashes the process, and the first one at which it does not.

    Attributes:
        level: the first level that did not crash; None if all did.
        crashes: signal by level, such as "SIGSEGV".
    """

    level: OptimizationLevel | None
    crashes: dict[str, str]

    FOLDER = "crash_verdicts"

    @classmethod
    def from_json(cls, known: Any) -> CrashVerdict:
        level = None if known["level"] is None else OptimizationLevel[known["level"].upper()]
        return cls(level, {str(name): str(signal) for name, signal in known["crashes"].items()})

    def to_json(self) -> Any:
        return {"level": None if self.level is None else self.level.label, "crashes": self.crashes}


@dataclass(frozen=True, kw_only=True)
class ProbedLoad:
    """A model and the conditions under which a runtime is to load it."""

    path: Path  # the original model file
    request: Mapping[str, Any]  # the child's input beside the model and the level; see probe_child.py
    circumstances: Sequence[str]  # further conditions of the result, such as the runtime's version
    levels: Sequence[OptimizationLevel] = tuple(OptimizationLevel)  # optimization levels to try, in this order

    def message(self, source: str | bytes, level: OptimizationLevel) -> dict[str, Any]:
        """Return the request to the child process. `source`: the model's bytes, or the path of its file."""
        path = "" if isinstance(source, bytes) else str(Path(source).absolute())
        return {"path": path, "bytes": len(source), "level": level.value, **self.request}

    @cached_property
    def key(self) -> str:
        """Key that is equal for trials with equal results; computing it reads the whole file, but not external weights."""
        # The device's number is not included: a model with a copy on each device is tried out once.
        request = dict(self.request)
        if "providers" in request:
            request["providers"] = [(name, _without_device(options)) for name, options in request["providers"]]
        return decision_key(self.path, [*self.circumstances, repr(sorted(request.items()))])


def _without_device(options: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in options.items() if key != "device_id"}


def onnx_trial(path: Path, providers: list[tuple[str, dict[str, str]]], settings: SessionSettings) -> ProbedLoad:
    """Return a trial with ONNX Runtime; `providers` has their names and options."""
    request = {
        "providers": providers,
        "entries": dict(settings.session_entries),
        "parallel": settings.parallel,
        "memory_arena": settings.memory_arena,
        "memory_pattern": settings.memory_pattern,
        "operator_libraries": settings.operator_libraries,
    }
    return ProbedLoad(path=path, request=request, circumstances=[ort.__version__, *map(stamp, settings.operator_libraries)])


class CrashProbe:
    """Runs trials, one at a time; thread-safe."""

    def __init__(
        self, decisions: Decisions, *, start: Callable[[], ProbeProcess] = ProbeProcess, limit_s: float = LIMIT_S
    ) -> None:
        self._decisions = decisions
        self._start = start
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: ProbeProcess | None = None
        self._idle: threading.Timer | None = None

    def expect(self, trial: ProbedLoad) -> None:
        """Start the child, because `safe_level` will be called soon."""
        if self._decisions.find(CrashVerdict, trial.key) is None:
            with self._lock, suppress(OSError):  # `safe_level` reports the error
                self._running()
                self._rest()

    def safe_level(self, trial: ProbedLoad, source: str | bytes) -> OptimizationLevel:
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

    def verdict(self, trial: ProbedLoad, source: str | bytes) -> CrashVerdict | None:
        """Return the verdict on a model, remembered if it is known; None if the model could not be tried, with a warning."""
        return self._decisions.of(_CrashTrial(self, trial, source))

    def close(self) -> None:
        """End the child, if there is one. An idle child also ends by itself."""
        self._cancel_idle()
        with self._lock:
            self._end()

    def tried(self, trial: ProbedLoad, source: str | bytes) -> CrashVerdict:
        """Load and run the model in the child; remembered decisions are ignored.

        Raises TrialEndedError, OSError: the model could not be tried.
        """
        with self._lock:
            try:
                return self._first_survived(trial, source)
            finally:
                self._rest()

    def _first_survived(self, trial: ProbedLoad, source: str | bytes) -> CrashVerdict:
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


@dataclass(frozen=True)
class _CrashTrial(Trial[CrashVerdict]):
    """Trial of a load: whether loading and running the model crashes the process."""

    kind = CrashVerdict

    _probe: CrashProbe
    _trial: ProbedLoad
    _source: str | bytes

    @property
    def key(self) -> str:
        return self._trial.key

    def decide(self) -> CrashVerdict | None:
        try:
            verdict = self._probe.tried(self._trial, self._source)
        except (TrialEndedError, OSError) as error:
            logger.warning("%s: could not be tried out in a process of its own: %s", self._trial.path, error)
            return None
        pause()
        return verdict
