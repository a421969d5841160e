"""The child process of the crash probe: loads and runs models, and reports its own death."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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
