"""A child process that loads and runs models on trial, and whose death is an answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from serve.backends.onnx_runtime.probe.alarm import Alarm

CHILD = Path(__file__).with_name("probe_child.py")
# -P: modules beside the program must not hide others of their name.
DEFAULT_COMMAND = (sys.executable, "-P", str(CHILD))

# The server answers requests meanwhile. Not the lowest there is: beside many busy processes a trial has to end in time, too.
NICENESS, LOWEST = 15, 19
LIGHT_KB = 128 << 10
KILLED = -9  # by SIGKILL, which Windows has no name for
# No model sends them: a terminal or a service manager that stops the server stops its processes, too.
STOPPED = {-signal.SIGTERM, -signal.SIGINT} | ({-signal.SIGHUP, -signal.SIGQUIT} if sys.platform != "win32" else set())


class TrialEndedError(Exception):
    """A trial ended without an answer for a reason that says nothing about the model."""


class CrashedError(Exception):
    """The process ended while it tried the model; the text is how, such as "SIGSEGV"."""


class ProbeProcess:
    """One child process. Starting it takes a tenth of a second; it goes on to the next trial unless a model ended it."""

    def __init__(self, command: tuple[str, ...] = DEFAULT_COMMAND) -> None:
        """Start it, without waiting until it is up.

        Raises:
            OSError: it cannot be started.
        """
        self._peak_kb: int | None = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=False
        )
        _give_way(self._process.pid)
        self._out_of_time = False
        self._limit = Alarm(self._run_out)

    @property
    def alive(self) -> bool:
        """Whether it can take a trial."""
        return self._process.poll() is None

    @property
    def is_light(self) -> bool:
        """Whether it has never held much more memory than one that has just been started; what a device takes counts, too."""
        return self._peak_kb is not None and self._peak_kb < LIGHT_KB

    def try_out(self, trial: dict[str, Any], model: bytes, limit_s: float) -> None:
        """Load and run a model once; returns when the process has survived it.

        Args:
            trial: as the child reads it.
            model: what follows it; empty where the model has a file.
            limit_s: seconds after which the process is ended.

        Raises:
            CrashedError: the model ended the process.
            TrialEndedError: it took too long, or somebody else ended the process.
        """
        self._limit.set(limit_s)
        try:
            answer = self._exchange(json.dumps(trial).encode() + b"\n", model)
        finally:
            self._limit.off()
        if not answer.endswith(b"\n"):  # it may have ended while it wrote
            self._explain(self._process.wait(), limit_s)
        self._peak_kb = json.loads(answer)["peak_kb"]

    def close(self) -> None:
        """End the process."""
        self._limit.stop()
        with contextlib.suppress(OSError):
            self._pipes()[0].close()
        self._process.kill()
        self._process.wait()
        self._pipes()[1].close()

    def _exchange(self, head: bytes, model: bytes) -> bytes:
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it ended while it read; the answer tells
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
            raise TrialEndedError(f"somebody stopped the trial ({_name(code)})")
        if code >= 0 and sys.platform != "win32":
            raise TrialEndedError(f"the trial's process ended with code {code}")
        raise CrashedError(_name(code))


def _give_way(pid: int) -> None:
    """From outside, before the process has begun: what it imports takes longer than most trials."""
    with contextlib.suppress(AttributeError, OSError):  # Windows has no such thing
        os.setpriority(os.PRIO_PROCESS, pid, min(LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS))


def _name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code & 0xFFFFFFFF:#x}"
